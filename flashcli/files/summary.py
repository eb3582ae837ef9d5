"""Summaries of input files: ranges, NaN and Inf, and whether the course's bounds are kept."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from flashcli.asked.shape import Chunk, Shape
from flashcli.files.fileformat import InputFile, read_output


def course_bounds_broken(shape: Shape, largest: float = 0.0) -> list[str]:
    """Name the course's bounds that a shape, or the largest magnitude of a case, breaks."""
    bounds = {
        "B outside 2 to 14000": 2 <= shape.B <= 14000,
        "N not 128 * 2^k, k = 0..8": shape.N in [128 * 2**k for k in range(9)],
        "d neither 32 nor 64": shape.d in (32, 64),
        "B*N*d not below 56000000": shape.B * shape.N * shape.d < 56_000_000,
        "values outside [-3, 3]": largest <= 3,
    }
    return [text for text, kept in bounds.items() if not kept]


def is_finite(floats: np.ndarray) -> bool:
    """Whether an array has neither NaN nor Inf."""
    with np.errstate(invalid="ignore"):  # NaN shows in both; quicker than to look at each
        return bool(np.isfinite(floats.min(initial=0)) and np.isfinite(floats.max(initial=0)))


def first_nonfinite(floats: np.ndarray, shape: Shape, chunk: Chunk) -> str:
    """Where the first NaN or Inf of a chunk of an input is, in words; empty if all is finite."""
    if is_finite(floats):
        return ""
    value, row, column = _first_nonfinite(floats, shape.d)
    b, matrix, i = shape.place(shape.input_rows(chunk).start + row)
    return f"{value} in {matrix} at (batch, row, column) = ({b}, {i}, {column})"


def first_lost(floats: np.ndarray, shape: Shape, chunk: Chunk) -> str:
    """Where the first NaN or Inf of the answer to a chunk is, in words; there is one."""
    value, row, column = _first_nonfinite(floats, shape.d)
    b, i = divmod(shape.output_rows(chunk).start + row, shape.N)
    return f"{value} at (batch, row, column) = ({b}, {i}, {column})"


def _first_nonfinite(floats: np.ndarray, d: int) -> tuple[np.float32, int, int]:
    """The first NaN or Inf of an array, and its row and column in a matrix of ``d`` columns."""
    index = int(np.argmax(~np.isfinite(floats)))
    return floats.flat[index], *divmod(index, d)


def summarise(path: str, header_only: bool) -> dict[str, object]:
    """A flat record of the file; the values are read a range of batches at a time."""
    with InputFile(path) as source:
        shape = source.shape
        record: dict[str, Any] = {**vars(shape), "bytes": shape.input_bytes}
        if header_only:
            return record | {"course_bounds_broken": course_bounds_broken(shape)}
        record |= _values(source.read, first_nonfinite, shape, "QKV")
    limits = [record[f"{name}_{end}"] for name in "QKV" for end in ("min", "max")]
    largest = float("inf") if record["nonfinite"] else float(np.max(np.abs(limits)))
    return record | {"course_bounds_broken": course_bounds_broken(shape, largest)}


def summarise_output(path: str, shape: Shape) -> dict[str, object]:
    """The record of an output, which does not say its shape; read a range of batches at a time."""

    def read(batches: range) -> np.ndarray:
        return read_output(path, shape, batches)[:, None]

    return {**vars(shape), "bytes": shape.output_bytes, **_values(read, first_lost, shape, "O")}


def _values(
    read: Callable[[range], np.ndarray], first: Callable[..., str], shape: Shape, names: str
) -> dict[str, object]:
    """The ranges of matrices that ``read`` gives as [batches, matrices, N, d], and the ``first`` NaN or Inf."""
    low, high, nonfinite, place = np.full(len(names), np.inf), np.full(len(names), -np.inf), 0, ""
    for batches in shape.batch_ranges(64 * 2**20):
        matrices = read(batches)
        low = np.fmin(low, np.fmin.reduce(matrices, axis=(0, 2, 3)))
        high = np.fmax(high, np.fmax.reduce(matrices, axis=(0, 2, 3)))
        bad = 0 if is_finite(matrices) else matrices.size - int(np.isfinite(matrices).sum())
        place = place or (first(matrices.ravel(), shape, shape.whole(batches)) if bad else "")
        nonfinite += bad
    ranges = {
        f"{name}_{end}": float(of[i]) for i, name in enumerate(names) for end, of in (("min", low), ("max", high))
    }
    return {**ranges, "nonfinite": nonfinite, "place": place}
