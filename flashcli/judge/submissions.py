"""The programs to judge: where they are, and building them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import flashcli
from flashcli.errors import BadInput, UsageError
from flashcli.judge.copying import NotCopied, copy_folder
from flashcli.judge.rules import Rules
from flashcli.judge.runnable import complaint
from flashcli.judge.sandbox import confined
from flashcli.judge.scratch import Scratch
from flashcli.judge.supervision import Finished, Supervision
from flashcli.judge.texts import ended, first_error, last_line, printable


@dataclass(frozen=True)
class Submission:
    """A program, run as ``command... IN OUT``. ``failure`` says why there is none, such as how its build failed."""

    name: str
    command: tuple[str, ...]
    folder: Path | None = None  # what is its own: to be built in a copy, and all that it sees of itself in a sandbox
    trusted: bool = False  # flashcli itself: run as it is, not confined
    failure: str = ""
    printed: str = ""  # the end of what its build printed
    stamp: tuple[int, ...] | None = None  # of the program as it was built


def python_path() -> str:
    """A PYTHONPATH by which `python -P -m flashcli` finds this very package, installed or not, from any folder."""
    return os.pathsep.join([str(Path(flashcli.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def own_program(backend: str, kernel: str | None) -> Submission:
    chosen_kernel = ("--kernel", kernel) if kernel else ()
    command = (sys.executable, "-P", "-m", "flashcli", "run", "--backend", backend, *chosen_kernel)
    return Submission("flashcli", command, trusted=True)


def find(named: Iterable[str], rules: Rules) -> list[Submission]:
    """The submissions that ``--exe`` names: [NAME=] a program or a submission's folder; or a folder of such."""
    found = [submission for name in named for submission in _find(name, rules)]
    names = [submission.name for submission in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"there are two submissions named {twice[0]!r}.", "rename one of them, by --exe NAME=PATH.")
    return found


def _find(name: str, rules: Rules) -> list[Submission]:
    label, equals, place = name.partition("=")
    if equals and not os.path.lexists(name):
        if not label or not place:
            raise UsageError(f"--exe {name!r} lacks a name or a path.", "--exe NAME=PATH gives a name to a submission.")
        return [_in_folder(Path(place), rules, label) if os.path.isdir(place) else _program(place, rules, label)]
    if not name:
        raise UsageError("--exe names nothing.", "name a program, or a folder of submissions.")
    path = Path(name)
    if not path.is_dir():
        return [_program(name, rules, name)]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    folders = [_in_folder(entry, rules) for entry in entries if entry.is_dir()]
    if _runs(path / rules.exe) or (rules.build and entries and not folders):
        return [_in_folder(path, rules)]
    programs = [
        Submission(printable(entry.name), (str(entry.absolute()),))
        for entry in entries
        if _runs(entry) and not rules.build
    ]
    if not folders + programs:
        hint = f"it should have a folder with {rules.exe} in it, or a program, for each submission; is --build missing?"
        raise BadInput(f"there are no submissions in {name!r}.", hint)
    return folders + programs


def _runs(program: Path) -> bool:
    return program.is_file() and os.access(program, os.X_OK)


def _in_folder(folder: Path, rules: Rules, name: str | None = None) -> Submission:
    """The submission that is in a folder of its own, built or to be built; it has the folder's name by default."""
    home = Path(os.path.abspath(folder))
    program = home / rules.exe
    missing = not rules.build and not os.access(program, os.X_OK)
    failure = f"there is no program {rules.exe}; is --build missing?" if missing else ""
    return Submission(printable(name or home.name), (str(program),), home, failure=failure)


def _program(place: str, rules: Rules, name: str) -> Submission:
    """A program named on the command line; with a build command, it need not be there yet."""
    path = os.path.abspath((None if rules.build else shutil.which(place)) or place)
    if rules.build and not os.path.exists(os.path.dirname(path)):
        raise UsageError(f"{place!r} cannot be built: its folder is not there.", "check --exe.")
    if not rules.build and (told := complaint(place, path)):
        raise UsageError(f"{place!r} cannot be run: {told[0]}.", told[1])
    return Submission(printable(name), (path,), Path(path).parent if rules.build else None)


def build(submission: Submission, rules: Rules, scratch: Scratch, supervision: Supervision) -> Submission:
    """Run the rules' build command in a copy of the submission's folder; the result is the program in that copy."""
    if submission.folder is None or rules.build is None:
        return submission  # there is nothing to build
    copy = scratch.new_folder("build")
    # Not behind the launcher: compilers are on the machine where people log in, and GPUs need not be.
    local = replace(rules, launcher=())
    program = Path(submission.command[0]).relative_to(submission.folder)
    try:
        copy_folder(submission.folder, copy, rules.build_size)
        finished = confined(supervision, ["/bin/sh", "-c", rules.build], copy, local, rules.build_time_limit)
    except NotCopied as error:
        return replace(submission, failure=f"its folder cannot be copied: {printable(str(error))}")
    except OSError as error:
        return replace(submission, failure=f"its folder cannot be copied{last_line((error.strerror or '').lower())}")
    failure = _build_failure(finished, copy / program, program, rules)
    return replace(submission, command=(str(copy / program),), folder=copy, failure=failure, printed=finished.printed)


def _build_failure(finished: Finished, built: Path, program: Path, rules: Rules) -> str:
    if finished.stopped == "time":
        return f"stopped after {rules.build_time_limit:g} s"
    if finished.stopped:
        return stopped(finished, rules)
    if finished.returncode:
        return f"{ended(finished.returncode)}{first_error(finished.printed)}"
    return "" if _runs(built) else f"it made no program {program}"


def stopped(finished: Finished, rules: Rules) -> str:
    """Why a command was ended that was within its time."""
    if finished.stopped == "processes":
        return f"more than {rules.processes} processes"
    if finished.stopped == "never":
        return "some of its processes could not be ended"
    return f"what watched it was killed{last_line(finished.printed)}"
