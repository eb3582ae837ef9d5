"""Greedy generation by a GPT-2 of PyTorch's, with the clock read at some tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import NamedTuple

import torch
from torch import Tensor

from bench.gpt2.cache import Cache
from bench.gpt2.model import GPT2


class Generation(NamedTuple):
    """The tokens of each sequence after its prompt, and the seconds until so many tokens of each were there."""

    tokens: list[list[int]]
    reached: dict[int, float]


def generate(
    model: GPT2, prompts: Tensor, count: int, cache: Cache | None, marks: Collection[int], replayed: bool = False
) -> Generation:
    """``count`` tokens after each of the prompts [B, P], each the most likely, and when each of ``marks`` was reached.

    The GPU is waited for at marks only: a token stays there until it is the next one's input. With ``replayed``, the
    work for a single token has been captured in a CUDA graph before the clock starts.
    """
    B, P = prompts.shape
    tokens = prompts.new_zeros(B, P + count + 1)  # one to spare, which the first run of what is captured writes
    tokens[:, :P] = prompts
    place = prompts.new_full((B, 1), P)  # of the last token, for a graph, which keeps nothing alive that it reads
    step = _stepping(model, tokens, P, cache)
    following = _replaying(model, tokens, place, cache) if replayed and cache else step
    reached = {}
    _wait(tokens)
    start = time.perf_counter()
    for n in range(1, count + 1):
        (step if n == 1 else following)(P + n - 1)
        if n in marks:
            _wait(tokens)
            reached[n] = time.perf_counter() - start
    return Generation(tokens[:, P : P + count].tolist(), reached)


def _stepping(model: GPT2, tokens: Tensor, P: int, cache: Cache | None) -> Callable[[int], None]:
    """The function that computes the n-th token of each sequence, counted from 0, from those before it."""
    positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)

    def step(n: int) -> None:
        given = slice(n - 1 if cache and n > P else 0, n)
        tokens[:, n] = model.logits(tokens[:, given], positions[:, given], cache).argmax(-1)

    return step


def _replaying(model: GPT2, tokens: Tensor, place: Tensor, cache: Cache) -> Callable[[int], object]:
    """A function for the token after the last one, by a CUDA graph that moves ``place`` [B, 1] on the GPU by one.

    So the cache is to be one that takes positions from there.
    """
    first = place.clone()

    def step() -> None:
        following = model.logits(tokens.gather(1, place), place, cache).argmax(-1, keepdim=True)
        place.add_(1)
        tokens.scatter_(1, place, following)

    aside = torch.cuda.Stream()
    aside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(aside):  # what libraries do the first time cannot be captured
        step()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    place.copy_(first)
    return lambda n: graph.replay()


def _wait(tensor: Tensor) -> None:
    if tensor.is_cuda:
        torch.cuda.synchronize()
