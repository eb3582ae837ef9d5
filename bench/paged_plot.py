"""Draw who has what in vLLM's paged attention: ``python -m bench.paged_plot FILE [--d 128 --page 16 --type float16]``.

The picture is made of the numbers that the kernel computes with: `Shares` has the constants of cuda/decode/paged.cuh,
and a test has the compiler compare them.
"""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import click

from bench import scripts
from flashcli.asked.decode import ITEM_SIZES, QUERY_TYPES
from flashcli.asked.shape import ceil_div
from flashcli.errors import UsageError
from flashcli.kernels.decode import KERNELS, PARTITION
from flashcli.kernels.tuning.decode import THREADS, Problem
from flashcli.measure.plots import BLACK, BLUE, GREEN, ORANGE, RED, SKY, check_picture, save_picture

WARP = 32
OF_WARPS = (SKY, ORANGE, GREEN, "#CC79A7")
OF_THREADS = (SKY, ORANGE, GREEN, "#CC79A7", BLUE, "#F0E442", RED, "#999999")  # of a group, of up to eight
EDGE = "#ffffff"
FRAME: dict[str, Any] = {"edgecolor": BLACK, "linewidth": 1.6, "zorder": 3}


class Shares(NamedTuple):
    """How threads share a page of keys and values, by the names in cuda/decode/paged.cuh."""

    HEAD_DIM: int
    PAGE: int
    THREAD_GROUP_SIZE: int
    VEC_SIZE: int
    NUM_VECS_PER_THREAD: int
    V_VEC_SIZE: int
    NUM_V_VECS_PER_ROW: int
    NUM_ROWS_PER_ITER: int
    NUM_ROWS_PER_THREAD: int
    NUM_WARPS: int = THREADS // WARP

    @classmethod
    def of(cls, d: int, page: int, kind: str) -> Shares:
        """The shares for heads of d numbers and a query of type ``kind``; UsageError where V1 has none."""
        if reason := KERNELS["paged_v1"].refuses(Problem(d, page, kind, kind, True)):
            raise UsageError(f"V1 does not compute this: {reason}.", "choose another --page, or --d.")
        size = ITEM_SIZES[kind]
        group = max(WARP // page, 1)
        vec, v_vec = max(16 // (group * size), 1), min(16 // size, page)
        rows = WARP // (page // v_vec)
        return cls(d, page, group, vec, d // group // vec, v_vec, page // v_vec, rows, ceil_div(d, rows))


def draw(shares: Shares, kind: str, path: str) -> None:
    """The query, a page of keys, a page of values, the pages of a sequence, and the sums of warps."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 12.5), layout="constrained")
    panels = figure.subplot_mosaic(
        [["query", "query"], ["keys", "values"], ["pages", "pages"], ["sums", "sums"]],
        height_ratios=[2.2, 9, 1.8, 1.8],
    )  # fmt: skip
    size = ITEM_SIZES[kind]
    figure.suptitle(f"V1 and V2: heads of {shares.HEAD_DIM} numbers, pages of {shares.PAGE} tokens, {kind}")
    _query(panels["query"], shares)
    _keys(panels["keys"], shares, size)
    _values(panels["values"], shares)
    _pages(panels["pages"], shares)
    _sums(panels["sums"], shares)
    for name, ax in panels.items():
        ax.set_axis_off()
        ax.autoscale_view(scaley=name != "sums")
    save_picture(figure, path, dpi=90)


def _box(ax: Any, x: float, y: float, width: float, height: float, colour: str, text: str = "", **more: Any) -> None:
    from matplotlib.patches import Rectangle

    style: dict[str, Any] = {"facecolor": colour, "edgecolor": EDGE, "linewidth": 0.6} | more
    ax.add_patch(Rectangle((x, y), width, height, **style))
    if text:
        ax.text(x + width / 2, y + height / 2, text, ha="center", va="center", fontsize=6.5)


def _title(ax: Any, *lines: str) -> None:
    ax.set_title("\n".join(lines), loc="left", fontsize=10 if len(lines) == 1 else 9)


def _left(ax: Any, y: float, text: str) -> None:
    """A word on the left of what stands there."""
    ax.text(-0.25, y, text, ha="right", va="center", fontsize=7)


def _query(ax: Any, shares: Shares) -> None:
    """The vecs of a query in memory, and as rows of q_vecs in shared memory."""
    group, count = shares.THREAD_GROUP_SIZE, shares.NUM_VECS_PER_THREAD * shares.THREAD_GROUP_SIZE
    whose = f"thread t of each group of {group} has vecs t, t + {group}, .. as a row of q_vecs"
    _title(ax, f"query: {count} vecs of {shares.VEC_SIZE} numbers; {whose}")
    for vec in range(count):
        colour = OF_THREADS[vec % group]
        _box(ax, vec, group + 1, 1, 0.9, colour, str(vec))
        _box(ax, vec // group * group, group - 1 - vec % group, group, 0.9, colour, str(vec))
    _left(ax, group + 1.45, "query")
    for thread in range(group):
        _left(ax, group - 0.55 - thread, f"q_vecs[{thread}]")


def _keys(ax: Any, shares: Shares, size: int) -> None:
    """A page of keys, a column a token; what lane 0 loads has a frame."""
    group, page, x = shares.THREAD_GROUP_SIZE, shares.PAGE, 16 // size
    chunks, parts = shares.HEAD_DIM // x, x // shares.VEC_SIZE
    lanes, each = min(page, WARP) * group, shares.VEC_SIZE * size
    _title(
        ax, f"a page of keys [D/x = {chunks}, page, x = {x}]: a group of {group} has a column",
        f"one load of a warp: {lanes} lanes x {each} bytes = {lanes * each} bytes, a row; k_vecs of lane 0: framed",
    )  # fmt: skip
    for vec, token in itertools.product(range(chunks * parts), range(page)):
        (chunk, part), frame = divmod(vec, parts), FRAME if token == 0 and vec % group == 0 else {}
        told = str(vec) if page * parts <= 40 else ""
        _box(ax, token + part / parts, chunks - chunk, 1 / parts, 0.9, OF_THREADS[vec % group], told, **frame)
    for token in range(page):
        of_token = token % WARP * group, token % WARP * group + group - 1
        ax.text(token + 0.5, chunks + 1.2, f"{token}", ha="center", va="center", fontsize=7)
        ax.text(token + 0.5, 0.6, "-".join(map(str, sorted({*of_token}))), ha="center", va="center", fontsize=6)
    for chunk in range(chunks):
        _left(ax, chunks - chunk + 0.45, f"{chunk * x}-{chunk * x + x - 1}")
    _left(ax, chunks + 1.2, "token")
    _left(ax, 0.6, "lanes")


def _values(ax: Any, shares: Shares) -> None:
    """A page of values, a line a number of the head; what lane 0 loads has a frame, and so have its logits."""
    rows, vec, at_once, steps = shares.HEAD_DIM, shares.V_VEC_SIZE, shares.NUM_ROWS_PER_ITER, shares.NUM_ROWS_PER_THREAD
    _title(
        ax, f"a page of values [D, page]: a v_vec is {vec} tokens of a row, {shares.NUM_V_VECS_PER_ROW} to a row",
        f"a warp loads {at_once} rows at a time; lane 0 has {steps} v_vecs, framed, and as many accs",
    )  # fmt: skip
    for token in range(shares.PAGE):
        _box(ax, token, rows + 3, 1, rows * 0.035, GREEN, str(token), **(FRAME if token < vec else {}))
    _left(ax, rows * 1.0175 + 3, "logits_vec")
    for row, column in itertools.product(range(rows), range(shares.NUM_V_VECS_PER_ROW)):
        style = FRAME if row % at_once == 0 and column == 0 else {"linewidth": 0.2}
        _box(ax, column * vec, rows - row, vec, 1, (SKY, ORANGE)[row // at_once % 2], **style)
    for step in range(steps):
        _left(ax, rows - step * at_once + 0.5, f"accs[{step}]: {step * at_once}")
    for column in range(shares.NUM_V_VECS_PER_ROW):
        ax.text((column + 0.5) * vec, rows - 3, f"lane {column}", ha="center", va="center", fontsize=8)


def _pages(ax: Any, shares: Shares) -> None:
    """The pages of a sequence, by the warp that takes them, in partitions."""
    of_partition, warps = PARTITION // shares.PAGE, shares.NUM_WARPS
    shown = of_partition + max(4, of_partition // 4)
    logits = f"logits has a number for each token: in V1 of all, in V2 of a partition of {PARTITION}"
    _title(ax, f"pages of a sequence: warp w of {warps} takes pages w, w + {warps}, ..; {logits}")
    for page in range(shown):
        _box(ax, page, 1, 1, 1, OF_WARPS[page % warps], str(page))
    for first, end in ((0, of_partition), (of_partition, shown)):
        ax.plot([first + 0.1, end - 0.1], [0.8, 0.8], color=BLACK, linewidth=1.2)
        told = f"partition {first // of_partition}" + (" .." if end == shown else "")
        ax.text((first + end) / 2, 0.6, told, ha="center", va="top", fontsize=8)


def _sums(ax: Any, shares: Shares) -> None:
    """How accs of all warps become the answer: the upper half hands its own to the lower half."""
    through = f"through {shares.NUM_WARPS // 2} x {shares.HEAD_DIM} numbers of shared memory, where logits were"
    _title(ax, f"sums: lanes of a row by shuffles, then warps by halves, {through}")
    left, x = shares.NUM_WARPS, 0.0
    while left:
        for warp in range(left):
            _box(ax, x + warp * 3, 1, 2.8, 1, OF_WARPS[warp], f"warp {warp}")
            if warp >= left // 2 and left > 1:
                to = x + (warp - left // 2) * 3 + 1.4
                arrow = {"arrowstyle": "->", "connectionstyle": "arc3,rad=0.3"}
                ax.annotate("", (to, 2), (x + warp * 3 + 1.4, 2), arrowprops=arrow)
        x, left = x + left * 3 + 1, left // 2
    ax.text(x, 1.5, f"out: {shares.HEAD_DIM} numbers", va="center", fontsize=8)
    ax.set_ylim(0.9, 3.2)


@click.command()
@click.argument("path", metavar="FILE")
@click.option("--d", default=128, show_default=True, help="Numbers of a head.")
@click.option("--page", default=16, show_default=True, help="Tokens of a page.")
@click.option("--type", "kind", type=click.Choice(QUERY_TYPES), default="float16", show_default=True)
def main(path: str, d: int, page: int, kind: str) -> None:
    """Draw which numbers each thread of V1 and V2 has, to FILE, .png, .svg or .pdf."""
    check_picture(path)
    draw(Shares.of(d, page, kind), kind, path)


if __name__ == "__main__":
    scripts.run(main)
