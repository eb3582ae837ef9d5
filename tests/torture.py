"""Runs that are hurt at random: by signals at any time, by system calls that fail. `make torture` prints a summary.

Whatever happens, the output is the old one or the right one, nothing else is left beside it, the exit code says what
happened, and nobody sees a traceback. Faults at system calls need strace.
"""

from __future__ import annotations

import argparse
import collections
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

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


class Torture:
    """A run of which every bit is known, again and again; what came of it, and what should not have."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.given = write_input(folder / "x.in", random_qkv(40, 100, 32))
        self.out = folder / "results" / "x.out"
        self.out.parent.mkdir()
        self.random = random.Random(seed)
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []
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


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--signals", type=int, default=300, help="runs that get signals at random times")
    parser.add_argument("--calls", type=int, default=150, help="runs in which a system call fails, or is interrupted")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        torture = Torture(Path(folder), options.seed)
        for _ in range(options.signals):
            torture.signals()
        for _ in range(options.calls if shutil.which("strace") else 0):
            call = torture.random.choice(list(FAULTS))
            most, errors = FAULTS[call]
            when = torture.random.randint(1, most)
            if torture.random.random() < 0.5:
                torture.at_a_system_call(f"inject={call}:error={torture.random.choice(errors)}:when={when}", CODES)
            else:
                number = torture.random.choice(ENDING)
                torture.at_a_system_call(f"inject={call}:signal={number.name}:when={when}", {0, 128 + number})
    print(f"{options.signals} runs with signals, {options.calls if shutil.which('strace') else 0} with faults:")
    for outcome, count in sorted(torture.outcomes.items()):
        print(f"  {outcome}: {count}")
    print(f"{len(torture.wrong)} went wrong.", *torture.wrong, sep="\n")
    return bool(torture.wrong)


if __name__ == "__main__":
    sys.exit(main())
