"""Attentions that GPT-2 is timed with, on PyTorch's tensors."""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench.gpt2.cache import Attend
from flashcli.api import attention
from flashcli.asked.shape import round_up
from flashcli.kernels.attention import KERNELS

NAIVE = "naive"


class Contender(NamedTuple):
    """An attention, and what has to be entered for it to be that one.

    With ``pages``, the type of the numbers in it, there is a cache in pages; it may be ``replayed`` in a CUDA graph.
    """

    attend: Attend
    within: Callable[[], Any] = contextlib.nullcontext
    pages: str = ""
    replayed: bool = False


def contenders(backend: str) -> dict[str, Contender]:
    """The contenders by name; the first is the one that the others' tokens are compared with."""
    found = {NAIVE: Contender(naive)}
    if backend == "cpu":
        found |= {"PyTorch SDPA": Contender(pytorchs), "flashcli": Contender(ours(None))}
        return found | {"paged": Contender(ours(None), pages="float32")}
    ways = {"math": SDPBackend.MATH, "efficient": SDPBackend.EFFICIENT_ATTENTION}
    for name, way in ways.items():
        found[f"PyTorch {name}"] = Contender(pytorchs, functools.partial(sdpa_kernel, way))
    kernels = [None, *(name for name, kernel in KERNELS.items() if kernel.strided)]
    found |= {name or "flashcli": Contender(ours(name)) for name in kernels}
    return found | {
        "paged": Contender(ours(None), pages="float32"),
        "paged fp16": Contender(ours(None), pages="float16"),
        "paged, graph": Contender(ours(None), pages="float32", replayed=True),
        "paged fp16, graph": Contender(ours(None), pages="float16", replayed=True),
    }


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
    """PyTorch's attention. A single query sees all keys, the others, which are all there are, those up to their own."""
    return functional.scaled_dot_product_attention(q, k, v, is_causal=q.shape[2] > 1)


def ours(kernel: str | None) -> Attend:
    """`flashcli.attention` with a kernel, or its own choice; several rows go before heads, as projections need them."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        B, H, M, d = q.shape
        out = q.new_empty(B, M, H, d).transpose(1, 2) if M > 1 else None
        return attention(q, k, v, causal=True, q_start=k.shape[2] - M, kernel=kernel, out=out)

    return attend
