"""The engines of a GPU, for copies in, for kernels, for copies out: how long each was busy, and how long beside others.

Times are in any unit, the same in and out.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from flashcli.run.timeline import ENGINES, Activity, Span

Interval = tuple[float, float]


class Engine(NamedTuple):
    """The time in which an engine was busy, and how much of it another one was busy, too."""

    busy: float
    beside: float


def length(intervals: Iterable[Interval]) -> float:
    """How long at least one of the intervals goes on."""
    activity = Activity()
    for interval in sorted(intervals):
        activity.add(*interval)
    return activity.seconds


def common(one: list[Interval], other: list[Interval]) -> float:
    """How long something of the one goes on while something of the other does."""
    return max(0.0, length(one) + length(other) - length([*one, *other]))


def engines(spans: Iterable[Span]) -> dict[str, Engine]:
    """Each engine's `Engine`, from the spans of its operations; spans of other phases than `ENGINES` do not count."""
    of = _by_phase(spans)
    return {
        engine: Engine(
            length(of[engine]),
            common(of[engine], [interval for other in ENGINES if other != engine for interval in of[other]]),
        )
        for engine in ENGINES
    }


def hidden(spans: Iterable[Span]) -> float:
    """The share of the kernels' and the copies' out time, added up, in which a copy in went on; 0 where neither was."""
    copies_in, *others = _by_phase(spans).values()
    time = sum(map(length, others))
    return sum(common(some, copies_in) for some in others) / time if time else 0.0


def _by_phase(spans: Iterable[Span]) -> dict[str, list[Interval]]:
    of: dict[str, list[Interval]] = {engine: [] for engine in ENGINES}
    for span in spans:
        if span.phase in of:
            of[span.phase].append((span.start, span.end))
    return of
