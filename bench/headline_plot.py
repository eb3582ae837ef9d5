"""Draw the README's picture: the rate of our fastest fp32 kernel on each case, beside those of the other fp32 kernels.

``python -m bench.headline_plot RECORD.json FILE.png`` draws a record of ``flashcli bench --against
torch --against triton``. Matplotlib is imported when there is something to draw.
"""

from __future__ import annotations

from bench import scripts
from bench.views import FP32_PEERS
from flashcli.kernels.attention import KERNELS
from flashcli.measure.plots import BLACK, BLUE, GREEN, ORANGE, RED, SKY, save_picture
from flashcli.measure.records import Record, of_kind
from flashcli.measure.rows import Row, Timed

OURS = "flashcli"
COLOURS = dict(zip((OURS, *FP32_PEERS), (BLUE, GREEN, RED, ORANGE, SKY), strict=True))
GROUP = 0.8  # of the space for a case


def rates(rows: list[Row]) -> dict[str, dict[str, float]]:
    """For each case, by its title, the TFLOP/s of each contender that was timed: the best of our kernels, the peers."""
    found: dict[str, dict[str, float]] = {}
    for row in of_kind(Timed, rows):
        name = OURS if row.contender in KERNELS else row.contender
        if name in COLOURS:
            case = found.setdefault(row.title, {})
            case[name] = max(row.tflops, case.get(name, 0))
    return found


def draw_headline(record: Record, path: str) -> None:
    """A group of bars for each case, the rate above each bar, and a line for what cuBLAS reaches in plain fp32."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    ax = figure.subplots()
    cases = rates(record.rows)
    shown = [name for name in COLOURS if any(name in case for case in cases.values())]
    width = GROUP / len(shown)
    for index, name in enumerate(shown):
        left = [place + width * (index - (len(shown) - 1) / 2) for place in range(len(cases))]
        bars = ax.bar(left, [case.get(name, 0) for case in cases.values()], width, color=COLOURS[name], label=name)
        texts = [f"{case[name]:.0f}" if name in case else "" for case in cases.values()]
        ax.bar_label(bars, texts, fontsize=8, padding=1, bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.5})
    if record.ceilings:
        ax.axhline(record.ceilings["fp32"] / 1e12, color=BLACK, linestyle="--", linewidth=1, label="cuBLAS in fp32")
    ax.set_xticks(range(len(cases)), [title.replace(" (", "\n(", 1) for title in cases])
    ax.tick_params(axis="x", length=0)
    ax.set(ylabel="TFLOP/s", title=f"fp32 attention on {record.circumstances['gpu']}, more is better")
    ax.legend(frameon=False, ncols=len(shown) + 1, loc="upper center", bbox_to_anchor=(0.5, -0.14))
    ax.spines[["top", "right"]].set_visible(False)
    save_picture(figure, path, dpi=100)


main = scripts.redrawing("flashcli bench --against torch --against triton", Timed, draw_headline)


if __name__ == "__main__":
    scripts.run(main)
