"""Draw a record of ``python -m bench.gpt2.times``: seconds over tokens, a line for each attention."""

from __future__ import annotations

from bench.rows import Generated
from flashcli.errors import BadInput
from flashcli.measure.plots import BLACK, BLUE, GREEN, ORANGE, RED, SKY, save_picture
from flashcli.measure.records import Record, by_case, of_kind

COLOURS = {
    "naive": BLACK,
    "PyTorch math": RED,
    "PyTorch efficient": GREEN,
    "flashcli": BLUE,
}  # kernels are ORANGE, pages SKY
MARKERS = "osv^D<>x"


def draw_generation(record: Record, path: str) -> None:
    """Draw the seconds until so many tokens were there, in a panel for each case: without a cache and with one."""
    from matplotlib.figure import Figure

    cases = by_case(of_kind(Generated, record.rows))
    if not cases:
        raise BadInput("nothing was generated: there is nothing to draw.", "the table says why.")
    figure = Figure(figsize=(11, 4.6), layout="constrained")
    machine = record.circumstances.get("gpu") or record.circumstances["cpu"]
    figure.suptitle(f"GPT-2 in fp32 on {machine}, less is better", fontsize=14)
    panels = figure.subplots(1, len(cases), squeeze=False)[0]
    for ax, (case, rows) in zip(panels, cases.items(), strict=True):
        for row, marker in zip(rows, MARKERS * len(rows), strict=False):
            counts = [int(count) for count in row.reached]
            colour = COLOURS.get(row.contender, SKY if row.contender.startswith("paged") else ORANGE)
            ax.plot(counts, list(row.reached.values()), marker=marker, color=colour, label=row.contender, linewidth=1.2)
        ax.set(title=case, xlabel="tokens", ylabel="seconds", ylim=(0, None))
        ax.set_xticks(counts)
        ax.grid(color="#e4e4e4", linewidth=0.7)
    named = {label: line for ax in panels for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend(named.values(), named.keys(), loc="outside lower center", ncols=5, frameon=False)
    save_picture(figure, path)
