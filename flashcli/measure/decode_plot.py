"""Draw a record of paged decode: how long each kernel takes, and its peers, over the floor.

Matplotlib is imported when there is something to draw.
"""

from __future__ import annotations

from flashcli.errors import BadInput
from flashcli.kernels.decode import CEILING
from flashcli.measure.plots import BLACK, BLUE, GREEN, ORANGE, RED, SKY, legend, save_picture
from flashcli.measure.records import Record, by_case, of_kind
from flashcli.measure.rows import Decoded

GREY, PURPLE = "#999999", "#CC79A7"
COLOURS = {
    "paged_v1": GREY, "paged_v2": SKY, "grouped": ORANGE, "split": GREEN, "tensor": BLUE, "PyTorch cuDNN": RED,
    "PyTorch flash": PURPLE,
}  # fmt: skip
GROUP = 0.84  # of the space for a batch
TITLE = "Paged decode on {}: times over that of reading the same bytes (line), less is better"


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
    shown = [name for name in COLOURS if any(name in case for case in cases.values())]
    if not shown:
        raise BadInput("no kernel was timed beside the floor: there is nothing to draw.", "the table says why.")
    figure = Figure(figsize=(13, 5.2), layout="constrained")
    ax = figure.subplots()
    width = GROUP / len(shown)
    for index, name in enumerate(shown):
        left = [place + width * (index - (len(shown) - 1) / 2) for place in range(len(cases))]
        times = [case.get(name, float("nan")) / case[CEILING.name] for case in cases.values()]
        ax.bar(left, times, width, color=COLOURS[name], label=name)
    ax.axhline(1, color=BLACK, linewidth=1)
    floors = (f"{case}\n{times[CEILING.name] * 1e6:.0f} us" for case, times in cases.items())
    ax.set_xticks(range(len(cases)), list(floors), rotation=30, ha="right", rotation_mode="anchor")
    ax.set(yscale="log", ylabel="times the floor", title=TITLE.format(record.circumstances["gpu"]))
    ax.set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    ax.tick_params(axis="x", length=0)
    ax.grid(axis="y", color="#e4e4e4", linewidth=0.7)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    legend(figure, ax)
    save_picture(figure, path)
