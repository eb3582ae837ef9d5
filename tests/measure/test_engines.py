"""What of a GPU's engines went on at the same time: spans in, time and shares out."""

from __future__ import annotations

import pytest

from flashcli.measure.engines import common, engines, hidden, length
from flashcli.run.timeline import ENGINES, Span

IN, KERNEL, OUT = ENGINES


@pytest.mark.parametrize(
    ("intervals", "time"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(4, 5), (1, 3)], 3),
        ([(1, 3), (3, 4)], 3),
        ([(1, 9), (2, 3), (8, 10)], 9),
        ([(1, 1)], 0),
    ],
)
def test_time_of_several_at_once_counts_once(intervals, time):
    assert length(intervals) == time


@pytest.mark.parametrize(
    ("one", "other", "time"),
    [
        ([(0, 4)], [(3, 9)], 1),
        ([(0, 4)], [(4, 9)], 0),
        ([(0, 4), (6, 8)], [(3, 7)], 2),
        ([(0, 9)], [(1, 2), (3, 4), (3, 5)], 3),
        ([(0, 2), (1, 3)], [(0, 3)], 3),
        ([], [(0, 3)], 0),
    ],
)
def test_time_in_common_is_counted_once_and_either_way(one, other, time):
    assert common(one, other) == common(other, one) == time


def spans(**of: list[tuple[float, float]]) -> list[Span]:
    phases = {"copies_in": IN, "kernels": KERNEL, "copies_out": OUT, "reading": "input"}
    return [Span(phases[name], *interval) for name, some in of.items() for interval in some]


def test_one_after_another_is_beside_nothing():
    some = spans(copies_in=[(0, 3)], kernels=[(3, 4)], copies_out=[(4, 6)])
    assert [tuple(engine) for engine in engines(some).values()] == [(3, 0), (1, 0), (2, 0)]
    assert hidden(some) == 0


def test_each_engine_counts_what_it_did_beside_any_other():
    some = spans(copies_in=[(0, 3), (3, 6)], kernels=[(3, 4), (6, 7)], copies_out=[(4, 6), (7, 9)])
    assert [tuple(engine) for engine in engines(some).values()] == [(6, 3), (2, 1), (4, 2)]
    assert hidden(some) == (1 + 2) / (2 + 4)


def test_two_kernels_at_a_time_are_one_busy_engine():
    assert tuple(engines(spans(kernels=[(0, 4), (1, 5)]))[KERNEL]) == (5, 0)


def test_reading_does_not_count_as_what_hides():
    some = spans(reading=[(0, 4)], copies_in=[(4, 5)], kernels=[(3, 5)], copies_out=[(5, 7)])
    assert hidden(some) == 1 / 4


def test_nothing_at_all():
    assert hidden([]) == 0 and [tuple(engine) for engine in engines([]).values()] == [(0, 0)] * 3
