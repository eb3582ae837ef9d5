"""Times of calls on PyTorch's tensors, contenders in turn, so that all see the same clocks of the GPU.

A contender is a list of calls without arguments, one for each set of inputs; they take turns, so that a cache that
holds one of them does not hold all.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from flashcli.measure.peers import event_seconds

Turns = Sequence[Callable[[], Any]]
WARM_UP = 2  # runs that are not counted
GRAPHED = 20  # calls in a graph, so that the replay is long beside its own launch
AHEAD = 800_000  # clocks of the GPU, some 0.4 ms, in which the host queues a call: else the GPU waits for it
HOSTED = 50  # calls between two looks at the host's clock: fewer than a GPU lets a host queue


def on_gpu(contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    """Seconds on the GPU of each run of each contender, by CUDA events; the host is ahead of the GPU."""

    def timed(turns: Turns, run: int) -> float:
        def before() -> None:
            turns[(run + 1) % len(turns)]()
            occupy()

        return event_seconds(before, turns[run % len(turns)])[0]

    return _race(timed, contenders, runs)


def occupy() -> None:
    """Give the GPU something to do until the host has queued what follows."""
    import torch

    torch.cuda._sleep(AHEAD)


def in_a_graph(contenders: Sequence[Turns], runs: int, calls: int = GRAPHED) -> list[list[float]]:
    """Seconds on the GPU of a call in a CUDA graph of so many, replayed: the host's time is not in it."""
    import torch

    graphs = []
    for turns in contenders:
        turns[0]()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for call in range(calls):
                turns[call % len(turns)]()
        graphs.append([graph.replay])
    return [[seconds / calls for seconds in some] for some in on_gpu(graphs, runs)]


def on_host(contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    """Seconds that the host takes to queue a call, while the GPU has time for what was queued before."""
    import torch

    def timed(turns: Turns, run: int) -> float:
        call = turns[0]
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(HOSTED):
            call()
        return (time.perf_counter() - start) / HOSTED

    return _race(timed, contenders, runs)


def on_cpu(contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    """Seconds of calls that compute on the CPU."""

    def timed(turns: Turns, run: int) -> float:
        start = time.perf_counter()
        turns[run % len(turns)]()
        return time.perf_counter() - start

    return _race(timed, contenders, runs)


def _race(timed: Callable[[Turns, int], float], contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    found = [[timed(turns, run) for turns in contenders] for run in range(WARM_UP + runs)]
    return [list(some) for some in zip(*found[WARM_UP:], strict=True)]
