"""Records of the grid: what our choice is compared with, what is said of targets, and the picture."""

from __future__ import annotations

import pytest
from support import drawing

from bench import grid_plot, views
from bench.rows import Gridded
from bench.targets import GRID_TARGETS, grid_target_lines
from flashcli.measure import records
from flashcli.measure.rows import Failure

ABOUT = {"B": 1, "N": 1024, "d": 64, "causal": False}
CASE = "(1, 1024, 64)"


def row(contender: str, seconds: float, replayed: float | None = None, case: str = CASE, **more: object) -> Gridded:
    times = {"min": seconds, "max": seconds, "runs": 3, "tflops": 1.0, "calls": 5 if replayed else 0}
    floors = {"floor_bytes": 1e-6, "floor_operations": 2e-6}
    return Gridded(
        **ABOUT | times | floors | more, case=case, contender=contender, seconds=seconds, replayed=replayed,
        relative_l2=1e-7, max_abs=1e-6,
    )  # fmt: skip


ROWS = [
    row("mma", 8e-6, 5e-6, chosen=False), row("wgmma", 1e-5, 4e-6, chosen=True), row("PyTorch efficient", 4e-5, 3e-5),
    row("Triton bf16x6", 5e-5, 2e-5), Failure(**ABOUT, case=CASE, contender="PyTorch math", error="no memory"),
    row("wgmma", 1e-3, case="(2, 1024, 64)", chosen=True, B=2),
]  # fmt: skip


def test_our_choice_stands_beside_the_best_peer_in_calls_and_in_graphs():
    assert views.grid_lines(ROWS)[1:] == [
        [CASE, "wgmma", "0.010", "20 %", "PyTorch efficient", "0.040", "4x", "0.004", "0.020", "5x",
         "mma, 1.25x"],
        ["(2, 1024, 64)", "wgmma", "1.000", "0 %", "", "", "", "", "", "", ""],
        ["geometric mean", "", "", "", "", "", "4x", "", "", "5x", ""],
    ]  # fmt: skip


def test_a_shape_without_our_choice_is_none():
    assert views.against_peers(ROWS[:1]) == [] and len(views.grid_lines([])) == 1


def test_targets_of_the_grid_are_told_of_our_choice():
    assert grid_target_lines(records.of_kind(Gridded, ROWS))[1:] == [
        [CASE, "at most 0.013", "0.010", "0.004", "reached"]
    ]
    assert grid_target_lines([row("wgmma", 2e-5, chosen=True)])[1][-1] == "missed"


def test_every_target_is_of_a_shape_of_the_grid():
    pytest.importorskip("torch", reason="PyTorch is not installed")
    from bench.grid import GRID, name_of

    assert set(GRID_TARGETS) <= {name_of(problem) for problem in GRID}


@drawing
def test_the_grid_is_drawn_with_each_shape_once_in_each_map(tmp_path):
    grid_plot.draw_grid(records.Record({"gpu": "GPU 1"}, ROWS), str(tmp_path / "x.svg"))
    text = (tmp_path / "x.svg").read_text()
    assert text.count(f">{CASE}</text>") == text.count(">(2, 1024, 64)</text>") == 2
    assert ">5.0</text>" in text and "geometric mean 5.0" in text  # in graphs
