"""Draw how a kernel divides its work: the grid of blocks, the tiles that a block works on, the rows of its threads.

``python -m bench.blocks_picture OUT.svg`` takes all numbers from the registry, for a rung with a thread a row of Q.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from bench import scripts
from flashcli.asked.shape import FLOAT_BYTES, Shape, ceil_div
from flashcli.errors import UsageError
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import STATIC_SHARED, Build
from flashcli.kernels.problem import Problem
from flashcli.measure.plots import BLACK, BLUE, GREEN, ORANGE, SKY, check_picture, save_picture
from flashcli.terminal import parameters

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PAPER, LINE = "#f2f2f2", "#b0b0b0"
WARP = 32
MATRICES = {"Q": BLUE, "K": GREEN, "V": SKY, "O": BLUE}
I, J = 0.42, 0.61  # where the tiles are that are shown, as a part of all


def picture(build: Build) -> Figure:
    """The picture of a kernel with a block for each row tile, and a thread for each of its rows."""
    from matplotlib.figure import Figure

    problem, tiling = build.problem, build.tiling
    Tr, Tc = ceil_div(problem.M, tiling.Br), ceil_div(problem.N, tiling.Bc)
    one_a_row = [launch.grid for launch in build.launches()] == [problem.B * Tr] and tiling.threads == tiling.Br
    if not one_a_row or sum(_in_shared(build).values()) > STATIC_SHARED:  # so that Q is in registers
        raise UsageError(
            f"kernel {build.kernel.name} is divided in another way.", "take split_q, or one soon after it."
        )
    i, j = int(I * Tr), int(J * Tc)
    figure = Figure(figsize=(13, 5.4), layout="constrained")
    grid, tiles, threads = figure.subplots(1, 3, width_ratios=(2.6, 4.4, 4))
    figure.suptitle(
        f"{build.kernel.name} on (B, N, d) = ({problem.B}, {problem.N}, {problem.d}): Br = {tiling.Br}, "
        f"Bc = {tiling.Bc}, Tr = {Tr}, Tc = {Tc}",
        fontweight="bold",
    )
    _grid(grid, problem.B, Tr, i)
    _tiles(tiles, Tr, Tc, i, j)
    _threads(threads, build)
    for ax in (grid, tiles, threads):
        ax.set_axis_off()
    return figure


def _box(ax: Axes, x: float, y: float, width: float, height: float, colour: str, edge: str = LINE) -> None:
    from matplotlib.patches import Rectangle

    ax.add_patch(Rectangle((x, y), width, height, facecolor=colour, edgecolor=edge, linewidth=0.8))


def _grid(ax: Axes, B: int, Tr: int, i: int) -> None:
    """A cell for each block, batches across and row tiles down; one is filled."""
    shown = B // 2
    for b in range(B):
        for tile in range(Tr):
            _box(ax, b, tile, 1, 1, ORANGE if (b, tile) == (shown, i) else PAPER)
    ax.set(xlim=(-1.2, B + 0.2), ylim=(Tr + 1.6, -1.6))
    ax.set_title(f"the grid: B x Tr = {B * Tr} blocks")
    ax.text(B / 2, -0.5, f"batch b = 0 to {B - 1}", ha="center")
    ax.text(-0.5, Tr / 2, f"row tile i = 0 to {Tr - 1}", va="center", ha="center", rotation=90)
    ax.text(B / 2, Tr + 1, f"block {shown * Tr + i} = b Tr + i: b = {shown}, i = {i}", ha="center", color="#a06a00")


def _tiles(ax: Axes, Tr: int, Tc: int, i: int, j: int) -> None:
    """The matrices of the block's batch: its tile of Q and O, and the tile of K and V of one step."""
    for place, (name, colour) in enumerate(MATRICES.items()):
        x, passes = place * 1.5, name in "KV"
        count, tile = (Tc, j) if passes else (Tr, i)
        top = 10 * tile / count
        _box(ax, x, 0, 1, 10, PAPER)
        _box(ax, x, top, 1, 10 / count, colour)
        ax.text(x + 0.5, -0.25, name, ha="center", fontweight="bold")
        ax.text(x + 1.06, top + 5 / count, f"{'j' if passes else 'i'} = {tile}", va="center", fontsize=8)
        if passes:
            ax.annotate("", (x + 0.5, 9.8), (x + 0.5, top + 0.3), arrowprops={"arrowstyle": "->", "color": colour})
    ax.set(xlim=(-0.2, 6.1), ylim=(11.4, -1))
    ax.set_title("the tiles of a block, in its batch's matrices")
    ax.text(2.95, 10.9, f"Q and O stay at tile i; K and V pass, j = 0 to {Tc - 1}, a tile a step", ha="center")


def _threads(ax: Axes, build: Build) -> None:
    """A step's product S = Q Kᵀ, of which each row is a thread's, in warps; and what takes how much shared memory."""
    (Br, Bc, threads, *_), d = build.tiling, build.problem.d
    height, wide, narrow, top = 7.0, 3.2, 3.2 * Bc / d, 3.0
    warp, r = height * WARP / Br, int(0.4 * Br)
    row, end = top + height * r / Br, wide + 0.5 + narrow
    _box(ax, wide + 0.5, top - 2.4, narrow, 2.0, GREEN)
    ax.text(wide + 0.5 + narrow / 2, top - 1.4, "Kᵀ", ha="center", va="center", fontweight="bold")
    for x, width, colour, name in ((0, wide, BLUE, "Q"), (wide + 0.5, narrow, ORANGE, "S")):
        _box(ax, x, top, width, height, colour)
        for edge in range(1, Br // WARP):
            ax.plot([x, x + width], [top + edge * warp] * 2, color="white", linewidth=1)
        _box(ax, x, row, width, height / Br, BLACK, BLACK)
        ax.text(x + width / 2, top + 0.4, name, ha="center", va="center", fontweight="bold", color="white")
    ax.text(end + 0.3, row, f"thread {r}:\nrow {r} of Q, S and O", va="center", fontsize=9)
    for number in range(threads // WARP):
        ax.text(-0.15, top + (number + 0.5) * warp, f"warp {number}", ha="right", va="center", fontsize=8)
    ax.text(wide / 2, top - 0.25, f"d = {d}", ha="center")
    ax.text(end + 0.15, top - 1.4, f"Bc = {Bc} keys", va="center", fontsize=9)
    shared = _in_shared(build)
    parts = " + ".join(f"{name} {size / 1024:g}" for name, size in shared.items())
    ax.text(wide, top + height + 0.9, f"shared memory: {parts} = {sum(shared.values()) / 1024:g} KiB", ha="center")
    ax.set(xlim=(-1.1, end + 2.2), ylim=(top + height + 1.4, -0.4))
    ax.set_title(f"the threads of a block: {threads}, one a row")


def _in_shared(build: Build) -> dict[str, int]:
    """The bytes of each tile in shared memory."""
    (Br, Bc, *_), d = build.tiling, build.problem.d
    return {name: FLOAT_BYTES * size for name, size in {"Q": Br * d, "K": Bc * d, "V": Bc * d, "S": Br * Bc}.items()}


@click.command()
@click.argument("path", metavar="PICTURE")
@click.option("--kernel", default="split_q", show_default=True, type=click.Choice(list(KERNELS)), help="Draw this one.")
@click.option("--shape", type=parameters.SHAPE, default="10,2048,64", show_default=True, help="On this input, B,N,d.")
def main(path: str, kernel: str, shape: Shape) -> None:
    """Draw grid, blocks and threads of a kernel to PICTURE."""
    check_picture(path)
    save_picture(picture(Build(KERNELS[kernel], Problem(shape.B, shape.N, shape.N, shape.d))), path)


if __name__ == "__main__":
    scripts.run(main)
