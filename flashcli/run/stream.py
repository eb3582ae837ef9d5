"""A stream from a source to a sink in chunks: reading, computing and writing overlap, and memory stays bounded.

A ring of slots, each with room for one chunk, goes round. A thread reads a chunk into a slot, the backend computes it,
a thread writes it, and the slot is free for a later chunk. A GPU's backend copies a chunk there, runs the kernel and
copies the result back, all in the slot's own CUDA stream. The number of slots is the only bound on how far reading
runs ahead.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import NamedTuple, Protocol

import numpy as np

from flashcli.asked.shape import Chunk, Shape
from flashcli.files.cut import Cut, chunks
from flashcli.files.summary import first_lost, first_nonfinite
from flashcli.process.pool import Pool, awaited
from flashcli.process.signals import held
from flashcli.run.slots import Backend, Overlap, Slot, ignore
from flashcli.run.timeline import Timeline

ONE_AFTER_ANOTHER = Overlap(reading=0, computing=0, writing=1)


class Watch(NamedTuple):
    """Who follows a stream, and may end it.

    timeline : is given what went on, from when to when
    progress : is told how many bytes of input are done with
    warn : is told, once, where a value of the input is that is not finite
    lost : is told, once, where a value of the answer is that is not finite though the input is
    check : is called now and then, and raises what is to end it all
    """

    timeline: Timeline
    progress: Callable[[int], None] = ignore
    warn: Callable[[str], None] = ignore
    lost: Callable[[str], None] = ignore
    check: Callable[[], None] = ignore


class Source(Protocol):
    """Where chunks come from: ``read_into`` fills the floats with one, on any thread."""

    @property
    def shape(self) -> Shape: ...

    def read_into(self, chunk: Chunk, floats: np.ndarray) -> None: ...


class Sink(Protocol):
    """Where the answers to chunks go, from any thread; ``in_order`` if it cannot seek."""

    @property
    def in_order(self) -> bool: ...

    def write(self, chunk: Chunk, values: np.ndarray) -> None: ...


def stream(
    source: Source,
    backend: Backend,
    sink: Sink,
    by: Cut,
    rows: range | None = None,
    serial: bool = False,
    watch: Watch | None = None,
) -> None:
    """Compute ``rows`` of the output of ``source`` (all by default, or none), cut into chunks ``by``, into ``sink``.

    ``serial`` does one thing after another, as a control.
    """
    rows = range(source.shape.B * source.shape.N) if rows is None else rows
    if rows:
        overlap = ONE_AFTER_ANOTHER if serial else backend.overlap
        _Stream(source, backend, sink, watch or Watch(Timeline(keeps=False))).run(by, rows, overlap)


class _Stream:
    """One stream: what is at which stage. A slot is in one of four queues, in the order of the chunks in them."""

    def __init__(self, source: Source, backend: Backend, sink: Sink, watch: Watch) -> None:
        self._source, self._backend, self._sink, self._watch = source, backend, sink, watch
        self._free: deque[Slot] = deque()
        self._reading: deque[tuple[Slot, Future[None]]] = deque()
        self._computing: deque[Slot] = deque()
        self._writing: deque[tuple[Slot, Future[None]]] = deque()
        self._warned = self._lost = False

    def run(self, by: Cut, rows: range, overlap: Overlap) -> None:
        shape, sink = self._source.shape, self._sink
        count = sum(1 for _ in itertools.islice(chunks(shape, by, rows), sum(overlap)))
        with self._watch.timeline.measure("computation", "take memory"):
            by, slots = self._backend.slots(shape, by, count)
        self._free.extend(slots)
        ahead = min(overlap.reading, len(slots) - 1)
        in_flight = min(overlap.computing, len(slots) - 1 - ahead)
        writers = 1 if sink.in_order else overlap.writing
        with _workers(max(1, ahead)) as self._readers, _workers(writers, abandoned=sink.in_order) as self._writers:
            self._all(chunks(shape, by, rows), ahead, in_flight)

    def _all(self, some: Iterable[Chunk], ahead: int, in_flight: int) -> None:
        """Take all chunks through their stages."""
        for chunk in some:
            self._watch.check()
            self._begin(chunk)
            self._go_on(ahead, in_flight)
        while self._reading or self._computing:
            self._watch.check()
            self._go_on(0, in_flight if len(self._reading) > 1 else 0)
        while self._writing:
            self._finish()

    def _begin(self, chunk: Chunk) -> None:
        """Start reading a chunk, as soon as there is a slot for it."""
        if not self._free:
            self._finish()
        slot = self._free.popleft()
        slot.chunk = chunk
        self._reading.append((slot, self._readers.submit(self._read, slot)))

    def _go_on(self, ahead: int, in_flight: int) -> None:
        """Take a chunk further if more than ``ahead`` are being read, and what is done, or more than ``in_flight``."""
        watch = self._watch
        if len(self._reading) > ahead:
            slot, read = self._reading.popleft()
            awaited(read)
            self._backend.submit(slot, slot.chunk, watch.timeline)
            self._computing.append(slot)
        while self._computing and (len(self._computing) > in_flight or self._backend.is_done(self._computing[0])):
            slot = self._computing.popleft()
            self._backend.wait(slot, watch.timeline, watch.check)
            self._look(slot)
            self._writing.append((slot, self._writers.submit(self._write, slot)))

    def _look(self, slot: Slot) -> None:
        """Tell of what is not finite."""
        chunk = slot.chunk
        if not slot.finite and not self._warned:
            self._warned = True
            self._watch.warn(first_nonfinite(slot.input_of(chunk), slot.shape, chunk))
        elif not slot.finite_answer and not self._warned and not self._lost:
            self._lost = True
            self._watch.lost(first_lost(slot.output_of(chunk), slot.shape, chunk))

    def _finish(self) -> None:
        """Wait until the oldest chunk is written; its slot is free then."""
        slot, written = self._writing.popleft()
        awaited(written)
        self._watch.progress(len(slot.shape.input_rows(slot.chunk)) * slot.shape.row_bytes)
        self._free.append(slot)

    def _read(self, slot: Slot) -> None:
        with self._watch.timeline.measure("input", f"read {slot.chunk}"):
            self._source.read_into(slot.chunk, slot.input_of(slot.chunk))
            self._backend.filled(slot)

    def _write(self, slot: Slot) -> None:
        if len(slot.shape.output_rows(slot.chunk)):
            with self._watch.timeline.measure("output", f"write {slot.chunk}"):
                self._sink.write(slot.chunk, slot.output_of(slot.chunk))


@contextlib.contextmanager
def _workers(count: int, abandoned: bool = False) -> Iterator[Pool]:
    """A pool of threads that drops what it has not begun when the block is left by an error.

    What it has begun is waited for, unless it is to be ``abandoned``: nobody may ever read from a pipe.
    """
    pool = Pool(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=not abandoned, cancel_futures=True)
        raise
    with held():
        pool.shutdown()
