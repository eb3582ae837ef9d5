"""Draw a record of ``python -m bench.training``: the losses, and how far ours are from PyTorch's."""

from __future__ import annotations

from bench.rows import Trained
from flashcli.errors import BadInput
from flashcli.measure.plots import BLUE, GREEN, save_picture
from flashcli.measure.records import Record, of_kind

COLOURS = {"flashcli": BLUE, "PyTorch SDPA": GREEN}


def draw_training(record: Record, path: str) -> None:
    """Draw the losses of both runs above, and their difference below."""
    from matplotlib.figure import Figure

    losses = {row.contender: row.losses for row in of_kind(Trained, record.rows)}
    if not COLOURS.keys() <= losses.keys():
        raise BadInput("the record has not both attentions: there is nothing to draw.", "train with both.")
    figure = Figure(figsize=(9, 6), layout="constrained")
    machine = record.circumstances.get("gpu") or record.circumstances["cpu"]
    figure.suptitle(f"A character-level GPT in fp32 on {machine}", fontsize=14)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 1))
    for name, colour in COLOURS.items():
        above.plot(losses[name], color=colour, label=name, linewidth=1.2, linestyle="-" if colour == BLUE else ":")
    above.set(ylabel="loss", ylim=(0, None))
    above.legend(frameon=False)
    apart = [abs(x - y) for x, y in zip(losses["flashcli"], losses["PyTorch SDPA"], strict=True)]
    below.semilogy([max(x, 1e-8) for x in apart], color=BLUE, linewidth=1)
    below.set(xlabel="step", ylabel="difference")
    for ax in (above, below):
        ax.grid(color="#e4e4e4", linewidth=0.7)
    save_picture(figure, path)
