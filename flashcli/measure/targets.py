"""How fast attention on tensors shall be, and what a record says of that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flashcli import tables
from flashcli.measure.rows import InPlace

CONTIGUOUS = "bhnd"


class Target(NamedTuple):
    """``most`` seconds; or, where there is a contender ``beside`` it, so many times as long as that takes."""

    case: str
    most: float
    beside: str = ""
    layout: str = CONTIGUOUS
    contender: str = "flashcli"

    @property
    def wanted(self) -> str:
        return f"at most {self.most:.2f}x {self.beside}" if self.beside else f"at most {self.most * 1e3:.3g} ms"


LAYOUT_CASES = ("t22 in heads", "short rows", "shorter rows")
TARGETS = (
    Target("grouped heads", 1.5e-3),
    Target("bias", 0.22e-3),
    *(Target(case, 1.05, "flashcli", layout) for case in LAYOUT_CASES for layout in ("bnhd", "qkv")),
    Target("a call", 1.2, "PyTorch SDPA"),
    Target("a call, gradients", 1.6, "PyTorch SDPA"),
    Target("replayed", 0.4, "PyTorch efficient"),
)


def target_lines(rows: Iterable[InPlace]) -> tables.Lines:
    """For each target that the rows tell of: what was measured, what is wanted, and whether it is reached."""
    seconds = {(row.case, row.contender, row.layout): row.seconds for row in rows}
    lines = [["target", "layout", "measured", "wanted", ""]]
    for target in TARGETS:
        own = seconds.get((target.case, target.contender, target.layout))
        other = seconds.get((target.case, target.beside, CONTIGUOUS)) if target.beside else 1.0
        if own is not None and other is not None:
            found = own / other
            measured = f"{found:.2f}x" if target.beside else f"{found * 1e3:.3f} ms"
            reached = "reached" if found <= target.most else "missed"
            lines.append([target.case, target.layout, measured, target.wanted, reached])
    return lines
