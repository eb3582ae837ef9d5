"""Whole commands raced in turn, timed and measured from outside."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Hashable, Mapping
from typing import NamedTuple, TypeVar

from flashcli.measure.race import Command, Ended, check, text

Name = TypeVar("Name", bound=Hashable)


class Measured(NamedTuple):
    """Output, time and memory of a command."""

    out: str
    seconds: float  # of the wall clock
    peak_mib: float  # the most memory that it had at a time


def succeed(command: Command, environment: Mapping[str, str] | None = None) -> Measured:
    """Run a command to its end that must not fail."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=err, env=environment)
        try:
            _, status, usage = os.wait4(process.pid, 0)  # which tells of its memory, as Popen does not
            seconds = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            process.kill()  # which does nothing, but after an interruption
            process.wait()
        done = check(command, Ended(process.returncode, text(out), text(err)))
        return Measured(done.out, seconds, usage.ru_maxrss / 1024)


def compete(
    commands: Mapping[Name, Command], runs: int, environment: Mapping[str, str] | None = None
) -> dict[Name, list[Measured]]:
    """Run each command ``runs`` times, in turns; returns what each run took."""
    taken: dict[Name, list[Measured]] = {name: [] for name in commands}
    for turn in range(runs):
        for name in rotated(list(commands), turn):  # what a command leaves for the system to do slows down the next
            taken[name].append(succeed(commands[name], environment))
    return taken


def rotated(names: list[Name], turn: int) -> list[Name]:
    """Rotate names so that another one begins in each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]
