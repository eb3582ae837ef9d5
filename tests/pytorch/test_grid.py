"""The grid: its shapes, what is raced on each, and its rows; computed on the CPU here, with a clock of the host's."""

from __future__ import annotations

import math
import time

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from bench import grid, rows  # noqa: E402
from bench.grid import GRID, OURS, name_of  # noqa: E402
from bench.rows import Gridded  # noqa: E402
from flashcli.errors import BackendUnavailable  # noqa: E402
from flashcli.kernels.attention import KERNELS  # noqa: E402
from flashcli.kernels.operation import Gpu  # noqa: E402
from flashcli.measure import clocks, in_place, peers  # noqa: E402
from flashcli.measure.rows import Failure  # noqa: E402
from flashcli.measure.tensors import Problem, random_inputs  # noqa: E402

CEILINGS = {"fp16": 7.5e14, "fp32": 5e13, "bytes": 4.2e12}
HOPPER = (9, 0)
H200 = Gpu(HOPPER, 132)


@pytest.fixture
def on_the_cpu(monkeypatch):
    """All contenders are PyTorch's attention on the CPU, but for one of ours that is wrong."""

    def seconds(before, work):
        start = time.perf_counter()
        answer = work()
        return time.perf_counter() - start, answer

    def ours(name):
        right = in_place.pytorchs_choice().bind
        wrong = lambda problem, inputs: lambda: torch.zeros_like(inputs.q)  # noqa: E731
        return in_place.Contender(name, wrong if name == "mma" else right)

    monkeypatch.setattr(peers, "event_seconds", seconds)
    monkeypatch.setattr(clocks, "event_seconds", seconds)
    monkeypatch.setattr(clocks, "occupy", lambda: None)
    monkeypatch.setattr(grid, "in_a_graph", lambda contenders, runs, calls: clocks.on_gpu(contenders, runs))
    monkeypatch.setattr(in_place, "ours", ours)
    monkeypatch.setattr(
        in_place, "random_inputs", lambda problem, seed, device, takes: random_inputs(problem, seed, "cpu", takes)
    )
    monkeypatch.setattr(grid, "_chosen", lambda problem: "wgmma")


def test_the_grid_is_of_some_sixty_shapes_from_8_to_256_and_from_few_rows_to_8_GB():
    assert 60 <= len(GRID) <= 72 and len({name_of(problem) for problem in GRID}) == len(GRID)
    assert {8, 256} <= {problem.d for problem in GRID} and {32, 131072} <= {problem.N for problem in GRID}
    assert 7.5e9 < max(problem.bytes * 4 / 3 for problem in GRID) < 8.5e9
    assert {problem.causal for problem in GRID} == {True, False}


@pytest.mark.parametrize("problem", GRID, ids=name_of)
def test_each_shape_is_raced_by_the_chosen_kernel_and_a_peer(problem):
    from flashcli.kernels.choice import choose

    names = [contender.name for contender, _ in grid.entrants(problem, OURS, ("torch",))]
    assert len(set(names)) == len(names) >= 3 and "PyTorch efficient" in names
    assert choose(HOPPER, grid.built(problem)).name in names


def test_all_that_is_launched_is_compiled_before():
    names = {build.kernel.name for build in grid.builds(GRID, ["wgmma"], H200)}
    assert names == {"wgmma"}
    macros = [tuple(build.macros().items()) for build in grid.builds(GRID, OURS, H200)]
    assert len(set(macros)) <= len(macros) < len(GRID) * len(OURS)


def test_right_answers_are_timed_and_wrong_ones_told(on_the_cpu, monkeypatch):
    monkeypatch.setattr(grid, "SLOW", math.inf)  # seconds: a busy machine is no reason to time a call once
    entered = grid.entrants(Problem(3, 1, 1, 40, 40, 16), ("wgmma", "mma", "register_tiled"), ())
    found = grid._race(entered, CEILINGS)
    chosen, wrong, other = found
    assert isinstance(wrong, Failure) and wrong.is_wrong
    assert isinstance(chosen, Gridded) and chosen.chosen and not other.chosen and chosen.replayed > 0
    assert chosen.floor == pytest.approx(4 * 4 * 3 * 40 * 16 / 4.2e12)
    assert [rows.read(row.written()) for row in found] == found


def test_what_is_slow_is_called_once(on_the_cpu, monkeypatch):
    monkeypatch.setattr(grid, "SLOW", 0.0)
    [row] = grid._race(grid.entrants(Problem(3, 1, 1, 40, 40, 16), ["wgmma"], ()), CEILINGS)
    assert row.runs == 1 and row.calls == 0 and row.replayed is None


def test_kernels_that_would_take_too_long_do_not_enter():
    longest = Problem(1, 1, 1, 131072, 131072, 64)
    assert [one.name for one, _ in grid.entrants(longest, OURS, ("torch",))] == ["mma", "wgmma", "PyTorch efficient"]
    assert not [name for name in OURS if name not in KERNELS]


def test_without_a_gpu_the_script_says_so():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    done = CliRunner().invoke(grid.main, [])
    assert isinstance(done.exception, BackendUnavailable) and "PyTorch finds no GPU." in str(done.exception)
