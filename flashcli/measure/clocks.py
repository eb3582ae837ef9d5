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
AHEAD = 800_000  # clocks of the GPU, some 0.4 ms, in which the host queues a call: else the GPU waits for it


def on_gpu(contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    """Seconds on the GPU of each run of each contender, by CUDA events; the host is ahead of the GPU."""

    def timed(turns: Turns, run: int) -> float:
        def before() -> None:
            turns[(run + 1) % len(turns)]()
            occupy()

        return event_seconds(before, turns[run % len(turns)])[0]

    return rounds(timed, contenders, runs)


def occupy() -> None:
    """Give the GPU something to do until the host has queued what follows."""
    import torch

    torch.cuda._sleep(AHEAD)


def on_cpu(contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    """Seconds of calls that compute on the CPU."""

    def timed(turns: Turns, run: int) -> float:
        start = time.perf_counter()
        turns[run % len(turns)]()
        return time.perf_counter() - start

    return rounds(timed, contenders, runs)


def rounds(timed: Callable[[Turns, int], float], contenders: Sequence[Turns], runs: int) -> list[list[float]]:
    """Seconds that ``timed`` finds for each run of each contender, in turn, after `WARM_UP` that do not count."""
    found = [[timed(turns, run) for turns in contenders] for run in range(WARM_UP + runs)]
    return [list(some) for some in zip(*found[WARM_UP:], strict=True)]
