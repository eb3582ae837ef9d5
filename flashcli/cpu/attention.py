"""Attention of NumPy arrays as they lie: heads, grouped heads, strides, a bias, other numbers of queries than of keys.

The algorithm is that of the file path (`flashcli.cpu.tiled`). Br is fixed here: a row has the same neighbours in
its tile, and the same bits in the answer, whatever other batches and heads there are, and with any number of threads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from flashcli.asked.attention import Call
from flashcli.asked.shape import MAX_FLOAT32, TILE
from flashcli.cpu.tiled import Matrices, Tile, attend, exceeds_float32, groups, magnitude, tiles
from flashcli.cpu.workers import Workers

BR_FULL, BR_CAUSAL = TILE // 2, TILE // 4  # a causal tile computes what its last row sees for all its rows
AT_A_LOOK = 2**18  # numbers of K that a thread looks at in one task, about
BESIDE_BIAS = 2.0**103  # scores below it plus any float32 are at most the largest float32


def attend_arrays(asked: Call, given: Matrices, threads: int | None = None) -> None:
    """What is asked for, of arrays in the shapes that it was asked for with, into ``given.out`` and ``given.lse``."""
    by_group, units = in_groups(asked, given), (asked.B, asked.Hkv, asked.group)
    limit = BESIDE_BIAS if asked.bias else MAX_FLOAT32
    with closing(Workers("attention", threads)) as workers:
        k_largest, v_largest = (np.broadcast_to(keys, units) for keys in largest_keys(asked, by_group, workers))

        def compute(tile: Tile) -> None:
            part, row = by_group.of(tile), asked.q_start + tile.rows.start
            attend(part, asked.scale, asked.causal, row)
            q, k, v = magnitude(part.q, (-2, -1)), k_largest[tile.units], v_largest[tile.units]
            for unit in np.argwhere(exceeds_float32(q, k, v, asked.N, asked.d, asked.scale, limit)):
                one = part.of(Tile(tuple(slice(index, index + 1) for index in unit), slice(None)))
                attend(one, asked.scale, asked.causal, row, np.float64)

        Br = BR_CAUSAL if asked.causal else BR_FULL
        for_each(workers, compute, list(tiles(units, asked.M, asked.N, Br, workers.count)))


def in_groups(asked: Call, given: Matrices) -> Matrices:
    """The same arrays, not copied, with units [B, Hkv, H / Hkv]: heads of Q that share one of K and V side by side."""
    B, H, Hkv, group, M, N, d = asked.B, asked.H, asked.Hkv, asked.group, asked.M, asked.N, asked.d
    q, out = (matrix.reshape(B, Hkv, group, M, d) for matrix in (given.q, given.out))
    k, v = (np.broadcast_to(matrix.reshape(B, Hkv, 1, N, d), (B, Hkv, group, N, d)) for matrix in (given.k, given.v))
    bias, lse = given.bias, given.lse
    if bias is not None:
        with_heads = bias if asked.heads or bias.ndim < 3 else bias[:, None]
        bias = np.broadcast_to(with_heads, (B, H, M, N)).reshape(B, Hkv, group, M, N)
    return Matrices(q, k, v, out, bias, None if lse is None else lse.reshape(B, Hkv, group, M))


def largest_keys(asked: Call, by_group: Matrices, workers: Workers) -> tuple[np.ndarray, np.ndarray]:
    """The largest magnitude in K, and in V, of each head of theirs: [B, Hkv, 1]."""
    k, v = (np.empty((asked.B, asked.Hkv, 1), np.float32) for _ in "kv")

    def look(units: tuple[slice, ...]) -> None:
        for largest, matrix in ((k, by_group.k), (v, by_group.v)):
            largest[units] = magnitude(matrix[units], (-2, -1))

    for_each(workers, look, list(groups(k.shape, max(1, AT_A_LOOK // (asked.N * asked.d)))))
    return k, v


def for_each(workers: Workers, function: Callable[[Any], None], tasks: list) -> None:
    """A single task does not wait for a thread to start. Raises what a worker raises."""
    deque((workers.map if len(tasks) > 1 else map)(function, tasks), maxlen=0)
