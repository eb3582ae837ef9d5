"""The output's rows divided among devices or processes: a contiguous range, a shard, for each, of about the same cost.

Every row needs only its own row of Q, and K and V of its batch, so that shards share nothing but the two files. A row
costs as much as it has keys: N, or, when causal, its number in the batch plus one.
"""

from __future__ import annotations

import itertools
import math

from flashcli.asked.shape import TILE, Shape, ceil_div
from flashcli.files.cut import Cut, batches, cut

SLACK = 8  # whole batches are divided if the largest shard then is at most 1/8 above the mean


def shards(shape: Shape, count: int, causal: bool = False) -> tuple[Cut, list[range]]:
    """How chunks are to be cut, and for each of ``count`` workers its rows of the output, a matrix [B N, d], in order.

    Shards end with a batch where batches are short and come out even, so that K and V are read once; else within a
    batch at a multiple of `TILE`, with K and V read by each. Where there is less work than workers, some are empty.
    """
    by = cut(shape)
    even = SLACK * count * ceil_div(shape.B, count) <= (SLACK + 1) * shape.B
    if by.whole and not even and shape.N > TILE:
        by = cut(shape, whole=False)
    step = shape.N if by.whole else TILE
    ends = [_end(shape, k, count, step, causal) for k in range(count + 1)]
    return by, [range(*pair) for pair in itertools.pairwise(ends)]


def input_rows(shape: Shape, rows: range) -> int:
    """Count the rows of the input [3 B N, d] that a shard reads: its own of Q, all of K and V of its batches."""
    return len(rows) + 2 * shape.N * len(batches(shape, rows))


def cost(rows: int, N: int, causal: bool) -> int:
    """The work of the first ``rows`` of a batch, counted in pairs of a query and a key."""
    return rows * (rows + 1) // 2 if causal else rows * N


def _end(shape: Shape, k: int, count: int, step: int, causal: bool) -> int:
    """The row, of those where a shard may end, that is nearest to having k of ``count`` parts of the cost before it."""
    N = shape.N
    batch, rest = divmod(shape.B * cost(N, N, causal) * k // count, cost(N, N, causal))
    row = (math.isqrt(8 * rest + 1) - 1) // 2 if causal else rest // N
    low = row // step * step
    high = min(low + step, N)
    nearer = low if rest - cost(low, N, causal) <= cost(high, N, causal) - rest else high
    return batch * N + nearer
