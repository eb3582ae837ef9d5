"""How fast attention on tensors shall be, and what a record says of that."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from bench.rows import Gridded
from flashcli.measure.rows import InPlace
from flashcli.measure.tensors import Problem
from flashcli.terminal import tables

CONTIGUOUS = "bhnd"


class Target(NamedTuple):
    """A time to reach: ``most`` seconds; or ``most`` times as long as the contender ``beside`` it takes, if any."""

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


# Milliseconds of our choice in single calls, by the names of the grid's shapes.
GRID_TARGETS = {
    "(1, 1024, 64)": 0.013, "(1, 2048, 64)": 0.018, "(4, 2048, 64)": 0.032, "(1, 8192, 64)": 0.095,
    "(1, 8192, 128)": 0.175, "(1, 4096, 256)": 0.120, "(8, 1000, 32)": 0.014, "(7, 777, 80)": 0.018,
    "(2000, 200, 64)": 0.170, "(256, 512, 32)": 0.055, "(12, 512, 64) causal": 0.014, "(12, 1024, 64) causal": 0.020,
    "(25, 1024, 64) causal": 0.030, "(10, 2048, 64)": 0.056, "(13600, 128, 32)": 0.30, "(4, 32768, 32)": 2.95,
    "(500, 2048, 64)": 2.73, "(2, 32768, 64)": 2.48, "(2, 16384, 128)": 1.07,
}  # fmt: skip


def grid_target_lines(rows: Iterable[Gridded]) -> tables.Lines:
    """For each target on the grid that the rows tell of: our choice, in single calls and in a CUDA graph."""
    lines = [["(B, N, d)", "wanted, ms", "measured, ms", "in a graph, ms", ""]]
    for row in rows:
        if row.chosen and row.case in GRID_TARGETS:
            most, found = GRID_TARGETS[row.case], row.seconds * 1e3
            replayed = "" if row.replayed is None else f"{row.replayed * 1e3:.3f}"
            reached = "reached" if found <= most else "missed"
            lines.append([row.case, f"at most {most:.3g}", f"{found:.3f}", replayed, reached])
    return lines


class BackwardTarget(NamedTuple):
    """A time to reach: ``most`` seconds for dQ, dK and dV together."""

    problem: Problem
    most: float


def _same(B: int, H: int, N: int, d: int, causal: bool = False) -> Problem:
    """A problem with as many heads and rows of K as of Q."""
    return Problem(B, H, H, N, N, d, causal)


BACKWARD = (
    BackwardTarget(_same(10, 1, 2048, 64), 0.32e-3),
    BackwardTarget(_same(500, 1, 2048, 64), 10.5e-3),
    BackwardTarget(_same(13600, 1, 128, 32), 1.5e-3),
    BackwardTarget(_same(4, 1, 16384, 32), 4.6e-3),
    BackwardTarget(_same(2, 1, 32768, 64), 10.0e-3),
    BackwardTarget(_same(2, 1, 16384, 128), 5.0e-3),
    BackwardTarget(_same(4, 12, 1024, 64, causal=True), 0.25e-3),
    BackwardTarget(_same(8, 16, 2048, 64, causal=True), 1.5e-3),
)
