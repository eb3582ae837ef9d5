"""What a run took, in the course report's phases: as text, and as a trace."""

from __future__ import annotations

import os
import time

from flashcli.timeline import Timeline

PHASES = {"input": "Input Time", "computation": "Computation Time", "output": "Output Time"}


def write_trace(path: str, timelines: dict[object, Timeline]) -> None:
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
