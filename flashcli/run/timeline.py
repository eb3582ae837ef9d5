"""Spans of time by phase, and the seconds each phase was active.

Phases overlap. A phase's time is that during which it was active, in whatever number of threads, so that the sum of all
may exceed the total.
"""

from __future__ import annotations

import contextlib
import heapq
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

ENGINES = ("host to device", "kernel", "device to host")  # the phases on a GPU
WAITING = 1024  # spans of a phase that are held back: one may end that much later than others that began after it


class Span(NamedTuple):
    """Something that went on from ``start`` to ``end``, seconds of `time.perf_counter`."""

    phase: str
    start: float
    end: float
    about: str = ""


class Activity:
    """The seconds during which at least one of many spans was going on, in bounded memory.

    Spans are counted in the order of their starts. They come in that of their ends, so the last ones wait for others
    that began before them.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[float, float]] = []  # a heap
        self._seconds, self._reached = 0.0, float("-inf")

    def add(self, start: float, end: float) -> None:
        heapq.heappush(self._waiting, (start, end))
        if len(self._waiting) > WAITING:
            self._seconds, self._reached = self._count(*heapq.heappop(self._waiting), self._seconds, self._reached)

    @property
    def seconds(self) -> float:
        seconds, reached = self._seconds, self._reached
        for span in sorted(self._waiting):
            seconds, reached = self._count(*span, seconds, reached)
        return seconds

    @staticmethod
    def _count(start: float, end: float, seconds: float, reached: float) -> tuple[float, float]:
        return seconds + max(0.0, end - max(start, reached)), max(reached, end)


_lock = threading.Lock()  # one for all timelines, which are sent to other processes, as locks cannot be


class Timeline:
    """Spans, gathered from any thread: their sums, and, for a trace, each of them."""

    def __init__(self, keeps: bool = True, within: Timeline | None = None) -> None:
        """Keep each span, for a trace, if ``keeps``, else only sums; spans also go to the timeline ``within``."""
        self.spans: list[Span] = []
        self.clock = time.time() - time.perf_counter()  # the calendar's time at 0, to compare hosts
        self.keeps, self._within = keeps, within
        self._activities: defaultdict[str, Activity] = defaultdict(Activity)
        self._first, self._last = float("inf"), float("-inf")

    @classmethod
    def merged(cls, timelines: list[Timeline]) -> Timeline:
        """The spans that several timelines of one process have kept."""
        made = cls()
        for span in (span for timeline in timelines for span in timeline.spans):
            made.add(*span)
        return made

    @contextlib.contextmanager
    def measure(self, phase: str, about: str = "") -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.add(phase, start, time.perf_counter(), about)

    def add(self, phase: str, start: float, end: float, about: str = "") -> None:
        with _lock:
            self._first, self._last = min(self._first, start), max(self._last, end)
            self._activities[phase].add(start, end)
            if self.keeps:
                self.spans.append(Span(phase, start, end, about))
        if self._within is not None:
            self._within.add(phase, start, end, about)

    def active(self, phase: str) -> float:
        """Seconds during which at least one span of the phase was going on."""
        return self._activities[phase].seconds

    def extent(self) -> float:
        """Seconds from the start of the first span to the end of the last."""
        return max(self._last - self._first, 0.0)

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


def wall_seconds(work: Callable[[Any], object], inputs: Sequence[Any], runs: int) -> list[float]:
    """Seconds of each of ``runs`` calls of ``work`` with inputs in turn; the last call has the first input."""
    seconds = []
    for index in range(runs, -1, -1):  # the first is a warm-up
        start = time.perf_counter()
        work(inputs[index % len(inputs)])
        seconds.append(time.perf_counter() - start)
    return seconds[1:]
