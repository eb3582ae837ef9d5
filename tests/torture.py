"""Runs that are hurt at random, by signals, by system calls that fail, by what is missing or scarce around them.

Whatever happens, the output is the old one or the right one, nothing else is left beside it, the exit code says what
happened, and nobody sees a traceback. A run that is killed may leave a hidden file, which the next run ignores. `make
torture` prints a summary. Faults at system calls need strace.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torturing
from support import ROOT, command, environment, random_qkv, write_input

OLD = b"the old output"
ENDING = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT]
CODES = {0, 65, 70, 71, 73, 74, 77}  # where a system call fails; never 1, "the answer is no"
# How often a run makes a system call, about, and what it may fail with.
FAULTS = {
    "openat": (700, ["ENOMEM", "EMFILE", "EACCES", "EIO"]),
    "pwrite64": (8, ["ENOSPC", "EIO", "EDQUOT"]),
    "preadv": (8, ["EIO", "ENOMEM"]),
    "read": (900, ["EIO"]),
    "close": (700, ["EIO", "EDQUOT"]),
    "rename": (1, ["EACCES", "EBUSY", "EXDEV"]),
    "fallocate": (1, ["ENOSPC", "EOPNOTSUPP"]),
    "mmap": (400, ["ENOMEM"]),
    "clone3": (4, ["EAGAIN"]),
    "write": (1, ["EIO", "EPIPE"]),
}


LIMITS = {  # from how little to how much of each a run may have
    "RLIMIT_FSIZE": (0, 600_000), "RLIMIT_AS": (2**24, 2**31), "RLIMIT_DATA": (2**22, 2**30), "RLIMIT_NOFILE": (0, 40),
    "RLIMIT_STACK": (2**16, 2**23), "RLIMIT_CORE": (0, 0), "RLIMIT_MEMLOCK": (0, 2**16), "RLIMIT_NPROC": (0, 5),
}  # fmt: skip
VARIABLES = {
    "LANG": ["C", "xx_YY", ""], "LC_ALL": ["POSIX", "tr_TR.UTF-8", "\udcff"], "HOME": ["", "/nowhere", "/dev/null"],
    "PATH": ["", "/nowhere"], "TMPDIR": ["/nowhere", "/dev/null"], "COLUMNS": ["0", "-1", "x"], "TERM": ["", "dumb"],
    "PYTHONIOENCODING": ["ascii", "utf-16"], "OMP_NUM_THREADS": ["0", "x", "999"], "XDG_CACHE_HOME": ["", "/nowhere"],
}  # fmt: skip


class Torture(torturing.Tally):
    """A run of which every bit is known, again and again."""

    def __init__(self, folder: Path, seed: int) -> None:
        super().__init__()
        self.given = write_input(folder / "x.in", random_qkv(40, 100, 32))
        self.out = folder / "results" / "x.out"
        self.out.parent.mkdir()
        self.random = random.Random(seed)
        start = time.monotonic()
        subprocess.run(self._run(), env=environment(), check=True, stdout=subprocess.DEVNULL)
        self.seconds = time.monotonic() - start
        self.right = self.out.read_bytes()

    def _run(self) -> list[str]:
        return command("run", self.given, self.out, "--backend", "cpu", "--threads", 2)

    def signals(self) -> None:
        """One signal, or two at once, at any time from the first moment to the last."""
        numbers = self.random.choices(ENDING, k=self.random.choice([1, 1, 2]))
        self.out.write_bytes(OLD)
        process = subprocess.Popen(
            self._run(), env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        )  # fmt: skip
        time.sleep(self.random.uniform(0, 1.1 * self.seconds))
        for number in numbers:
            process.send_signal(number)
        error = process.communicate(timeout=60)[1].decode()
        code, what = process.returncode, "+".join(number.name for number in numbers)
        self._look(what, code, error, {0, *(128 + number for number in numbers)})

    def at_a_system_call(self, options: str, codes: set[int]) -> None:
        """A fault that strace injects."""
        self.out.write_bytes(OLD)
        trace = ["strace", "-f", "-qq", "-o", "/dev/null", "-e", options]
        done = subprocess.run([*trace, *self._run()], env=environment(), capture_output=True, timeout=120)
        self._look(options, done.returncode, done.stderr.decode(), codes)

    def kill(self) -> None:
        """SIGKILL at any time, and a run after that."""
        self.out.write_bytes(OLD)
        with subprocess.Popen(self._run(), env=environment(), stdout=subprocess.DEVNULL) as process:
            time.sleep(self.random.uniform(0, 1.1 * self.seconds))
            process.kill()
        for path in self.out.parent.glob(f".{self.out.name}.*.tmp"):
            path.unlink()
        self._look("SIGKILL", process.returncode, "", {0, -signal.SIGKILL})
        done = subprocess.run(self._run(), env=environment(), capture_output=True)
        self._look("a run after SIGKILL", done.returncode, done.stderr.decode(), {0})

    def circumstances(self) -> None:
        """Little of something, odd or missing variables, closed descriptors, a working folder that is gone."""
        self.out.write_bytes(OLD)
        around, what = environment(), []
        before: list[Callable[[], Any]] = []
        for _ in range(self.random.choice([1, 1, 2])):
            way = self.random.choice(["limit", "limit", "variable", "variable", "descriptors", "folder", "umask"])
            if way == "limit":
                name = self.random.choice(list(LIMITS))
                most = self.random.randint(*LIMITS[name])
                before.append(lambda name=name, most=most: resource.setrlimit(getattr(resource, name), (most, most)))
                what.append(f"{name}={most}")
            elif way == "variable":
                name = self.random.choice(list(VARIABLES))
                value = self.random.choice([None, *VARIABLES[name]])
                around = {key: text for key, text in around.items() if key != name} | ({name: value} if value else {})
                what.append(f"{name}={value!r}")
            elif way == "descriptors":
                closed = self.random.sample([0, 1, 2], self.random.randint(1, 3))
                before.append(lambda closed=closed: [os.close(fd) for fd in closed])
                what.append(f"without descriptors {closed}")
            elif way == "folder":
                before.append(_go_nowhere)
                what.append("in a folder that is gone")
            else:
                before.append(lambda: os.umask(0o777))
                what.append("umask 777")
        try:
            done = subprocess.run(
                self._run(), env=around, capture_output=True, timeout=120, preexec_fn=lambda: [act() for act in before]
            )
        except (OSError, subprocess.SubprocessError):
            self.outcomes["could not be started"] += 1
            return
        self._look(", ".join(what), done.returncode, done.stderr.decode(errors="replace"), CODES)

    def _look(self, what: str, code: int, error: str, codes: set[int]) -> None:
        if code not in codes and f"{ROOT}/flashcli/" not in error and "\nError: " not in f"\n{error}":
            code, error, codes = 0, "", {0}  # Python tells of it in its own way
            self.outcomes["ended before flashcli began"] += 1
        else:
            self.outcomes[f"exit code {code}"] += 1
        content = self.out.read_bytes()
        others = sorted(name for name in os.listdir(self.out.parent) if name != self.out.name)
        complete = content == self.right and (code == 0 or "is complete" in error or code == 74)
        for fault in (
            f"exit code {code}" if code not in codes else "",
            "a traceback" if ("Traceback" in error or "Exception ignored" in error) and not before_us(error) else "",
            f"left {others}" if others else "",
            "a wrong output" if not complete and content != OLD else "",
        ):
            if fault:
                self.wrong.append(f"{what}: {fault}: {error.strip()[-300:]}")
        for name in others:
            (self.out.parent / name).unlink()


def before_us(error: str) -> bool:
    """Whether it tells of what happened while Python started, before it ran a line of flashcli's."""
    starting = 'last):\n  File "<frozen importlib' in error or "Error processing line" in error  # of a .pth file
    return starting and f"{ROOT}/flashcli/" not in error


def _go_nowhere() -> None:
    folder = tempfile.mkdtemp()
    os.chdir(folder)
    os.rmdir(folder)


def main(signals: int, calls: int, kills: int, circumstances: int, seed: int) -> Torture:
    calls = calls if shutil.which("strace") else 0
    print(
        f"{signals} runs with signals, {calls} with faults at system calls, {kills} killed, {circumstances} in odd "
        "circumstances:", flush=True,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(Path(folder), seed)
        for times, hurt in ((signals, torture.signals), (kills, torture.kill), (circumstances, torture.circumstances)):
            for _ in range(times):
                hurt()
        for _ in range(calls):
            call = torture.random.choice(list(FAULTS))
            most, errors = FAULTS[call]
            when = torture.random.randint(1, most)
            if torture.random.random() < 0.5:
                torture.at_a_system_call(f"inject={call}:error={torture.random.choice(errors)}:when={when}", CODES)
            else:
                number = torture.random.choice(ENDING)
                torture.at_a_system_call(f"inject={call}:signal={number.name}:when={when}", {0, 128 + number})
    return torture


if __name__ == "__main__":
    torturing.end(main, __doc__, signals=300, calls=150, kills=50, circumstances=200)
