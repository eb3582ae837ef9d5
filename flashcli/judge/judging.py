"""Run the submissions on the cases, check every output of every run, and give the verdicts."""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flashcli.errors import FlashError
from flashcli.files.testcases import Case
from flashcli.judge.answers import Compare, answer
from flashcli.judge.processes import Finished, execute
from flashcli.judge.rules import Rules
from flashcli.judge.sandbox import confined, remove
from flashcli.judge.submissions import Submission, python_path
from flashcli.judge.texts import ended, last_line

ACCEPTED = "accepted"
WRONG = "wrong answer"
FAILED = "runtime error"
TOO_SLOW = "time limit exceeded"
NO_OUTPUT = "no output"
WRONG_SIZE = "wrong size"
BUILD_FAILED = "build failed"
VERDICTS = (ACCEPTED, WRONG, FAILED, TOO_SLOW, NO_OUTPUT, WRONG_SIZE, BUILD_FAILED)


class Result(NamedTuple):
    """A submission's verdict on a case. ``seconds`` is the median of ``runs``, or the time of the run that failed."""

    submission: str
    case: str
    B: int
    N: int
    d: int
    seconds: float
    verdict: str
    detail: str
    penalty: float
    device: str
    runs: list[float]
    printed: str = ""  # the end of what the program, or its failed build, printed


class Attempt(NamedTuple):
    """One run, checked."""

    seconds: float
    verdict: str
    detail: str
    printed: str


@dataclass
class Judging:
    """What one judging is done with. With a ``seed`` inputs are made anew from it; without, the cases' own are used."""

    rules: Rules
    scratch: Path
    seed: int | None = None
    device: str = ""
    prepare: Callable[[Case], None] = lambda case: list(case.prepare())  # or one that shows progress
    secret: int = field(default_factory=lambda: secrets.randbits(64))  # chooses the rows that are checked

    def results(
        self, cases: list[Case], submissions: list[Submission], done: frozenset[tuple[str, str]] = frozenset()
    ) -> Iterator[Result]:
        """Case by case, so that one input at a time is on disk and all programs meet the machine in the same state."""
        for case in cases:
            pending = [entry for entry in submissions if (entry.name, case.name) not in done]
            for entry in pending:
                if entry.failure:
                    yield self._result(entry, case, [Attempt(0.0, BUILD_FAILED, entry.failure, entry.printed)])
            if pending := [entry for entry in pending if not entry.failure]:
                yield from self._judge_case(case, pending)

    def _judge_case(self, case: Case, submissions: list[Submission]) -> Iterator[Result]:
        rules = self.rules.for_case(case.name)
        case = replace(case, time_limit=rules.time_limit or case.time_limit)
        attempts: dict[str, list[Attempt]] = {entry.name: [] for entry in submissions}
        for run in range(rules.runs):
            with self._ready(case, run) as ready:
                right = answer(ready, self.secret)
                for entry in submissions:
                    made = attempts[entry.name]
                    if made and made[-1].verdict != ACCEPTED:
                        continue  # one failure is enough
                    made.append(self._attempt(entry, ready, right, rules))
                    if made[-1].verdict != ACCEPTED or len(made) == rules.runs:
                        yield self._result(entry, case, made)

    @contextlib.contextmanager
    def _ready(self, case: Case, run: int) -> Iterator[Case]:
        """The case with its input file there: its own, or a new one for this run, gone afterwards."""
        if self.seed is None:
            if not case.is_ready():
                self.prepare(case)
            yield case
            return
        case = case.anew(self.scratch / "inputs", derived_seed(self.seed, case.name, run))
        try:
            self.prepare(case)
            _settle(case.input)
            yield case
        finally:
            case.input.unlink(missing_ok=True)

    def _attempt(self, entry: Submission, case: Case, right: Compare, rules: Rules) -> Attempt:
        self.scratch.mkdir(exist_ok=True)  # a program may have removed it
        folder = Path(tempfile.mkdtemp(prefix="run-", dir=self.scratch))
        stamp = case.stamp()
        try:
            attempt = _run_and_check(entry, case, right, rules, folder)
        finally:
            remove(folder)
        if self.seed is not None and case.stamp() != stamp:
            self.prepare(case)  # for the next one
            return attempt._replace(verdict=FAILED, detail="it changed its input file")
        return attempt

    def _result(self, entry: Submission, case: Case, attempts: list[Attempt]) -> Result:
        last, runs = attempts[-1], [attempt.seconds for attempt in attempts]
        seconds = statistics.median(runs) if last.verdict == ACCEPTED else last.seconds
        penalty = self.rules.for_case(case.name).penalty
        return Result(
            entry.name, case.name, *vars(case.shape).values(), seconds, last.verdict, last.detail, penalty,
            self.device, runs, last.printed,
        )  # fmt: skip


def _settle(path: Path) -> None:
    """Have the disk done with a new file before anybody's time is taken."""
    with open(path, "rb") as file:
        os.fsync(file.fileno())


def derived_seed(seed: int, case: str, run: int) -> int:
    """A seed for each input of a judging: nothing that a program keeps from one run is of use in the next."""
    digest = hashlib.sha256(f"{seed}/{case}/{run}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _run_and_check(entry: Submission, case: Case, right: Compare, rules: Rules, folder: Path) -> Attempt:
    """Run ``program IN OUT``. IN is a link, so that deleting it harms nobody; OUT is in a new folder: not there yet."""
    output = folder / f"{case.name}.out"
    source = folder / f"{case.name}.in"
    source.symlink_to(case.input.resolve())
    command = [*entry.command, str(source), str(output)]
    try:
        if entry.trusted:
            finished = execute(command, None, os.environ | {"PYTHONPATH": python_path()}, case.time_limit, rules.grace)
        else:
            finished = confined(command, folder, rules, case.time_limit, case.shape.output_bytes)
    except OSError as error:
        return Attempt(0.0, FAILED, f"it cannot be run{last_line(error.strerror.lower())}", "")
    return Attempt(finished.seconds, *_verdict(finished, output, case, right, rules), finished.printed)


def _verdict(finished: Finished, output: Path, case: Case, right: Compare, rules: Rules) -> tuple[str, str]:
    if finished.stopped == "processes":
        return FAILED, f"more than {rules.processes} processes"
    if finished.stopped:
        return TOO_SLOW, f"stopped after {case.time_limit:g} s"
    if finished.returncode:
        return FAILED, ended(finished.returncode) + last_line(finished.printed)
    if not os.path.lexists(output):
        return NO_OUTPUT, "it ended well, but wrote no file"
    if output.is_symlink() or not output.is_file():
        return NO_OUTPUT, "what it made is not a regular file"
    if (size := output.stat().st_size) != case.shape.output_bytes:
        return WRONG_SIZE, f"{size} bytes, not {case.shape.output_bytes}"
    return _compared(right, output, rules.tolerance)


def _compared(right: Compare, output: Path, tolerance: float) -> tuple[str, str]:
    try:
        comparison = right(str(output), tolerance)
    except FlashError as error:  # unreadable, say
        return WRONG, str(error)
    if comparison.matches:
        return ACCEPTED, ""
    parts = [f"{comparison.mismatches} of {comparison.count} elements"]
    if comparison.max_abs:  # of the finite ones, if there are any
        parts.append(f"largest error {comparison.max_abs:.2g}")
    if comparison.got_nonfinite:
        parts.append(f"{comparison.got_nonfinite} NaN or Inf")
    return WRONG, ", ".join([*parts, f"first at {comparison.first_place()}"])
