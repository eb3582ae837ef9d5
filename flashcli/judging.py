"""Run a program on a test case, as the course's judge does (`EXE IN OUT`), and give a verdict."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from flashcli.errors import BadInput, UsageError
from flashcli.fileformat import InputFile
from flashcli.testcases import Case
from flashcli.verify import compare_files, compare_sample

ACCEPTED = "accepted"
WRONG = "wrong answer"
FAILED = "runtime error"
TOO_SLOW = "time limit exceeded"
CAPTURED = 64 * 1024  # bytes of a program's own output that are looked at


class Result(NamedTuple):
    case: str
    B: int
    N: int
    d: int
    seconds: float
    verdict: str
    detail: str
    printed: str  # the end of what the program printed


class Finished(NamedTuple):
    seconds: float
    returncode: int | None  # None: it was stopped at the time limit
    printed: str


def judge(case: Case, program: list[str], scratch: Path, tolerance: float) -> Result:
    """Run ``program IN OUT`` in the folder ``scratch`` and check what it wrote."""
    output = scratch / f"{case.name}.out"
    output.unlink(missing_ok=True)  # a program that writes nothing must not pass on an old file
    finished = execute([*program, str(case.input.resolve()), str(output)], scratch, case.time_limit)
    verdict, detail = verdict_of(case, finished, output, tolerance)
    output.unlink(missing_ok=True)
    return Result(case.name, *vars(case.shape).values(), finished.seconds, verdict, detail, finished.printed)


def execute(command: list[str], folder: Path, time_limit: float) -> Finished:
    """Run a command in its own process group; the whole group is killed at the time limit."""
    with tempfile.TemporaryFile(dir=folder) as log:
        start = time.perf_counter()
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True
            )
        except OSError as error:
            raise UsageError(f"{command[0]!r} cannot be run: {error.strerror.lower()}.", "check --exe.") from error
        try:
            returncode = process.wait(time_limit)
        except subprocess.TimeoutExpired:
            returncode = None
        finally:
            seconds = time.perf_counter() - start
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # what it left behind, too
            process.wait()
        log.seek(max(0, log.seek(0, os.SEEK_END) - CAPTURED))
        return Finished(seconds, returncode, log.read().decode(errors="replace").strip())


def verdict_of(case: Case, finished: Finished, output: Path, tolerance: float) -> tuple[str, str]:
    if finished.returncode is None:
        return TOO_SLOW, f"stopped after {case.time_limit:g} s"
    if finished.returncode:
        last_line = finished.printed.rpartition("\n")[2]
        return FAILED, f"{exit_text(finished.returncode)}" + (f": {last_line}" if last_line else "")
    if not output.exists():
        return WRONG, "no output file"
    try:
        comparison = _compare(case, output, tolerance)
    except BadInput as error:
        return WRONG, str(error)
    if comparison.matches:
        return ACCEPTED, ""
    return WRONG, f"{comparison.mismatches} of {comparison.count} elements, first at {comparison.first_place()}"


def _compare(case: Case, output: Path, tolerance: float):
    if case.reference:
        return compare_files(str(output), str(case.reference), case.shape, tolerance)
    with InputFile(case.input) as source:
        return compare_sample(str(output), source, seed=case.seed or 0, tolerance=tolerance)


def exit_text(returncode: int) -> str:
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"
