"""GPT-2 in plain PyTorch, whatever its attention is, and greedy generation with it.

Source: Radford et al., "Language models are unsupervised multitask learners", 2019; names of weights as in Hugging
Face's transformers.
"""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from bench.gpt2_cache import HEAD, Attend, Cache, Config, Dense, Pages, at
from flashcli.asked.shape import round_up
from flashcli.errors import BadInput


def shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """The name and the shape of each weight; matrices are [inputs, outputs]."""
    width = config.width
    found: dict[str, tuple[int, ...]] = {
        "wte.weight": (config.vocabulary, width),
        "wpe.weight": (config.context, width),
    }
    norms = ["ln_f", *(f"h.{layer}.ln_{which}" for layer in range(config.layers) for which in (1, 2))]
    for layer in range(config.layers):
        for name, inputs, outputs in (
            ("attn.c_attn", 1, 3), ("attn.c_proj", 1, 1), ("mlp.c_fc", 1, 4), ("mlp.c_proj", 4, 1)
        ):  # fmt: skip
            found[f"h.{layer}.{name}.weight"] = inputs * width, outputs * width
            found[f"h.{layer}.{name}.bias"] = (outputs * width,)
    return found | {f"{norm}.{what}": (width,) for norm in norms for what in ("weight", "bias")}


def random_weights(config: Config, seed: int) -> dict[str, Tensor]:
    """Seeded weights, the same on every machine.

    Those of queries and keys are large enough for attention to prefer some tokens to others, and those of projections
    for what is generated to depend on it: with GPT-2's own initial weights, a model repeats its last token.
    """
    generator = torch.Generator().manual_seed(seed)
    deviations = {"wte.weight": 0.02, "wpe.weight": 0.02, "attn.c_attn.weight": 0.08, "c_proj.weight": 0.08}
    found = {}
    for name, shape in shapes(config).items():
        if name.endswith(".bias"):
            found[name] = torch.zeros(shape)
        elif len(shape) == 1:
            found[name] = torch.ones(shape)
        else:
            deviation = next((value for end, value in deviations.items() if name.endswith(end)), 0.04)
            found[name] = torch.empty(shape).normal_(0, deviation, generator=generator)
    return found


def sized(weights: Mapping[str, Tensor]) -> Config:
    """The sizes of the model that weights are of; BadInput if they are not those of a GPT-2."""
    try:
        (vocabulary, width), context = weights["wte.weight"].shape, len(weights["wpe.weight"])
    except (KeyError, ValueError) as error:
        raise BadInput("these are not the weights of a GPT-2: there is no matrix wte.weight or wpe.weight.") from error
    layers = sum(re.fullmatch(r"h\.\d+\.ln_1\.weight", name) is not None for name in weights)
    config = Config(layers, width // HEAD, context, vocabulary)
    for name, shape in shapes(config).items():
        if name not in weights or tuple(weights[name].shape) != shape:
            has = list(weights[name].shape) if name in weights else "missing"
            raise BadInput(f"these are not the weights of a GPT-2: {name} is {has}, not {list(shape)}.")
    return config


class GPT2:
    """A model on a device; ``attend`` is its attention, ``pages`` whether a cache is in pages, and of which numbers."""

    def __init__(self, weights: Mapping[str, Tensor], attend: Attend, pages: torch.dtype | None = None) -> None:
        self.config, self.weights, self.attend, self._pages = sized(weights), weights, attend, pages

    def new_cache(self) -> Cache:
        """Room for keys and values of all layers and positions."""
        like = self.weights["wte.weight"]
        return Pages(self.config, like, self._pages) if self._pages else Dense(self.config, like, self.attend)

    def logits(self, tokens: Tensor, start: int | Tensor = 0, cache: Cache | None = None) -> Tensor:
        """Logits of the token after ``tokens`` [1, M], which are at position ``start`` and after it: [1, vocabulary].

        With a ``cache``, their keys and values go there, and those before ``start`` are in it already. Without one, the
        tokens are all that there is.
        """
        weights = self.weights
        x = weights["wte.weight"][tokens] + at(weights["wpe.weight"], start, tokens.shape[1])
        for layer in range(self.config.layers):
            x = x + self._attention(self._norm(x, f"h.{layer}.ln_1"), layer, start, cache)
            inner = self._linear(self._norm(x, f"h.{layer}.ln_2"), f"h.{layer}.mlp.c_fc")
            x = x + self._linear(functional.gelu(inner, approximate="tanh"), f"h.{layer}.mlp.c_proj")
        return self._norm(x[:, -1], "ln_f") @ weights["wte.weight"].T

    def _attention(self, x: Tensor, layer: int, start: int | Tensor, cache: Cache | None) -> Tensor:
        """q, k and v are slices of one projection: nothing is copied for attention."""
        B, M, width = x.shape
        qkv = self._linear(x, f"h.{layer}.attn.c_attn").view(B, M, 3, self.config.heads, HEAD)
        if cache is None:
            o = self.attend(*(qkv[:, :, which].transpose(1, 2) for which in range(3))).transpose(1, 2)
        else:
            o = cache.attend(layer, start, qkv)
        return self._linear(o.reshape(B, M, width), f"h.{layer}.attn.c_proj")

    def _linear(self, x: Tensor, name: str) -> Tensor:
        weight, bias = self.weights[f"{name}.weight"], self.weights[f"{name}.bias"]
        return torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], weight.shape[1])

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return functional.layer_norm(x, x.shape[-1:], self.weights[f"{name}.weight"], self.weights[f"{name}.bias"])


class Generation(NamedTuple):
    """The generated tokens, and the seconds until so many tokens were there."""

    tokens: list[int]
    reached: dict[int, float]


def generate(
    model: GPT2, first: int, count: int, cached: bool, marks: Collection[int], replayed: bool = False
) -> Generation:
    """``count`` tokens after the token ``first``, each the most likely, and when each of ``marks`` was reached.

    The GPU is waited for at marks only: a token stays there until it is the next one's input. With ``replayed``, a
    token's work has been captured in a CUDA graph before the clock starts.
    """
    tokens = model.weights["wte.weight"].new_empty((1, count + 1), dtype=torch.long)
    tokens[0, 0] = first
    step = _replaying(model, tokens) if replayed else _stepping(model, tokens, cached)
    reached = {}
    _wait(tokens)
    start = time.perf_counter()
    for n in range(1, count + 1):
        step(n)
        if n in marks:
            _wait(tokens)
            reached[n] = time.perf_counter() - start
    return Generation(tokens[0, 1:].tolist(), reached)


def _stepping(model: GPT2, tokens: Tensor, cached: bool) -> Callable[[int], None]:
    """The function that computes token n."""
    cache = model.new_cache() if cached else None

    def step(n: int) -> None:
        given = tokens[:, n - 1 : n] if cached else tokens[:, :n]
        tokens[:, n] = model.logits(given, n - 1 if cached else 0, cache).argmax(-1)

    return step


def _replaying(model: GPT2, tokens: Tensor) -> Callable[[int], object]:
    """A function for the token after the last one, by a CUDA graph: the position is on the GPU, and the graph moves it.

    So the cache is to be one that takes it from there.
    """
    cache, position = model.new_cache(), tokens.new_zeros(1)

    def step() -> None:
        following = model.logits(tokens.index_select(1, position), position, cache).argmax(-1, keepdim=True)
        position.add_(1)
        tokens.index_copy_(1, position, following)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what libraries do the first time cannot be captured
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    position.zero_()
    return lambda n: graph.replay()


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()


# ---- Attention


def naive(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention by PyTorch's operations, with all scores in memory."""
    M, N = q.shape[2], k.shape[2]
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]))
    if M > 1:
        scores = scores.masked_fill(_later(round_up(N, 1024), q.device)[N - M : N, :N], -torch.inf)
    return torch.softmax(scores, -1) @ v


@functools.cache
def _later(size: int, device: torch.device) -> Tensor:
    """Which of so many tokens come after which: [size, size]."""
    return torch.ones(size, size, dtype=torch.bool, device=device).triu(1)


def pytorchs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """PyTorch's attention. A single query sees all keys, the others, without a cache, those up to their own."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def ours(kernel: str | None) -> Attend:
    """`flashcli.attention` with a kernel, or its own choice; several rows go before heads, as projections need them."""
    from flashcli.api import attention

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, M, d = q.shape
        out = q.new_empty(B, M, H, d).transpose(1, 2) if M > 1 else None
        return attention(q, k, v, causal=True, q_start=k.shape[2] - M, kernel=kernel, out=out)

    return attend
