"""Reports of a run's time in the course report's phases: as a record, as text, and as a trace."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from flashcli.asked.shape import Shape, tflops
from flashcli.run.timeline import Timeline
from flashcli.terminal import tables

PHASES = {"input": "Input Time", "computation": "Computation Time", "output": "Output Time"}


class Part(NamedTuple):
    """The work of one device, or of one process: its rows, times and findings."""

    name: str  # of the device or process; empty if it is the only one
    who: dict[str, Any]  # the same, for programs
    details: dict[str, Any]  # of its backend
    rows: range  # of the output
    timeline: Timeline  # what is to be in a trace
    seconds: dict[str, float]  # by phase
    place: str  # in words, of the first value of its input that is not finite; empty if there is none
    lost: str  # the same of its answer, if it is not finite though its input is

    def record(self) -> dict[str, Any]:
        used: dict[str, Any] = {
            name: self.details[name] for name in ("device", "bus", "threads") if name in self.details
        }
        return {**self.who, **used, "first_row": self.rows.start, "rows": len(self.rows), **self.seconds}


def phase_seconds(timeline: Timeline, backend: str) -> dict[str, float]:
    """The seconds of each phase, and of the kernels where a backend can tell them."""
    phases = {phase: timeline.active(phase) for phase in PHASES}
    return phases | ({"kernel_seconds": timeline.active("kernel")} if backend == "cuda" else {})


def run_record(shape: Shape, causal: bool, parts: list[Part], timeline: Timeline) -> dict[str, Any]:
    """The record of all parts. Among processes the slowest counts; devices of one process share a ``timeline``."""
    kind = "ranks" if "rank" in parts[0].who else "devices"
    seconds = phase_seconds(timeline, parts[0].details["backend"])
    if kind == "ranks":
        seconds = {name: max(value, *(part.seconds[name] for part in parts)) for name, value in seconds.items()}
    total = {"total": seconds_since_process_start(), "pipeline": timeline.extent()}
    record = {**vars(shape), **total, **seconds, **parts[0].details}
    if kernel := record.get("kernel_seconds"):
        record["tflops"] = tflops(**vars(shape), seconds=kernel, causal=causal)
    if len(parts) > 1:
        record[kind] = [part.record() for part in parts]
        record["imbalance"] = imbalance(record[kind])
    return record


def sharing(parts: list[Part]) -> str:
    """How many ranks share how many GPUs, in words; empty if none do."""
    used = [(part.who["host"], part.details["bus"]) for part in parts if "bus" in part.details]
    count = len(set(used))
    return f"{len(used)} ranks share {count} GPU{'s' if count > 1 else ''}." if count < len(used) else ""


def write_trace(path: str, timelines: Mapping[Any, Timeline]) -> None:
    """Timelines as a Chrome trace, for https://ui.perfetto.dev: under the name of each a track for each phase."""
    import json  # here, because few runs need it and it takes a millisecond

    from flashcli.files.outputs import write_whole

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


def report(record: dict[str, Any]) -> str:
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
        lines += [table(parts), balance(parts)]
    return "\n".join(lines)


def table(parts: list[dict[str, Any]]) -> str:
    """A line for each device or process, seconds to the millisecond."""
    lines = [[f"{value:.3f}" if isinstance(value, float) else str(value) for value in part.values()] for part in parts]
    return tables.text([[name.replace("_", " ") for name in parts[0]], *lines])


def busy(part: dict[str, Any]) -> float:
    """Seconds that a device or a process computed: those of its kernels, where they are known."""
    return part.get("kernel_seconds", part["computation"])


def imbalance(parts: list[dict[str, Any]]) -> float:
    """The seconds by which the slowest part exceeds the mean, as a share of the mean."""
    seconds = [busy(part) for part in parts]
    return max(seconds) * len(seconds) / sum(seconds) - 1 if any(seconds) else 0.0


def balance(parts: list[dict[str, Any]]) -> str:
    """The slowest and the fastest part, and the imbalance, in words."""
    kind = next(iter(parts[0]))  # rank or gpu
    ends = max(parts, key=busy), min(parts, key=busy)
    return "slowest: {}; fastest: {}; imbalance: {:.1%}".format(
        *(f"{kind} {part[kind]}, {busy(part):.3f} s" for part in ends), imbalance(parts)
    )
