"""What a run took: seconds by phase, and one flat record of which text and JSON are only views."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

PHASES = {"input": "Input Time", "computation": "Computation Time", "output": "Output Time"}


class Phases:
    """Wall time spent in each phase, summed over chunks."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PHASES, 0.0)

    @contextlib.contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.seconds[phase] += time.perf_counter() - start


def seconds_since_process_start() -> float:
    """Wall time since the process began, interpreter start-up included (0.01 s resolution on Linux)."""
    try:
        with open("/proc/self/stat") as file:
            start_ticks = int(file.read().rpartition(")")[2].split()[19])
        return time.clock_gettime(time.CLOCK_BOOTTIME) - start_ticks / os.sysconf("SC_CLK_TCK")
    except (OSError, AttributeError, ValueError):
        return time.process_time()  # no /proc: the time this process has computed is the nearest there is


def tflops(B: int, N: int, d: int, seconds: float) -> float:
    """4 B N² d operations (two matrix products; the exponentials are not counted) over the time, in 10^12 a second."""
    return 4 * B * N * N * d / seconds / 1e12


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
    return "\n".join(lines)
