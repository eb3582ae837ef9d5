"""The input of a case for the programs of others: in a folder of its own, and made again when a program damages it."""

from __future__ import annotations

import contextlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from flashcli.files.regular import stamp
from flashcli.files.testcases import Case
from flashcli.judge.answers import Compare, answer
from flashcli.judge.scratch import Scratch


class Ready(NamedTuple):
    """A case whose input is there, and how to compare an output with the right one."""

    case: Case
    right: Compare


class OwnInputs:
    """The case's own file, for programs that are trusted with it; generated on first use."""

    def __init__(self, case: Case, secret: int, tell: Callable[[str], None]) -> None:
        if not case.is_ready():
            _make(case, tell)
        self._ready = Ready(case, answer(case, secret))

    def lent(self, submission: str) -> contextlib.AbstractContextManager[Ready]:
        return contextlib.nullcontext(self._ready)


class NewInputs:
    """Files made anew from seeds, each lent to one program at a time. Use as a context manager."""

    def __init__(
        self, case: Case, scratch: Scratch, seed_for: Callable[[str], int], each: bool, secret: int,
        tell: Callable[[str], None],
    ) -> None:  # fmt: skip
        """``seed_for`` a submission; if not ``each`` has an input of its own, "" stands for all."""
        self._case, self._scratch, self._seed_for, self._each = case, scratch, seed_for, each
        self._secret, self._tell = secret, tell
        self._idle: list[Case] = []
        self._right: Compare | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> NewInputs:
        return self

    def __exit__(self, *exc: object) -> None:
        for case in self._idle:
            self._scratch.remove(case.input.parent)

    @contextlib.contextmanager
    def lent(self, submission: str) -> Iterator[Ready]:
        """An input for a program to run on. Damaged says what that did to it, if it is not as it was."""
        ready = self._take(submission)
        before = stamp(ready.case.input)
        try:
            yield ready
            if stamp(ready.case.input) != before:
                raise Damaged(_what_is_there(ready.case.input))
            if not self._each:
                with self._lock:
                    self._idle.append(ready.case)
        finally:
            if ready.case not in self._idle:
                self._scratch.remove(ready.case.input.parent)

    def _take(self, submission: str) -> Ready:
        with self._lock:
            self._idle = [*filter(Case.is_ready, self._idle)]  # or the scratch folder was damaged
            if self._idle and self._right is not None:
                return Ready(self._idle.pop(), self._right)
        case = self._case.anew(self._scratch.new_folder("input"), self._seed_for(submission if self._each else ""))
        _make(case, self._tell)
        _settle(case.input)
        with self._lock:
            right = answer(case, self._secret) if self._each or self._right is None else self._right
            self._right = right
        return Ready(case, right)


class Damaged(Exception):
    """The error that a program damaged its input file; its text says how."""


def _make(case: Case, tell: Callable[[str], None]) -> None:
    tell(f"making the input of {case.name}")
    for _ in case.prepare():
        pass


def _settle(path: Path) -> None:
    """Have the disk done with a new file before anybody's time is taken."""
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def _what_is_there(path: Path) -> str:
    """Say what a program did to its input file, judging by what is at its path now."""
    try:
        mode = os.lstat(path).st_mode
    except OSError:
        return "it removed its input file"
    kinds = {stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket"}
    kind = kinds.get(stat.S_IFMT(mode))
    return f"it replaced its input file by {kind}" if kind else "it changed its input file"
