"""Run one command within bounds, and leave none of its processes behind. Linux only (pidfd, /proc, subreaper)."""

from __future__ import annotations

import contextlib
import ctypes
import os
import selectors
import signal
import subprocess
import time
from pathlib import Path
from typing import NamedTuple

CAPTURED = 64 * 1024  # bytes of what a program prints that are kept, the last ones
TICK = 0.02  # seconds between looks at the number of processes
LOOK = 1.0  # seconds between counts of them, if nothing tells that they have become more
PATIENCE = 10.0  # seconds to wait for killed processes to be gone
PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h


class Finished(NamedTuple):
    """How a command ended. ``stopped`` says why it was killed: "time", "processes", or "" if it was not."""

    seconds: float
    returncode: int | None
    stopped: str
    printed: str


class Tail:
    """The last `CAPTURED` bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * CAPTURED:
            del self._data[:-CAPTURED]

    def text(self) -> str:
        return self._data[-CAPTURED:].decode(errors="replace").strip()


def execute(
    command: list[str],
    folder: Path | None,
    environment: dict[str, str] | None,
    time_limit: float,
    grace: float = 0.0,
    processes: int | None = None,
) -> Finished:
    """Run a command in a session of its own, with no input. OSError if it cannot be started.

    At the time limit its process group gets SIGTERM and, after ``grace`` seconds, SIGKILL; with more than ``processes``
    processes and threads, SIGKILL at once. Afterwards whatever it started is killed, in whatever session it hides.
    """
    _adopt_orphans()
    others, crowd = set(descendants()), Crowd(processes)
    start = time.perf_counter()
    process = subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True, bufsize=0,
    )  # fmt: skip
    tail = Tail()
    try:
        seconds, stopped = _watch(process, tail, crowd, start, time_limit, grace)
    finally:
        _end(process, others)
        with process.stdout:
            _drain(process.stdout.fileno(), tail)
    return Finished(min(seconds, time_limit), process.returncode, stopped, tail.text())


class Crowd:
    """Whether there are too many processes and threads below this one; cheap enough to be asked at every tick."""

    def __init__(self, most: int | None) -> None:
        self._most, self._before, self._next_look = most, _tasks_of_system(), time.perf_counter() + LOOK

    def too_large(self) -> bool:
        """Counts them all only if the whole system's number, one small file, has grown; and every now and then."""
        if self._most is None:
            return False
        now = time.perf_counter()
        if _tasks_of_system() - self._before <= self._most and now < self._next_look:
            return False
        self._next_look = now + LOOK
        return sum(descendants().values()) > self._most


def _watch(process, tail: Tail, crowd: Crowd, start: float, time_limit: float, grace: float) -> tuple[float, str]:
    """Seconds until the process ended or was given up, and why it was stopped; reads what it prints meanwhile."""
    stopped, deadline = "", start + time_limit
    with selectors.DefaultSelector() as selector, _pidfd(process.pid) as pidfd:
        selector.register(pidfd, selectors.EVENT_READ)
        selector.register(process.stdout.fileno(), selectors.EVENT_READ, data=tail)
        while (left := deadline - time.perf_counter()) > 0:
            for key, _ in selector.select(min(left, TICK)):
                if key.data is None:
                    return time.perf_counter() - start, stopped
                if not (data := os.read(key.fd, CAPTURED)):
                    selector.unregister(key.fd)
                tail.add(data)
            if crowd.too_large():
                return time.perf_counter() - start, "processes"  # no grace: every moment makes more of them
            if not stopped and time.perf_counter() >= deadline and grace:
                stopped, deadline = "time", deadline + grace
                _signal_group(process.pid, signal.SIGTERM)
    return time.perf_counter() - start, stopped or "time"


@contextlib.contextmanager
def _pidfd(pid: int):
    """A file descriptor that becomes readable when the process ends: waiting to the microsecond, without polling."""
    fd = os.pidfd_open(pid)
    try:
        yield fd
    finally:
        os.close(fd)


def _end(process: subprocess.Popen, others: set[int]) -> None:
    _signal_group(process.pid, signal.SIGKILL)
    with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it in the kernel: give up, go on
        process.wait(PATIENCE)
    deadline = time.perf_counter() + PATIENCE
    while (strays := set(descendants()) - others - {process.pid}) and time.perf_counter() < deadline:
        for pid in strays:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)  # ours, now that its parent is gone
        time.sleep(0.001)


def _drain(fd: int, tail: Tail) -> None:
    """What the pipe still holds; not waiting, for something unkillable may hold its other end."""
    os.set_blocking(fd, False)
    with contextlib.suppress(BlockingIOError):
        while data := os.read(fd, CAPTURED):
            tail.add(data)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)


def _adopt_orphans() -> None:
    """Make the orphans among our descendants our children, so that none can hide from `descendants`."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> dict[int, int]:
    """Process id -> number of threads, of everything below this process."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid, parent, threads in _processes():
        children.setdefault(parent, []).append((pid, threads))
    found, waiting = {}, [os.getpid()]
    while waiting:
        for pid, threads in children.get(waiting.pop(), ()):
            found[pid] = threads
            waiting.append(pid)
    return found


def _processes():
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            values = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
            yield int(name), int(values[1]), int(values[17])


def tasks_of_user() -> int:
    """Processes and threads of this user, which is what RLIMIT_NPROC counts."""
    total = 0
    for pid, _, threads in _processes():
        with contextlib.suppress(OSError):
            total += threads if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
    return total


def _tasks_of_system() -> int:
    """Processes and threads of the whole machine."""
    return int(Path("/proc/loadavg").read_text().split()[3].partition("/")[2])
