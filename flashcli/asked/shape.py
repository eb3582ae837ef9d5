"""Shapes of attention and their arithmetic: batches, rows, chunks of them, operations; and the limits."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeVar

if TYPE_CHECKING:
    import numpy as np

Whole = TypeVar("Whole", int, "np.ndarray")  # a whole number, or an array of them

MAX_D = 256  # the longest head that the kernels have registers and shared memory for
TILE = 384
MAX_INT32 = 2**31 - 1
MAX_FLOAT32 = (2 - 2**-23) * 2.0**127
MAX_SCALE = MAX_FLOAT32 / math.log2(math.e)  # beyond it scale · log2(e), in kernels, is infinite
FLOAT_BYTES = 4
HEADER_BYTES = 12  # B, N, d as int32, before the numbers of an input file


def ceil_div(a: Whole, b: int) -> Whole:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


class Chunk(NamedTuple):
    """A contiguous piece of an input file: some rows of some batches, and the output that follows from it.

    ``matrices`` says what it has of each of its ``batches``. "QKV" is all; "Q" is some rows of Q; "KV" is some rows of
    the matrix of 2 N rows that K and V form one below the other. ``rows`` are rows of the matrices named. "KV" gives
    no output.
    """

    matrices: str
    batches: range
    rows: range

    def __str__(self) -> str:
        if self.matrices == "QKV":
            return f"batches {self.batches.start} to {self.batches.stop - 1}"
        return f"batch {self.batches.start}, {self.matrices} rows {self.rows.start} to {self.rows.stop - 1}"


@dataclass(frozen=True)
class Shape:
    """The shape of a file, B batches of N rows of d float32 numbers, and the places of its bytes."""

    B: int
    N: int
    d: int

    @property
    def batch_floats(self) -> int:
        """Numbers in one of Q, K, V, O of one batch."""
        return self.N * self.d

    @property
    def input_batch_bytes(self) -> int:
        return 3 * self.batch_floats * FLOAT_BYTES

    @property
    def output_batch_bytes(self) -> int:
        return self.batch_floats * FLOAT_BYTES

    @property
    def row_bytes(self) -> int:
        return self.d * FLOAT_BYTES

    @property
    def input_bytes(self) -> int:
        return HEADER_BYTES + self.B * self.input_batch_bytes

    @property
    def output_bytes(self) -> int:
        return self.B * self.output_batch_bytes

    def batch_ranges(self, max_bytes: int) -> Iterator[range]:
        """Consecutive ranges of batches whose input is at most ``max_bytes`` each, but at least one batch."""
        step = max(1, max_bytes // self.input_batch_bytes)
        return (range(b, min(b + step, self.B)) for b in range(0, self.B, step))

    def whole(self, batches: range) -> Chunk:
        """The chunk with all of Q, K and V of some batches."""
        return Chunk("QKV", batches, range(3 * self.N))

    def input_rows(self, chunk: Chunk) -> range:
        """The rows of a chunk in the input, a matrix [3 B N, d]."""
        first = (3 * chunk.batches.start + "QKV".index(chunk.matrices[0])) * self.N + chunk.rows.start
        return range(first, first + len(chunk.batches) * len(chunk.rows))

    def output_rows(self, chunk: Chunk) -> range:
        """The rows of a chunk's answer in the output, a matrix [B N, d]; empty for chunks of K and V."""
        if chunk.matrices == "QKV":
            return range(chunk.batches.start * self.N, chunk.batches.stop * self.N)
        first = chunk.batches.start * self.N + chunk.rows.start
        return range(first, first + (len(chunk.rows) if chunk.matrices == "Q" else 0))

    def place(self, input_row: int) -> tuple[int, str, int]:
        """The batch, the matrix's name ("Q", "K", "V") and the row in that matrix of a row of the input [3 B N, d]."""
        matrix, row = divmod(input_row, self.N)
        return matrix // 3, "QKV"[matrix % 3], row

    def __str__(self) -> str:
        return f"({self.B}, {self.N}, {self.d})"


def shape_problem(shape: Shape) -> str:
    """The fault in a header's B, N or d, in words; empty if there is none."""
    limits = {"B": MAX_INT32, "N": MAX_INT32, "d": MAX_D}
    return " and ".join(
        f"{name} = {value}, not from 1 to {limits[name]}"
        for name, value in vars(shape).items()
        if not 1 <= value <= limits[name]
    )


def tflops(B: int, N: int, d: int, seconds: float, causal: bool = False) -> float:
    """Attention's rate in 10^12 operations a second: 4 B N² d (two matrix products, no exponentials) over the time.

    Causal attention needs N (N + 1) / 2 pairs of a query and a key instead of N².
    """
    pairs = N * (N + 1) // 2 if causal else N * N
    return 4 * B * pairs * d / seconds / 1e12
