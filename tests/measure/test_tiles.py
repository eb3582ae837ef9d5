"""flashcli bench --tiles: which tiles are tried, what rows, table and picture say of them."""

from __future__ import annotations

from itertools import product

import pytest
from click.testing import CliRunner
from support import drawing, flashcli

from bench.records import read
from flashcli.commands.bench import command
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import STATIC_SHARED, nothing
from flashcli.kernels.problem import Problem
from flashcli.measure import plots, records, reported
from flashcli.measure.records import Record, of_kind
from flashcli.measure.rows import Skipped, Tiled

SEARCH = ("bench", "--tiles", "--shape", "1,20,128", "--runs", "1")  # a long head, for which few tiles fit
CHOICES = [name for name, kernel in KERNELS.items() if kernel.tilings is not nothing]


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("d", [32, 64])
def test_the_tiles_of_a_kernel_are_among_those_that_are_tried(name, d):
    problem = Problem(10, 2048, 2048, d)
    tried = list(KERNELS[name].tilings(problem))
    assert KERNELS[name].tiling(problem) in tried and len(set(tried)) == len(tried) > 10


def test_all_tiles_are_tried_that_shared_memory_holds():
    tried = {tiling[:2] for tiling in KERNELS["q_in_registers"].tilings(Problem(10, 2048, 2048, 64))}
    assert tried == {
        (Br, Bc)
        for Br, Bc in product((32, 64, 128, 256), (4, 8, 16, 32, 64, 128))
        if 4 * (2 * Bc * 64 + Br * Bc) <= STATIC_SHARED
    }


@pytest.fixture
def searched(fake_gpu, tmp_path):
    """A record of a kernel's tiles, and what the command has printed."""
    path = tmp_path / "tiles.json"
    done = flashcli(*SEARCH, "--kernel", "split_q", "--json", path)
    assert done.code == 0, done.err
    return read(path.read_text()), done.out


def test_every_pair_is_timed(searched):
    record, printed = searched
    rows = of_kind(Tiled, record.rows)
    problem, kernel = Problem(1, 20, 20, 128), KERNELS["split_q"]
    assert [(row.Br, row.Bc) for row in rows] == [tiling[:2] for tiling in kernel.tilings(problem)]
    assert [(row.Br, row.Bc) for row in rows if row.own] == [kernel.tiling(problem)[:2]]
    assert {row.registers for row in rows} == {128} and all(0 < row.occupancy <= 100 for row in rows)
    assert printed.startswith("split_q on (1, 20, 128)\nBr ")
    assert printed.count("the fastest") == printed.count("its own") == 1


def test_tiles_for_which_registers_do_not_suffice_are_not_timed(fake_gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu.Function, "local_size_bytes", 48)
    done = CliRunner().invoke(command, [*SEARCH[1:], "--kernel", "fused"])
    assert done.exit_code == 1 and "fused, 32 x 16: skipped: registers do not suffice: 48 bytes spill" in done.output


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--kernel", "wgmma"], "there is no choice of tiles for wgmma."),
        (["--ladder"], "--tiles has no meaning for the ladder."),
        (["--against", "torch"], "--against has no meaning for tiles."),
        (["--backend", "cpu"], "--tiles is for GPUs, not for the cpu backend."),
    ],
)
def test_what_has_no_meaning_is_refused(monkeypatch, options, message):
    monkeypatch.setattr("flashcli.measure.peers.installed", lambda name: True)
    flashcli(*SEARCH, *options).assert_error(2, message)


def tiled(Br: int, Bc: int, seconds: float, own: bool = False, kernel: str = "split_q") -> Tiled:
    figures = {"relative_l2": 1e-7, "max_abs": 1e-7, "min": seconds, "max": seconds, "runs": 3, "tflops": 1.0}
    return Tiled(
        case="t10", B=10, N=2048, d=64, contender="", kernel=kernel, Br=Br, Bc=Bc, seconds=seconds, own=own,
        threads=Br, registers=90, shared=49152, occupancy=25.0, limited_by="shared memory", **figures,
    )  # fmt: skip


ROWS = [tiled(128, 16, 2e-3, own=True), tiled(64, 32, 1e-3), tiled(64, 16, 4e-3), tiled(32, 16, 1e-3, kernel="fused")]


def test_a_table_has_a_line_for_each_Br_and_a_column_for_each_Bc():
    (title, lines), (other, _) = records.tiles_tables(ROWS)
    assert (title, other) == ("split_q on t10 (10, 2048, 64)", "fused on t10 (10, 2048, 64)")
    assert lines == [
        ["Br", "Bc = 16", "Bc = 32"],
        ["64", "4.000 ms, 90, 25 %", "1.000 ms, 90, 25 % (the fastest)"],
        ["128", "2.000 ms, 90, 25 % (its own)", ""],
    ]


@drawing
def test_the_picture_has_a_panel_for_each_search(tmp_path):
    path = tmp_path / "tiles.svg"
    plots.draw_tiles(Record({}, ROWS), str(path))
    drawn = path.read_text()
    assert all(text in drawn for text in ("split_q on t10", "fused on t10", "4 ms", "90 registers"))
    with pytest.raises(plots.BadInput, match="no tiles were timed"):
        plots.draw_tiles(Record({}, [Skipped(case="", B=1, N=1, d=1, contender="", skipped="")]), str(path))


def test_the_reports_gains_are_those_of_its_steps():
    assert reported.gain("t10", "fused", "max_shared") == pytest.approx(2.27, abs=0.01)
    assert reported.gain("t29", "ml_in_registers", "no_bank_conflicts") == pytest.approx(3.31, abs=0.01)
    unknown = (("t11", "q_in_registers", "deferred"), ("x", "split_q", "float4"))
    assert {reported.gain(*of) for of in unknown} == {None}
    assert {name for rungs in reported.COMPUTING.values() for name in rungs} <= set(KERNELS)
