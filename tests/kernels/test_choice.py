"""Which kernel computes arrays when nobody names one: the fastest as the model has it, which is held to the record."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support import ROOT, flashcli

from bench import fit
from bench.records import read
from bench.rows import Gridded
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.choice import AS_FAST, FULL, HOST, PREFERENCE, SHORT_HEAD, TWINS, candidates, choose, why
from flashcli.kernels.problem import Problem
from flashcli.kernels.tuning import cost, costs
from flashcli.measure import records
from flashcli.terminal import as_json

HOPPER, AMPERE = (9, 0), (8, 0)
GRID = ROOT / "cuda/records/grid.json"
ROWS = records.of_kind(Gridded, read(GRID.read_bytes()).rows)
CASES = list(records.by_case(row for row in ROWS if row.contender in KERNELS).values())
ALLOWED = 1.05  # times the fastest of our kernels; where the GPU waits for the host,
WAITING = 1.2  # so much, for a launch less
NEWER = {"(1000, 128, 128)"}  # shapes that `wgmma_short` takes since the record was made, which has no row of it


def on_arrays(B: int, N: int, d: int, causal: bool = False, **more: object) -> Problem:
    return Problem(B, N, N, d, causal, **{"in_place": True, "batch_invariant": True, **more})


OTHER_TILINGS = "the grid's record is of other tilings: make bench-grid"


@pytest.fixture(scope="module")
def of_these_kernels():
    """Skips what only holds of a record made with the kernels as they are, where one test fails in place of many."""
    if fit.tilings(ROWS) != costs.TILINGS:
        pytest.skip(OTHER_TILINGS)


# The record


def test_the_record_is_of_these_tilings():
    assert fit.tilings(ROWS) == costs.TILINGS, OTHER_TILINGS


@pytest.mark.usefixtures("of_these_kernels")
@pytest.mark.parametrize("free", [False, True])
def test_the_kernel_that_is_chosen_is_within_5_percent_of_the_best_on_every_shape_of_the_record(free):
    found = fit.regrets(ROWS, batch_invariant=not free)
    assert len(found) == len(CASES)
    waits = {row.case for row in ROWS if row.chosen and row.seconds * 1e6 < HOST}
    slower = [one for one in found if one.times > (WAITING if one.case in waits else ALLOWED)]
    assert [one for one in slower if one.case not in NEWER or math.isfinite(one.times)] == []


def test_of_tiny_calls_the_one_with_a_launch_less_is_chosen():
    tiny = on_arrays(4, 64, 64, batch_invariant=False)
    expected = {one.name: one.microseconds for one in candidates(HOPPER, tiny) if not one.refused}
    assert expected["wgmma"] < expected["mma_short"] < AS_FAST * HOST
    assert choose(HOPPER, tiny).name == "mma_short"
    assert why(HOPPER, tiny).startswith(
        "is expected to be as fast as wgmma or as the host (8.5 us), and has no pre-pass"
    )


@pytest.mark.usefixtures("of_these_kernels")
@pytest.mark.parametrize("some", CASES, ids=lambda some: some[0].case)
def test_the_record_says_which_kernel_was_chosen(some):
    """A record that was made with other kernels or constants is to be made anew."""
    chosen = choose(HOPPER, fit.problem_of(some[0])).name
    newer = some[0].case in NEWER and chosen not in {row.contender for row in some}
    assert newer or [row.contender for row in some if row.chosen] == [chosen]


@pytest.mark.usefixtures("of_these_kernels")
def test_the_constants_are_those_of_the_record():
    assert fit.fitted(ROWS) == cost.COSTS, "python -m bench.fit cuda/records/grid.json"
    assert fit.WRITTEN.read_text() == fit.source(cost.COSTS, costs.TILINGS)


@pytest.mark.usefixtures("of_these_kernels")
@pytest.mark.parametrize("some", CASES, ids=lambda some: some[0].case)
def test_the_model_knows_each_time_of_the_record_by_half(some):
    for row in filter(fit.may_be_chosen, some):
        expected = cost.microseconds(KERNELS[row.contender], fit.problem_of(row))
        assert 0.55 < expected / (row.seconds * 1e6) < 1.5, row.contender


# The rule


@pytest.mark.parametrize("N", [1, 31, 128, 200, 256, 257, 384, 1000, 1024, 4096])
@pytest.mark.parametrize("d", [1, 8, 12, 16, 32, 40, 64, 80, 128, 200, 256])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("more", [{}, {"bias": "float32"}, {"precision": "fp16"}], ids=str)
def test_bytes_do_not_depend_on_company_nor_on_how_arrays_lie(N, d, causal, more):
    ways = [
        on_arrays(B, N, d, causal, sms=sms, aligned=aligned, dense=dense, lse=lse, **more)
        for B in (1, 7, 300, 100_000)
        for sms in (60, 132)
        for aligned, dense, lse in ((True, True, False), (True, False, True), (False, True, False))
    ]
    made = {(_arithmetic(choose(HOPPER, way).name), choose(HOPPER, way).tiling(way).Bc) for way in ways}
    assert len(made) == 1


@pytest.mark.parametrize("d", [100, 128])
def test_rows_that_the_best_kernel_cannot_read_get_one_whatever_their_company(d):
    """With a mask of keys wgmma_short is best, and wgmma has other tiles."""
    ways = [on_arrays(B, 96, d, False, bias="bool", mask_of_keys=True, aligned=False) for B in (1, 300, 100_000)]
    assert choose(HOPPER, ways[0]._replace(aligned=True)).name == "wgmma_short"
    assert {choose(HOPPER, way).name for way in ways} == {"wgmma"}


def _arithmetic(name: str) -> str:
    return "twins" if name in TWINS else name


def test_twins_are_chosen_by_B_where_they_give_the_same_bytes():
    """Only where Bc is the same."""
    for N, d in ((128, 32), (200, 64), (1000, 64)):
        problem = on_arrays(1, N, d)
        same = len({KERNELS[name].tiling(problem).Bc for name in TWINS}) == 1
        names = {choose(HOPPER, problem._replace(B=B)).name for B in (1, 10, 100, 1000, 10_000)}
        assert same or len(names) == 1


def test_what_is_expected_to_be_fastest_is_chosen_where_the_kernel_may_depend_on_B():
    for B, N, d in ((64, 256, 8), (4, 500, 32), (1000, 200, 64), (2, 4096, 128)):
        problem = on_arrays(B, N, d, batch_invariant=False)
        able = {one.name: one.microseconds for one in candidates(HOPPER, problem) if not one.refused}
        assert choose(HOPPER, problem).name == min(able, key=able.get)
    assert FULL > 132


@pytest.mark.parametrize(
    "shortest", [on_arrays(100, 200, SHORT_HEAD), Problem(100, 200, 200, SHORT_HEAD)], ids=["arrays", "files"]
)
def test_heads_of_a_few_numbers_are_left_to_ffma(shortest):
    shorter = shortest._replace(d=shortest.d - 1)
    assert choose(HOPPER, shorter).name == "register_tiled"
    assert choose(HOPPER, shorter._replace(precision="fp16")).splits
    assert choose(HOPPER, shortest).splits


def test_many_heads_are_split_in_shared_memory_as_long_as_one_stays_there():
    assert [choose(HOPPER, on_arrays(1000, N, 32)).name for N in (896, 897)] == list(TWINS)
    assert [choose(HOPPER, on_arrays(1000, N, 64)).name for N in (448, 449)] == list(TWINS)


def test_files_go_by_preference_whatever_the_model_says():
    assert [choose(HOPPER, Problem(B, N, N, 32)).name for B in (1, 1000) for N in (896, 897)] == list(TWINS) * 2


def test_on_other_gpus_the_same_rule_holds_for_what_runs_there():
    for B, N, d in ((1, 64, 8), (8, 1000, 32), (2, 16384, 128)):
        assert choose(AMPERE, on_arrays(B, N, d)).name in ("mma", "mma_short", "register_tiled")
    assert choose(AMPERE, on_arrays(2, 16384, 128)).name == "mma"
    assert choose((7, 5), on_arrays(8, 1000, 32)).name == "register_tiled"


def test_a_kernel_without_constants_is_chosen_last_and_then_by_preference(monkeypatch):
    monkeypatch.setattr(cost, "COSTS", {})
    assert choose(HOPPER, on_arrays(8, 200, 32)).name == PREFERENCE[0]


# The model


@pytest.mark.parametrize("name", PREFERENCE)
@pytest.mark.parametrize("causal", [False, True])
def test_more_batches_are_never_expected_to_take_much_less(name, causal):
    """Somewhat less is possible, for another tiling."""
    N = 128 if name == "mma_short" else 512
    found = [cost.microseconds(KERNELS[name], on_arrays(B, N, 64, causal)) for B in (1, 10, 40, 200, 4000, 40_000)]
    assert found[0] > 0 and all(more > 0.8 * less for less, more in itertools.pairwise(found))
    assert found[-1] > 50 * found[0]


def test_the_mask_halves_the_work_of_long_sequences():
    whole, half = (cost.work(KERNELS["mma"], on_arrays(100, 65536, 64, causal)).pairs for causal in (False, True))
    assert 0.49 < half / whole < 0.52
    last = on_arrays(1, 4096, 64, True)._replace(M=128)  # which sees nearly all keys
    assert cost.work(KERNELS["mma"], last).pairs > 0.95 * cost.work(KERNELS["mma"], last._replace(causal=False)).pairs


def test_constants_are_found_again_from_the_times_that_they_make():
    made = {"mma": cost.COSTS["mma"]}
    rows = [row for row in ROWS if row.contender == "mma"]
    exact = [
        Gridded(**vars(row) | {"seconds": cost.microseconds(KERNELS["mma"], fit.problem_of(row)) / 1e6}) for row in rows
    ]
    again = fit.fitted(exact)["mma"]
    assert again.path == made["mma"].path and again.launch == pytest.approx(made["mma"].launch, rel=1e-2)
    assert again.pair == pytest.approx(made["mma"].pair, rel=1e-2, abs=1e-3)


def test_a_fit_writes_the_constants_and_marks_the_record(tmp_path, monkeypatch):
    written, record = tmp_path / "costs.py", tmp_path / "grid.json"
    written.write_bytes(fit.WRITTEN.read_bytes())
    other = [replace(row, chosen=False if row.contender in KERNELS else None) for row in ROWS if row.B < 1000]
    as_json.write(records.Record({"gpu": "GPU 1"}, other).written(), str(record))
    monkeypatch.setattr(fit, "WRITTEN", written)
    monkeypatch.setattr(cost, "COSTS", dict(cost.COSTS))
    done = CliRunner().invoke(fit.main, [str(record)])
    assert done.exit_code == 0 and done.output.startswith("batch_invariant=True: "), done.output
    found: dict = {}
    exec(compile(written.read_text(), "costs", "exec"), found)
    assert found["COSTS"] == cost.COSTS == fit.fitted(other) and found["TILINGS"] == fit.tilings(other)
    marks = [row.chosen for row in records.of_kind(Gridded, read(record.read_bytes()).rows)]
    assert sum(map(bool, marks)) == len(records.by_case(other))


# flashcli kernels --shape


def test_the_command_tells_what_is_chosen_and_what_is_expected():
    done = flashcli("kernels", "--shape", "8,100,32", "--causal", "--arch", "sm_90a", "--json", "-")
    told = json.loads(done.out)
    problem = on_arrays(8, 100, 32, True)
    assert told["chosen"] == choose(HOPPER, problem).name
    assert [one["name"] for one in told["kernels"]] == list(PREFERENCE)
    assert [one["microseconds"] for one in told["kernels"]] == [one.microseconds for one in candidates(HOPPER, problem)]
    text = flashcli("kernels", "--shape", "8,100,32", "--causal", "--arch", "sm_90a").out.splitlines()
    assert text[0] == (
        f"(8, 100, 32) causal in fp32 on sm_90a: {told['chosen']} for arrays, {told['chosen_for_files']} for files"
    )
    assert all(line.endswith((" us", " ms")) for line in text[1:6])


def test_the_command_tells_why_a_kernel_is_none():
    done = flashcli("kernels", "--shape", "8,1000,7", "--arch", "sm_80")
    assert "  wgmma           it needs sm_90a" in done.out.splitlines()
    assert "  mma             heads of less than 8 numbers are left to FFMA in fp32" in done.out.splitlines()
    assert done.out.startswith("(8, 1000, 7) in fp32 on sm_80: register_tiled for arrays and files\n")


def test_the_command_tells_what_run_takes_too():
    done = flashcli("kernels", "--shape", "10,448,64", "--arch", "sm_90a").out.splitlines()
    assert done[0].endswith("on sm_90a: wgmma for arrays, wgmma_short for files")
    assert done[-1] == "For files, as `flashcli run` computes them, wgmma_short comes first of all that can."


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        ("8,1000,7", "register_tiled is the only one that may compute this."),
        ("8,1000,32", "wgmma is expected to be the fastest."),
        ("4,32,64", "mma_short is expected to be the fastest."),
        ("4,64,64", "mma_short has the bytes of the best kernel for large batches, which wgmma has not."),
        ("1,1,80", "mma has the bytes of the best kernel for large batches, which wgmma has not."),
    ],
)
def test_the_command_tells_why_a_kernel_is_chosen(shape, why):
    done = flashcli("kernels", "--shape", shape, "--arch", "sm_90a")
    assert any(line.startswith(f"For arrays, {why}") for line in done.out.splitlines()), done.out


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--shape", "8,1000"], "not three numbers B,N,d"),
        (["mma", "--shape", "8,200,32"], "leave out NAME and --operation"),
        (["--operation", "decode", "--shape", "8,200,32"], "leave out NAME and --operation"),
        (["--arch", "sm_80"], "--arch has a meaning with NAME or --shape only."),
        (["--shape", "8,200,32", "--arch", "x"], "'x' is not an architecture."),
        (["--shape", "8,200,32", "--arch", "sm_99"], "'sm_99' is not an architecture."),
        (["--shape", "8,200,32", "--arch", "sm_61", "--precision", "fp16"], "no kernel computes in fp16 on sm_61."),
    ],
)
def test_what_the_command_refuses(arguments, complaint):
    done = flashcli("kernels", *arguments)
    assert done.code in (2, 69) and complaint in done.err
