"""Draw the grid: how many times as fast as the best fp32 peer our choice is on each shape, and how close to the floor.

``python -m bench.grid_plot RECORD.json FILE.png`` draws a record of ``python -m bench.grid``.
Matplotlib is imported when there is something to draw.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from bench import scripts
from bench.rows import Gridded
from bench.views import Against, against_peers, geometric_mean
from flashcli.errors import BadInput
from flashcli.measure.plots import save_picture
from flashcli.measure.records import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMMAND = "python -m bench.grid"
CELL, LINE, ACROSS = 1.1, 0.5, 10  # of a shape, in inches across and down; shapes in a line
GROUPS = {"d = 8 to 24": 24, "32": 32, "40 to 64": 64, "80 to 128": 128, "160 to 256": 256, "causal": 256}


class Panel(NamedTuple):
    """A heat map: what its cells show, and from which value to which its colours go."""

    title: str
    value: Callable[[Against], float | None]
    text: Callable[[float], str]
    colours: str
    limits: tuple[float, float]
    logarithmic: bool


def _faster(one: Against) -> float | None:
    return one.faster if one.faster_replayed is None else one.faster_replayed


def _share(one: Against) -> float | None:
    return one.share if one.share_replayed is None else one.share_replayed


PANELS = (
    Panel("times as fast as the best fp32 peer", _faster, "{:.1f}".format, "RdYlGn", (0.1, 10.0), True),
    Panel("share of the floor", _share, "{:.0%}".format, "viridis", (0.0, 1.0), False),
)


def lines(record: Record) -> list[tuple[str, list[Against]]]:
    """Shapes with head sizes up to the same limit, and those with the mask, each in lines of at most `ACROSS`.

    Small heads come first, and among those the shapes with the fewest operations. A line that goes on has no name.
    """
    groups: dict[str, list[Against]] = {name: [] for name in GROUPS}
    for one in sorted(against_peers(record.rows), key=lambda it: (it.ours.d, it.operations)):
        limit = "causal" if one.ours.causal else next(name for name, most in GROUPS.items() if one.ours.d <= most)
        groups[limit].append(one)
    return [
        ("" if start else name, some[start : start + ACROSS])
        for name, some in groups.items()
        for start in range(0, len(some), ACROSS)
    ]


def draw_grid(record: Record, path: str) -> None:
    """Both heat maps: lines of head sizes, a cell for each shape."""
    from matplotlib.figure import Figure

    shapes = lines(record)
    if not shapes:
        raise BadInput("no shape was timed: there is nothing to draw.", f"`{COMMAND}` tells why.")
    across = max(len(some) for _, some in shapes)
    size = (1.5 + CELL * max(across, 6), len(PANELS) * (0.7 + LINE * len(shapes)))
    figure = Figure(figsize=size, layout="constrained")
    figure.suptitle(f"fp32 attention on {record.circumstances['gpu']}: a call in a CUDA graph, long ones by themselves")
    for ax, panel in zip(figure.subplots(len(PANELS)), PANELS, strict=True):
        _draw(ax, panel, shapes, across)
    save_picture(figure, path, dpi=90)


def _draw(ax: Axes, panel: Panel, shapes: list[tuple[str, list[Against]]], across: int) -> None:
    from matplotlib.colors import LogNorm, Normalize

    known = [[_known(panel.value(one)) for one in some] for _, some in shapes]
    padded: Any = [[*some, *[math.nan] * (across - len(some))] for some in known]
    norm = (LogNorm if panel.logarithmic else Normalize)(*panel.limits, clip=True)
    ax.imshow(padded, cmap=panel.colours, norm=norm, aspect="auto")
    for y, ((_, some), values) in enumerate(zip(shapes, known, strict=True)):
        for x, (one, value) in enumerate(zip(some, values, strict=True)):
            said = "–" if math.isnan(value) else panel.text(value)
            dark = panel.colours == "viridis" and value < 0.6
            colour, shape = "white" if dark else "black", str(one.ours.shape)
            ax.text(x, y, f"{said}\n{shape}", ha="center", va="center", fontsize=7.5, color=colour)
    values = [value for some in known for value in some if not math.isnan(value)]
    mean = f"; geometric mean {panel.text(geometric_mean(values))}" if values else ""
    ax.set_title(panel.title + mean, loc="left", fontweight="bold", fontsize=10)
    ax.set_yticks(range(len(shapes)), [name for name, _ in shapes])
    ax.set_xticks([])
    ax.tick_params(axis="y", length=0)
    ax.spines[:].set_visible(False)


def _known(value: float | None) -> float:
    return math.nan if value is None else value


main = scripts.redrawing(COMMAND, Gridded, draw_grid)


if __name__ == "__main__":
    scripts.run(main)
