"""GPT-2 writes text from files as Hugging Face has them, with NumPy: beside a model in float64 that is stated here."""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as some
from support import python

from bench.gpt2 import __main__ as script
from bench.gpt2 import serve as serving
from bench.gpt2 import tokens, weights
from bench.gpt2.cache import new_pages
from bench.gpt2.library import OfNumPy
from bench.gpt2.model import GPT2
from bench.gpt2.times import PROMPT
from bench.gpt2.weights import Config
from flashcli.errors import BadInput, UsageError

save_file = pytest.importorskip("safetensors.numpy", reason="safetensors is not installed").save_file

MERGES = [("l", "l"), ("e", "ll"), ("Ġ", "a"), ("H", "ell"), ("Hell", "o"), ("Ġ", "l"), ("a", "n")]
NAMES = [*tokens.LETTERS, *(a + b for a, b in MERGES), tokens.END]
TINY = Config(layers=2, heads=3, context=64, vocabulary=len(NAMES), head=16)


def beside(config: Config, prefix: str, wte: np.ndarray) -> dict[str, np.ndarray]:
    """What files have beside weights: OpenAI's, without a prefix, a mask of floats a layer; those saved later more."""
    triangle = np.tril(np.ones((1, 1, config.context, config.context), np.float32))
    layers = [f"{prefix}h.{layer}.attn" for layer in range(config.layers)]
    if not prefix:
        return {f"{layer}.bias": triangle for layer in layers}
    return {
        **{f"{layer}.bias": triangle.astype(bool) for layer in layers},
        **{f"{layer}.masked_bias": np.array(-1e4, np.float32) for layer in layers},
        "lm_head.weight": wte,
    }


def checkpoint(folder: Path, config: Config = TINY, prefix: str = "transformer.", kind: str = "float32") -> dict:
    """A folder with a model and a tokenizer as Hugging Face has them; gives the tensors of its file."""
    made = weights.random_weights(config, seed=1)
    random = np.random.default_rng(2)
    made |= {n: x + random.normal(0, 0.1, x.shape).astype(np.float32) for n, x in made.items() if x.ndim == 1}
    tensors = {prefix + name: np.ascontiguousarray(x, kind) for name, x in made.items()}
    others = beside(config, prefix, tensors[f"{prefix}wte.weight"])
    save_file(tensors | others, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"n_head": config.heads}))
    (folder / "vocab.json").write_text(json.dumps({name: number for number, name in enumerate(NAMES)}))
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *map(" ".join, MERGES), ""]), encoding="utf-8")
    return {name.removeprefix(prefix): x for name, x in tensors.items()}


def oracle(tensors: dict, heads: int, given: list[int]) -> np.ndarray:
    """Logits after a text, in float64, with all of the text computed at once, head by head, row by row."""
    w = {name: tensor.astype(np.float64) for name, tensor in tensors.items()}

    def norm(x: np.ndarray, name: str) -> np.ndarray:
        centred = x - x.mean(-1)[:, None]
        return centred / np.sqrt(x.var(-1)[:, None] + 1e-5) * w[f"{name}.weight"] + w[f"{name}.bias"]

    def linear(x: np.ndarray, name: str) -> np.ndarray:
        return np.einsum("ni,io->no", x, w[f"{name}.weight"]) + w[f"{name}.bias"]

    x = w["wte.weight"][given] + w["wpe.weight"][: len(given)]
    width = x.shape[1]
    for layer in range(sum(name.endswith("ln_1.weight") for name in w)):
        qkv = linear(norm(x, f"h.{layer}.ln_1"), f"h.{layer}.attn.c_attn")
        attended = np.zeros_like(x)
        for h in range(heads):
            columns = slice(h * width // heads, (h + 1) * width // heads)
            q, k, v = (qkv[:, part * width : (part + 1) * width][:, columns] for part in range(3))
            for i in range(len(x)):
                p = np.exp(q[i] @ k[: i + 1].T / math.sqrt(width // heads))
                attended[i, columns] = p @ v[: i + 1] / p.sum()
        x = x + linear(attended, f"h.{layer}.attn.c_proj")
        inner = linear(norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
        gelu = 0.5 * inner * (1 + np.tanh(math.sqrt(2 / math.pi) * (inner + 0.044715 * inner**3)))
        x = x + linear(gelu, f"h.{layer}.mlp.c_proj")
    return norm(x, "ln_f")[-1] @ w["wte.weight"].T


def greedily(tensors: dict, heads: int, given: list[int], count: int) -> list[int]:
    for _ in range(count):
        given = [*given, int(oracle(tensors, heads, given).argmax())]
    return given[-count:]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("gpt2")


@pytest.fixture(scope="module")
def tensors(folder):
    return checkpoint(folder)


@pytest.fixture(scope="module")
def model(folder, tensors):
    return GPT2(*weights.load(folder), OfNumPy())


# Tokens


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("Hello, I'm a language model,", ["Hello", ",", " I", "'m", " a", " language", " model", ","]),
        ("we'll  go\n\n on_x2²½ ", ["we", "'ll", " ", " go", "\n\n", " on", "_", "x", "2²½", " "]),
        ("naïve\u00a0東京 'S 👍\t.", ["naïve", "\u00a0", "東京", " '", "S", " 👍", "\t", "."]),
    ],
)
def test_text_is_cut_into_words_with_the_space_before_them(text, want):
    assert tokens.words(text) == want


def test_the_pair_that_training_found_first_is_merged_first(folder, tensors):
    tokenizer = tokens.load(folder)
    assert [NAMES[token] for token in tokenizer.encode("Hello all llll la")] == [
        "Hello", "Ġa", "ll", "Ġ", "ll", "ll", "Ġl", "a",
    ]  # fmt: skip


@given(some.text(some.characters(exclude_categories=["Cs"])))
def test_tokens_are_the_bytes_of_any_text(text):
    tokenizer = tokens.Tokenizer({name: number for number, name in enumerate(NAMES)}, MERGES)
    text += "\udc80"  # as Python has a byte of the command line that is no UTF-8
    assert b"".join(map(tokenizer.bytes_of, tokenizer.encode(text))) == text.encode(errors="surrogateescape")


@pytest.mark.parametrize("as_text", [True, False])
def test_a_tokenizer_may_be_one_file(tmp_path, folder, tensors, as_text):
    merges = [" ".join(pair) for pair in MERGES] if as_text else MERGES
    model = {"vocab": {name: number for number, name in enumerate(NAMES)}, "merges": merges}
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": model}))
    text = "Hello, all of you"
    assert tokens.load(tmp_path).encode(text) == tokens.load(folder).encode(text)


def test_a_tokenizer_that_is_none_is_told(tmp_path):
    with pytest.raises(BadInput, match="has no tokenizer"):
        tokens.load(tmp_path)
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    with pytest.raises(BadInput, match=r"cannot read .*merges\.txt"):
        tokens.load(tmp_path)
    (tmp_path / "merges.txt").write_text("a b c")
    with pytest.raises(BadInput, match="no tokenizer of GPT-2's kind"):
        tokens.load(tmp_path)
    (tmp_path / "merges.txt").write_text("")
    with pytest.raises(BadInput, match="the vocabulary has no token 'b'"):
        tokens.load(tmp_path).encode("ab")


# Weights


@pytest.mark.parametrize(("prefix", "kind"), [("", "float32"), ("transformer.", "float16")])
def test_names_may_have_a_prefix_and_numbers_may_be_halves(tmp_path, prefix, kind):
    want = checkpoint(tmp_path, prefix=prefix, kind=kind)
    config, got = weights.load(tmp_path)
    assert config == TINY and got.keys() == want.keys() == weights.shapes(TINY).keys()
    assert all(got[name].dtype == np.float32 and (got[name] == want[name]).all() for name in want)


def test_names_and_shapes_are_those_of_gpt2_small():
    """As transformers prints them for openai-community/gpt2, which with a mask a layer are 160 tensors."""
    found = weights.shapes(Config())
    assert {name.removeprefix("h.0."): shape for name, shape in found.items() if not re.match(r"h\.[1-9]", name)} == {
        "wte.weight": (50257, 768), "wpe.weight": (1024, 768), "ln_1.weight": (768,), "ln_1.bias": (768,),
        "attn.c_attn.weight": (768, 2304), "attn.c_attn.bias": (2304,), "attn.c_proj.weight": (768, 768),
        "attn.c_proj.bias": (768,), "ln_2.weight": (768,), "ln_2.bias": (768,), "mlp.c_fc.weight": (768, 3072),
        "mlp.c_fc.bias": (3072,), "mlp.c_proj.weight": (3072, 768), "mlp.c_proj.bias": (768,), "ln_f.weight": (768,),
        "ln_f.bias": (768,),
    }  # fmt: skip
    assert len(found) + 12 == 160


def test_weights_may_be_in_several_files(tmp_path, folder, tensors):
    for part in range(2):
        save_file(dict(list(tensors.items())[part::2]), tmp_path / f"model-{part}.safetensors")
    (tmp_path / "config.json").write_text('{"n_head": 3}')
    config, got = weights.load(tmp_path)
    assert config == TINY and all((got[name] == tensors[name]).all() for name in tensors)


def test_heads_have_64_numbers_where_nothing_else_is_said():
    made = weights.random_weights(Config(layers=1, heads=2, context=8, vocabulary=9), seed=0)
    assert weights.sized(made) == (1, 2, 8, 9, 64) and Config() == (12, 12, 1024, 50257, 64)


def test_weights_that_are_none_of_gpt2_are_told(tmp_path, tensors):
    path = tmp_path / "x.safetensors"
    for found, complaint in (
        ({"x": np.ones(2)}, "no matrix wte.weight"),
        ({name: x for name, x in tensors.items() if name != "ln_f.bias"}, "ln_f.bias is missing"),
        (tensors | {"h.0.mlp.c_fc.bias": np.ones(3)}, r"h.0.mlp.c_fc.bias is \[3\], not \[192\]"),
        (tensors | {"h.1.attn.c_attn.weight": np.ones((144, 48))}, r"c_attn.weight is \[144, 48\], not \[48, 144\]"),
    ):
        save_file(found, path)
        with pytest.raises(BadInput, match=complaint):
            weights.load(path)
    path.write_text("no")
    with pytest.raises(BadInput, match=r"not a whole \.safetensors file"):
        weights.load(path)
    with pytest.raises(BadInput, match="cannot read"):
        weights.load(tmp_path / "missing")
    path.unlink()
    with pytest.raises(BadInput, match=r"has no \.safetensors file"):
        weights.load(tmp_path)
    (tmp_path / "config.json").write_text('{"n_head": 0}')
    save_file(tensors, path)
    with pytest.raises(BadInput, match="does not say how many heads"):
        weights.load(path)


# Text


def test_logits_are_the_oracles_whether_of_a_prompt_or_of_single_tokens_in_pages(model, tensors):
    text = np.random.default_rng(0).integers(TINY.vocabulary, size=(1, 40))
    cache, at = new_pages(TINY, 1, 40, model.library), np.arange(40)[None]
    got = [model.logits(text[:, :20], at[:, :20], cache)[0]]
    got += [model.logits(text[:, i : i + 1], at[:, i : i + 1], cache)[0] for i in range(20, 40)]
    for length, logits in zip(range(20, 41), got, strict=True):
        np.testing.assert_allclose(logits, oracle(tensors, 3, text[0, :length].tolist()), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(model.logits(text, at), got[-1][None], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["h.0.attn.c_proj.weight", "wpe.weight", "h.1.ln_2.bias"])
def test_the_oracle_tells_a_weight_that_is_read_wrong(tensors, name):
    other = tensors | {name: tensors[name].T if "c_proj" in name else tensors[name][::-1]}
    text = [5, 7, 200, 3]
    assert np.abs(oracle(other, 3, text) - oracle(tensors, 3, text)).max() > 1e-2


def test_a_prompt_is_gone_on_with_as_it_is_in_float64(folder, tensors):
    tokenizer = tokens.load(folder)
    want = greedily(tensors, 3, tokenizer.encode("Hello all"), 12)
    assert tokenizer.end not in want and len({*want}) > 3
    done = python("-m", "bench.gpt2", "--weights", folder, "--backend", "cpu", "--tokens", 12, "Hello all")
    assert done.code == 0, done.err
    assert done.out == "Hello all" + b"".join(map(tokenizer.bytes_of, want)).decode(errors="replace") + "\n"
    assert done.err.startswith("12 tokens in ")


def test_a_tokenizer_of_another_model_is_refused(tmp_path):
    checkpoint(tmp_path, TINY._replace(vocabulary=200))
    with pytest.raises(BadInput, match=f"a model of 200 tokens, and a tokenizer of {len(NAMES)}"):
        script.opened(tmp_path, seed=0)


def test_weights_that_are_not_there_are_told(tmp_path):
    with pytest.raises(BadInput, match=r"cannot read '.*missing': no such file"):
        script.opened(tmp_path / "missing", seed=0)


def test_prompts_of_several_lengths_are_gone_on_with_as_each_alone(model, tensors):
    prompts = [[5, 7, 200, 3, 9], [17], [40, 41, 42]]
    steps = list(script.generate(model, prompts, 20, script.chooser(0, 0)))
    assert np.array(steps).T.tolist() == [greedily(tensors, 3, prompt, 20) for prompt in prompts]


def test_tokens_are_drawn_by_a_seed_the_more_freely_the_higher_the_temperature():
    logits = np.tile(np.array([0.0, 2.0, 1.0]), (3000, 1))
    assert {*script.chooser(0, 0)(logits)} == {1}
    drawn = script.chooser(0.5, 0)(logits)
    p = np.exp(np.array([0.0, 4.0, 2.0]))
    np.testing.assert_allclose(np.bincount(drawn) / 3000, p / p.sum(), atol=0.03)
    assert (drawn == script.chooser(0.5, 0)(logits)).all() and (drawn != script.chooser(0.5, 1)(logits)).any()


def test_a_text_ends_at_its_last_token_and_characters_are_shown_whole():
    tokenizer, said = tokens.of_bytes(), []
    steps = iter(np.array([[tokenizer.encode("ü")[0]], [tokenizer.encode("ü")[1]], [tokenizer.end], [0]]))
    assert script.tell(["x"], steps, tokenizer, said.append) == 2
    assert said == ["x", "", "ü", "", "\n"] and len(list(steps)) == 1


def test_random_weights_are_said_to_be_so(monkeypatch):
    monkeypatch.setattr(script, "Config", lambda vocabulary: Config(1, 1, 40, vocabulary))
    done = CliRunner().invoke(script.main, ["--backend", "cpu", "--tokens", "3", "--temperature", "1"])
    assert done.exit_code == 0, done.output
    assert done.stdout.startswith(tokens.PROMPT) and "without --weights the model is random numbers" in done.stderr
    several = CliRunner().invoke(script.main, ["--backend", "cpu", "--tokens", "2", "a", "bc"])
    assert several.stdout.startswith("a") and "\n\nbc" in several.stdout


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--tokens", "999", "abc"], "1002, more than the 1000"),
        (["a", ""], "is empty"),
        (["--temperature", "nan", "a"], "--temperature is nan, not a finite number."),
    ],
)
def test_a_prompt_or_temperature_that_cannot_be_is_refused(monkeypatch, arguments, complaint):
    monkeypatch.setattr(script, "Config", lambda vocabulary: Config(1, 1, 1000, vocabulary))
    done = CliRunner().invoke(script.main, ["--backend", "cpu", *arguments])
    assert isinstance(done.exception, UsageError) and complaint in str(done.exception)


def test_the_prompt_that_is_timed_has_a_token_for_each_of_its_words():
    assert len(PROMPT) == len(tokens.words(tokens.PROMPT))


# Beside transformers


def test_tokens_and_logits_are_those_of_transformers(tmp_path, folder, tensors):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    theirs = transformers.GPT2TokenizerFast(vocab=str(folder / "vocab.json"), merges=str(folder / "merges.txt"))
    text = f"{tokens.PROMPT} all in all; naïve, 東京  ½ of it's\n\n 'll "
    given = tokens.load(folder).encode(text)
    assert theirs(text)["input_ids"] == given

    import torch

    config = transformers.GPT2Config(
        n_layer=2, n_head=3, n_embd=48, n_positions=64, vocab_size=TINY.vocabulary, bos_token_id=0, eos_token_id=0
    )
    torch.manual_seed(0)
    another = transformers.GPT2LMHeadModel(config).eval()
    another.save_pretrained(tmp_path)
    with torch.no_grad():
        want = another(torch.tensor([given[:60]])).logits[:, -1].numpy()
    ours = GPT2(*weights.load(tmp_path), OfNumPy())
    got = ours.logits(np.array([given[:60]]), np.arange(len(given[:60]))[None])
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


# a server's loop

SERVED = Config(layers=2, heads=2, context=128, vocabulary=40, head=16)
PROMPTS = [[5, 7, 5, 7, 5, 7, 9], list(range(30, 3, -1)) * 2, [3], [11, 12, 13] * 13]


class RowByRow(OfNumPy):
    """NumPy's arrays with products of one row at a time, whose bytes do not depend on what else is in a step."""

    def product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        rows = x.reshape(-1, 1, x.shape[-1])
        return np.concatenate([row @ weight for row in rows]).reshape(*x.shape[:-1], -1)


def served() -> GPT2:
    return GPT2(SERVED, weights.random_weights(SERVED, seed=1), RowByRow())


def alone(prompt: list[int], count: int) -> serving.Request:
    """A prompt in one piece, then a token a step: the plain loop."""
    request = serving.Request(prompt, count)
    assert serving.serve(served(), [request], chunk=len(prompt), drafts=0) == count
    return request


@pytest.mark.parametrize(("chunk", "drafts"), [(16, 4), (5, 0), (64, 7)])
def test_requests_that_are_served_together_get_the_tokens_and_the_bytes_that_they_get_alone(chunk, drafts):
    requests = [serving.Request(prompt, 12 + i) for i, prompt in enumerate(PROMPTS)]
    serving.serve(served(), requests, chunk=chunk, drafts=drafts)
    for request, prompt in zip(requests, PROMPTS, strict=True):
        want = alone(prompt, request.count)
        assert request.tokens == want.tokens and len(request.logits) == request.count
        assert [row.tobytes() for row in request.logits] == [row.tobytes() for row in want.logits]


def test_right_drafts_save_steps_and_wrong_ones_change_nothing():
    want = alone(PROMPTS[0], 20).tokens

    def oracle(tokens: list[int], most: int) -> list[int]:
        return want[len(tokens) : len(tokens) + most]

    def liar(tokens: list[int], most: int) -> list[int]:
        return [(token + 1) % SERVED.vocabulary for token in oracle(tokens, most)]

    for drafter, steps in ((oracle, 4), (liar, 20)):
        request = serving.Request(PROMPTS[0], 20)
        assert serving.serve(served(), [request], drafter, drafts=4) == steps
        assert request.tokens == want


def test_the_plain_loop_writes_what_the_model_without_a_cache_does():
    tokens = list(PROMPTS[3])
    model = served()
    for _ in range(5):
        given = np.array([tokens])
        tokens.append(int(model.logits(given, np.arange(len(tokens))[None]).argmax()))
    assert alone(PROMPTS[3], 5).tokens == tokens
