"""GPT-2 on PyTorch's tensors: the same tokens by every attention, with a cache and without; what is told of them."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from click.testing import CliRunner
from support import can_draw, python

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from bench import views  # noqa: E402
from bench.gpt2 import serve, times  # noqa: E402
from bench.gpt2 import weights as weighing  # noqa: E402
from bench.gpt2.__main__ import chooser, generate  # noqa: E402
from bench.gpt2.cache import Dense, new_pages  # noqa: E402
from bench.gpt2.contenders import NAIVE, Contender, contenders, naive  # noqa: E402
from bench.gpt2.library import OfNumPy, OfPyTorch  # noqa: E402
from bench.gpt2.model import GPT2  # noqa: E402
from bench.gpt2.weights import Config  # noqa: E402
from bench.records import read  # noqa: E402
from bench.rows import Generated  # noqa: E402
from flashcli.errors import BadInput, UsageError  # noqa: E402
from flashcli.measure.rows import Failure, Skipped  # noqa: E402

TINY = Config(layers=2, heads=2, context=56, vocabulary=300)
CPU = OfPyTorch("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """Tiny products are no quicker on more, and much slower where others use them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def weights():
    return {name: CPU.put(x) for name, x in weighing.random_weights(TINY, seed=0).items()}


def measure(weights, found, tokens, batch=1, runs=1):
    return list(times.measure(TINY, weights, found, batch, tokens, runs))


def small(monkeypatch):
    monkeypatch.setattr(times, "Config", lambda: TINY)


@pytest.mark.parametrize(("batch", "runs"), [(1, 2), (3, 1)])
def test_every_attention_generates_the_same_tokens_with_a_cache_and_without(weights, batch, runs):
    rows = measure(weights, contenders("cpu"), 36, batch, runs)
    assert [row.contender for row in rows] == ["naive", "PyTorch SDPA", "flashcli"] * 2 + ["paged"]
    assert [row.case for row in rows] == ["no cache"] * 3 + ["KV cache"] * 4
    for row in rows:
        assert isinstance(row, Generated) and row.differs_at is None and (row.B, row.runs) == (batch, runs)
        assert list(row.reached) == ["32", "36"] and 0 < row.reached["32"] < row.reached["36"]
    assert "| the same 36 |" in views.VIEWS["gpt2"](rows)


def test_prompts_of_a_batch_differ():
    prompts = times.prompts_of(4, 50257)
    assert tuple(prompts[0]) == times.PROMPT and len(np.unique(prompts, axis=0)) == 4 and prompts.shape == (4, 8)


@pytest.mark.parametrize("kind", ["float32", "float16"])
def test_a_prompt_and_single_tokens_have_the_logits_of_all_in_any_cache(weights, kind):
    tokens = torch.randint(TINY.vocabulary, (2, 24), generator=torch.Generator().manual_seed(0))
    positions = torch.arange(24).expand(2, 24)
    model = GPT2(TINY, weights, CPU, naive)
    tolerance = 1e-4 if kind == "float32" else 5e-2
    for cache in (new_pages(TINY, 2, 24, CPU, kind), Dense(TINY, 2, CPU, naive)):
        model.logits(tokens[:, :20], positions[:, :20], cache)
        for i in range(20, 24):
            got = model.logits(tokens[:, i : i + 1], positions[:, i : i + 1], cache)
        torch.testing.assert_close(got, model.logits(tokens, positions), rtol=tolerance, atol=tolerance)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3])
def test_pages_give_naives_tokens_on_a_gpu_and_in_a_graph(weights, batch):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    there = {name: weight.cuda() for name, weight in weights.items()}
    found = {name: x for name, x in contenders("cuda").items() if name == "naive" or x.pages == "float32"}
    rows = measure(there, found, 40, batch)
    assert [row.contender for row in rows] == ["naive", "naive", "paged", "paged, graph"]
    assert all(isinstance(row, Generated) and row.differs_at is None for row in rows)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_text_is_the_same_by_pytorch_as_by_numpy(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    made, there = weighing.random_weights(TINY, seed=0), OfPyTorch(device)
    models = GPT2(TINY, made, OfNumPy()), GPT2(TINY, {name: there.put(x) for name, x in made.items()}, there)
    with torch.inference_mode():
        got, want = (np.array(list(generate(model, [[5, 7, 200], [9]], 30, chooser(0, 0)))) for model in models)
    assert (got == want).all()


def test_what_is_generated_depends_on_attention(weights):
    def blind(q, k, v):
        return v[:, :, -q.shape[2] :].clone()

    [right, row, *_] = measure(weights, {NAIVE: contenders("cpu")[NAIVE], "blind": Contender(blind)}, 20, batch=2)
    assert isinstance(row, Generated) and row.differs_at is not None and row.gap > 0 and math.isfinite(row.gap)
    assert "another at" in views.VIEWS["gpt2"]([right, row])


def test_an_attention_that_cannot_be_is_told_and_the_others_go_on(weights):
    def failing(error):
        def attend(q, k, v):
            raise error

        return Contender(attend)

    found = {NAIVE: contenders("cpu")[NAIVE], "a": failing(BadInput("no")), "b": failing(RuntimeError("no\nmore"))}
    _, skipped, failed = measure(weights, found, 2)[:3]
    assert isinstance(skipped, Skipped) and isinstance(failed, Failure) and failed.error == "no"


def test_a_file_of_weights_is_generated_from_and_drawn(tmp_path, weights):
    safetensors = pytest.importorskip("safetensors.torch", reason="safetensors is not installed")
    path, picture, record = tmp_path / "x.safetensors", tmp_path / "x.svg", tmp_path / "x.json"
    drawn = ["--plot", picture] if can_draw() else []
    safetensors.save_file({f"transformer.{name}": weight for name, weight in weights.items()}, path)
    done = python(
        "-m", "bench.gpt2.times", "--backend", "cpu", "--tokens", "5", "--runs", "1", "--batch", "2",
        "--weights", path, *drawn, "--json", record,
    )  # fmt: skip
    assert done.code == 0, done.err
    found = read(record.read_bytes())
    assert len(found.rows) == 7 and found.circumstances["torch"] == torch.__version__
    assert found.circumstances["command"].startswith("python -m bench.gpt2.times --backend cpu --tokens 5")
    assert not drawn or ">KV cache</text>" in picture.read_text()


def test_some_attentions_are_chosen_and_others_refused(monkeypatch):
    small(monkeypatch)
    done = CliRunner().invoke(times.main, ["--backend", "cpu", "--tokens", "3", "--attention", "paged", "--json", "-"])
    assert [row["contender"] for row in json.loads(done.stdout)["rows"]] == ["naive", "naive", "paged"]
    done = CliRunner().invoke(times.main, ["--backend", "cpu", "--tokens", "3", "--attention", "flash"])
    assert isinstance(done.exception, UsageError) and "there is no --attention flash" in str(done.exception)


def test_more_tokens_than_positions_are_refused(monkeypatch):
    small(monkeypatch)
    done = CliRunner().invoke(times.main, ["--backend", "cpu", "--tokens", "49"])
    assert isinstance(done.exception, UsageError) and "--tokens 49 and a prompt of 8 are more than the 56" in str(
        done.exception
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_servers_loop_writes_what_the_plain_one_does(device):
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    library = OfPyTorch(device)
    weights = {name: library.put(x) for name, x in weighing.random_weights(TINY, seed=1).items()}
    model, prompts = GPT2(TINY, weights, library), [[5, 7, 5, 7, 5, 7], list(range(20)), [3]]
    requests, alone = ([serve.Request(prompt, 9) for prompt in prompts] for _ in range(2))
    with torch.no_grad():
        steps = serve.serve(model, requests, chunk=8)
        assert sum(serve.serve(model, [one], chunk=100, drafts=0) for one in alone) == 27 > steps
    assert [one.tokens for one in requests] == [one.tokens for one in alone]
