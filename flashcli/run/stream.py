"""From a source to a sink in chunks: reading, computing and writing overlap, and memory stays bounded.

A ring of slots, each with room for one chunk, goes round: a thread reads a chunk into a slot, the backend computes it
(on a GPU: copies it there, runs the kernel, copies the result back, all in the slot's own CUDA stream), a thread writes
it, and the slot is free for a later chunk. The number of slots is the only bound on how far reading runs ahead.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from flashcli.backends.base import Overlap, ignore
from flashcli.files.cut import Cut, chunks
from flashcli.files.summary import first_nonfinite
from flashcli.shape import Chunk
from flashcli.timeline import Timeline

ONE_AFTER_ANOTHER = Overlap(reading=0, computing=0, writing=1)


def stream(
    source,
    backend,
    sink,
    timeline: Timeline,
    by: Cut,
    rows: range | None = None,
    progress: Callable[[int], None] = ignore,
    warn: Callable[[str], None] | None = None,
    serial: bool = False,
    check: Callable[[], None] = ignore,
) -> None:
    """Compute ``rows`` of the output of ``source`` (all by default, or none), cut into chunks ``by``, into ``sink``.

    ``source`` has ``shape`` and ``read_into(chunk, floats)``; ``sink`` has ``write(chunk, floats)`` and ``in_order``,
    true if it cannot seek. ``progress`` is told how many bytes of input are done with. ``warn`` is told, once, where a
    value is that is not finite. ``serial`` does one thing after another, as a control. ``check`` is called
    now and then, and raises what is to end it all.
    """
    shape = source.shape
    overlap = ONE_AFTER_ANOTHER if serial else backend.overlap
    rows = range(shape.B * shape.N) if rows is None else rows
    if not rows:
        return
    count = sum(1 for _ in chunks(shape, by, rows))
    with timeline.measure("computation", "take memory"):
        by, slots = backend.slots(shape, by, min(sum(overlap), count))
    todo = list(chunks(shape, by, rows))
    ring = [(chunk, slots[index % len(slots)]) for index, chunk in enumerate(todo)]
    ahead = min(overlap.reading, len(slots) - 1)
    in_flight = min(overlap.computing, len(slots) - 1 - ahead)
    reading: list[Future[str]] = []
    writing: list[Future[None]] = []

    def read(chunk: Chunk, slot) -> str:
        floats = slot.input_of(chunk)
        with timeline.measure("input", f"read {chunk}"):
            source.read_into(chunk, floats)
            place = first_nonfinite(floats, shape, chunk)
            slot.finite = not place
            return place

    def write(chunk: Chunk, slot) -> None:
        if len(shape.output_rows(chunk)):
            with timeline.measure("output", f"write {chunk}"):
                sink.write(chunk, slot.output_of(chunk))

    def written(index: int) -> None:
        writing[index].result()
        progress(len(shape.input_rows(todo[index])) * shape.row_bytes)

    writers_needed = 1 if sink.in_order else overlap.writing
    with _workers(max(1, ahead)) as readers, _workers(writers_needed, abandoned=sink.in_order) as writers:
        for step in range(len(ring) + ahead + in_flight):
            check()
            if step < len(ring):
                if step >= len(slots):
                    written(step - len(slots))  # its slot is needed again
                reading.append(readers.submit(read, *ring[step]))
            if 0 <= (index := step - ahead) < len(ring):
                if (place := reading[index].result()) and warn:
                    warn(place)
                    warn = None
                chunk, slot = ring[index]
                backend.submit(slot, chunk, timeline)
            if (index := step - ahead - in_flight) >= 0:
                backend.wait(ring[index][1], timeline, check)
                writing.append(writers.submit(write, *ring[index]))
        for index in range(max(0, len(ring) - len(slots)), len(ring)):
            written(index)


@contextlib.contextmanager
def _workers(count: int, abandoned: bool = False):
    """A pool of threads that drops what it has not begun when the block is left by an error.

    What it has begun is waited for, unless it is to be ``abandoned``: nobody may ever read from a pipe.
    """
    pool = ThreadPoolExecutor(count)
    try:
        yield pool
    except BaseException:
        pool.shutdown(wait=not abandoned, cancel_futures=True)
        raise
    pool.shutdown()
