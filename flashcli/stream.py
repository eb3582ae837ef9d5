"""From a source to a sink in chunks of batches: reading, computing and writing overlap, and memory stays bounded.

A ring of slots, each with room for one chunk, goes round: a thread reads a chunk into a slot, the backend computes it
(on a GPU: copies it there, runs the kernel, copies the result back, all in the slot's own CUDA stream), a thread writes
it, and the slot is free for a later chunk. The number of slots is the only bound on how far reading runs ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from flashcli.fileformat import Shape
from flashcli.timing import Timeline

CHUNK_BYTES = 8 * 2**20  # of input: enough to keep a GPU busy, little enough to start computing and writing early
CHUNKS = 8  # at least, as far as there are batches: so that small files overlap too


class Overlap(NamedTuple):
    """How many chunks may be in each stage at a time; each takes a slot, and a thread for reading or writing it.

    ``computing`` counts those submitted after the one whose result is waited for.
    """

    reading: int
    computing: int
    writing: int


ONE_AFTER_ANOTHER = Overlap(reading=0, computing=0, writing=1)


def ignore(value: object) -> None:
    """The callback of somebody who does not want to know."""


def stream(
    source,
    backend,
    sink,
    timeline: Timeline,
    progress: Callable[[int], None] = ignore,
    warn: Callable[[str], None] | None = None,
    serial: bool = False,
) -> None:
    """Compute every batch of ``source`` into ``sink``.

    ``source`` has ``shape`` and ``read_into(batches, array)``; ``sink`` has ``write(batches, array)`` and ``in_order``,
    true if it cannot seek. ``progress`` is told how many batches were written. ``warn`` is told, once, where the first
    value is that is not finite. ``serial`` does one thing after another, as a control.
    """
    overlap = ONE_AFTER_ANOTHER if serial else backend.overlap
    with timeline.measure("computation", "take memory"):
        slots = backend.slots(source.shape, chunk_shape(source.shape).B, sum(overlap))
    chunks = source.shape.batch_ranges(slots[0].capacity * source.shape.input_batch_bytes)
    ring = [(batches, slots[index % len(slots)]) for index, batches in enumerate(chunks)]
    ahead = min(overlap.reading, len(slots) - 1)
    in_flight = min(overlap.computing, len(slots) - 1 - ahead)
    reading: list[Future[str]] = []
    writing: list[Future[None]] = []

    def read(batches: range, slot) -> str:
        with timeline.measure("input", f"read {name_of(batches)}"):
            source.read_into(batches, slot.input[: len(batches)])
            place = first_nonfinite(slot.input[: len(batches)], batches.start)
            slot.finite = not place
            return place

    def write(batches: range, slot) -> None:
        with timeline.measure("output", f"write {name_of(batches)}"):
            sink.write(batches, slot.output[: len(batches)])

    def written(index: int) -> None:
        writing[index].result()
        progress(len(ring[index][0]))

    with _workers(max(1, ahead)) as readers, _workers(1 if sink.in_order else overlap.writing) as writers:
        for step in range(len(ring) + ahead + in_flight):
            if step < len(ring):
                if step >= len(slots):
                    written(step - len(slots))  # its slot is needed again
                reading.append(readers.submit(read, *ring[step]))
            if 0 <= (index := step - ahead) < len(ring):
                if (place := reading[index].result()) and warn:
                    warn(place)
                    warn = None
                backend.submit(ring[index][1], ring[index][0], timeline)
            if (index := step - ahead - in_flight) >= 0:
                backend.wait(ring[index][1], timeline)
                writing.append(writers.submit(write, *ring[index]))
        for index in range(max(0, len(ring) - len(slots)), len(ring)):
            written(index)


def name_of(batches: range) -> str:
    return f"batches {batches.start} to {batches.stop - 1}"


@contextlib.contextmanager
def _workers(count: int):
    """A pool of threads that drops what it has not begun when the block is left by an error."""
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    finally:
        pool.shutdown(cancel_futures=True)


def chunk_shape(shape: Shape) -> Shape:
    """The shape of a chunk: what a backend gets at a time, unless it is short of memory."""
    batches = min(max(1, CHUNK_BYTES // shape.input_batch_bytes), -(-shape.B // CHUNKS))
    return Shape(batches, shape.N, shape.d)


class Arrays(NamedTuple):
    """Arrays in memory as a source and a sink: q, k, v and out are [B, N, d]."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray

    in_order = False

    @property
    def shape(self) -> Shape:
        return Shape(*self.q.shape)

    def read_into(self, batches: range, qkv: np.ndarray) -> None:
        for index, matrix in enumerate((self.q, self.k, self.v)):
            qkv[:, index] = matrix[batches.start : batches.stop]

    def write(self, batches: range, o: np.ndarray) -> None:
        self.out[batches.start : batches.stop] = o


def first_nonfinite(qkv: np.ndarray, first_batch: int) -> str:
    """Where the first NaN or Inf of [batches, 3, N, d] is, in words; empty if all is finite."""
    with np.errstate(invalid="ignore"):
        if np.isfinite(qkv.min()) and np.isfinite(qkv.max()):  # NaN shows in both; quicker than to look at each value
            return ""
    bad = ~np.isfinite(qkv)
    b, matrix, row, column = np.unravel_index(np.argmax(bad), bad.shape)
    value = qkv[b, matrix, row, column]
    return f"{value} in {'QKV'[matrix]} at (batch, row, column) = ({first_batch + b}, {row}, {column})"
