"""Paged decode on a GPU: every kernel judged against float64 first, then timed beside its peers.

``python -m flashcli.measure.decode [--check-only | --times-only] [--kernel NAME]... [--json FILE]``. Times are medians
by CUDA events, with the second-level cache flushed before each run and every page used once, in random order. Needs
PyTorch and PyCUDA.
"""

from __future__ import annotations

import itertools

import click

from flashcli.asked.decode import LAYOUTS
from flashcli.errors import MISMATCH
from flashcli.kernels.decode import CEILING, KERNELS
from flashcli.measure import machine, scripts
from flashcli.measure.decode_calls import calls
from flashcli.measure.decode_check import check_kernels, compile_for, grid
from flashcli.measure.decode_shapes import SHAPES
from flashcli.measure.decode_times import Contender, times, told, variants
from flashcli.measure.rows import Row
from flashcli.terminal import as_json


@click.command()
@click.option(
    "--kernel", "kernels", multiple=True, type=click.Choice(list(KERNELS)), help="All by default; repeatable."
)
@click.option("--check-only", is_flag=True, help="Judge, but do not time.")
@click.option("--times-only", is_flag=True, help="Time, but do not judge.")
@click.option("--every", default=1, show_default=True, help="Judge on each so many-th case only.")
@click.option("--layout", "layouts", multiple=True, type=click.Choice(LAYOUTS), default=("hnd",), show_default=True)
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
    contenders = [Contender(CEILING), *itertools.chain.from_iterable(map(variants, tried or names))]
    wrong: list[str] = []
    aside = json_path == as_json.PRINT
    if not times_only:
        cases = list(itertools.islice(grid(), 0, None, every))
        compile_for(names, cases)
        counted, void, wrong = check_kernels(names, cases)
        click.echo(f"{counted} cases, {void} of them void, {len(names)} kernels: {len(wrong)} wrong", err=aside)
        for line in wrong[:40]:
            click.echo(f"  {line}", err=aside)
    rows: list[Row] = []
    if not check_only:
        shapes = tuple(shape for shape in SHAPES if not chosen or any(text in shape.name for text in chosen))
        timed = times(contenders, shapes, layouts, peers)
        for row in itertools.chain(timed, calls(layouts[0]) if peers and not tried else ()):
            rows.append(row)
            click.echo(told(row), err=True)
    if rows:
        scripts.publish("decode", machine.gpu_circumstances(), rows, json_path)
    if wrong:
        raise SystemExit(MISMATCH)


if __name__ == "__main__":
    scripts.run(main)
