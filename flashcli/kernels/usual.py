"""Builds that calls of usual shapes need, found ahead of them; tiles follow from shapes, and many shapes share some."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from flashcli.kernels import backward, choice, decode
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.problem import Problem

HEADS = (32, 64, 80, 96, 128)  # numbers in a head
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)  # heads of all batches
LENGTHS = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096, 8192, 16384, 32768)  # queries, and keys
HALVES = ("float16", "bfloat16")
SHARED_HEADS = ((8, 8), (32, 8), (64, 8))  # heads of queries, and of the cache
TABLES = (16, 32, 64, 128, 256, 512, 1024, 2048)  # pages of a sequence, at most


def of_files(gpu: Gpu, d: int) -> Iterator[Build]:
    """Builds of `flashcli run`."""
    for B, N, causal in itertools.product(BATCHES, LENGTHS, (False, True)):
        problem = Problem(B, N, N, d, causal, sms=gpu.multiprocessors)
        yield Build(choice.choose(gpu.capability, problem), problem)


def of_attention(gpu: Gpu, d: int) -> Iterator[Build]:
    """Builds of `flashcli.attention` on dense arrays, with and without the LSE, which gradients need."""
    for B, N, causal, lse in itertools.product(BATCHES, LENGTHS, (False, True), (False, True)):
        problem = Problem(
            B, N, N, d, causal, sms=gpu.multiprocessors, in_place=True, lse=lse, batch_invariant=True, speed=gpu.speed
        )  # fmt: skip
        yield Build(choice.choose(gpu.capability, problem), problem)


def of_gradients(gpu: Gpu, d: int) -> Iterator[Build]:
    """Builds of `flashcli.attention_backward`, and those for what is not finite."""
    for B, N, causal in itertools.product((1, 1024), LENGTHS, (False, True)):
        problem = backward.of_sizes(d, causal, B=B, M=N, N=N)
        yield from backward.builds(gpu, problem)


def of_decode(gpu: Gpu, d: int) -> Iterator[Build]:
    """Builds of `flashcli.decode` of one token a sequence, in halves, on pages of 16 tokens."""
    if d % 8:
        return
    for kind, transposed, (heads, kv_heads), S, width in itertools.product(
        HALVES, (False, True), SHARED_HEADS, BATCHES[::2], TABLES
    ):
        yield decode.choose(
            decode.Problem(
                d, 16, kind, kind, transposed, sequences=S, heads=heads, kv_heads=kv_heads, table_width=width, gpu=gpu
            )
        )


class Usual(NamedTuple):
    """Shapes of a call: the ``builds`` that they need on a GPU for heads of a length, and the usual ``heads``."""

    builds: Callable[[Gpu, int], Iterator[Build]]
    heads: tuple[int, ...] = HEADS


CALLS = {
    "run": Usual(of_files, (32, 64)), "attention": Usual(of_attention), "backward": Usual(of_gradients),
    "decode": Usual(of_decode),
}  # fmt: skip


def builds(gpu: Gpu, calls: Iterable[str] = CALLS, heads: Iterable[int] = ()) -> list[Build]:
    """All builds that differ of these calls with heads of these lengths, or the usual ones; most needed ones first."""
    found: dict[tuple, Build] = {}
    needed: defaultdict[tuple, float] = defaultdict(float)  # by how large a share of a call's shapes
    for call in calls:
        for d in heads or CALLS[call].heads:
            some = [*CALLS[call].builds(gpu, d)]
            for build in some:
                key = build.kernel.name, *build.macros().items()
                found.setdefault(key, build)
                needed[key] += 1 / len(some)
    return [found[key] for key in sorted(needed, key=needed.__getitem__, reverse=True)]
