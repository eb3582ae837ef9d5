"""flashcli bench --ladder: which rungs climb which cases, how often they are timed, what rows and tables say."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner
from support import flashcli

from bench.records import read
from flashcli.asked.shape import Shape
from flashcli.commands.bench import command
from flashcli.errors import FlashError, UsageError
from flashcli.files.fileformat import InputFile
from flashcli.kernels.attention import KERNELS
from flashcli.measure import bench, ladder, machine, records
from flashcli.measure.records import of_kind
from flashcli.measure.rows import Failure, Row, Rung, Skipped, Timed

SHAPES = {"t10": Shape(2, 20, 8), "t30": Shape(4, 20, 8)}
OPERATIONS = 4 * 2 * 20 * 20 * 8  # of the first
NAMES = ["plain_c", "slow", "split_q", "wgmma"]


@pytest.fixture
def rungs(monkeypatch):
    """A ladder of four: one on the host, one below those for all cases, two for all of them."""
    some = KERNELS["q_in_registers"]
    registry = {name: replace(some, name=name) for name in NAMES[1:3]}
    registry = {"plain_c": replace(some, name="plain_c", on_host=True), **registry, "wgmma": KERNELS["wgmma"]}
    for module in (bench, ladder):
        monkeypatch.setattr(module, "KERNELS", registry)
    return registry


def rung(about: Row, **figures: float) -> Rung:
    """A row with figures, of which most do not matter."""
    names = ("relative_l2", "max_abs", "seconds", "min", "max", "tflops", "total", "input", "computation", "output")
    return Rung(**vars(about), **{"runs": 20, "commands": 2, **dict.fromkeys(names, 1.0), **figures})


@pytest.fixture
def climbed(monkeypatch):
    """Instead of being measured, a rung has a rate of 1 GFLOP/s; gives which rung climbed which shape."""
    calls = []

    def climb(about, given, inputs, *rest):
        calls.append((about.contender, about.B))
        with InputFile(given) as file:
            assert file.shape == about.shape and (file.read(range(about.B)) == inputs[0]).all()
        seconds = OPERATIONS * about.B / 2 / 1e9 / len(calls)
        return rung(about, seconds=seconds, tflops=1e-3)

    monkeypatch.setattr(ladder, "climb", climb)
    return calls


def climb_all(names=NAMES, shapes=SHAPES, everywhere=False, capability=(9, 0)) -> list[Row]:
    return list(ladder.ladder(shapes, names, bench.Conditions(20, False, 0), capability, everywhere))


# Which rungs climb which cases


def test_the_lowest_rungs_climb_the_first_case_only(rungs, climbed):
    rows = climb_all()
    assert climbed == [("plain_c", 2), ("slow", 2), ("split_q", 2), ("wgmma", 2), ("split_q", 4), ("wgmma", 4)]
    assert [row.skipped for row in of_kind(Skipped, rows)] == ["as in the report, on t10 only"] * 2


def test_every_rung_climbs_the_cases_that_are_named(rungs, climbed):
    assert not of_kind(Skipped, climb_all(everywhere=True))
    assert len(climbed) == 8


def test_a_rung_that_does_not_run_here_says_what_it_needs(rungs, climbed):
    rows = climb_all(capability=(8, 0))
    assert [row.skipped for row in rows if row.contender == "wgmma"] == ["it needs sm_90a"] * 2
    assert ("plain_c", 2) in climbed


def test_a_case_that_would_take_too_long_is_predicted_from_the_one_before(rungs, climbed, monkeypatch):
    monkeypatch.setattr(ladder, "SLOWEST", 1.5 * OPERATIONS / 1e9)
    rows = climb_all(everywhere=True)
    assert all(isinstance(row, Rung) for row in rows[:4])
    assert [row.skipped for row in rows[4:]] == ["a run would take some 0 s, at its rate before"] * 4


def test_a_case_nobody_climbs_has_no_inputs_made(rungs, climbed, monkeypatch):
    monkeypatch.setattr(ladder, "_inputs", None)
    assert len(climb_all(["wgmma"], capability=(8, 0))) == 2


# How one is measured


def commands(monkeypatch, *totals: float, kernel_seconds: float = 1e-3) -> list[float]:
    left = list(totals)

    def run(name, given, causal):
        total = left.pop(0)
        phases = {"input": 0.1 * total, "computation": 0.5 * total, "output": 0.2 * total}
        return {"total": total, **phases, "kernel_seconds": kernel_seconds}

    monkeypatch.setattr(ladder, "_whole_command", run)
    return left


def measured_as(monkeypatch, row: Row) -> list[int]:
    """Have the kernel measured with that result; gives how many runs that was to have."""
    runs = []

    def measured(about, contender, inputs, conditions):
        runs.append(conditions.runs)
        return row

    monkeypatch.setattr(bench, "measured", measured)
    return runs


ABOUT = Row.about("t10", SHAPES["t10"], "mma", False)
TIMED = Timed(**vars(ABOUT), relative_l2=1e-6, max_abs=1e-6, seconds=1.0, min=1.0, max=1.0, runs=20, tflops=1e-3)


def climb(wanted=20) -> Row:
    return ladder.climb(ABOUT, Path("in"), [], bench.Conditions(wanted, False, 0))


@pytest.mark.parametrize(("totals", "median"), [((1.0, 1.05, 9.0), 1.025), ((5.0, 1.0, 1.1), 1.1)])
def test_a_third_command_decides_where_two_differ(monkeypatch, totals, median):
    commands(monkeypatch, *totals)
    phases, seconds = ladder.whole_commands("mma", Path("in"), False)
    assert (phases["total"], phases["computation"]) == pytest.approx((median, median / 2))
    assert (seconds, phases["commands"]) == (1e-3, 2 if totals[0] == 1 else 3)


@pytest.mark.parametrize(
    ("kernel_seconds", "wanted", "runs"), [(1e-4, 20, 20), (1e-4, 5, 5), (0.025, 20, 8), (1.0, 20, 3), (1.0, 2, 2)]
)
def test_a_slow_kernel_has_fewer_runs(monkeypatch, kernel_seconds, wanted, runs):
    commands(monkeypatch, 1, 1, kernel_seconds=kernel_seconds)
    counted = measured_as(monkeypatch, TIMED)
    assert isinstance(climb(wanted), Rung)
    assert counted == [runs]


def test_a_wrong_rung_has_no_times_at_all(monkeypatch):
    commands(monkeypatch, 1, 1)
    wrong = Failure(**vars(ABOUT), relative_l2=1.0, max_abs=1.0, error="wrong: relative L2 1.0e+00, 0 not finite")
    measured_as(monkeypatch, wrong)
    assert climb() == wrong and bench.failed([wrong, TIMED]) and not bench.failed([TIMED])


def test_a_run_that_takes_too_long_is_not_repeated(monkeypatch):
    commands(monkeypatch, 1, 1, kernel_seconds=12)
    assert climb() == Skipped(**vars(ABOUT), skipped="a run takes 12 s")


def test_a_command_that_takes_too_long_is_stopped(monkeypatch):
    monkeypatch.setattr(ladder, "COMMAND_LIMIT", 0.01)  # Python alone takes longer to start
    assert climb() == Skipped(**vars(ABOUT), skipped="the command takes more than 0 s")


def test_a_command_that_fails_is_an_error_of_its_row(fake_gpu, monkeypatch, tmp_path):
    with pytest.raises(FlashError, match=r"flashcli run failed: cannot read '.*missing'"):
        ladder._whole_command("mma", tmp_path / "missing", False)
    monkeypatch.setenv("FAKE_GPU_FAILS", "launch")
    [row] = climb_all(["mma"], {"t10": SHAPES["t10"]}, capability=(8, 0))
    assert row.error.startswith("flashcli run failed: kernel mma failed on Fake GPU")


# The command


def test_the_ladder_is_climbed(fake_gpu, tmp_path):
    path = tmp_path / "ladder.json"
    kernels = ["--kernel", "wgmma", "--kernel", "mma", "--kernel", "q_in_registers"]
    done = flashcli("bench", "--ladder", *kernels, "--shape", "2,20,8", "--json", path)
    assert done.code == 0, done.err
    record = read(path.read_text())
    assert record.circumstances["gpu"] == "Fake GPU" and record.ceilings == {}
    assert [row.contender for row in record.rows] == ["q_in_registers", "mma", "wgmma"]
    first, second = of_kind(Rung, record.rows)
    for row in (first, second):
        assert row.relative_l2 < 1e-6 and row.min <= row.seconds <= row.max
        assert 0 < row.computation < row.total
    assert done.out.startswith(records.texts(records.ladder_tables(record.rows)))
    assert re.search(r"^wgmma +skipped: it needs sm_90a$", done.out, re.MULTILINE)


def test_a_ladder_that_nobody_climbs_is_code_1(monkeypatch, tmp_path):
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path))
    done = flashcli("bench", "--ladder", "--kernel", "sequential", "--shape", "2,20,8")
    assert done.code == 1 and "flashcli run failed: there is no C compiler" in done.out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "cpu"], "--ladder is for GPUs, not for the cpu backend."),
        (["--against", "torch"], "--against has no meaning for the ladder."),
        (["--threads", "2", "--backend", "cpu"], "--threads has no meaning for the ladder."),
        (["--precision", "fp16"], "--precision has no meaning for the ladder."),
    ],
)
def test_what_the_ladder_refuses(monkeypatch, options, message):
    monkeypatch.setattr("flashcli.measure.peers.installed", lambda name: True)
    done = CliRunner().invoke(command, ["--ladder", "--shape", "2,20,8", *options])
    assert isinstance(done.exception, UsageError) and done.exception.hint
    assert message in str(done.exception)


def test_a_rung_of_the_host_needs_no_gpu(no_pycuda, monkeypatch, climbed):
    monkeypatch.setattr(ladder, "climb", lambda about, *rest: rung(about))
    done = CliRunner().invoke(command, ["--ladder", "--kernel", "sequential", "--shape", "2,20,8"])
    assert done.exit_code == 0, done.output
    assert "sequential  1000 ms" in done.output
    flashcli("bench", "--ladder", "--shape", "2,20,8").assert_error(69, "there is no NVIDIA driver here")


def test_plain_bench_leaves_the_slow_rungs_to_the_ladder(monkeypatch):
    chosen = []
    monkeypatch.setattr("flashcli.commands.bench.FAST_FROM", "mma")
    monkeypatch.setattr("flashcli.commands.timing.Timing.is_cpu", lambda *_: False)
    monkeypatch.setattr(machine, "gpu_circumstances", dict)
    monkeypatch.setattr(bench, "gpu_contenders", lambda kernels, *rest: chosen.append(kernels) or [])
    for options in ([], ["--kernel", "all"], ["--kernel", "wgmma", "--kernel", "q_in_registers"]):
        CliRunner().invoke(command, ["--shape", "2,20,8", *options])
    names = list(KERNELS)
    assert chosen == [names[names.index("mma") :], names, ["q_in_registers", "wgmma"]]


# The tables

ROW = rung(
    Row.about("t10", Shape(10, 2048, 64), "split_q", False), seconds=2.5e-3, min=2.4e-3, max=2.6e-3, tflops=4.295,
    total=0.4321, input=0.001, computation=0.41, output=0.002,
)  # fmt: skip


def test_a_table_for_each_case_with_a_line_for_neighbours_skipped_alike():
    unnamed = {"case": "(2, 3, 4)", "B": 2, "N": 3, "d": 4}
    rows = [
        *(Skipped(contender=name, skipped="too slow", **unnamed) for name in ("a", "b")),
        Failure(contender="c", error="wrong: no", **unnamed),
        replace(ROW, contender="d", **unnamed, seconds=2.2),
        replace(ROW, contender="fused", seconds=1.0),
        replace(ROW, contender="max_shared", seconds=0.01),
        ROW,
    ]
    lines = records.markdowns(records.ladder_tables(rows)).splitlines()
    assert lines[0] == "**(2, 3, 4)**" and lines[8] == "**t10 (10, 2048, 64)**"
    assert lines[10] == f"| {' | '.join(records.RUNGS)} |"
    assert [line.split(" | ")[:2] for line in lines[4:6]] == [["| a, b", "skipped: too slow"], ["| c", "wrong: no"]]
    assert lines[6].startswith("| d | 2200 ms | 2.400 to 2.600 | 4.29 | 0.432 s |")
    assert lines[-1] == (
        "| split_q | 2.500 ms | 2.400 to 2.600 | 4.29 | 4x | 1.76x | 400x | 0.432 s | 0.001 s | 0.410 s | 0.002 s |"
    )
    assert all(line.count("|") == len(records.RUNGS) + 1 for line in lines[10:] if line.startswith("|"))


def test_the_reports_gain_is_over_the_same_rung_and_there_are_no_columns_without_commands():
    names = ("restructured", "no_bank_conflicts", "o_in_registers")
    rows = [replace(TIMED, case="t29", contender=name, seconds=1 / n) for n, name in enumerate(names, 1)]
    [(_, [head, *lines])] = records.ladder_tables(rows)
    assert head[4:] == ["over the one before", "in the report", "over the first"]
    assert [line[4:] for line in lines] == [["", "", ""], ["2x", "3.3x", "2x"], ["1.5x", "", "3x"]]
