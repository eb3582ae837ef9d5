"""Measuring attention on PyTorch's tensors, GPT-2 and models of transformers: what is computed, on the CPU."""

from __future__ import annotations

import json
import math

import pytest
from click.testing import CliRunner
from support import can_draw, python

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_oracle import oracle  # noqa: E402

from bench import arrays, gpt2, gpt2_model, models, views  # noqa: E402
from bench.gpt2 import Contender, contenders, measure  # noqa: E402
from bench.records import read  # noqa: E402
from bench.rows import Generated  # noqa: E402
from flashcli.commands.bench_tensors import command  # noqa: E402
from flashcli.errors import BackendUnavailable, BadInput, UsageError  # noqa: E402
from flashcli.measure import in_place  # noqa: E402
from flashcli.measure.bench import Conditions  # noqa: E402
from flashcli.measure.in_place import race  # noqa: E402
from flashcli.measure.rows import Failure, InPlace, Skipped  # noqa: E402
from flashcli.measure.tensors import LAYOUTS, Problem, random_inputs, sampled  # noqa: E402

BENCH = ["--backend", "cpu", "--shape", "2,40,8", "--runs", "1"]
TINY = gpt2_model.Config(layers=2, heads=2, context=48, vocabulary=300)
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
    assert sampled(problem, inputs, right.float(), 0).relative_l2 < 1e-7
    for wrong in (right * 0, right.mean(2, keepdim=True).expand_as(right), right.roll(1, 0), right.roll(1, 1)):
        assert sampled(problem, inputs, wrong, 0).relative_l2 > 1e-2
    assert sampled(problem, inputs, right * torch.nan, 0).got_nonfinite


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
        assert len(set(names)) == len(names) and names[0] == ("flashcli", "bhnd") and case.clock in in_place.CLOCKS


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


# GPT-2


@pytest.fixture(scope="module")
def weights():
    return gpt2_model.random_weights(TINY, seed=0)


def test_the_logits_are_those_of_transformers(weights):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GPT2Config(
        n_layer=TINY.layers, n_head=TINY.heads, n_embd=TINY.width, n_positions=TINY.context, vocab_size=TINY.vocabulary,
        bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    theirs = transformers.GPT2LMHeadModel(config).eval()
    left = theirs.load_state_dict({f"transformer.{name}": weight for name, weight in weights.items()}, strict=False)
    assert not left.unexpected_keys and set(left.missing_keys) <= {"lm_head.weight"}
    theirs.tie_weights()
    tokens = torch.randint(TINY.vocabulary, (1, 20), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        got, want = gpt2_model.GPT2(weights, gpt2_model.naive).logits(tokens), theirs(tokens).logits[:, -1]
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_every_attention_generates_the_same_tokens_with_a_cache_and_without(weights):
    rows = list(measure(weights, contenders("cpu"), tokens=40, runs=2))
    assert [row.contender for row in rows] == ["naive", "PyTorch SDPA", "flashcli"] * 2 + ["paged"]
    assert [row.case for row in rows] == ["no cache"] * 3 + ["KV cache"] * 4
    for row in rows:
        assert isinstance(row, Generated) and row.differs_at is None and row.runs == 2
        assert list(row.reached) == ["32", "40"] and 0 < row.reached["32"] < row.reached["40"]
    assert "| the same 40 |" in views.VIEWS["gpt2"](rows)


@pytest.mark.parametrize("kind", [torch.float32, torch.float16])
def test_several_tokens_at_a_time_have_the_logits_of_all_in_pages_too(weights, kind):
    tokens = torch.randint(TINY.vocabulary, (1, 21), generator=torch.Generator().manual_seed(0))
    model = gpt2_model.GPT2(weights, gpt2_model.naive, kind)
    cache = model.new_cache()
    for start in range(0, 21, 3):
        got = model.logits(tokens[:, start : start + 3], start, cache)
    tolerance = 1e-4 if kind == torch.float32 else 5e-2
    torch.testing.assert_close(got, model.logits(tokens), rtol=tolerance, atol=tolerance)
    one = model.logits(tokens[:, -1:], torch.tensor([20]), cache)  # again, from a position that the host does not see
    torch.testing.assert_close(one, got, rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
def test_pages_give_naives_tokens_on_a_gpu_and_in_a_graph(weights):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    there = {name: weight.cuda() for name, weight in weights.items()}
    found = {name: x for name, x in contenders("cuda").items() if name == "naive" or x.pages == "float32"}
    rows = list(measure(there, found, tokens=40, runs=1))
    assert [row.contender for row in rows] == ["naive", "naive", "paged", "paged, graph"]
    assert all(isinstance(row, Generated) and row.differs_at is None for row in rows)


def test_what_is_generated_depends_on_attention(weights):
    def blind(q, k, v):
        return v[:, :, -q.shape[2] :].clone()

    naive = contenders("cpu")[gpt2.NAIVE]
    [right, row, *_] = measure(weights, {"naive": naive, "blind": Contender(blind)}, tokens=20, runs=1)
    assert isinstance(row, Generated) and row.differs_at is not None and row.gap > 0 and math.isfinite(row.gap)
    assert "another at" in views.VIEWS["gpt2"]([right, row])


def test_an_attention_that_cannot_be_is_told_and_the_others_go_on(weights):
    def failing(error):
        def attend(q, k, v):
            raise error

        return Contender(attend)

    found = {"naive": contenders("cpu")["naive"], "a": failing(BadInput("no")), "b": failing(RuntimeError("no\nmore"))}
    _, skipped, failed = list(measure(weights, found, tokens=2, runs=1))[:3]
    assert isinstance(skipped, Skipped) and isinstance(failed, Failure) and failed.error == "no"


def test_a_file_of_weights_is_generated_from_and_drawn(tmp_path, weights):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    path, picture, record = tmp_path / "x.safetensors", tmp_path / "x.svg", tmp_path / "x.json"
    drawn = ["--plot", picture] if can_draw() else []
    named = {f"transformer.{name}": weight for name, weight in weights.items()}
    safetensors.save_file(named | {"transformer.h.0.attn.bias": torch.ones(1, 1, 4, 4)}, path)
    done = python(
        "-m", "bench.gpt2", "--backend", "cpu", "--tokens", "5", "--runs", "1", "--weights", path,
        *drawn, "--json", record,
    )  # fmt: skip
    assert done.code == 0, done.err
    found = read(record.read_bytes())
    assert len(found.rows) == 7 and found.circumstances["torch"] == torch.__version__
    assert found.circumstances["command"].startswith("python -m bench.gpt2 --backend cpu --tokens 5")
    assert not drawn or ">KV cache</text>" in picture.read_text()


def test_weights_that_are_none_of_gpt2_are_told(tmp_path, weights):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    path = tmp_path / "x.safetensors"
    for some, complaint in (
        ({"x": torch.ones(2)}, "no matrix wte.weight"),
        ({name: weights[name] for name in weights if name != "ln_f.bias"}, "ln_f.bias is missing"),
        (weights | {"h.0.mlp.c_fc.bias": torch.ones(3)}, r"h.0.mlp.c_fc.bias is \[3\], not \[512\]"),
    ):
        safetensors.save_file(some, path)
        with pytest.raises(BadInput, match=complaint):
            gpt2.load(str(path))
    path.write_text("no")
    with pytest.raises(BadInput, match=r"not a \.safetensors file"):
        gpt2.load(str(path))
    with pytest.raises(BadInput, match="cannot read"):
        gpt2.load(str(tmp_path / "missing"))


def test_some_attentions_are_chosen_and_others_refused(monkeypatch, weights):
    monkeypatch.setattr(gpt2_model, "random_weights", lambda config, seed: weights)
    done = CliRunner().invoke(gpt2.main, ["--backend", "cpu", "--tokens", "3", "--attention", "paged", "--json", "-"])
    assert [row["contender"] for row in json.loads(done.stdout)["rows"]] == ["naive", "naive", "paged"]
    done = CliRunner().invoke(gpt2.main, ["--backend", "cpu", "--tokens", "3", "--attention", "flash"])
    assert isinstance(done.exception, UsageError) and "there is no --attention flash" in str(done.exception)


def test_more_tokens_than_positions_are_refused(monkeypatch, weights):
    monkeypatch.setattr(gpt2_model, "random_weights", lambda config, seed: weights)
    done = CliRunner().invoke(gpt2.main, ["--backend", "cpu", "--tokens", "49"])
    assert isinstance(done.exception, UsageError) and "--tokens 49 is more than the 48" in str(done.exception)


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


@pytest.mark.parametrize("script", [arrays, gpt2, models])
def test_without_a_gpu_the_scripts_say_so(script):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    if script is models:
        pytest.importorskip("transformers", reason="transformers is not installed")
    done = CliRunner().invoke(script.main, [])
    assert isinstance(done.exception, BackendUnavailable) and "PyTorch finds no GPU." in str(done.exception)
