"""`flashcli run`: from an input file to an output file, and the record of how long it took."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable

from flashcli.backends import warm_up
from flashcli.cut import cut
from flashcli.fileformat import InputFile, check_creatable, check_distinct, create_output
from flashcli.stream import ignore, stream
from flashcli.timing import PHASES, Timeline, seconds_since_process_start, tflops


def run(
    input_path: str | os.PathLike,
    output_path: str | os.PathLike,
    open_backend: Callable[..., object],
    warn: Callable[[str], None],
    progress: Callable[[int], contextlib.AbstractContextManager] = lambda total: contextlib.nullcontext(ignore),
    serial: bool = False,
    trace: str | None = None,
    causal: bool = False,
) -> dict[str, object]:
    """Compute ``output_path`` from ``input_path``; returns the record of what was done and how long it took.

    ``open_backend((B, N, d), rows=M)`` gives a backend for chunks of that shape, with M rows of Q each. Nothing is
    computed before it is sure that the output can be created. ``progress(total)``, in bytes of input, is a context
    manager; it gives a function to be told of those that are done with. ``causal`` only says what `open_backend`'s
    backend computes, for the rate.
    """
    timeline, now = Timeline(), time.perf_counter()
    timeline.add("start", now - seconds_since_process_start(), now, "start Python")

    def warn_of(place: str) -> None:
        warn(f"{input_path} holds a value that is not finite, first {place}; IEEE rules apply.")

    check_distinct(input_path, output_path)
    if trace is not None:
        check_distinct(input_path, trace)
        check_distinct(output_path, trace)
        check_creatable(trace)
    with InputFile(input_path) as file, create_output(output_path, file.shape) as sink:
        file.will_read()
        shape, by = file.shape, cut(file.shape)
        with timeline.measure("computation", "open the backend"):
            opened = open_backend((by.batches, shape.N, shape.d), rows=by.rows)
        with opened as backend:
            with progress(shape.B * shape.input_batch_bytes) as tell:
                stream(file, backend, sink, timeline, by, progress=tell, warn=warn_of, serial=serial)
            for about, start, end in warm_up.steps:
                timeline.add("start", start, end, about)
            details = {"description": backend.description, **backend.details()}
        with timeline.measure("output", "commit"):
            sink.commit()
    if trace is not None:
        timeline.write_trace(trace)
    phases = {phase: timeline.active(phase) for phase in PHASES}
    record = {**vars(shape), "total": seconds_since_process_start(), **phases, **details}
    if seconds := timeline.active("kernel"):
        record |= {"kernel_seconds": seconds, "tflops": tflops(**vars(shape), seconds=seconds, causal=causal)}
    return record
