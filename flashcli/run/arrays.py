"""Arrays in memory instead of files, for the same way through a backend's slots."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from flashcli.asked.shape import Chunk, Shape
from flashcli.files.cut import cut
from flashcli.run.slots import Backend
from flashcli.run.stream import stream


class Arrays(NamedTuple):
    """Arrays in memory as a source and a sink: q, k, v and out are [B, N, d]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    in_order: bool = False

    @property
    def shape(self) -> Shape:
        return Shape(*self.q.shape)

    def read_into(self, chunk: Chunk, floats: np.ndarray) -> None:
        B, N, d = len(chunk.batches), *self.q.shape[1:]
        matrices = [getattr(self, name.lower())[chunk.batches.start : chunk.batches.stop] for name in chunk.matrices]
        rows, first = floats.reshape(B, -1, d), 0
        for index, matrix in enumerate(matrices):  # that part of each which is among the chunk's rows
            low, high = (min(max(end - index * N, 0), N) for end in (chunk.rows.start, chunk.rows.stop))
            rows[:, first : first + high - low] = matrix[:, low:high]
            first += high - low

    def write(self, chunk: Chunk, values: np.ndarray) -> None:
        rows = slice(chunk.rows.start, chunk.rows.stop) if chunk.matrices == "Q" else slice(None)
        target = self.out[chunk.batches.start : chunk.batches.stop, rows]
        target[...] = values.reshape(target.shape)


def attend(backend: Backend, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
    """Attention of arrays float32 [B, N, d] into ``out``, by an open backend."""
    arrays = Arrays(q, k, v, out)
    stream(arrays, backend, arrays, cut(arrays.shape))


def forward(backend: Backend, qkv: np.ndarray, out: np.ndarray) -> None:
    """Attention of Q, K and V in one array [B, 3, N, d], as files have them, written to ``out`` [B, N, d]."""
    attend(backend, qkv[:, 0], qkv[:, 1], qkv[:, 2], out)
