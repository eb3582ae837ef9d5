"""The programs to judge: where they are, and building them."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import flashcli
from flashcli.errors import BadInput, UsageError
from flashcli.judge.processes import Finished
from flashcli.judge.rules import Rules
from flashcli.judge.sandbox import confined
from flashcli.judge.texts import ended, first_error, last_line, printable


@dataclass(frozen=True)
class Submission:
    """A program, run as ``command... IN OUT``. ``failure`` says why there is none, such as how its build failed."""

    name: str
    command: tuple[str, ...]
    trusted: bool = False  # flashcli itself: run as it is, not confined
    failure: str = ""
    printed: str = ""  # the end of what its build printed


def python_path() -> str:
    """A PYTHONPATH by which `python -P -m flashcli` finds this very package, installed or not, from any folder."""
    return os.pathsep.join([str(Path(flashcli.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])])


def own_program(backend: str, kernel: str | None) -> Submission:
    chosen_kernel = ("--kernel", kernel) if kernel else ()
    command = (sys.executable, "-P", "-m", "flashcli", "run", "--backend", backend, *chosen_kernel)
    return Submission("flashcli", command, trusted=True)


def find(named: Iterable[str], rules: Rules) -> list[Submission]:
    """The submissions that ``--exe`` names: a program, or a folder with a folder or a program for each of them."""
    found = [submission for name in named for submission in _find(name, rules)]
    names = [submission.name for submission in found]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise UsageError(f"there are two submissions named {twice[0]!r}.", "rename one of them.")
    return found


def _find(name: str, rules: Rules) -> list[Submission]:
    if not name:
        raise UsageError("--exe names nothing.", "name a program, or a folder of submissions.")
    path = Path(name)
    if not path.is_dir():
        return [Submission(printable(name), (_program(name, rules),))]
    entries = sorted(entry for entry in path.iterdir() if not entry.name.startswith("."))
    folders = [_in_folder(entry, rules) for entry in entries if entry.is_dir()]
    if rules.build and entries and not folders:
        return [_in_folder(path, rules)]  # one submission's own folder
    programs = [
        Submission(printable(entry.name), (str(entry.absolute()),))
        for entry in entries
        if entry.is_file() and os.access(entry, os.X_OK) and not rules.build
    ]
    if not folders + programs:
        hint = f"it should have a folder with {rules.exe} in it, or a program, for each submission; is --build missing?"
        raise BadInput(f"there are no submissions in {name!r}.", hint)
    return folders + programs


def _in_folder(folder: Path, rules: Rules) -> Submission:
    """The submission that is in a folder of its own, built or to be built."""
    home = os.path.abspath(folder)
    program = os.path.join(home, rules.exe)
    missing = not rules.build and not os.access(program, os.X_OK)
    failure = f"there is no program {rules.exe}; is --build missing?" if missing else ""
    return Submission(printable(os.path.basename(home)), (program,), failure=failure)


def _program(name: str, rules: Rules) -> str:
    """The path of a program named on the command line; with a build command, it need not be there yet."""
    path = os.path.abspath((None if rules.build else shutil.which(name)) or name)
    if not os.path.exists(os.path.dirname(path) if rules.build else path):
        raise UsageError(f"{name!r} cannot be run: no such file or directory.", "check --exe.")
    if not rules.build and not os.access(path, os.X_OK):
        raise UsageError(f"{name!r} cannot be run: permission denied.", "chmod +x it.")
    return path


def build(submission: Submission, rules: Rules, scratch: Path) -> Submission:
    """Run the rules' build command in a copy of the submission's folder; the result is the program in that copy."""
    program = Path(submission.command[0])
    copy = Path(tempfile.mkdtemp(prefix="build-", dir=scratch))
    # Not behind the launcher: compilers are on the machine where people log in, and GPUs need not be.
    local = replace(rules, launcher=())
    try:
        shutil.copytree(program.parent, copy, symlinks=True, dirs_exist_ok=True)
        finished = confined(["/bin/sh", "-c", rules.build], copy, local, rules.build_time_limit)
    except OSError as error:  # shutil.Error is one
        return replace(submission, failure=f"its folder cannot be copied{last_line(str(error))}")
    built = copy / program.name
    failure = _build_failure(finished, built, rules)
    return replace(submission, command=(str(built),), failure=failure, printed=finished.printed)


def _build_failure(finished: Finished, built: Path, rules: Rules) -> str:
    if finished.stopped:
        return f"stopped after {rules.build_time_limit:g} s"
    if finished.returncode:
        return f"{ended(finished.returncode)}{first_error(finished.printed)}"
    return "" if os.access(built, os.X_OK) else f"it made no program {built.name}"
