"""How an input is cut into chunks, each of which goes through the pipeline at a time.

Whole batches, several at a time; where one batch is long, or has to be shared, rows of its K and V, which stay, then
rows of its Q, which pass. Rows are cut at multiples of `TILE`, which every kernel's Br divides: a row then has the same
neighbours in its tile, and the same bits in the answer, however the work is divided.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from flashcli.asked.shape import TILE, Chunk, Shape, ceil_div, round_up

CHUNK_BYTES = 8 * 2**20  # of input: enough to keep a GPU busy, little enough to start computing and writing early
CHUNKS = 8  # at least, as far as there are batches: so that small files overlap too


class Cut(NamedTuple):
    """The largest chunk: some whole batches; or, if not ``whole``, some rows of one batch."""

    whole: bool
    batches: int
    rows: int

    def input_floats(self, shape: Shape) -> int:
        """Numbers in the largest chunk."""
        return self.batches * self.rows * shape.d * (3 if self.whole else 1)

    def output_floats(self, shape: Shape) -> int:
        """Numbers in the answer to the largest chunk."""
        return self.batches * self.rows * shape.d

    def smaller(self) -> Cut | None:
        """Half of the largest chunk, where memory is short; None if it cannot be halved."""
        if self.whole:
            return self._replace(batches=ceil_div(self.batches, 2)) if self.batches > 1 else None
        return self._replace(rows=round_up(ceil_div(self.rows, 2), TILE)) if self.rows > TILE else None


def cut(shape: Shape, whole: bool = True) -> Cut:
    """Chunks of about `CHUNK_BYTES`; of batches no longer than that unless not ``whole``, else of rows."""
    if whole and shape.input_batch_bytes <= CHUNK_BYTES:
        return Cut(True, min(CHUNK_BYTES // shape.input_batch_bytes, ceil_div(shape.B, CHUNKS)), shape.N)
    parts = ceil_div(2 * shape.output_batch_bytes, CHUNK_BYTES)  # of Q, equal ones: with its answer, a row of Q is two
    return Cut(False, 1, min(round_up(ceil_div(shape.N, parts), TILE), shape.N))


def batches(shape: Shape, rows: range) -> range:
    """The batches to which some rows of the output, a matrix [B N, d], belong."""
    return range(rows.start // shape.N, ceil_div(rows.stop, shape.N)) if rows else range(0)


def chunks(shape: Shape, by: Cut, rows: range) -> Iterator[Chunk]:
    """The chunks that make ``rows`` of the output, a matrix [B N, d], in order.

    Where batches are ``whole``, so must the rows' be; else they begin and end at a batch's end or a multiple of `TILE`.
    """
    N, touched = shape.N, batches(shape, rows)
    if by.whole:
        for b in touched[:: by.batches]:
            yield shape.whole(range(b, min(b + by.batches, touched.stop)))
        return
    for b in touched:
        wanted = range(max(rows.start - b * N, 0), min(rows.stop - b * N, N))
        for matrices, part in (("KV", range(2 * N)), ("Q", wanted)):
            for row in range(part.start, part.stop, by.rows):
                yield Chunk(matrices, range(b, b + 1), range(row, min(row + by.rows, part.stop)))
