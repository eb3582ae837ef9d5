"""What a run took: spans of time by phase, the seconds each phase was active, and views of them.

Phases overlap. A phase's time is that during which it was active, in whatever number of threads, so that the sum of all
may exceed the total.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

PHASES = {"input": "Input Time", "computation": "Computation Time", "output": "Output Time"}


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


def write_trace(path: str, timelines: dict[object, Timeline]) -> None:
    """Timelines as a Chrome trace, for https://ui.perfetto.dev: under the name of each a track for each phase."""
    import json  # here, because few runs need it and it takes a millisecond

    from flashcli.outputs import write_whole

    first = next(iter(timelines.values())).clock
    ahead = {name: timeline.clock - first for name, timeline in timelines.items()}
    starts = (span.start + ahead[name] for name, timeline in timelines.items() for span in timeline.spans)
    origin = min(starts, default=0.0)
    events = [
        {"name": span.about or span.phase, "cat": span.phase, "ph": "X", "pid": name, "tid": track,
         "ts": (span.start + ahead[name] - origin) * 1e6, "dur": (span.end - span.start) * 1e6}
        for name, timeline in timelines.items() for span, track in timeline.tracks()
    ]  # fmt: skip
    write_whole(path, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))


def seconds_since_process_start() -> float:
    """Wall time since the process began, interpreter start-up included (0.01 s resolution on Linux)."""
    try:
        with open("/proc/self/stat") as file:
            start_ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.process_time()  # no /proc: the time this process has computed is the nearest there is


def tflops(B: int, N: int, d: int, seconds: float, causal: bool = False) -> float:
    """4 B N² d operations (two matrix products; the exponentials are not counted) over the time, in 10^12 a second.

    Causal attention needs N (N + 1) / 2 pairs of a query and a key instead of N².
    """
    pairs = N * (N + 1) // 2 if causal else N * N
    return 4 * B * pairs * d / seconds / 1e12


def report(record: dict[str, object]) -> str:
    """The record as text: the course report's five lines, in its format, then what this run was."""
    lines = [
        f"(B, N, d): ({record['B']}, {record['N']}, {record['d']})",
        f"Total Time: {record['total']:.3f} seconds",
        *(f"{label}: {record[phase]:.3f} seconds" for phase, label in PHASES.items()),
        f"backend: {record['description']}",
    ]
    if "kernel_seconds" in record:
        lines.append(f"kernel: {record['kernel_seconds'] * 1e3:.3f} ms, {record['tflops']:.1f} TFLOP/s")
    if parts := record.get("devices") or record.get("ranks"):
        lines += [*columns(parts), balance(parts)]
    return "\n".join(lines)


def columns(rows: list[dict[str, object]]) -> list[str]:
    """A table as lines of text, seconds to the millisecond."""
    texts = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()] for row in rows]
    texts.insert(0, [name.replace("_", " ") for name in rows[0]])
    widths = [max(map(len, column)) for column in zip(*texts, strict=True)]
    return ["  ".join(map(str.ljust, line, widths)).rstrip() for line in texts]


def busy(part: dict[str, object]) -> float:
    """Seconds that a device or a process computed: those of its kernels, where they are known."""
    return part.get("kernel_seconds", part["computation"])


def imbalance(parts: list[dict[str, object]]) -> float:
    """By how much the slowest exceeds the mean, as a share of it."""
    seconds = [busy(part) for part in parts]
    return max(seconds) * len(seconds) / sum(seconds) - 1 if any(seconds) else 0.0


def balance(parts: list[dict[str, object]]) -> str:
    """The slowest and the fastest of them, in words."""
    kind = next(iter(parts[0]))  # rank or gpu
    ends = max(parts, key=busy), min(parts, key=busy)
    return "slowest: {}; fastest: {}; imbalance: {:.1%}".format(
        *(f"{kind} {part[kind]}, {busy(part):.3f} s" for part in ends), imbalance(parts)
    )
