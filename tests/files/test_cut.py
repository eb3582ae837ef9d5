"""How an input is cut: every row of the output once, after its K and V, in chunks of bounded size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashcli.asked.shape import Shape
from flashcli.files.cut import CHUNK_BYTES, TILE, Cut, chunks, cut
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem

shapes = st.builds(Shape, st.integers(1, 5), st.integers(1, 5 * TILE), st.integers(1, 8))


@given(shape=shapes, tiles=st.integers(1, 6), data=st.data())
def test_rows_are_cut_so_that_each_is_computed_once_after_its_keys(shape, tiles, data):
    N, ends = shape.N, [b * shape.N + i for b in range(shape.B) for i in range(0, shape.N, TILE)]
    first = data.draw(st.sampled_from(ends))
    last = data.draw(st.sampled_from([end for end in [*ends, shape.B * N] if end > first]))
    by = Cut(False, 1, min(N, tiles * TILE))
    computed, keys = [], {}
    for chunk in chunks(shape, by, range(first, last)):
        [b] = chunk.batches
        assert 0 < len(chunk.rows) * shape.d <= by.input_floats(shape)
        if chunk.matrices == "KV":
            keys.setdefault(b, []).extend(chunk.rows)
        else:
            assert chunk.rows.start % TILE == 0
            assert keys[b] == list(range(2 * N))
            computed += shape.output_rows(chunk)
    assert computed == list(range(first, last))


@given(shape=shapes, batches=st.integers(1, 6), data=st.data())
def test_whole_batches_are_cut_so_that_each_is_computed_once(shape, batches, data):
    first = data.draw(st.integers(0, shape.B - 1))
    last = data.draw(st.integers(first + 1, shape.B))
    found = list(chunks(shape, Cut(True, batches, shape.N), range(first * shape.N, last * shape.N)))
    assert [b for chunk in found for b in chunk.batches] == list(range(first, last))
    assert all(len(chunk.batches) <= batches for chunk in found)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 1), (2, 128, 32), (13600, 128, 32), (500, 2048, 64), (2, 32768, 64), (1, 2**20, 256), (3, 10**9, 1)],
)
@pytest.mark.parametrize("whole", [True, False])
def test_a_chunk_is_of_bounded_size_whatever_the_input(shape, whole):
    shape = Shape(*shape)
    by = cut(shape, whole)
    size = 4 * (by.input_floats(shape) + (0 if by.whole else by.output_floats(shape)))
    assert size <= CHUNK_BYTES + 2 * TILE * shape.row_bytes
    assert by.whole == (whole and shape.input_batch_bytes <= CHUNK_BYTES)
    assert by.rows == shape.N or by.rows % TILE == 0


def test_the_halves_end_with_one_batch_or_one_tile():
    for by, last in ((Cut(True, 13, 5), Cut(True, 1, 5)), (Cut(False, 1, 10 * TILE + 1), Cut(False, 1, TILE))):
        while smaller := by.smaller():
            assert smaller < by
            by = smaller
        assert by == last


@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
@pytest.mark.parametrize("N", [100, 1000, 100_000])
def test_rows_are_cut_where_tiles_end(kernel, N):
    for d in range(1, 257):
        for precision in kernel.precisions:
            for B in (1, 2, 5, 100):
                Br = kernel.tiling(Problem(B, N, N, d, precision=precision)).Br
                assert TILE % Br == 0 or Br >= N  # one tile is not cut
