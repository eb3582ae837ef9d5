"""The rules of a judging: defaults, a TOML file that changes them, and overrides for single cases."""

from __future__ import annotations

import fnmatch
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from flashcli.errors import BadInput
from flashcli.files.regular import read_regular
from flashcli.files.tolerance import TOLERANCE
from flashcli.judge.containment import WAYS
from flashcli.terminal import sizes

Value = TypeVar("Value")
RANKINGS = {
    "passed": "most points, one for a case accepted unless it is given others, then least time",
    "penalty": "least time, a case not accepted counting as its penalty",
    "relative": "largest mean, by points, of (best time / own time), a case not accepted counting as 0",
}


@dataclass(frozen=True)
class Rules:
    """The rules by which cases are judged. Times are in seconds, sizes in bytes."""

    cases: Path = Path("testcases")  # the folder with the test cases
    select: tuple[str, ...] = ()  # patterns of case names; empty: all
    time_limit: float | None = None  # None: what the case itself says
    grace: float = 1.0  # from SIGTERM, at the time limit, to SIGKILL
    penalty: float = 60.0  # what a case not accepted counts, in the ranking "penalty"
    points: float | None = None  # what a case counts in the others; None: what the case itself says
    tolerance: float = TOLERANCE
    runs: int = 1  # each on new inputs and each checked; their median is the time
    ranking: str = "passed"
    inputs: str = "same"  # for all submissions; or "each" has its own
    give_up: int | None = None  # after so many time limits, the other cases of a submission are not run
    exe: str = "hw4"  # the program in each submission's folder
    build: str | None = None  # shell command, run in a copy of that folder
    build_time_limit: float = 300.0
    build_size: int = 2**30  # of that folder
    sandbox: str = ""  # or "bwrap"
    readable: tuple[str, ...] = ()  # folders that are seen in the sandbox, beside the system's
    containment: str = "auto"  # or one of containment.WAYS: how processes are kept from outliving their run
    launcher: tuple[str, ...] = ()  # put before the program, such as srun -N1 -n1 --gres=gpu:1
    environment: dict[str, str] = field(default_factory=dict)  # added to the clean one
    memory: int | None = None  # address space; None: no limit, for CUDA reserves far more of it than memory
    file_size: int = 2**30  # of any one file, on top of the size of the right output
    processes: int = 2048  # threads included
    case: dict[str, dict[str, Any]] = field(default_factory=dict)  # overrides by pattern; later ones win

    def for_case(self, name: str) -> Rules:
        overrides: dict[str, Any] = {}
        for pattern, table in self.case.items():
            if matches(name, pattern):
                overrides |= table
        return replace(self, **overrides)


def matches(name: str, pattern: str) -> bool:
    """Match a name against shell-like patterns, where ``[01-10]`` stands for 01 to 10, as in Slurm's host lists."""
    return any(fnmatch.fnmatchcase(name, glob) for glob in expand(pattern))


def expand(pattern: str) -> list[str]:
    """Write out a pattern's numbers: ``t[01-03]*`` -> ``t01*``, ``t02*``, ``t03*``."""
    if not (found := re.search(r"\[(\d+)-(\d+)\]", pattern)):
        return [pattern]
    first, last = found.groups()
    head, tail = pattern[: found.start()], expand(pattern[found.end() :])
    return [f"{head}{number:0{len(first)}}{rest}" for number in range(int(first), int(last) + 1) for rest in tail]


def unmatched(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """The patterns that stand for no case at all: misspelt, most likely."""
    names = list(names)
    return [pattern for pattern in patterns if not any(matches(name, pattern) for name in names)]


def load(path: Path) -> Rules:
    """The rules of a TOML file; its ``cases`` is relative to the file's folder. BadInput says what is wrong in it."""
    content = read_regular(path)
    try:
        table = tomllib.loads(content.decode())
        values = _checked(table, {name: CHECKS[name] for name in (*CHECKS, "case")}, "")
        values["case"] = {
            name: _checked(override, {key: CHECKS[key] for key in OVERRIDABLE}, f"case.{name}: ")
            for name, override in values.get("case", {}).items()
        }
    except (ValueError, UnicodeDecodeError) as error:  # TOMLDecodeError is a ValueError
        raise BadInput(f"{str(path)!r} is not a rules file: {error}.", f"its keys are {', '.join(CHECKS)}.") from error
    return replace(Rules(**values), cases=path.parent / values.get("cases", "testcases"))


def _checked(table: object, checks: dict[str, tuple[Callable, str]], where: str) -> dict[str, Any]:
    if not isinstance(table, dict):
        raise ValueError(f"{where}{table!r} is not a table")
    checked = {}
    for name, value in table.items():
        if name not in checks:
            raise ValueError(f"{where}there is no key {name!r} here")
        convert, wanted = checks[name]
        try:
            checked[name] = convert(value)
        except (TypeError, ValueError, OverflowError):
            raise ValueError(f"{where}{name} must be {wanted}, not {value!r}") from None
    return checked


def kept(value: Value, good: bool) -> Value:
    """Return a value that is good; ValueError for any other."""
    if not good:
        raise ValueError
    return value


def _number(above: float, including: bool = False) -> Callable[[Any], float]:
    def convert(value: Any) -> float:
        number = type(value) in (int, float) and math.isfinite(value)
        return float(kept(value, number and (value > above or (including and value == above))))

    return convert


def _count(value: Any) -> int:
    return kept(value, type(value) is int and value > 0)


def size(value: object) -> int:
    """Bytes: a whole number above 0, or a text such as "8 GiB"."""
    return sizes.parse(value) if isinstance(value, str) else _count(value)


def _text(value: Any) -> str:
    return kept(value, isinstance(value, str) and value != "" and "\0" not in value)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(map(_text, kept(value, isinstance(value, list))))


def _places(value: object) -> tuple[str, ...]:
    places = _texts(value)
    return kept(places, all(map(os.path.isabs, places)))


def _table(value: Any) -> dict:
    return kept(value, isinstance(value, dict))


def _variables(value: Any) -> dict[str, str]:
    texts = _table(value).items()
    return kept(value, all(name and "=" not in name and isinstance(x, str) and "\0" not in x for name, x in texts))


def _choice(*names: str) -> tuple[Callable, str]:
    wanted = f"one of {', '.join(names)}" if len(names) > 1 else f'"{names[0]}"'
    return lambda value: kept(value, value in names), wanted


def _file_name(value: Any) -> str:
    path = Path(_text(value))
    return kept(value, not path.is_absolute() and ".." not in path.parts)


SECONDS = (_number(0), "a number of seconds above 0")
SECONDS_OR_0 = (_number(0, including=True), "a number of seconds, 0 or more")
SIZE = (size, 'a number of bytes above 0, or a text such as "8 GiB"')
COUNT = (_count, "a whole number above 0")
CHECKS: dict[str, tuple[Callable, str]] = {
    "cases": (_text, "the name of a folder"),
    "select": (_texts, 'a list of patterns of case names, such as ["t[01-10]", "t2?"]'),
    "time_limit": SECONDS,
    "grace": SECONDS_OR_0,
    "penalty": SECONDS_OR_0,
    "points": (_number(0), "a number above 0"),
    "tolerance": (_number(0, including=True), "a number, 0 or more"),
    "runs": COUNT,
    "ranking": _choice(*RANKINGS),
    "inputs": _choice("same", "each"),
    "give_up": COUNT,
    "exe": (_file_name, "the name of a file in each submission's folder"),
    "build": (_text, 'a shell command, such as "make hw4"'),
    "build_time_limit": SECONDS,
    "build_size": SIZE,
    "sandbox": _choice("bwrap"),
    "readable": (_places, 'a list of absolute paths, such as ["/home/course/venv"]'),
    "containment": _choice("auto", *WAYS),
    "launcher": (_texts, 'a list of words, such as ["srun", "-N1", "-n1", "--gres=gpu:1"]'),
    "environment": (_variables, 'a table of texts, such as OMP_NUM_THREADS = "4"'),
    "memory": SIZE,
    "file_size": SIZE,
    "processes": COUNT,
    "case": (_table, 'tables by pattern, such as [case."t[29-30]"]'),
}
OVERRIDABLE = ("time_limit", "grace", "penalty", "points", "tolerance", "runs", "memory", "file_size", "processes")
assert set(CHECKS) == {item.name for item in fields(Rules)}, "every rule can be written in a file"
