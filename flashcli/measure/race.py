"""Whole commands in processes of their own: started, timed and measured from outside."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from typing import IO, NamedTuple

from flashcli.errors import FlashError

Command = Sequence[object]  # its words
FLASHCLI = (sys.executable, "-m", "flashcli")


class Ended(NamedTuple):
    """A command that has ended. ``code`` is negative, the number of the signal, if one ended it."""

    code: int
    out: str
    err: str
    seconds: float  # of the wall clock
    peak_mib: float  # the most memory that it had at a time


class TookTooLong(FlashError):
    """The error that a command was stopped, because it had taken all the time that it may take."""


def finish(command: Command, limit: float | None = None, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end, however that is; TookTooLong if it takes more than ``limit`` seconds."""
    stopped = threading.Event()
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        start = time.perf_counter()
        process = subprocess.Popen([*map(str, command)], stdout=out, stderr=err, env=environment)

        def stop() -> None:
            stopped.set()
            process.kill()

        watch = threading.Timer(limit or 0, stop)
        try:
            if limit is not None:
                watch.start()
            _, status, usage = os.wait4(process.pid, 0)  # which tells of its memory, as Popen does not
            seconds = time.perf_counter() - start
            process.returncode = os.waitstatus_to_exitcode(status)
        finally:
            watch.cancel()
            process.kill()  # which does nothing, but after an interruption
            process.wait()
        if stopped.is_set():
            raise TookTooLong(f"the command takes more than {limit:.0f} s")
        return Ended(process.returncode, _text(out), _text(err), seconds, usage.ru_maxrss / 1024)


def _text(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode(errors="replace")


def succeed(command: Command, limit: float | None = None, environment: Mapping[str, str] | None = None) -> Ended:
    """Run a command to its end that must not fail; FlashError has the first line of its complaint."""
    done = finish(command, limit, environment)
    if done.code:
        told = (done.err.strip() or done.out.strip() or f"exit code {done.code}").splitlines()[0]
        raise FlashError(f"{_called(command)} failed: {told.removeprefix('Error: ')}", "see whether it runs by itself.")
    return done


def _called(command: Command) -> str:
    words = [*map(str, command)]
    return f"flashcli {words[3]}" if tuple(words[:3]) == FLASHCLI else " ".join(words)
