"""Ways to hold all processes that a program starts, so that none of them outlives it. Linux, Python's own modules only.

In each, a first process is the parent of all others; it adopts those whose own parent has ended.

- "namespace": the first process is the init of a PID namespace of its own. When it ends, by whatever means, the kernel
  ends all others, however fast they fork. Ordinary users need user namespaces for it.
- "cgroup": all are in a control group of their own, which the kernel ends as one.
- "freezing": all are stopped by SIGSTOP until no new one appears, then killed. What forks and ends faster than /proc
  can be read escapes this for a while.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterator

NAMES = {"namespace": "a PID namespace", "cgroup": "a control group", "freezing": "stopping and killing its processes"}

CLONE_NEWNS, CLONE_NEWUSER, CLONE_NEWPID = 0x20000, 0x10000000, 0x20000000  # linux/sched.h
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REC, MS_SLAVE = 2, 4, 8, 1 << 14, 1 << 19  # linux/mount.h
PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 4, 24, 36  # linux/prctl.h
# Powers that root's programs do without: modules, raw devices, ptrace, mounts, reboots, clock, perf, BPF, checkpoints.
POWERS = (16, 17, 19, 21, 22, 25, 38, 39, 40)  # linux/capability.h
ROUNDS = 20  # of stopping what is new


def _call(name: str, *arguments: object) -> None:
    """A system call of libc's, whose failure is an OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, name)(*arguments) == -1:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), name)


def adopt_orphans() -> None:
    """Have every process below this one, whose own parent ends, become a child of this one."""
    _call("prctl", PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def hide(hidden: bool = True) -> None:
    """Have no program of the same user look into this process: its memory and its open files, by ptrace or /proc."""
    _call("prctl", PR_SET_DUMPABLE, int(not hidden), 0, 0, 0)


def give_up_powers() -> None:
    """Leave root's means to get round `hide` and containment to no program that is started from here."""
    for power in POWERS:
        with contextlib.suppress(OSError):  # who is not root has none to give up
            _call("prctl", PR_CAPBSET_DROP, power, 0, 0, 0)


class Freezing:
    """Nothing holds the processes: they are found in /proc when they are to end."""

    def enter(self) -> None:
        """Called in the first process, before it starts anything. OSError if this way cannot be gone here."""

    def kill(self) -> None:
        """Called in the first process and in its parent, when all is to end and something may be left."""
        freeze_and_kill(os.getpid())

    def close(self) -> None:
        """Close what this way of containment has opened, when nothing runs any more."""


class Namespace(Freezing):
    def enter(self) -> None:
        _unshare()
        _call("mount", None, b"/", None, MS_REC | MS_SLAVE, None)  # so that the next mounts are nobody else's
        if os.fork():  # the first child is the init of the new namespace
            os._exit(0)
        _call("mount", b"proc", b"/proc", b"proc", MS_NOSUID | MS_NODEV | MS_NOEXEC, None)
        with contextlib.suppress(OSError):  # what is left in memory shared by name is gone with it; not all have that
            _call("mount", b"shm", b"/dev/shm", b"tmpfs", MS_NOSUID | MS_NODEV, b"mode=1777")

    def kill(self) -> None:
        """Leave the killing to Linux, which does it as soon as the first process has ended."""


def _unshare() -> None:
    try:
        _call("unshare", CLONE_NEWPID | CLONE_NEWNS)  # as root may
    except PermissionError:
        user, group = os.geteuid(), os.getegid()
        _call("unshare", CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWUSER)
        hide(False)  # or these files would be root's
        for name, text in (("setgroups", "deny"), ("uid_map", f"{user} {user} 1"), ("gid_map", f"{group} {group} 1")):
            with open(f"/proc/self/{name}", "w") as file:
                file.write(text)


class Cgroup(Freezing):
    def __init__(self) -> None:
        self._folder = os.path.join(_own_cgroup(), f"flashcli-{os.getpid()}-{time.monotonic_ns()}")
        os.mkdir(self._folder)
        if not os.path.exists(f"{self._folder}/cgroup.kill"):  # Linux 5.14
            self.close()
            raise FileNotFoundError("cgroup.kill")

    def enter(self) -> None:
        self._write("cgroup.procs", "0")

    def kill(self) -> None:
        self._write("cgroup.kill", "1")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            os.rmdir(self._folder)

    def _write(self, name: str, text: str) -> None:
        with open(f"{self._folder}/{name}", "w") as file:
            file.write(text)


def _own_cgroup() -> str:
    """The folder of this process's control group, of version 2. OSError if there is none."""
    with open("/proc/self/cgroup") as file:
        [path] = [line.split("::", 1)[1].rstrip("\n") for line in file if line.startswith("0::")] or [""]
    with open("/proc/self/mountinfo") as file:
        for line in file:
            before, _, after = line.partition(" - ")
            root, place = before.split()[3:5]
            if after.startswith("cgroup2 ") and path.startswith(root):
                return os.path.join(place, path[len(root) :].lstrip("/"))
    raise FileNotFoundError("cgroup2")


WAYS = {"namespace": Namespace, "cgroup": Cgroup, "freezing": Freezing}  # the best first


def freeze_and_kill(root: int) -> None:
    """Stop everything below a process, until nothing new appears or that takes too long; then kill it all."""
    stopped: set[int] = set()
    for _ in range(ROUNDS):
        if not (new := set(descendants(root)) - stopped):
            break
        _signal(new, signal.SIGSTOP)
        stopped |= new
    _signal(stopped, signal.SIGKILL)


def _signal(pids: set[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, number)


def descendants(root: int) -> dict[int, int]:
    """Process id -> number of threads, of everything below a process, but for what has ended."""
    children: dict[int, list[tuple[int, int]]] = {}
    for pid, parent, threads, _ in processes():
        children.setdefault(parent, []).append((pid, threads))
    found, waiting = {}, [root]
    while waiting:
        for pid, threads in children.get(waiting.pop(), ()):
            found[pid] = threads
            waiting.append(pid)
    return found


def most_memory(root: int) -> int:
    """Bytes of memory that the largest process below another one has had at its most."""
    found = [0]
    for pid in descendants(root):
        with contextlib.suppress(OSError), open(f"/proc/{pid}/status") as file:
            found += [1024 * int(line.split()[1]) for line in file if line.startswith("VmHWM:")]
    return max(found)


def processes() -> Iterator[tuple[int, int, int, int]]:
    """List the running processes, each as (its id, its parent's id, its number of threads, its group's id)."""
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError), open(f"/proc/{name}/stat", "rb") as file:
            values = file.read().rpartition(b")")[2].split()  # the name before it may hold anything
            if values[0] != b"Z" or int(values[17]) > 1:  # a zombie, unless other threads of it go on
                yield int(name), int(values[1]), int(values[17]), int(values[2])


def tasks_of_user() -> int:
    """Processes and threads of this user, which is what RLIMIT_NPROC counts."""
    total = 0
    for pid, _, threads, _ in processes():
        with contextlib.suppress(OSError):
            total += threads if os.stat(f"/proc/{pid}").st_uid == os.getuid() else 0
    return total


def tasks_of_system() -> int:
    """Processes and threads of the whole machine: one small file to read."""
    with open("/proc/loadavg") as file:
        return int(file.read().split()[3].partition("/")[2])
