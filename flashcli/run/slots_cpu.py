"""The NumPy backend of the file pipeline: the default where there is no GPU.

Tiles of a chunk (`flashcli.cpu.attention`) run in threads, the next chunk's after them. A file's answers have the bytes
that `flashcli.attention` gives for the same numbers in arrays.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np

from flashcli.asked.shape import Chunk, Shape
from flashcli.cpu.attention import BC, Matrices, Sight, Tile, attend, exceeds_float32, magnitude, row_tile, tiles
from flashcli.cpu.workers import description, one_blas_thread, usable_cores
from flashcli.files.cut import Cut
from flashcli.process.pool import Pool
from flashcli.run.slots import Backend, LongBatch, Overlap, Slot, ignore
from flashcli.run.timeline import Timeline

T = TypeVar("T")


class Work(NamedTuple):
    """Batches, and what there is to look at: ``given`` [batches, matrices, M, d] is what has come with Q, Q included.

    ``first_row`` is the position of Q's first row in the sequence.
    """

    matrices: Matrices
    given: np.ndarray
    first_row: int = 0


class Done(NamedTuple):
    """A tile, and the largest magnitude in its rows of each matrix that was given: [batches, matrices]."""

    tile: Tile
    largest: np.ndarray


class CpuSlot(Slot):
    work: Work
    running: Iterator[Any]  # Done; or, of K and V of a long batch, the largest magnitude of each


class CpuLongBatch(LongBatch):
    largest: np.ndarray  # magnitude in K, and in V, so far


class CpuBackend(Backend[CpuSlot]):
    # One thread reads, and one writes, faster than all others compute; a second writer would spin for the file's lock.
    # Of two chunks in computation, the second employs the threads for which the first has no work left.
    overlap = Overlap(reading=1, computing=1, writing=1)

    def __init__(self, causal: bool = False, scale: float | None = None, threads: int | None = None) -> None:
        self._causal = causal
        self._scale = scale
        self._Br = row_tile(1, causal)
        self._threads = threads or len(usable_cores())
        self._pool = Pool(self._threads, thread_name_prefix="attention")

    def __enter__(self) -> CpuBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    @property
    def description(self) -> str:
        return f"{description(self._threads)} (Br={self._Br}, Bc={BC})"

    def details(self) -> dict[str, object]:
        return {"backend": "cpu", "threads": self._threads, "Br": self._Br, "Bc": BC}

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[CpuSlot]]:
        self._Br = row_tile(shape.N, self._causal)
        smaller = by.smaller()  # what waits in few small slots may still be in a cache
        if smaller and smaller.batches * smaller.rows >= self._threads * self._Br:
            by = smaller
        # Two, so that one fills while the other is used. Of the batch before the last, all is done: at least two chunks
        # came since, and `overlap` lets one be computed beside another.
        self._long = [] if by.whole else CpuLongBatch.several(2, shape)
        return by, [CpuSlot(shape, by) for _ in range(count)]

    def submit(self, slot: CpuSlot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk, slot.submitted = chunk, time.perf_counter()
        given, answer, (_, N, d) = slot.input_of(chunk), slot.output_of(chunk), vars(slot.shape).values()
        if chunk.matrices == "QKV":
            qkv = given.reshape(-1, 3, N, d)
            q, k, v = qkv.transpose(1, 0, 2, 3)
            self._start(slot, Work(Matrices(q, k, v, answer.reshape(q.shape)), qkv))
            return
        batch = self._long_of(slot)
        if chunk.matrices == "KV":
            batch.keep(chunk, given)
            slot.running = self._pool.results(magnitude, np.split(given, [max(N - chunk.rows.start, 0) * d]))
        else:
            q = given.reshape(1, -1, d)
            matrices = Matrices(q, batch.k[None], batch.v[None], answer.reshape(q.shape))
            self._start(slot, Work(matrices, q[:, None], chunk.rows.start))

    def wait(self, slot: CpuSlot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        done = list(checking(slot.running, check))
        if slot.chunk.matrices == "KV":
            batch, largest = self._long_of(slot), np.array(done)
            slot.finite = bool(np.isfinite(largest).all())
            batch.largest = largest if slot.chunk.rows.start == 0 else np.maximum(batch.largest, largest)
        else:
            slot.finite = all(np.isfinite(largest).all() for _, largest in done)
            compute = functools.partial(self._compute, slot.work, dtype=np.float64)
            for _ in checking(self._pool.results(compute, self._huge(slot, done)), check):
                """Their input has been looked at before."""
        timeline.add("computation", slot.submitted, time.perf_counter(), f"compute {slot.chunk}")

    def _long_of(self, slot: Slot) -> CpuLongBatch:
        return self._long[slot.chunk.batches.start % len(self._long)]

    def _start(self, slot: CpuSlot, work: Work) -> None:
        (B, M, _), N = work.matrices.q.shape, work.matrices.k.shape[1]
        slot.work = work
        slot.running = self._pool.results(
            functools.partial(self._compute, work), tiles((B,), M, N, self._Br, self._threads)
        )

    def _scale_of(self, d: int) -> float:
        return 1 / math.sqrt(d) if self._scale is None else self._scale

    @one_blas_thread()
    def _compute(self, work: Work, tile: Tile, dtype: type = np.float32) -> Done:
        """The answer of a tile; its input is looked at while it is in a cache."""
        part, [batches] = work.matrices.of(tile), tile.units
        sight = Sight(work.first_row + tile.rows.start) if self._causal else Sight()
        attend(part, self._scale_of(part.q.shape[-1]), sight, dtype)
        return Done(tile, magnitude(work.given[batches, :, tile.rows], (2, 3)))

    def _huge(self, slot: CpuSlot, done: list[Done]) -> Iterator[Tile]:
        """The tiles, of one batch each, for which float32 may have no room in between.

        That depends on the tile's Q and its batch's K and V alone, and so do the answer's bits, however chunks are cut.
        """
        B, N, d = slot.work.matrices.k.shape
        if slot.chunk.matrices == "Q":
            keys = self._long_of(slot).largest[None]
        else:
            keys = np.zeros((B, 2), np.float32)
            for tile, largest in done:
                keys[tile.units] = np.maximum(keys[tile.units], largest[:, 1:])
        for ([batches], rows), largest in done:
            k, v = keys[batches].T
            for b in batches.start + np.flatnonzero(exceeds_float32(largest[:, 0], k, v, N, d, self._scale_of(d))):
                yield Tile((slice(b, b + 1),), rows)


def checking(running: Iterable[T], check: Callable[[], None]) -> Iterator[T]:
    """Pass on each result, and call ``check`` after it; an error of a worker is raised here."""
    for result in running:
        yield result
        check()
