"""The cores that this process may use: fewer than the machine's under a launcher, taskset or in a container."""

from __future__ import annotations

import os


def usable_cores() -> frozenset[int]:
    """Their numbers."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(usable)
