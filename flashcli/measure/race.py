"""Whole commands in processes of their own."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from typing import IO, NamedTuple

from flashcli.errors import FlashError

Command = Sequence[object]  # its words
FLASHCLI = (sys.executable, "-m", "flashcli")


class Ended(NamedTuple):
    """A command that has ended. ``code`` is negative, the number of the signal, if one ended it."""

    code: int
    out: str
    err: str


class TookTooLong(FlashError):
    """The error that a command was stopped, because it had taken all the time that it may take."""


def finish(command: Command, limit: float | None = None) -> Ended:
    """Run a command to its end, however that is; TookTooLong if it takes more than ``limit`` seconds."""
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:  # no pipes, which what it leaves may hold
        try:
            done = subprocess.run([*map(str, command)], stdout=out, stderr=err, timeout=limit, check=False)
        except subprocess.TimeoutExpired:
            raise TookTooLong(f"the command takes more than {limit:.0f} s") from None
        return Ended(done.returncode, text(out), text(err))


def text(file: IO[bytes]) -> str:
    """Read all that has been written to a file."""
    file.seek(0)
    return file.read().decode(errors="replace")


def succeed(command: Command, limit: float | None = None) -> Ended:
    """Run a command to its end that must not fail."""
    return check(command, finish(command, limit))


def check(command: Command, done: Ended) -> Ended:
    """Return how a command ended that did not fail; FlashError has the first line of its complaint."""
    if done.code:
        told = (done.err.strip() or done.out.strip() or f"exit code {done.code}").splitlines()[0]
        raise FlashError(f"{_called(command)} failed: {told.removeprefix('Error: ')}", "see whether it runs by itself.")
    return done


def _called(command: Command) -> str:
    words = [*map(str, command)]
    return f"flashcli {words[3]}" if tuple(words[:3]) == FLASHCLI else " ".join(words)
