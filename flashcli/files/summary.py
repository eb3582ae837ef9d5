"""What an input file holds: ranges, NaN and Inf, and whether it keeps to the course's bounds."""

from __future__ import annotations

import numpy as np

from flashcli.asked.shape import Chunk, Shape
from flashcli.files.fileformat import InputFile


def course_bounds_broken(shape: Shape, largest: float = 0.0) -> list[str]:
    """The course's bounds on its cases that a shape, or a largest magnitude, does not keep to."""
    bounds = {
        "2 <= B <= 14000": 2 <= shape.B <= 14000,
        "N = 128 * 2^k, k = 0..8": shape.N in [128 * 2**k for k in range(9)],
        "d = 32 or 64": shape.d in (32, 64),
        "B*N*d < 56000000": shape.B * shape.N * shape.d < 56_000_000,
        "values in [-3, 3]": largest <= 3,
    }
    return [text for text, kept in bounds.items() if not kept]


def is_finite(floats: np.ndarray) -> bool:
    """Whether there is neither NaN nor Inf."""
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
    """It, and its row and column in a matrix of ``d`` columns."""
    index = int(np.argmax(~np.isfinite(floats)))
    return floats.flat[index], *divmod(index, d)


def summarise(path: str, header_only: bool = False) -> dict[str, object]:
    """A flat record of the file; the values are read a range of batches at a time."""
    with InputFile(path) as source:
        shape = source.shape
        record: dict[str, object] = {**vars(shape), "bytes": shape.input_bytes}
        if header_only:
            return record | {"course_bounds_broken": course_bounds_broken(shape)}
        low, high, nonfinite, place = np.full(3, np.inf), np.full(3, -np.inf), 0, ""
        for batches in shape.batch_ranges(64 * 2**20):
            qkv = source.read(batches)
            low = np.fmin(low, np.fmin.reduce(qkv, axis=(0, 2, 3)))
            high = np.fmax(high, np.fmax.reduce(qkv, axis=(0, 2, 3)))
            place = place or first_nonfinite(qkv.ravel(), shape, shape.whole(batches))
            nonfinite += qkv.size - int(np.isfinite(qkv).sum()) if place else 0
    for index, name in enumerate("QKV"):
        record |= {f"{name}_min": float(low[index]), f"{name}_max": float(high[index])}
    largest = float("inf") if nonfinite else float(np.max(np.abs([low, high])))
    broken = course_bounds_broken(shape, largest)
    return record | {"nonfinite": nonfinite, "place": place, "course_bounds_broken": broken}
