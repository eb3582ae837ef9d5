"""From an input file to an output file, a bounded number of batches at a time."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np

from flashcli.attention import CHUNK_BYTES
from flashcli.fileformat import InputFile, check_distinct, create_output
from flashcli.timing import Phases, seconds_since_process_start, tflops


def run(
    input_path: Path,
    output_path: Path,
    open_backend: Callable[[tuple[int, int, int]], object],
    warn: Callable[[str], None],
) -> dict[str, object]:
    """Compute ``output_path`` from ``input_path``; returns the record of what was done and how long it took.

    ``open_backend((B, N, d))`` gives a backend for that shape. Nothing is computed before it is sure that the output
    can be created.
    """
    phases = Phases()
    warned = False
    check_distinct(input_path, output_path)
    with InputFile(input_path) as source, create_output(output_path, source.shape) as sink:
        shape = source.shape
        with phases.measure("computation"):
            opened = open_backend((shape.B, shape.N, shape.d))
        with opened as backend:
            for batches in shape.batch_ranges(CHUNK_BYTES):
                with phases.measure("input"):
                    qkv = source.read(batches)
                    if not warned and (place := first_nonfinite(qkv, batches.start)):
                        warn(f"{input_path} holds a value that is not finite, first {place}; IEEE rules apply.")
                        warned = True
                with phases.measure("computation"):
                    out = np.empty((len(batches), shape.N, shape.d), np.float32)
                    backend.forward(qkv, out)
                with phases.measure("output"):
                    sink.write(batches, out)
            details = {"description": backend.description, **backend.details()}
        with phases.measure("output"):
            sink.commit()
    record = {**vars(shape), "total": seconds_since_process_start(), **phases.seconds, **details}
    if "kernel_seconds" in record:
        record["tflops"] = tflops(**vars(shape), seconds=record["kernel_seconds"])
    return record


def first_nonfinite(qkv: np.ndarray, first_batch: int) -> str:
    """Where the first NaN or Inf of [batches, 3, N, d] is, in words; empty if all is finite."""
    with np.errstate(all="ignore"):
        if np.isfinite(qkv.sum()):  # one quick pass: NaN and Inf survive a sum
            return ""
    bad = ~np.isfinite(qkv)
    if not bad.any():
        return ""  # finite values whose sum overflows
    b, matrix, row, column = np.unravel_index(np.argmax(bad), bad.shape)
    value = qkv[b, matrix, row, column]
    return f"{value} in {'QKV'[matrix]} at (batch, row, column) = ({first_batch + b}, {row}, {column})"
