"""Draw a record of ``flashcli streams``: the wall time of each way to hand chunks to a GPU, over the number of streams.

Matplotlib is imported when there is something to draw.
"""

from __future__ import annotations

from flashcli.errors import BadInput
from flashcli.measure.plots import BLACK, BLUE, GREEN, ORANGE, RED, legend, save_picture
from flashcli.measure.records import Record, of_kind
from flashcli.measure.rows import MEMORIES, Streamed

COLOURS = (BLUE, ORANGE, GREEN, RED)
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
        for colour, (connections, order) in zip(COLOURS * len(lines), lines, strict=False):
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
    legend(figure, ax)
    save_picture(figure, path)
