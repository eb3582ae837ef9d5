"""Measuring attention on PyTorch's tensors and in models of transformers: what is computed, on the CPU."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_oracle import oracle  # noqa: E402

from bench import arrays, models  # noqa: E402
from bench.clocks import CLOCKS  # noqa: E402
from bench.gpt2 import times  # noqa: E402
from bench.records import read  # noqa: E402
from flashcli.commands.bench_tensors import command  # noqa: E402
from flashcli.errors import BackendUnavailable, UsageError  # noqa: E402
from flashcli.measure import in_place  # noqa: E402
from flashcli.measure.bench import Conditions  # noqa: E402
from flashcli.measure.in_place import race  # noqa: E402
from flashcli.measure.rows import Failure, InPlace  # noqa: E402
from flashcli.measure.tensors import LAYOUTS, Problem, compared, random_inputs, sample  # noqa: E402

BENCH = ["--backend", "cpu", "--shape", "2,40,8", "--runs", "1"]
QUICK = Conditions(runs=2, causal=False, seed=0)
PROBLEMS = [
    Problem(2, 4, 4, 30, 30, 8),
    Problem(2, 4, 2, 20, 30, 8, causal=True, layout="bnhd"),
    Problem(2, 4, 2, 30, 30, 8, layout="qkv"),
    Problem(2, 4, 4, 30, 20, 8, bias=(2, 1, 30, 20)),
]


# Problems on tensors


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_problem_has_its_shapes_and_lies_as_it_says(problem):
    inputs = random_inputs(problem, 0, "cpu")
    assert inputs.q.shape == (problem.B, problem.H, problem.M, problem.d)
    assert inputs.k.shape == inputs.v.shape == (problem.B, problem.Hkv, problem.N, problem.d)
    assert inputs.q.is_contiguous() == (problem.layout == "bhnd") and inputs.q.stride(-1) == 1
    shared = inputs.q.untyped_storage().data_ptr() == inputs.v.untyped_storage().data_ptr()
    assert shared == (problem.layout == "qkv")


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_a_wrong_answer_is_told_from_a_right_one(problem):
    inputs = random_inputs(problem, 0, "cpu")
    right, _ = oracle(inputs.q, inputs.k, inputs.v, inputs.bias, problem.causal)
    known = sample(problem, inputs, 0)
    assert compared(known, right.float()).relative_l2 < 1e-7
    for wrong in (right * 0, right.mean(2, keepdim=True).expand_as(right), right.roll(1, 0), right.roll(1, 1)):
        assert compared(known, wrong).relative_l2 > 1e-2
    assert compared(known, right * torch.nan).got_nonfinite


def test_rows_of_the_right_answer_take_no_memory_for_all_scores():
    problem = Problem(1, 1, 1, 2**20, 2**20, 1)  # 8 TiB of scores
    assert random_inputs(problem, 0, "cpu").changes(problem, 0, 0, [3, 5]).shape == (2, 2**20)


def test_only_pairs_that_are_seen_are_counted():
    for M, N in ((5, 5), (3, 7), (7, 3)):
        pairs = int(torch.ones(M, N).tril().sum())
        assert Problem(2, 4, 2, M, N, 8, causal=True).operations == 4 * 2 * 4 * pairs * 8
        assert Problem(2, 4, 2, M, N, 8).operations == 4 * 2 * 4 * M * N * 8


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_ours_and_pytorchs_are_checked_and_timed(problem):
    entrants = [(contender, problem) for contender in in_place.cpu_contenders(["torch"])]
    rows = race("it", entrants, "cpu", QUICK, "cpu")
    assert [row.contender for row in rows] == ["flashcli cpu", "PyTorch SDPA"]
    assert all(isinstance(row, InPlace) and row.relative_l2 < 1e-6 and row.runs == 2 for row in rows)


def test_what_is_wrong_or_fails_is_told_and_the_others_are_timed():
    def failing(problem, inputs):
        raise RuntimeError("no\nmore")

    zeros = in_place.Contender("zeros", lambda problem, inputs: lambda: torch.zeros_like(inputs.q))
    entrants = [zeros, in_place.Contender("failing", failing), in_place.pytorchs_choice()]
    wrong, failed, right = race("it", [(one, PROBLEMS[0]) for one in entrants], "cpu", QUICK, "cpu")
    assert isinstance(wrong, Failure) and wrong.is_wrong and isinstance(failed, Failure) and failed.error == "no"
    assert isinstance(right, InPlace)


@pytest.mark.parametrize("gradients", [True, False])
def test_gradients_are_wanted_where_a_case_says_so(gradients):
    seen = []

    def bind(problem, inputs):
        seen.append(inputs.q.requires_grad)
        return in_place.pytorchs_choice().bind(problem, inputs)

    [row] = race("it", [(in_place.Contender("it", bind, gradients=gradients), PROBLEMS[0])], "cpu", QUICK, "cpu")
    assert isinstance(row, InPlace) and set(seen) == {gradients}


def test_the_cases_on_a_gpu_have_entrants_with_names_of_their_own():
    found = list(arrays.cases(triton=False))
    assert len({case.name for case in found}) == len(found)
    for case in found:
        names = [(contender.name, problem.layout) for contender, problem in case.entrants]
        assert len(set(names)) == len(names) and names[0] == ("flashcli", "bhnd") and case.clock in CLOCKS


# flashcli bench-tensors


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bench_times_tensors(tmp_path, layout):
    path = tmp_path / "x.json"
    asked = ["--heads", "4", "--kv-heads", "2", "--layout", layout, "--causal", "--against", "torch", "--json", path]
    done = CliRunner().invoke(command, [*BENCH, *map(str, asked)])
    assert done.exit_code == 0, done.output
    found = read(path.read_bytes()).rows
    assert [(row.H, row.Hkv, row.M, row.layout, row.causal) for row in found] == [(4, 2, 40, layout, True)] * 2
    assert f"(2, 4/2, 40, 8) {layout}" in done.output


@pytest.mark.parametrize(
    ("asked", "complaint"),
    [
        (["--heads", "4", "--kv-heads", "3"], "--kv-heads 3 does not divide --heads 4."),
        (["--layout", "qkv", "--queries", "7"], "--layout qkv is of one tensor"),
        (["--kernel", "mma"], "--kernel mma is for GPUs, not for the cpu backend."),
    ],
)
def test_what_bench_refuses_of_tensors(asked, complaint):
    done = CliRunner().invoke(command, [*BENCH, *asked])
    assert isinstance(done.exception, UsageError) and complaint in str(done.exception)


def test_kernels_for_files_are_none_for_tensors():
    done = CliRunner().invoke(command, ["--shape", "2,40,8", "--heads", "4", "--kernel", "fused"])
    assert done.exit_code == 2 and "'fused' is not one of" in done.output


# Models of transformers


def test_models_of_transformers(monkeypatch, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    small = [models.Model(family, 2, 4, kv, 16, 2, 40) for family, kv in (("GPT-2", 4), ("Llama", 2), ("BERT", 4))]
    monkeypatch.setattr(models, "MODELS", tuple(small))
    path = tmp_path / "x.json"
    done = CliRunner().invoke(models.main, ["--backend", "cpu", "--runs", "1", "--json", str(path)])
    assert done.exit_code == 0, done.output
    found = read(path.read_bytes()).rows
    assert [row.contender for row in found] == [*models.IMPLEMENTATIONS] * 3
    assert (
        all(row.relative_l2 < 1e-6 for row in found) and json.loads(path.read_text())["circumstances"]["transformers"]
    )


def test_every_model_has_the_heads_that_it_says():
    pytest.importorskip("transformers", reason="transformers is not installed")
    for model in models.MODELS:
        config = models.configuration(model)
        assert config.num_attention_heads == model.H and config.hidden_size == model.H * model.d
        assert getattr(config, "num_key_value_heads", model.H) == model.Hkv


@pytest.mark.parametrize("script", [arrays, times, models])
def test_without_a_gpu_the_scripts_say_so(script):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if script is models:
        pytest.importorskip("transformers", reason="transformers is not installed")
    done = CliRunner().invoke(script.main, [])
    assert isinstance(done.exception, BackendUnavailable) and "PyTorch finds no GPU." in str(done.exception)
