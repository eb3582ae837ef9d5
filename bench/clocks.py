"""Times of calls on a GPU beside those that commands tell: of their replay in a CUDA graph, and on the host."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flashcli.measure import in_place
from flashcli.measure.clocks import Turns, on_gpu, rounds

GRAPHED = 20  # calls in a graph, so that the replay is long beside its own launch
HOSTED = 50  # calls between two looks at the host's clock: fewer than a GPU lets a host queue


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

    return rounds(timed, contenders, runs)


BESIDE = {"host": on_host, "graph": in_a_graph}
CLOCKS = in_place.CLOCKS | BESIDE
