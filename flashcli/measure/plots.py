"""Pictures of records. Matplotlib is imported when there is something to draw."""

from __future__ import annotations

import importlib
import io
import itertools
import math
import textwrap
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashcli.asked.shape import tflops
from flashcli.errors import BackendUnavailable, BadInput, UsageError
from flashcli.files.outputs import check_creatable, write_whole
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.decode import CEILING
from flashcli.measure.records import Record, by_case, by_search, fastest, of_kind
from flashcli.measure.rows import MEMORIES, Decoded, Rung, Streamed, Tiled

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PICTURES = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which the colour-blind can tell apart.
BLACK, ORANGE, BLUE, GREEN, RED, SKY = "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00", "#56B4E9"
GREY, PURPLE = "#999999", "#CC79A7"
# Bars of each rung: the colour, and the seconds of the whole command that it shows.
BARS: dict[str, tuple[str, Callable[[Rung], float]]] = {
    "total": (BLUE, lambda row: row.total),
    "computing": (ORANGE, lambda row: row.computation),
    "input and output": (GREEN, lambda row: row.input + row.output),
}
BARS_CAPTION = "Median of whole commands, `flashcli run --serial`, files in the page cache; the scale is logarithmic."
MUST = "the bytes of Q, K, V once in and O once out"
ROOFS = "Roofs, measured in the same run: a copy, a matrix product in fp32, a third of one in fp16."
Moved = Mapping[tuple[str, str], float]  # bytes, by the shape and the name of a rung
BAR = 0.27  # of the space for a rung
SLOWEST = 3.0  # times of the best with which tiles are red
TILES_CAPTION = "Median of the kernel, registers of a thread, occupancy. Bold: the fastest. Framed: the kernel's own."
# Units that rungs multiply with, each with a colour and a marker.
UNITS = {
    "one CPU core": (BLACK, "s"),
    "FFMA, fp32": (BLUE, "o"),
    "tensor cores, three fp16 products for one": (RED, "^"),
}
WIDTH, HEIGHT = 13.0, 4.0  # of a panel across the figure, in inches
LABELS_APART = 0.057  # of a panel's height


def roofline_path(path: str) -> str:
    return str(Path(path).with_stem(f"{Path(path).stem}-roofline"))


def check_drawable(path: str) -> None:
    """Find out before the work whether `draw_ladder` will succeed after it."""
    for name in (path, roofline_path(path)):
        check_picture(name)


def check_picture(path: str) -> None:
    """Find out before the work whether a picture can be drawn to a file."""
    try:
        importlib.import_module("matplotlib.figure")  # it may be there, and something that it needs may not
    except ImportError as error:
        missing = f"Matplotlib, which draws, cannot be imported: {error}."
        raise BackendUnavailable(missing, "pip install matplotlib.") from error
    if Path(path).suffix not in PICTURES:
        raise UsageError(f"{path!r} is not the name of a picture.", f"let it end in {', '.join(PICTURES)}.")
    check_creatable(path)


def draw_ladder(record: Record, path: str, moved: Moved | None = None, over: str = MUST) -> None:
    """Both pictures of a ladder's record; ``over`` says what the bytes are that rungs ``moved``."""
    cases = list(by_case(of_kind(Rung, record.rows)).values())
    if not cases:
        raise BadInput("no rung was timed: there is nothing to draw.", "the table says why.")
    machine = str(record.circumstances.get("gpu") or record.circumstances["cpu"])
    save_picture(_bars(cases, machine), path)
    save_picture(_roofline(cases, machine, record.ceilings or {}, moved or {}, over), roofline_path(path))


def draw_tiles(record: Record, path: str) -> None:
    """A heat map for each case and kernel of ``flashcli bench --tiles``: times, in those of the fastest tiles."""
    from matplotlib.figure import Figure

    searches = by_search(record.rows)
    if not searches:
        raise BadInput("no tiles were timed: there is nothing to draw.", "the table says why.")
    lines = math.ceil(len(searches) / 2)
    figure = Figure(figsize=(WIDTH, HEIGHT * lines), layout="constrained")
    for place, ((title, kernel), rows) in enumerate(searches.items(), 1):
        ax = figure.add_subplot(lines, min(2, len(searches)), place)
        ax.set_title(f"{kernel} on {title}", loc="left", fontweight="bold")
        _draw_search(ax, rows)
    figure.supxlabel(TILES_CAPTION, fontsize=10)
    save_picture(figure, path)


def _draw_search(ax: Axes, rows: list[Tiled]) -> None:
    from matplotlib.patches import Rectangle

    Brs, Bcs, best = sorted({row.Br for row in rows}), sorted({row.Bc for row in rows}), fastest(rows)
    times = [[math.nan] * len(Bcs) for _ in Brs]
    for row in rows:
        y, x = Brs.index(row.Br), Bcs.index(row.Bc)
        times[y][x] = min(row.seconds / best.seconds, SLOWEST)
        text = f"{row.seconds * 1e3:.4g} ms\n{row.registers} registers\n{row.occupancy:.0f} %"
        ax.text(x, y, text, ha="center", va="center", fontsize=7, fontweight="bold" if row is best else "normal")
        if row.own:
            ax.add_patch(Rectangle((x - 0.48, y - 0.48), 0.96, 0.96, fill=False, edgecolor=BLUE, linewidth=2))
    ax.imshow(times, cmap="RdYlGn_r", vmin=1, vmax=SLOWEST, aspect="auto", alpha=0.7)
    ax.set_xticks(range(len(Bcs)), map(str, Bcs))
    ax.set_yticks(range(len(Brs)), map(str, Brs))
    ax.set(xlabel="Bc", ylabel="Br")


def save_picture(figure: Figure, path: str, dpi: int = 110) -> None:
    """Write a figure to a file: a figure has the same bytes whenever it is drawn."""
    import matplotlib

    buffer, undated = io.BytesIO(), {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(Path(path).suffix)
    as_text: Any = {"svg.fonttype": "none", "font.sans-serif": ["DejaVu Sans", "sans-serif"]}
    with matplotlib.rc_context({"svg.hashsalt": "flashcli", **as_text}):
        figure.savefig(buffer, format=Path(path).suffix[1:], dpi=dpi, metadata=undated)
    write_whole(path, buffer.getvalue())


def _panels(cases: list[list[Rung]], title: str) -> tuple[Figure, list[Axes]]:
    """A figure with axes for each case: the first, with the most rungs, across; the others in pairs below."""
    from matplotlib.figure import Figure

    lines = 1 + len(cases) // 2
    figure = Figure(figsize=(WIDTH, HEIGHT * lines + 1), layout="constrained")
    figure.suptitle(title, fontsize=14)
    grid = figure.add_gridspec(lines, 2)
    places = [grid[0, :], *(grid[1 + index // 2, index % 2] for index in range(len(cases) - 1))]
    axes = [figure.add_subplot(place) for place in places]
    for ax, rows in zip(axes, cases, strict=True):
        ax.set_title(rows[0].title, loc="left", fontweight="bold")
        ax.grid(color="#e4e4e4", linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def _bars(cases: list[list[Rung]], machine: str) -> Figure:
    figure, axes = _panels(cases, f"Whole commands and kernels on {machine}")
    rows = list(itertools.chain(*cases))
    bottom, top = min(row.seconds for row in rows) / 2, max(row.total for row in rows) * 2
    for ax, some in zip(axes, cases, strict=True):
        for index, (series, (colour, height)) in enumerate(BARS.items()):
            left = [place + BAR * (index - 1) for place in range(len(some))]
            ax.bar(left, [height(row) for row in some], BAR, color=colour, label=series)
        seconds = [row.seconds for row in some]
        ax.plot(seconds, "D", color=BLACK, markeredgecolor="white", label="the kernel alone, all batches in one launch")
        ax.set(yscale="log", ylim=(bottom, top), xlim=(-0.7, len(some) - 0.3), ylabel="seconds")
        names = [row.contender for row in some]
        ax.set_xticks(range(len(some)), names, rotation=30, ha="right", rotation_mode="anchor")
        ax.tick_params(axis="x", length=0)
        ax.grid(axis="x", visible=False)
    _legend(figure, axes[0], BARS_CAPTION)
    return figure


def _legend(figure: Figure, ax: Axes, caption: str | None = None) -> None:
    """Name what is drawn in one of the axes in a line below all of them, with a caption above it."""
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False,
        title=caption and textwrap.fill(caption, 150), title_fontsize=10,
    )  # fmt: skip


def _roofline(
    cases: list[list[Rung]], machine: str, ceilings: dict[str, float], moved: Moved, over: str = MUST
) -> Figure:
    figure, axes = _panels(cases, f"Roofline of the rungs on {machine}")
    rows = list(itertools.chain(*cases))
    points = {}
    for row in rows:
        operations = tflops(**vars(row.shape), seconds=1e-12, causal=bool(row.causal))
        must = row.shape.input_bytes + row.shape.output_bytes  # so all rungs on a case have one intensity
        points[id(row)] = operations / moved.get((str(row.shape), row.contender), must), row.tflops
    left, right = min(1.0, *(x / 2 for x, _ in points.values())), max(x for x, _ in points.values()) * 30
    for ax, some in zip(axes, cases, strict=True):
        rates = [row.tflops for row in some]
        ax.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
        ax.set(xlim=(left, right), ylim=(min(rates) / 2, 2 * max([*rates, *_roofs(ceilings).values()])))
        _draw_roofs(ax, ceilings)
        for unit, (colour, marker) in UNITS.items():
            xy = [points[id(row)] for row in some if _unit(row) == unit]
            ax.plot(*zip(*xy, strict=True) if xy else ([], []), marker, color=colour, markersize=7, label=unit)
        _name_points(ax, [(row.contender, *points[id(row)]) for row in some])
    roofs = ROOFS if ceilings else "No roofs: there was no PyTorch to measure them with."
    _legend(figure, axes[0], f"Operations: 4 B N² d, the exponentials not counted, over {over}. {roofs}")
    return figure


def _unit(row: Rung) -> str:
    host, ffma, tensor_cores = UNITS
    kernel = KERNELS[row.contender]
    return host if kernel.on_host else tensor_cores if kernel.splits else ffma


def _roofs(ceilings: dict[str, float]) -> dict[str, float]:
    """TFLOP/s that matrix products reach on the units that rungs use."""
    return {"fp32": ceilings["fp32"] / 1e12, "fp16 / 3": ceilings["fp16"] / 3e12} if ceilings else {}


def _draw_roofs(ax: Axes, ceilings: dict[str, float]) -> None:
    left, right = ax.get_xlim()
    for name, rate in _roofs(ceilings).items():
        ridge = rate * 1e12 / ceilings["bytes"]
        ax.plot([left, ridge, right], [rate * left / ridge, rate, rate], color="#555555", linewidth=1.2, zorder=1)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(right / 1.1, rate, f"{name}: {rate:.0f}", fontsize=8, ha="right", va="center", bbox=box, zorder=4)
    if ceilings:  # above the slope, where no point can be
        highest = max(_roofs(ceilings).values())
        ax.text(left * 1.2, highest, f"copy: {ceilings['bytes'] / 1e12:.2f} TB/s", fontsize=8, va="center")


def _name_points(ax: Axes, points: list[tuple[str, float, float]]) -> None:
    """Names with TFLOP/s in a column at the right, in the order of the points, each with a line to its point."""
    low, high = (math.log(limit) for limit in ax.get_ylim())
    points = sorted(points, key=lambda point: point[2])
    heights = spread([(math.log(y) - low) / (high - low) for _, _, y in points], LABELS_APART)
    for (name, x, y), height in zip(points, heights, strict=True):
        ax.annotate(
            f"{name}  {y:.3g}", (x, y), (1.02, height), textcoords="axes fraction", va="center", fontsize=9,
            arrowprops={"arrowstyle": "-", "color": "#bbbbbb", "linewidth": 0.7, "shrinkB": 4},
        )  # fmt: skip


def spread(heights: list[float], gap: float) -> list[float]:
    """Ascending heights moved apart until neighbours are at least ``gap`` apart; all from 0 to 1 if they fit."""
    moved = list(heights)
    for index in range(1, len(moved)):
        moved[index] = max(moved[index], moved[index - 1] + gap)
    ceiling = 1.0
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], ceiling)
        ceiling = moved[index] - gap
    return moved


# ---- flashcli bench-decode

OF_DECODE = {
    "paged_v1": GREY, "paged_v2": SKY, "grouped": ORANGE, "split": GREEN, "tensor": BLUE, "PyTorch cuDNN": RED,
    "PyTorch flash": PURPLE,
}  # fmt: skip
GROUP = 0.84  # of the space for a batch
DECODE_TITLE = "Paged decode on {}: times over that of reading the same bytes (line), less is better"


def draw_decode(record: Record, path: str) -> None:
    """A group of bars for each batch, in the first layout; its floor in microseconds stands below its name."""
    from matplotlib.figure import Figure

    rows = of_kind(Decoded, record.rows)
    rows = [row for row in rows if row.layout == rows[0].layout]
    cases = {
        case: floor_and_others
        for case, some in by_case(rows).items()
        if CEILING.name in (floor_and_others := {row.contender: row.seconds for row in some})
    }
    shown = [name for name in OF_DECODE if any(name in case for case in cases.values())]
    if not shown:
        raise BadInput("no kernel was timed beside the floor: there is nothing to draw.", "the table says why.")
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    ax = figure.subplots()
    width = GROUP / len(shown)
    for index, name in enumerate(shown):
        left = [place + width * (index - (len(shown) - 1) / 2) for place in range(len(cases))]
        times = [case.get(name, float("nan")) / case[CEILING.name] for case in cases.values()]
        ax.bar(left, times, width, color=OF_DECODE[name], label=name)
    ax.axhline(1, color=BLACK, linewidth=1)
    floors = (f"{case}\n{times[CEILING.name] * 1e6:.0f} us" for case, times in cases.items())
    ax.set_xticks(range(len(cases)), list(floors), rotation=30, ha="right", rotation_mode="anchor")
    ax.set(yscale="log", ylabel="times the floor", title=DECODE_TITLE.format(record.circumstances["gpu"]))
    ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    _legend(figure, ax)
    save_picture(figure, path)


# ---- flashcli streams

OF_LINES = (BLUE, ORANGE, GREEN, RED)
MARKERS = {"depth": "o", "breadth": "s"}


def draw_streams(record: Record, path: str) -> None:
    """A panel for each kind of the host's memory, a line for each order and number of connections."""
    from matplotlib.figure import Figure

    rows = of_kind(Streamed, record.rows)
    if not rows:
        raise BadInput("no way was timed: there is nothing to draw.", "the table says why.")
    busiest = min(max(row.copies_in, row.kernels, row.copies_out) for row in rows)
    memories = [memory for memory in reversed(MEMORIES) if any(row.memory == memory for row in rows)]
    counts = sorted({row.streams for row in rows})
    figure = Figure(figsize=(6.5 * len(memories), 4.6), layout="constrained")
    figure.suptitle(f"{rows[0].title} on {record.circumstances['gpu']}: copies in, kernels, copies out", fontsize=13)
    for ax, memory in zip(figure.subplots(1, len(memories), squeeze=False)[0], memories, strict=True):
        some = [row for row in rows if row.memory == memory]
        lines = sorted({(row.connections, row.order) for row in some})
        for colour, (connections, order) in zip(OF_LINES * len(lines), lines, strict=False):
            of = {row.streams: row.seconds for row in some if row.connections == connections}
            of |= {row.streams: row.seconds for row in some if (row.connections, row.order) == (connections, order)}
            name = f"{order} first, {connections} connection{'s' * (connections > 1)}"
            ax.plot(
                [counts.index(count) for count in of], [seconds * 1e3 for seconds in of.values()], MARKERS[order] + "-",
                color=colour, label=name,
            )  # fmt: skip
        ax.axhline(busiest * 1e3, color=BLACK, linewidth=1, linestyle="--", label="the busiest engine")
        ax.set(title=f"{memory} memory", xlabel="streams", ylabel="milliseconds", ylim=(0, None))
        ax.set_xticks(range(len(counts)), [str(count or "default") for count in counts])
        ax.grid(axis="y", color="#e4e4e4", linewidth=0.7)
        ax.spines[["top", "right"]].set_visible(False)
    _legend(figure, ax)
    save_picture(figure, path)
