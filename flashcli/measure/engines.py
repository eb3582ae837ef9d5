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

    @property
    def share(self) -> float:
        """The part of its time that it shared with others; 0 if it never was busy."""
        return self.beside / self.busy if self.busy else 0.0


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


def hidden(spans: Iterable[Span], *behind: str) -> float:
    """The share of the kernels' and the copies' out time, added up, in which a phase of ``behind`` went on.

    By default that is the copies in. It is 0 where there was neither a kernel nor a copy out.
    """
    of = _by_phase(spans, *behind)
    cover = [interval for phase in behind or ENGINES[:1] for interval in of[phase]]
    time = sum(length(of[engine]) for engine in ENGINES[1:])
    return sum(common(of[engine], cover) for engine in ENGINES[1:]) / time if time else 0.0


def _by_phase(spans: Iterable[Span], *more: str) -> dict[str, list[Interval]]:
    of: dict[str, list[Interval]] = {phase: [] for phase in (*ENGINES, *more)}
    for span in spans:
        if span.phase in of:
            of[span.phase].append((span.start, span.end))
    return of
