"""Draw the ladder: bars of each rung's command and kernel, as the report has them, and a roofline with every rung.

``python -m flashcli.measure.plots RECORD.json FILE.png [--profile PROFILE.json]`` draws a record of
``flashcli bench --ladder`` to FILE.png and FILE-roofline.png. Matplotlib is imported when there is something to draw.
"""

from __future__ import annotations

import importlib.util
import io
import itertools
import json
import math
import textwrap
from pathlib import Path

import click

from flashcli.errors import BackendUnavailable, BadInput, UsageError, explained
from flashcli.files.outputs import check_creatable, write_whole
from flashcli.kernels.attention import KERNELS
from flashcli.measure import records
from flashcli.shape import tflops

FORMATS = (".png", ".svg", ".pdf")
# Okabe and Ito's colours, which the colour-blind can tell apart.
BLACK, ORANGE, BLUE, GREEN, RED = "#000000", "#E69F00", "#0072B2", "#009E73", "#D55E00"
BARS = {"total": BLUE, "computing": ORANGE, "input and output": GREEN}
BARS_CAPTION = "Median of whole commands, `flashcli run --serial`, files in the page cache; the scale is logarithmic."
BAR = 0.27  # of the space for a rung
# What a rung multiplies with: its colour and marker, and the one of the ceilings that bounds it.
UNITS = {
    "one CPU core": (BLACK, "s"),
    "FFMA, fp32": (BLUE, "o"),
    "tensor cores, three fp16 products for one": (RED, "^"),
}
WIDTH, HEIGHT = 13.0, 4.0  # of a panel across the figure, in inches
LABELS_APART = 0.062  # of a panel's height


def roofline_path(path: str) -> str:
    return str(Path(path).with_stem(f"{Path(path).stem}-roofline"))


def check(path: str) -> None:
    """Find out before the work whether `draw` will succeed after it."""
    if not importlib.util.find_spec("matplotlib"):
        raise BackendUnavailable("Matplotlib, which draws, is not installed.", "pip install matplotlib.")
    if Path(path).suffix not in FORMATS:
        raise UsageError(f"{path!r} is not the name of a picture.", f"let it end in {', '.join(FORMATS)}.")
    for name in (path, roofline_path(path)):
        check_creatable(name)


def draw(record: dict, path: str, profile: dict | None = None) -> None:
    """Both pictures of a ladder's record; with the DRAM bytes that a record of ``flashcli profile`` has measured."""
    timed = [row for row in record["rows"] if "seconds" in row]
    if not timed:
        raise BadInput("no rung was timed: there is nothing to draw.", "the table says why.")
    cases = [list(rows) for _, rows in itertools.groupby(timed, key=lambda row: row["case"])]
    machine = record["circumstances"].get("gpu") or record["circumstances"]["cpu"]
    _save(_bars(cases, machine), path)
    measured = profile["rows"] if profile else []
    _save(_roofline(cases, machine, record.get("ceilings", {}), measured), roofline_path(path))


def _save(figure, path: str) -> None:
    buffer = io.BytesIO()
    figure.savefig(buffer, format=Path(path).suffix[1:], dpi=110)
    write_whole(path, buffer.getvalue())


def _panels(cases: list[list[dict]], title: str):
    """A figure with axes for each case: the first, with the most rungs, across; the others in pairs below."""
    from matplotlib.figure import Figure

    lines = 1 + len(cases) // 2
    figure = Figure(figsize=(WIDTH, HEIGHT * lines + 1), layout="constrained")
    figure.suptitle(title, fontsize=14)
    grid = figure.add_gridspec(lines, 2)
    places = [grid[0, :], *(grid[1 + index // 2, index % 2] for index in range(len(cases) - 1))]
    axes = [figure.add_subplot(place) for place in places]
    for ax, rows in zip(axes, cases, strict=True):
        ax.set_title(records.case_title(rows[0]), loc="left", fontweight="bold")
        ax.grid(color="#e4e4e4", linewidth=0.7)
        ax.set_axisbelow(True)
    return figure, axes


def _bars(cases: list[list[dict]], machine: str):
    figure, axes = _panels(cases, f"Whole commands and kernels on {machine}")
    rows = list(itertools.chain(*cases))
    bottom, top = min(row["seconds"] for row in rows) / 2, max(row["total"] for row in rows) * 2
    for ax, some in zip(axes, cases, strict=True):
        for index, (series, colour) in enumerate(BARS.items()):
            left = [place + BAR * (index - 1) for place in range(len(some))]
            ax.bar(left, [_phase(row, series) for row in some], BAR, color=colour, label=series)
        seconds = [row["seconds"] for row in some]
        ax.plot(seconds, "D", color=BLACK, markeredgecolor="white", label="the kernel alone, all batches in one launch")
        ax.set(yscale="log", ylim=(bottom, top), xlim=(-0.7, len(some) - 0.3), ylabel="seconds")
        names = [row["contender"] for row in some]
        ax.set_xticks(range(len(some)), names, rotation=30, ha="right", rotation_mode="anchor")
        ax.tick_params(axis="x", length=0)
        ax.grid(axis="x", visible=False)
    _legend(figure, axes[0], BARS_CAPTION)
    return figure


def _legend(figure, ax, caption: str) -> None:
    handles, labels = ax.get_legend_handles_labels()
    figure.legend(
        handles, labels, loc="outside lower center", ncols=len(labels), frameon=False,
        title=textwrap.fill(caption, 150), title_fontsize=10,
    )  # fmt: skip


def _phase(row: dict, series: str) -> float:
    """Seconds of the whole command."""
    phases = {"total": "total", "computing": "computation"}
    return row[phases[series]] if series in phases else row["input"] + row["output"]


def _roofline(cases: list[list[dict]], machine: str, ceilings: dict[str, float], measured: list[dict]):
    figure, axes = _panels(cases, f"Roofline of the rungs on {machine}")
    rows = list(itertools.chain(*cases))
    moved = {id(row): _dram_bytes(row, measured) or _must_move(row) for row in rows}
    points = {id(row): (_operations(row) / moved[id(row)], row["tflops"]) for row in rows}
    left, right = min(1.0, *(x / 2 for x, _ in points.values())), max(x for x, _ in points.values()) * 30
    for ax, some in zip(axes, cases, strict=True):
        rates = [row["tflops"] for row in some]
        ax.set(xscale="log", yscale="log", xlabel="operations a byte", ylabel="TFLOP/s")
        ax.set(xlim=(left, right), ylim=(min(rates) / 2, 2 * max([*rates, *_roofs(ceilings).values()])))
        _draw_roofs(ax, ceilings)
        for unit, (colour, marker) in UNITS.items():
            xy = [points[id(row)] for row in some if _unit(row) == unit]
            ax.plot(*zip(*xy, strict=True) if xy else ([], []), marker, color=colour, markersize=7, label=unit)
        _name_points(ax, [(row["contender"], *points[id(row)]) for row in some])
    _legend(figure, axes[0], _caption(rows, measured, bool(ceilings)))
    return figure


def _operations(row: dict) -> float:
    return tflops(row["B"], row["N"], row["d"], 1.0, row["causal"]) * 1e12


def _dram_bytes(row: dict, measured: list[dict]) -> float | None:
    """Bytes that a rung moved through DRAM, where a profile has them.

    Not for a function of many launches: the caches were empty before the one that was counted, which they are not
    before the others.
    """
    names = ("B", "N", "d", "contender")
    functions = [other for other in measured if all(other[name] == row[name] for name in names)]
    if not functions or any(other.get("launches") != 1 or "dram_bytes" not in other for other in functions):
        return None
    return sum(other["dram_bytes"] for other in functions)


def _must_move(row: dict) -> float:
    """Bytes of Q, K, V once in and O once out: whatever the rung, so that all on a case have one intensity."""
    return 16 * row["B"] * row["N"] * row["d"]


def _unit(row: dict) -> str:
    host, ffma, tensor_cores = UNITS
    kernel = KERNELS[row["contender"]]
    return host if kernel.on_host else tensor_cores if kernel.splits else ffma


def _roofs(ceilings: dict[str, float]) -> dict[str, float]:
    """TFLOP/s that matrix products reach on the units that rungs use."""
    return {"fp32": ceilings["fp32"] / 1e12, "fp16 / 3": ceilings["fp16"] / 3e12} if ceilings else {}


def _draw_roofs(ax, ceilings: dict[str, float]) -> None:
    left, right = ax.get_xlim()
    for name, rate in _roofs(ceilings).items():
        ridge = rate * 1e12 / ceilings["bytes"]
        ax.plot([left, ridge, right], [rate * left / ridge, rate, rate], color="#555555", linewidth=1.2, zorder=1)
        box = {"facecolor": "white", "edgecolor": "none", "pad": 1}
        ax.text(right / 1.1, rate, f"{name}: {rate:.0f}", fontsize=8, ha="right", va="center", bbox=box, zorder=4)
    if ceilings:  # above the slope, where no point can be
        highest = max(_roofs(ceilings).values())
        ax.text(left * 1.2, highest, f"copy: {ceilings['bytes'] / 1e12:.2f} TB/s", fontsize=8, va="center")


def _name_points(ax, points: list[tuple[str, float, float]]) -> None:
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


def _caption(rows: list[dict], measured: list[dict], roofed: bool) -> str:
    """What the roofline's axes and lines stand for."""
    known = sum(_dram_bytes(row, measured) is not None for row in rows)
    must = "the bytes of Q, K, V once in and O once out"
    dram = "the bytes that a launch with empty caches moves through DRAM, as counted by Nsight Compute"
    mixed = f"{dram}; for rungs of many launches, or none counted, {must}"
    what = must if known == 0 else dram if known == len(rows) else mixed
    roofs = "Roofs, measured in the same run: a copy, a matrix product in fp32, a third of one in fp16."
    without = "No roofs: there was no PyTorch to measure them with."
    return f"Operations: 4 B N² d, the exponentials not counted, over {what}. {roofs if roofed else without}"


@click.command()
@click.argument("record", type=Path)
@click.argument("picture")
@click.option("--profile", type=Path, help="A record of `flashcli profile`, for the bytes that rungs moved.")
def main(record: Path, picture: str, profile: Path | None) -> None:
    """Draw a RECORD of `flashcli bench --ladder` to PICTURE, and its roofline beside it."""
    check(picture)
    launches = _load(profile, "flashcli profile", {"launches"}) if profile else None
    draw(_load(record, "flashcli bench --ladder", {"total", "tflops"}), picture, launches)


def _load(path: Path, command: str, columns: set[str]) -> dict:
    """A record of ``command``, in which every row that has times has these ``columns``, as no other command's does."""
    with explained("read", path):
        content = path.read_bytes()
    try:
        record = json.loads(content)
        timed = [row for row in record["rows"] if "seconds" in row]
        right = "circumstances" in record and all(columns <= row.keys() for row in timed)
    except (ValueError, KeyError, TypeError):
        right = False
    if not right:
        raise BadInput(f"{str(path)!r} is not a record of `{command}`.", f"`{command} --json FILE` writes one.")
    return record


if __name__ == "__main__":
    from flashcli.measure import scripts

    scripts.run(main)
