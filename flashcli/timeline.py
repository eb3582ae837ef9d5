"""Spans of time by phase, and the seconds each phase was active.

Phases overlap. A phase's time is that during which it was active, in whatever number of threads, so that the sum of all
may exceed the total.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Span(NamedTuple):
    """Something that went on from ``start`` to ``end``, seconds of `time.perf_counter`."""

    phase: str
    start: float
    end: float
    about: str = ""


class Timeline:
    """Spans, gathered from any thread."""

    def __init__(self) -> None:
        self.spans: list[Span] = []
        self.clock = time.time() - time.perf_counter()  # the calendar's time at 0, to compare hosts

    @classmethod
    def merged(cls, timelines: list[Timeline]) -> Timeline:
        """The spans of several timelines of one process."""
        made = cls()
        made.spans = [span for timeline in timelines for span in timeline.spans]
        return made

    @contextlib.contextmanager
    def measure(self, phase: str, about: str = "") -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, start, time.perf_counter(), about)

    def add(self, phase: str, start: float, end: float, about: str = "") -> None:
        self.spans.append(Span(phase, start, end, about))

    def active(self, phase: str) -> float:
        """Seconds during which at least one span of the phase was going on."""
        seconds, reached = 0.0, float("-inf")
        for _, start, end, _ in sorted(span for span in self.spans if span.phase == phase):
            seconds += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return seconds

    def extent(self) -> float:
        """Seconds from the start of the first span to the end of the last."""
        return max((span.end for span in self.spans), default=0.0) - min((s.start for s in self.spans), default=0.0)

    def tracks(self) -> Iterator[tuple[Span, str]]:
        """Each span with the name of a track on which it overlaps no other: more than one for a phase, if need be."""
        busy_until: dict[str, float] = {}
        for span in sorted(self.spans, key=lambda span: span.start):
            number = 1
            while busy_until.get(f"{span.phase} {number}", float("-inf")) > span.start:
                number += 1
            track = f"{span.phase} {number}"
            busy_until[track] = span.end
            yield span, track


def wall_seconds(work: Callable[[object], None], inputs: list, runs: int) -> list[float]:
    """Seconds of each of ``runs`` calls of ``work`` with inputs in turn; the last call has the first input."""
    seconds = []
    for index in range(runs, -1, -1):  # the first is a warm-up
        start = time.perf_counter()
        work(inputs[index % len(inputs)])
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
