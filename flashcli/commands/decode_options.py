"""Options of paged decode: those of a shape, and those of `flashcli generate`, folded into one argument ``decode``."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from flashcli.asked.decode import LAYOUTS, MAX_QUERY_TOKENS, QUERY_TYPES, BlockSparse
from flashcli.commands import options
from flashcli.errors import UsageError
from flashcli.terminal import parameters

if TYPE_CHECKING:
    from flashcli.files.decode.cases import Case

CACHE_TYPES = {"e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2", "int8": "int8"}
PAGES = ("unique", "reversed", "shared")


class HeadsType(click.ParamType):
    """S,H,Hkv,D as four numbers."""

    name = "S,H,Hkv,D"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        parts = str(value).strip("() ").split(",")
        if len(parts) != 4 or not all(parameters.is_count(part.strip()) and int(part) for part in parts):
            self.fail(f"{value!r} is not four numbers S,H,Hkv,D, such as 8,32,8,128.", param, context)
        return tuple(map(int, parts))


class SparseType(click.ParamType):
    """The fields of a `BlockSparse` in their order, of which the last may be left out."""

    name = "STRIDE,SIZE[,LOCAL[,STEP[,RANK]]]"

    def convert(self, value: object, param: click.Parameter | None, context: click.Context | None) -> BlockSparse:
        if isinstance(value, BlockSparse):
            return value
        if not re.fullmatch(r"-?\d{1,18}(,-?\d{1,18}){1,4}", str(value)):
            self.fail(f"{value!r} is not {self.name}, such as 8,64,16,1.", param, context)
        return BlockSparse(*map(int, str(value).split(",")))


def _of_shapes(more: str = "") -> tuple[Callable, ...]:
    """The options of a shape beside its heads; ``more`` ends each help."""
    return (
        click.option(
            "--lengths", default="1024", show_default=True,
            help="Tokens of the sequences: 4096 in each; a list, such as 131072,64x255, where 255 sequences have 64; "
            f"uniform:2000, from 1 to 2000; skewed:100000, one has 100000 and most far fewer.{more}",
        ),
        click.option(
            "--queries", default="", metavar="LIST",
            help="Have sequences ask with numbers of tokens of their own, written as --lengths: in 1x128,2048x2, one "
            f"each of 128 sequences, and 2048 of two.{more}",
        ),
        click.option(
            "--page", type=click.IntRange(1), default=16, show_default=True, help=f"Tokens a page.{more}"
        ),
        click.option(
            "--type", "query_type", type=click.Choice(QUERY_TYPES), default="float16", show_default=True,
            help=f"The type of queries, and of the cache.{more}",
        ),
        click.option(
            "--cache", "--fp8", "cache_type", type=click.Choice(list(CACHE_TYPES)),
            callback=lambda context, option, value: CACHE_TYPES.get(value, ""),
            help=f"Have a cache of fp8, e4m3 or e5m2, or of int8.{more}",
        ),
    )  # fmt: skip


shape_options = options.several(_of_shapes())  # of a shape, `OF_SHAPES`, but for its heads
OF_SHAPES = ("lengths", "queries", "page", "query_type", "cache_type")
OPTIONS = (  # but for the heads and the seed, each has the name of a field of `Case`
    click.option(
        "--decode", "heads", type=HeadsType(), metavar="S,H,Hkv,D",
        help="An input of `flashcli decode` instead: S sequences, H heads, Hkv in the cache, D numbers each.",
    ),
    *_of_shapes(" For --decode."),
    click.option(
        "--query-tokens", "T", type=click.IntRange(1, MAX_QUERY_TOKENS), default=1, show_default=True,
        help="How many of a sequence's last tokens ask. For --decode.",
    ),
    click.option(
        "--layout", type=click.Choice(LAYOUTS), default="vllm", show_default=True,
        help="How a page lies in memory. For --decode.",
    ),
    click.option(
        "--pages", type=click.Choice(PAGES), default="unique", show_default=True,
        help="Pages of the sequences: their own at random, their own the last first, or shared ones. For --decode.",
    ),
    click.option(
        "--sharpness", type=parameters.FiniteRange(0), default=3.0, show_default=True,
        help="Standard deviation of scores: at 0 all weights are alike. For --decode.",
    ),
    click.option(
        "--value-scale", type=parameters.FiniteRange(0), default=1.0, show_default=True,
        help="Standard deviation of values. For --decode.",
    ),
    click.option("--alibi", is_flag=True, help="Have ALiBi's slopes. For --decode."),
    click.option(
        "--softcap", type=parameters.FiniteRange(0), default=0.0, show_default=True,
        help="Make a score x this times tanh(x / this), which bounds it; 0: leave it. For --decode.",
    ),
    click.option("--sinks", is_flag=True, help="Have a sink of each head, a score without a key. For --decode."),
    click.option(
        "--no-causal", "causal", is_flag=True, flag_value=False, default=True,
        help="Have each query token of --queries see all of its sequence, as the last one does. For --decode.",
    ),
    click.option(
        "--window", type=click.IntRange(0), default=0, show_default=True,
        help="Tokens that a query sees; 0: all. For --decode.",
    ),
    click.option(
        "--block-sparse", "sparse", type=SparseType(), metavar=SparseType.name,
        help="Have heads see every STRIDE-th block of SIZE tokens, shifted by STEP from head to head, and the last "
        "LOCAL ones. For --decode.",
    ),
)  # fmt: skip


def case_options(command: Callable) -> Callable:
    """Give a command these options; it is called with ``decode``, a `Case`, None if no --decode is given."""

    @functools.wraps(command)
    def folded(*, heads: tuple[int, int, int, int] | None, seed: int, **given: Any) -> Any:
        from flashcli.files.decode.cases import Case

        of_case = {field.name: given.pop(field.name) for field in fields(Case) if field.name in given}
        if heads is None:
            _refuse_without_decode()
            return command(decode=None, seed=seed, **given)
        if of_case["queries"] and of_case["T"] > 1:
            told = "--query-tokens is the same number for all sequences, --queries one for each."
            raise UsageError(told, "leave out one of them.")
        return command(decode=Case(*heads, **of_case, seed=seed), seed=seed, **given)

    return options.several(OPTIONS)(folded)


def _refuse_without_decode() -> None:
    from click.core import ParameterSource

    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.help and parameter.help.endswith("For --decode."):
            source = context.get_parameter_source(parameter.name)
            if source not in (ParameterSource.DEFAULT, None):
                raise click.UsageError(f"{parameter.opts[0]} has a meaning with --decode only.", context)


def make(output_path: str, case: Case, reference_path: str | None, aside: bool) -> None:
    """Write the file, and its answer in float64 if that is wanted; say what the file is."""
    import os

    from flashcli.files.decode.cases import generate, memory_wanted
    from flashcli.files.outputs import check_creatable
    from flashcli.run import memory

    for least in memory_wanted(case):
        memory.require(least, "queries, block tables and a mark for each slot")
    if reference_path:
        if os.path.exists(output_path) and not os.path.isfile(output_path):
            raise UsageError("--reference is computed from OUT, which has to be a regular file.", "name a file as OUT.")
        check_creatable(reference_path)
    asked = generate(output_path, case)
    if reference_path:
        import numpy as np

        from flashcli.cpu.decode import DecodeCpu
        from flashcli.run.decode import run

        run(output_path, reference_path, lambda: DecodeCpu(compute=np.float64), options.late_progress)
    size = os.path.getsize(output_path) if os.path.isfile(output_path) else 0
    sizes = f"(S, T, H, Hkv, D) = ({asked.S}, {asked.T}, {asked.H}, {asked.Hkv}, {asked.D})"
    if asked.is_ragged:
        sizes = f"(S, H, Hkv, D) = ({asked.S}, {asked.H}, {asked.Hkv}, {asked.D}), {asked.total} query tokens"
    click.echo(
        f"{output_path}: {sizes}, "
        f"{int(asked.seq_lens.sum(dtype='int64'))} tokens of {asked.key_cache.dtype.name} in pages of {asked.page} "
        f"({asked.layout}), seed {case.seed}, {size} bytes",
        err=aside,
    )
