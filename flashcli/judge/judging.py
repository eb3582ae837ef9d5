"""Run the submissions on the cases, check every output of every run, and give the verdicts."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import secrets
import stat
import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from flashcli.errors import FlashError
from flashcli.files.regular import stamp
from flashcli.files.testcases import Case
from flashcli.judge.answers import Compare
from flashcli.judge.device_code import ProgramKernel, kernels
from flashcli.judge.inputs import Damaged, NewInputs, OwnInputs, Ready
from flashcli.judge.rules import Rules
from flashcli.judge.runnable import not_started_inside, why_not_run
from flashcli.judge.sandbox import confined, trusted
from flashcli.judge.scratch import Scratch
from flashcli.judge.submissions import Submission, build, python_path, stopped
from flashcli.judge.supervision import Finished, Supervision
from flashcli.judge.texts import ended, last_line

ACCEPTED = "accepted"
WRONG = "wrong answer"
FAILED = "runtime error"
TOO_SLOW = "time limit exceeded"
NO_OUTPUT = "no output"
WRONG_SIZE = "wrong size"
BUILD_FAILED = "build failed"
NOT_RUN = "not run"
VERDICTS = (ACCEPTED, WRONG, FAILED, TOO_SLOW, NO_OUTPUT, WRONG_SIZE, BUILD_FAILED, NOT_RUN)


class Result(NamedTuple):
    """A submission's verdict on a case.

    ``seconds`` is the median of ``runs``, or the time of the run that failed; None if the program was not run.
    """

    submission: str
    case: str
    B: int
    N: int
    d: int
    seconds: float | None
    verdict: str
    detail: str
    penalty: float
    device: str
    runs: list[float]
    printed: str = ""  # the end of what the program, or its failed build, printed
    returncode: int | None = None
    points: float = 1.0  # what the case counts
    memory: int | None = None  # bytes, the most of any process of any run; None if that is not known
    kernels: tuple[ProgramKernel, ...] = ()  # of the program


class Attempt(NamedTuple):
    """One run, checked."""

    seconds: float | None
    verdict: str
    detail: str
    printed: str = ""
    returncode: int | None = None
    memory: int | None = None


def _say_nothing(about: str) -> None:
    pass


@dataclass
class Judging:
    """The settings and tools of one judging. A ``seed`` makes new inputs; without one, the cases' own are used."""

    rules: Rules
    scratch: Scratch
    supervision: Supervision
    seed: int | None = None
    device: str = ""
    jobs: int = 1  # programs that run at a time
    tell: Callable[[str], None] = _say_nothing  # what is being done
    secret: int = field(default_factory=lambda: secrets.randbits(64))  # chooses the rows that are checked
    _built: dict[str, Submission] = field(default_factory=dict)
    _kernels: dict[str, tuple[ProgramKernel, ...]] = field(default_factory=dict)  # by submission
    _too_slow: Counter = field(default_factory=Counter)  # time limits exceeded, by submission

    def results(
        self, cases: list[Case], submissions: list[Submission], earlier: Iterable[Result] = ()
    ) -> Iterator[Result]:
        """Judge case by case, so that one input at a time is on disk and all programs meet the machine in one state.

        What has an ``earlier`` result is left out.
        """
        earlier = list(earlier)
        done = {(result.submission, result.case) for result in earlier}
        self._too_slow.update(result.submission for result in earlier if result.verdict == TOO_SLOW)
        for case in cases:
            if pending := [entry for entry in submissions if (entry.name, case.name) not in done]:
                yield from self._judge_case(case, pending)

    def _judge_case(self, case: Case, submissions: list[Submission]) -> Iterator[Result]:
        rules = self.rules.for_case(case.name)
        case = replace(case, time_limit=rules.time_limit or case.time_limit)
        attempts: dict[str, list[Attempt]] = {entry.name: [] for entry in submissions}
        for run in range(rules.runs):
            # One failure is enough.
            going = [entry for entry in submissions if all(a.verdict == ACCEPTED for a in attempts[entry.name])]
            with self._inputs(case, run) as inputs:
                made = zip(going, self._attempts(going, inputs, rules), strict=True)
                yield from self._decided(case, made, attempts, rules.runs)

    def _decided(
        self, case: Case, made: Iterable[tuple[Submission, Attempt]], attempts: dict[str, list[Attempt]], runs: int
    ) -> Iterator[Result]:
        """Add attempts to those that were made before; the result of a submission that needs no more of them."""
        for entry, attempt in made:
            attempts[entry.name].append(attempt)
            if attempt.verdict != ACCEPTED or len(attempts[entry.name]) == runs:
                self._too_slow[entry.name] += attempt.verdict == TOO_SLOW
                yield self._result(entry, case, attempts[entry.name])

    def _inputs(self, case: Case, run: int) -> contextlib.AbstractContextManager[OwnInputs | NewInputs]:
        if (seed := self.seed) is None:
            return contextlib.nullcontext(OwnInputs(case, self.secret, self.tell))
        seed_for = functools.partial(derived_seed, seed, case.name, run)
        return NewInputs(case, self.scratch, seed_for, self.rules.inputs == "each", self.secret, self.tell)

    def _attempts(
        self, submissions: list[Submission], inputs: OwnInputs | NewInputs, rules: Rules
    ) -> Iterator[Attempt]:
        """Make one attempt of each submission, in their order, up to ``jobs`` at a time."""
        if self.jobs == 1:
            yield from (self._attempt(entry, inputs, rules) for entry in submissions)
            return
        with ThreadPoolExecutor(self.jobs) as pool:
            try:
                yield from pool.map(lambda entry: self._attempt(entry, inputs, rules), submissions)
            except BaseException:
                self.supervision.close()  # or the pool would wait for its threads, and these for their programs
                pool.shutdown(cancel_futures=True)
                raise

    def _attempt(self, entry: Submission, inputs: OwnInputs | NewInputs, rules: Rules) -> Attempt:
        if rules.give_up and self._too_slow[entry.name] >= rules.give_up:
            limits = "time limit" if rules.give_up == 1 else "time limits"
            return Attempt(None, NOT_RUN, f"it has exceeded {rules.give_up} {limits}")
        entry = self._ready(entry)
        if entry.failure:
            return Attempt(None, BUILD_FAILED, entry.failure, entry.printed)
        if entry.name not in self._kernels and not entry.trusted:
            found = kernels(entry.command[0], rules, self.scratch, self.supervision)
            self._kernels[entry.name] = tuple(found)
        try:
            with inputs.lent(entry.name) as ready:
                attempt = self._run_and_check(entry, ready, rules)
        except Damaged as damaged:
            attempt = attempt._replace(verdict=FAILED, detail=str(damaged))
        if not self.scratch.intact():
            self.scratch.mend()
            return attempt._replace(verdict=FAILED, detail="it damaged the judge's folder")
        return attempt

    def _ready(self, entry: Submission) -> Submission:
        """The submission with its program built: when it is first needed, and again if somebody has damaged it."""
        if not self.rules.build or entry.trusted:
            return entry
        built = self._built.get(entry.name)
        if built is None or (not built.failure and stamp(built.command[0]) != built.stamp):
            self.tell(f"building {entry.name}")
            built = build(entry, self.rules, self.scratch, self.supervision)
            self._built[entry.name] = built = replace(built, stamp=stamp(built.command[0]))
        return built

    def _run_and_check(self, entry: Submission, ready: Ready, rules: Rules) -> Attempt:
        """Run ``program IN OUT``. IN is a link in a new folder, and OUT is to be in it: nothing is there yet."""
        case, folder = ready.case, self.scratch.new_folder("run")
        output, source = folder / f"{case.name}.out", folder / f"{case.name}.in"
        try:
            source.symlink_to(case.input.resolve())
            try:
                command = [*entry.command, str(source), str(output)]
                finished = self._run(command, entry, case, folder, rules)
            except OSError as error:
                return Attempt(None, FAILED, f"it cannot be run: {why_not_run(entry.command[0], error.errno)}")
            if rules.sandbox and (number := not_started_inside(finished.printed)):
                return Attempt(None, FAILED, f"in the sandbox {why_not_run(entry.command[0], number)}")
            verdict = _verdict(finished, output, case, ready.right, rules)
            seconds = None if finished.stopped == "lost" else finished.seconds
            return Attempt(seconds, *verdict, finished.printed, finished.returncode, finished.memory or None)
        finally:
            self.scratch.remove(folder)

    def _run(self, command: list[str], entry: Submission, case: Case, folder: Path, rules: Rules) -> Finished:
        about = f"{case.name}: {entry.name}"
        self.tell(f"{about}, waiting for {rules.launcher[0]}" if rules.launcher else about)
        began = functools.partial(self.tell, about)
        if entry.trusted:
            extra = {"PYTHONPATH": python_path()}
            return trusted(self.supervision, command, rules, case.time_limit, extra, began)
        own = [entry.folder or Path(entry.command[0]), case.input.resolve()]
        size = case.shape.output_bytes
        return confined(self.supervision, command, folder, rules, case.time_limit, size, own, began)

    def _result(self, entry: Submission, case: Case, attempts: list[Attempt]) -> Result:
        last, runs = attempts[-1], [attempt.seconds for attempt in attempts if attempt.seconds is not None]
        seconds = statistics.median(runs) if last.verdict == ACCEPTED else last.seconds
        rules = self.rules.for_case(case.name)
        memory = max((attempt.memory for attempt in attempts if attempt.memory), default=None)
        return Result(
            entry.name, case.name, case.shape.B, case.shape.N, case.shape.d, seconds, last.verdict, last.detail,
            rules.penalty, self.device, runs, last.printed, last.returncode, rules.points or case.points, memory,
            self._kernels.get(entry.name, ()),
        )  # fmt: skip


def derived_seed(seed: int, case: str, run: int, submission: str = "") -> int:
    """A seed for each input of a judging: nothing that a program keeps from one run is of use in the next."""
    whose = f"/{submission}" if submission else ""
    digest = hashlib.sha256(f"{seed}/{case}/{run}{whose}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def _verdict(finished: Finished, output: Path, case: Case, right: Compare, rules: Rules) -> tuple[str, str]:
    if finished.stopped == "time":
        return TOO_SLOW, f"stopped after {case.time_limit:g} s"
    if finished.stopped:
        return FAILED, stopped(finished, rules)
    if finished.returncode:
        return FAILED, ended(finished.returncode) + last_line(finished.printed)
    if not os.path.lexists(output):
        return NO_OUTPUT, "it ended well, but wrote no file"
    try:
        fd = os.open(output, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError as error:
        readable = stat.S_ISREG(os.lstat(output).st_mode)
        return (
            NO_OUTPUT,
            f"its output cannot be read{last_line((error.strerror or str(error)).lower())}" if readable else NO_FILE,
        )
    try:
        return _judged(fd, case, right, rules.tolerance)
    finally:
        os.close(fd)


NO_FILE = "what it made is not a regular file"


def _judged(fd: int, case: Case, right: Compare, tolerance: float) -> tuple[str, str]:
    """The verdict on an open output: by its descriptor, so that what is judged is one file, whatever is at its name."""
    status = os.fstat(fd)
    if not stat.S_ISREG(status.st_mode):
        return NO_OUTPUT, NO_FILE
    if status.st_size != case.shape.output_bytes:
        doubles = ", twice as many: float64, not float32?" if status.st_size == 2 * case.shape.output_bytes else ""
        return WRONG_SIZE, f"{status.st_size} bytes, not {case.shape.output_bytes}{doubles}"
    return _compared(right, f"/proc/self/fd/{fd}", tolerance)


def _compared(right: Compare, output: str, tolerance: float) -> tuple[str, str]:
    try:
        comparison = right(output, tolerance)
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
