"""Paged decode on a GPU: every kernel judged against float64 first, then timed beside its peers.

``python -m bench.decode [--check-only | --times-only] [--kernel NAME]... [--json FILE]``. Times are medians by
CUDA events, with the second-level cache flushed before each run and every page used once, in random order. Needs
PyTorch and a GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import click

from bench import scripts
from bench.decode_calls import calls
from bench.decode_check import builds_for, check_side_by_side, grid, judged
from bench.rows import Called
from flashcli.asked.decode import LAYOUTS, Decode
from flashcli.cpu.workers import usable_cores
from flashcli.errors import MISMATCH, UsageError
from flashcli.kernels import decode
from flashcli.kernels.decode import CEILING, KERNELS
from flashcli.kernels.operation import Build, Kernel, named
from flashcli.kernels.tuning.decode import Tuning
from flashcli.measure import machine
from flashcli.measure.builds import compile_all
from flashcli.measure.decode_shapes import SHAPES
from flashcli.measure.decode_times import Ways, times, ways
from flashcli.measure.rows import Decoded, Failure, Row, Skipped
from flashcli.terminal import as_json

READ_RATE = 4.2e12  # bytes a second that an H200's memory gives


def variants(text: str) -> Ways:
    """``tensor:blocks=2/3,piece=65536`` is a kernel with each combination of such fields of `Tuning`."""
    name, _, given = text.partition(":")
    chosen = [part.partition("=") for part in given.split(",") if part]
    unknown = [field for field, _, _ in chosen if field not in Tuning._fields]
    numbers = [values.split("/") for _, _, values in chosen]
    if unknown or not all(number.isdecimal() for some in numbers for number in some):
        hint = f"write it as tensor:blocks=2/3,threads=64; there are {', '.join(Tuning._fields)}."
        raise UsageError(f"--variant {text}: that is no kernel with numbers to try.", hint)
    kernel = CEILING if name == CEILING.name else named(KERNELS, name, "paged decode")
    if not chosen:
        return ways([kernel])
    found: dict[str, Callable[[Decode], Build]] = {}
    for tried in itertools.product(*numbers):
        with_names = dict(zip((field for field, _, _ in chosen), map(int, tried), strict=True))
        label = " ".join([name, *(f"{field}={number}" for field, number in with_names.items())])
        found[label] = functools.partial(_tuned, kernel, Tuning(**with_names))
    return found


def _tuned(kernel: Kernel, tuning: Tuning, asked: Decode) -> Build:
    """The build of a kernel with another tuning than its own."""
    return Build(kernel, decode.build_of(kernel, asked).problem._replace(tuning=tuning))


@click.command()
@click.option(
    "--kernel", "kernels", multiple=True, type=click.Choice(list(KERNELS)), help="All by default; repeatable."
)
@click.option("--check-only", is_flag=True, help="Judge, but do not time.")
@click.option("--times-only", is_flag=True, help="Time, but do not judge.")
@click.option("--every", default=1, show_default=True, help="Judge on each so many-th case only.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), default=("vllm",), show_default=True)
@click.option("--shape", "chosen", multiple=True, help="Shapes whose names hold this text; all by default.")
@click.option("--peers/--no-peers", default=True, show_default=True, help="PyTorch's attention on gathered pages, too.")
@click.option("--variant", "tried", multiple=True, metavar="KERNEL:FIELD=N/N,..", help="Time these instead of kernels.")
@as_json.json_option
def main(
    kernels: tuple[str, ...],
    check_only: bool,
    times_only: bool,
    every: int,
    layouts: tuple[str, ...],
    chosen: tuple[str, ...],
    peers: bool,
    tried: tuple[str, ...],
    json_path: str | None,
) -> None:
    """Judge and time the kernels of paged decode on this machine's first GPU."""
    names = list(kernels or KERNELS)
    contenders = {label: build for text in (CEILING.name, *(tried or names)) for label, build in variants(text).items()}
    wrong: list[str] = []
    rows: list[Row] = []
    aside = json_path == as_json.PRINT
    if not times_only:
        cases = list(itertools.islice(grid(), 0, None, every))
        compile_all(builds_for(names, cases))
        counted, void, wrong, verdicts = check_side_by_side(names, cases, len(usable_cores()))
        rows += judged(verdicts)
        click.echo(f"{counted} cases, {void} of them void, {len(names)} kernels: {len(wrong)} wrong", err=aside)
        for line in wrong[:40]:
            click.echo(f"  {line}", err=aside)
    if not check_only:
        shapes = {name: case for name, case in SHAPES.items() if not chosen or any(text in name for text in chosen)}
        timed = times(contenders, shapes, layouts, peers)
        rows += scripts.told(itertools.chain(timed, calls(layouts[0]) if peers and not tried else ()), told)
    if rows:
        scripts.publish("decode", machine.gpu_circumstances(), rows, json_path)
    if wrong:
        raise SystemExit(MISMATCH)


def told(row: Row) -> str:
    """A row of paged decode's times as a line of text."""
    start = f"{row.case:>20} {row.contender:14}"
    if isinstance(row, Skipped):
        return f"{start} skipped: {row.skipped}"
    if isinstance(row, Failure):
        return f"{start} {row.error}"
    if isinstance(row, Called):
        return f"{start} {row.layout:4} {row.seconds * 1e6:8.1f} us, {row.clock}"
    assert isinstance(row, Decoded)
    error = "" if row.relative_l2 is None else f", relative L2 {row.relative_l2:.1e}"
    rate = row.bytes / row.seconds
    figures = f"{row.seconds * 1e6:8.1f} us (least {row.min * 1e6:.1f}), {rate / 1e9:5.0f} GB/s"
    return f"{start} {row.layout:4} {figures}, {rate / READ_RATE:4.0%} of the memory's rate{error}"


if __name__ == "__main__":
    scripts.run(main)
