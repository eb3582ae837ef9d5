"""`flashcli run`: from an input file to an output file, and the record of how long it took.

The output's rows are divided among devices, or among the processes of a launcher, which all write into one file; one
device of one process is the case of one part.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from flashcli.backends.base import ignore
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.cut import Cut, batches, cut
from flashcli.files.fileformat import ChunkWriter, InputFile, create_output
from flashcli.files.outputs import check_creatable, check_distinct
from flashcli.gpu import warm_up
from flashcli.run.ranks import ALONE, Alone
from flashcli.run.report import PHASES, imbalance, seconds_since_process_start, write_trace
from flashcli.run.shards import input_rows, shards
from flashcli.run.stream import stream
from flashcli.run.threads import together
from flashcli.shape import Shape, tflops
from flashcli.timeline import Timeline

Progress = Callable[[int], contextlib.AbstractContextManager]


def silent(total: int) -> contextlib.AbstractContextManager:
    """No progress bar."""
    return contextlib.nullcontext(ignore)


class Task(NamedTuple):
    """What the parts have in common: from where to where, and with what; whom to tell of progress and of warnings."""

    file: InputFile
    sink: ChunkWriter
    by: Cut
    open_backend: Callable[..., object]
    ranks: Alone
    serial: bool
    tell: Callable[[int], None]
    warn: Callable[[str], None] | None


class Part(NamedTuple):
    """What one device, or one process, has done."""

    name: str
    who: dict[str, object]  # the same, for programs
    details: dict[str, object]  # of its backend
    rows: range  # of the output
    timeline: Timeline
    seconds: dict[str, float]  # by phase
    place: str  # in words, of its first value that is not finite; empty if there is none

    def record(self) -> dict[str, object]:
        used = {name: self.details[name] for name in ("device", "bus", "threads") if name in self.details}
        return {**self.who, **used, "first_row": self.rows.start, "rows": len(self.rows), **self.seconds}


def run(
    input_path: str | os.PathLike,
    output_path: str | os.PathLike,
    open_backend: Callable[..., object],
    warn: Callable[[str], None],
    progress: Progress = silent,
    serial: bool = False,
    trace: str | None = None,
    causal: bool = False,
    devices: Sequence[int] = (),
    ranks: Alone = ALONE,
) -> dict[str, object]:
    """Compute ``output_path`` from ``input_path``; returns the record of what was done and how long it took.

    ``open_backend((B, N, d), rows=M)`` gives a backend for chunks of that shape, with M rows of Q each; where several
    ``devices`` are named, it is called for each, with ``device`` too, on a thread of its own. Where there are several
    ``ranks``, each does its share, and all but rank 0 return an empty record. Nothing is computed before it is sure
    that the output can be created. ``progress(total)``, in bytes of input, is a context manager; it gives a function to
    be told of those that are done with. ``causal`` says what `open_backend`'s backend computes, for fair shares and for
    the rate.
    """
    count, began = max(ranks.size, len(devices)), time.perf_counter()
    before = seconds_since_process_start()

    def warn_of(place: str) -> None:
        warn(f"{input_path} holds a value that is not finite, first {place}; IEEE rules apply.")

    check_distinct(input_path, output_path, trace)
    if trace is not None and ranks.rank == 0:
        check_creatable(trace)
    with InputFile(input_path) as file:
        shape = file.shape
        by, shares = shards(shape, count, causal)
        if ranks.size > 1:
            shares = [shares[ranks.rank]]
        file.will_read(batches(shape, range(shares[0].start, shares[-1].stop)))
        with _output(output_path, shape, count, ranks) as sink:
            total = sum(input_rows(shape, rows) for rows in shares) * shape.row_bytes
            with progress(total) as tell:
                task = Task(file, sink, by, open_backend, ranks, serial, tell, warn_of if count == 1 else None)
                if len(devices) > 1:
                    parts = _on_each(devices, task, shares)
                else:
                    parts = [_compute(ranks.name, ranks.who, task, shares[0], ranks.check)]
            own = Timeline.merged([part.timeline for part in parts])
            start = _start_up(began - before, began)
            parts[0] = parts[0]._replace(timeline=Timeline.merged([start, parts[0].timeline]))
            if ranks.rank > 0:
                sink.commit()
                ranks.gather(parts[0] if trace else parts[0]._replace(timeline=Timeline()))
                return {}
            parts += ranks.gather()
            with own.measure("output", "commit"):
                sink.commit()
    if count > 1 and (places := [part.place for part in parts if part.place]):
        warn_of(places[0])
    if ranks.size > 1 and (crowd := _sharing(parts)):
        warn(crowd)
    if trace is not None:
        alone = {1: Timeline.merged([start, own])}
        write_trace(trace, {part.name: part.timeline for part in parts} if count > 1 else alone)
    return _record(shape, causal, parts, own, ranks)


def _start_up(start: float, end: float) -> Timeline:
    """What went on before the run: of the process, and of the driver on other threads."""
    timeline = Timeline()
    timeline.add("start", start, end, "start Python")
    for about, *span in warm_up.steps:
        timeline.add("start", *span, about)
    return timeline


def _output(path: str | os.PathLike, shape: Shape, count: int, ranks: Alone) -> ChunkWriter:
    """The output, made by rank 0 and opened by all."""
    if ranks.rank > 0:
        return create_output(path, shape, shared=ranks.share())
    sink = create_output(path, shape)
    try:
        if count > 1 and sink.in_order:
            raise UsageError(
                f"{os.fspath(path)!r} cannot be written by several GPUs or processes at a time: it cannot seek.",
                "write to a regular file, or use one GPU in one process.",
            )
        if ranks.size > 1:
            ranks.share(sink.share())
    except BaseException:
        sink.discard()
        raise
    return sink


def _compute(name: str, who: dict, task: Task, rows: range, check: Callable[[], None], **device: int) -> Part:
    """A share of the rows, on one device."""
    shape, timeline, places = task.file.shape, Timeline(), []
    sizes = cut(shape)  # not task.by: the tiles are to be the same whatever the number of shares
    with timeline.measure("computation", "open the backend"):
        opened = task.open_backend((sizes.batches, shape.N, shape.d), rows=sizes.rows, **device)
    with opened as backend:
        _agree(task.ranks, backend.details()["backend"])
        warn = task.warn or places.append
        stream(task.file, backend, task.sink, timeline, task.by, rows, task.tell, warn, task.serial, check)
        details = {"description": backend.description, **backend.details()}
    return Part(name, who, details, rows, timeline, _seconds(timeline, details["backend"]), "".join(places))


def _on_each(devices: Sequence[int], task: Task, shares: list[range]) -> list[Part]:
    """One part on each device, each on its own thread: so PyCUDA's contexts want it."""
    lock = threading.Lock()

    def tell(count: int) -> None:
        with lock:
            task.tell(count)

    def compute(device: int, rows: range, check: Callable[[], None]) -> Part:
        try:
            return _compute(f"GPU {device}", {"gpu": device}, task._replace(tell=tell), rows, check, device=device)
        except Exception as error:
            error.add_note(f"Where: GPU {device}.")
            raise

    return together([functools.partial(compute, *pair) for pair in zip(devices, shares, strict=True)])


def _agree(ranks: Alone, backend: str) -> None:
    """No rank falls back to the CPU where others do not: that would be slow, and other bits."""
    if (first := ranks.share(backend)) != backend:
        raise BackendUnavailable(
            f"rank 0 computes with backend {first}, rank {ranks.rank} could only with {backend}.",
            "have a GPU for every process, or --backend cpu.",
        )


def _sharing(parts: list[Part]) -> str:
    """How many ranks share how many GPUs, in words; empty if none do."""
    used = [(part.who["host"], part.details["bus"]) for part in parts if "bus" in part.details]
    count = len(set(used))
    return f"{len(used)} ranks share {count} GPU{'s' if count > 1 else ''}." if count < len(used) else ""


def _seconds(timeline: Timeline, backend: str) -> dict[str, float]:
    phases = {phase: timeline.active(phase) for phase in PHASES}
    return phases | ({"kernel_seconds": timeline.active("kernel")} if backend == "cuda" else {})


def _record(shape: Shape, causal: bool, parts: list[Part], own: Timeline, ranks: Alone) -> dict[str, object]:
    """All parts in figures. Of processes, the slowest counts."""
    seconds = _seconds(own, parts[0].details["backend"])
    if ranks.size > 1:
        seconds = {name: max(value, *(part.seconds[name] for part in parts)) for name, value in seconds.items()}
    total = {"total": seconds_since_process_start(), "pipeline": own.extent()}
    record = {**vars(shape), **total, **seconds, **parts[0].details}
    if kernel := record.get("kernel_seconds"):
        record["tflops"] = tflops(**vars(shape), seconds=kernel, causal=causal)
    if len(parts) > 1:
        kind = "ranks" if ranks.size > 1 else "devices"
        record[kind] = [part.record() for part in parts]
        record["imbalance"] = imbalance(record[kind])
    return record
