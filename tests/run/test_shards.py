"""How rows are divided: each once, in order, where chunks may be cut, and as evenly as that allows."""

from __future__ import annotations

import itertools
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from flashcli.asked.shape import Shape
from flashcli.files.cut import TILE, batches, cut
from flashcli.run.shards import SLACK, cost, input_rows, shards

lengths = st.one_of(st.integers(1, 3 * TILE), st.integers(1, 10**6), st.sampled_from([TILE, 2 * TILE, 2**20]))
shapes = st.builds(Shape, st.one_of(st.integers(1, 40), st.integers(1, 10**6)), lengths, st.sampled_from([1, 32, 256]))
counts = st.one_of(st.integers(1, 9), st.integers(1, 1000))


def cost_of(rows: range, N: int, causal: bool) -> int:
    ends = (divmod(end, N) for end in (rows.start, rows.stop))
    before, after = (batch * cost(N, N, causal) + cost(row, N, causal) for batch, row in ends)
    return after - before


@given(shape=shapes, count=counts, causal=st.booleans())
def test_every_row_is_in_one_shard_and_shards_are_in_order(shape, count, causal):
    _, found = shards(shape, count, causal)
    assert len(found) == count
    assert (found[0].start, found[-1].stop) == (0, shape.B * shape.N)
    assert all(one.stop == other.start for one, other in itertools.pairwise(found))


@given(shape=shapes, count=counts, causal=st.booleans())
def test_shards_end_where_chunks_may_be_cut(shape, count, causal):
    by, found = shards(shape, count, causal)
    for rows in found:
        assert rows.stop % shape.N == 0 if by.whole else rows.stop % shape.N % TILE == 0


@given(shape=shapes, count=counts, causal=st.booleans())
def test_shards_are_as_even_as_the_places_to_cut_allow(shape, count, causal):
    by, found = shards(shape, count, causal)
    costs = [cost_of(rows, shape.N, causal) for rows in found]
    step = shape.N if by.whole else min(TILE, shape.N)
    largest = cost(shape.N, shape.N, causal) - cost(shape.N - step, shape.N, causal)  # what lies between two places
    assert sum(costs) == shape.B * cost(shape.N, shape.N, causal)
    assert max(costs) <= sum(costs) / count + largest + 1
    if by.whole and shape.N > TILE:
        assert max(costs) <= sum(costs) / count * (1 + 1 / SLACK)


@given(shape=shapes, causal=st.booleans())
def test_one_shard_is_everything_cut_as_ever(shape, causal):
    assert shards(shape, 1, causal) == (cut(shape), [range(shape.B * shape.N)])


def test_a_cost_is_that_of_its_rows():
    for N in (1, 5, 8):
        for rows in range(N + 1):
            assert cost(rows, N, causal=False) == rows * N
            assert cost(rows, N, causal=True) == sum(i + 1 for i in range(rows))


@pytest.mark.parametrize(
    ("shape", "count", "whole", "ends"),
    [
        ((8, 65536, 64), 4, False, [131072, 262144, 393216]),  # equal numbers of long batches: K and V are read once
        ((500, 2048, 64), 2, True, [250 * 2048]),
        ((4, 2048, 64), 2, True, [2 * 2048]),
        ((17, 2048, 64), 2, True, [8 * 2048]),  # the larger is 1/17 above the mean, less than 1/8: not divided for that
        ((9, 2048, 64), 2, True, [4 * 2048]),
        ((7, 2048, 64), 2, False, [3 * 2048 + 3 * TILE]),  # but 1/7 is more
        ((3, 2048, 64), 2, False, [2048 + 3 * TILE]),  # of 768 and 1152 the nearer to 1024
        ((1, 10 * TILE, 64), 2, False, [5 * TILE]),
        ((1, TILE, 64), 2, True, [0]),  # nothing to divide
    ],
)
def test_examples(shape, count, whole, ends):
    by, found = shards(Shape(*shape), count)
    assert (by.whole, [rows.stop for rows in found[:-1]]) == (whole, ends)


def test_a_causal_half_has_more_rows_at_the_beginning():
    [first, second] = shards(Shape(1, 100 * TILE, 64), 2, causal=True)[1]
    assert len(first) / (len(first) + len(second)) == pytest.approx(2**-0.5, abs=0.01)


@pytest.mark.parametrize("shape", [(10**6, 10**6, 64), (2**31 - 1, 2**31 - 1, 1)])
def test_large_inputs_take_no_time(shape):
    start = time.perf_counter()
    shards(Shape(*shape), 1000, causal=True)
    assert time.perf_counter() - start < 0.5


def test_what_a_shard_reads():
    shape = Shape(3, 1000, 8)
    assert list(batches(shape, range(500, 1500))) == [0, 1]
    assert input_rows(shape, range(500, 1500)) == 1000 + 4 * 1000
    assert input_rows(shape, range(3000)) == 9000
    assert (len(batches(shape, range(500, 500))), input_rows(shape, range(500, 500))) == (0, 0)
