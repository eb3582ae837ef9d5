"""How much memory there is for this process: less than the machine's in a container or a job."""

from __future__ import annotations

import os
from collections.abc import Iterator

from flashcli.errors import OutOfMemory
from flashcli.terminal import sizes

CGROUPS = "/sys/fs/cgroup"


def require(size: int, what: str) -> None:
    """Refuse what there is not enough memory for. The system would promise it, and end the process when it is used."""
    if size > (free := available()):
        raise OutOfMemory(
            f"out of memory: {what} take {sizes.text(size)}, {sizes.text(free)} are free.",
            "use a larger machine, or a smaller file.",
        )


def available() -> int:
    """Bytes that can be taken without others losing theirs; a great many, if the system does not say."""
    return min(_of_machine(), *(_of_cgroup(folder) for folder in _cgroups()), 2**63)


def _of_machine() -> int:
    for line in _lines("/proc/meminfo"):
        name, value, *_ = line.split()
        if name == "MemAvailable:":
            return int(value) * 1024
    return 2**63


def _cgroups() -> Iterator[str]:
    """The folder of each group of processes, of this version of cgroups or the one before, that this one belongs to."""
    for line in _lines("/proc/self/cgroup"):
        _, controllers, path = line.rstrip("\n").split(":", 2)
        if controllers in ("", "memory"):
            base = os.path.join(CGROUPS, controllers)
            parts = path.strip("/").split("/")
            yield from (os.path.join(base, *parts[:count]) for count in range(len(parts) + 1))


def _of_cgroup(folder: str) -> int:
    """Bytes of memory left in a cgroup: its limit less what is used, where files that are only cached do not count."""
    limit = _number(folder, "memory.max", "memory.limit_in_bytes")
    used = _number(folder, "memory.current", "memory.usage_in_bytes")
    if limit is None or used is None:
        return 2**63
    counts = dict(line.split() for line in _lines(os.path.join(folder, "memory.stat")))
    cached = int(counts.get("inactive_file", 0)) + int(counts.get("active_file", 0))
    return max(0, limit - used + cached)


def _number(folder: str, *names: str) -> int | None:
    """The number in the first of these files that exists; None if there is none, or it is no number."""
    for name in names:
        for line in _lines(os.path.join(folder, name)):
            return int(line) if line.strip().isdecimal() else None
    return None


def _lines(path: str) -> list[str]:
    try:
        with open(path) as file:
            return file.readlines()
    except OSError:
        return []
