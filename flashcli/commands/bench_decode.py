from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from flashcli.asked.decode import LAYOUTS
from flashcli.commands import decode_options, options, timing
from flashcli.errors import UsageError
from flashcli.kernels.decode import CEILING, DEFAULTS, FOR_MANY_ROWS, KERNELS, VERSIONS

if TYPE_CHECKING:
    from flashcli.cpu.pages import DecodeArrays
    from flashcli.files.decode.cases import Case
    from flashcli.measure.records import Record
    from flashcli.measure.rows import Row

    Given = tuple[str, DecodeArrays] | dict[str, Case]  # a file, or shapes by name

LAYOUT = "vllm"
ON_CPU = "1x4096 32/8"  # of the record's shapes: the others take long there


@click.command(
    epilog=options.examples(
        "flashcli bench-decode --shape 8,32,8,128 --lengths 4096 --ladder --against torch",
        "flashcli bench-decode --shape 4,32,8,128 --lengths 131072,64x3 --cache e4m3",
        "flashcli bench-decode --backend cpu --shape 2,8,2,64",
    )
)
@click.argument("path", metavar="[FILE]", required=False)
@click.option(
    "--shape", "heads", type=decode_options.HeadsType(), metavar="S,H,Hkv,D", multiple=True,
    help="Time S sequences with H heads, Hkv in the cache, of D numbers each; repeatable.",
)  # fmt: skip
@decode_options.shape_options
@click.option(
    "--rule", is_flag=True,
    help="Time vLLM's V1 and V2 alone, and tell which of them vLLM takes, by length and blocks; without --shape in "
    "batches on both sides of that rule.",
)  # fmt: skip
@click.option(
    "--layout", type=click.Choice(LAYOUTS), help=f"How a page lies in memory: {LAYOUT} by default; a FILE says it."
)
@timing.options_of(
    KERNELS, "the fastest, with --ladder all", ("torch",),
    ladder=("Time all kernels.", "Draw the ladder, in times of the floor, to FILE, .png, .svg or .pdf."),
)  # fmt: skip
def command(
    path: str | None, heads: tuple[tuple[int, int, int, int], ...], layout: str | None, rule: bool,
    how: timing.Timing, **of_shapes: Any,
) -> None:  # fmt: skip
    """Time paged decode beside the floor: a kernel that reads the same keys and values, and computes nothing.

    FILE is one of `flashcli decode`. Without it and --shape, the shapes of the record are timed, on a CPU one of them.
    A wrong answer is refused, not timed: the exit code is 1 then, and if nothing could be timed.
    """
    from flashcli.measure import machine, plots, records

    if rule and (how.kernels or how.ladder or how.against or how.plot):
        hint = "leave out --kernel, --ladder, --against and --plot, or --rule."
        raise UsageError("--rule times V1 and V2 alone.", hint)
    how.check(plots.check_picture)
    _check_source(click.get_current_context(), path, bool(heads))
    on_gpus = ["--rule"] * rule + [
        *(f"--kernel {name}" for name in how.kernels),
        *(f"--against {name}" for name in how.against),
    ]
    on_cpu = how.is_cpu(on_gpus + ["--ladder"] * how.ladder, machine.gpus)
    given = _read(path) if path else _shapes(heads, on_cpu, rule, **of_shapes)
    record = records.Record(machine.circumstances())
    how = replace(how, kernels=VERSIONS) if rule else how
    rows = (_on_cpu if on_cpu else _on_gpu)(record, given, layout or LAYOUT, how)
    how.finish(record, rows, records.rule_tables if rule else records.decode_tables, plots.draw_decode)


def _check_source(context: click.Context, path: str | None, shaped: bool) -> None:
    """Refuse what the source of the numbers, a file, shapes or the record's shapes, says itself."""
    given = {
        option.name: option.opts[0]
        for option in context.command.params
        if context.get_parameter_source(str(option.name)) == ParameterSource.COMMANDLINE
    }
    if path and (mine := given.get("heads") or given.get("layout")):
        raise UsageError(f"{mine} has no meaning with FILE, which says it.", f"leave out {mine}, or FILE.")
    for name in decode_options.OF_SHAPES if not shaped else ():
        if name in given:
            raise UsageError(f"{given[name]} goes with a shape.", "name a shape: --shape S,H,Hkv,D.")


def _read(path: str) -> tuple[str, DecodeArrays]:
    """The name of a file, and what it asks."""
    from flashcli.files.decode.tensors import read_decode

    return os.path.basename(path), read_decode(path)[0]


def _shapes(heads: Sequence[tuple[int, int, int, int]], on_cpu: bool, rule: bool, **of_shapes: Any) -> dict[str, Case]:
    """The shapes that are named, or else those of the record, on a CPU one of them; with ``rule`` those of that."""
    from flashcli.files.decode.cases import Case
    from flashcli.measure.decode_shapes import OF_THE_RULE, SHAPES

    if not heads:
        known = OF_THE_RULE if rule else SHAPES
        return {ON_CPU: known[ON_CPU]} if on_cpu else known
    told = f", queries {of_shapes['queries']}" if of_shapes["queries"] else ""
    name = "{}x({}) {}/{} D={}{}".format
    return {name(S, of_shapes["lengths"], H, Hkv, D, told): Case(S, H, Hkv, D, **of_shapes) for S, H, Hkv, D in heads}


def _on_gpu(record: Record, given: Given, layout: str, how: timing.Timing) -> Iterator[Row]:
    """The floor, the kernels, and PyTorch's attention if that is wanted."""
    from flashcli.measure import decode_arrays, machine, peers
    from flashcli.measure.decode_times import times, times_of, ways

    peers.check_installed("torch", gpu=True)
    record.circumstances |= machine.gpu_circumstances()
    ragged = given[1].is_ragged if isinstance(given, tuple) else any(case.queries for case in given.values())
    fastest = how.chosen(KERNELS, FOR_MANY_ROWS if ragged else DEFAULTS)
    contenders = ways([CEILING, *(KERNELS[name] for name in fastest)])
    against, runs = bool(how.against), how.runs_on(on_cpu=False)
    if isinstance(given, tuple):
        return times_of(decode_arrays.Given(*given), contenders, against, runs)
    return times(contenders, given, [layout], against, runs, how.seed)


def _on_cpu(record: Record, given: Given, layout: str, how: timing.Timing) -> Iterator[Row]:
    from flashcli.cpu.workers import usable_cores
    from flashcli.files.decode.cases import make
    from flashcli.measure import machine
    from flashcli.measure.decode_times import on_cpu

    threads, runs = how.threads or len(usable_cores()), how.runs_on(on_cpu=True)
    record.circumstances |= machine.cpu_circumstances(threads)
    if isinstance(given, tuple):
        yield on_cpu(*given, threads, runs)
        return
    for name, case in given.items():
        yield on_cpu(name, make(replace(case, layout=layout, seed=how.seed)), threads, runs)
