"""The record of a judging: a file with a line of JSON for its circumstances, then one for each result, as they come."""

from __future__ import annotations

import datetime
import fcntl
import json
import os
import secrets
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from flashcli.errors import BadInput, CannotCreate, UsageError, explained
from flashcli.files.regular import check_regular, read_regular
from flashcli.judge.containment import NAMES
from flashcli.judge.device_code import ProgramKernel
from flashcli.judge.judging import ACCEPTED, VERDICTS, Result
from flashcli.judge.rules import Rules, kept
from flashcli.judge.texts import printable

SAME = ("seed", "device", "rules")  # circumstances that results which belong together share
IRRELEVANT = ("ranking", "select", "penalty", "points")  # rules that do not change what a verdict is
UNLIKE = (*IRRELEVANT, "cases")  # rules that are no part of the circumstances, or have no default in them
LONGEST_TIME = 1e9  # seconds, thirty years: what is longer was not measured
LONGEST_NAME = 200
HINT = "`flashcli judge --results FILE` writes one."


def _text(value: Any) -> str:
    return printable(kept(value, isinstance(value, str)))


def _name(value: object) -> str:
    text = _text(value).strip()
    return kept(text, 1 <= len(text) <= LONGEST_NAME)


def _number(value: Any) -> int:
    return kept(value, type(value) is int and 0 < value < 2**31)


def _seconds(value: Any) -> float:
    return float(kept(value, type(value) in (int, float) and 0 <= value <= LONGEST_TIME))  # NaN is neither


def _seconds_or_none(value: object) -> float | None:
    return None if value is None else _seconds(value)


def _bytes_or_none(value: Any) -> int | None:
    return kept(value, value is None or (type(value) is int and 0 <= value < 2**63))


def _verdict(value: Any) -> str:
    return kept(value, value in VERDICTS)


def _times(value: Any) -> list[float]:
    return [_seconds(item) for item in kept(value, isinstance(value, list))]


def _kernels(value: Any) -> tuple[ProgramKernel, ...]:
    return tuple(map(_kernel, value))


def _kernel(value: Any) -> ProgramKernel:
    registers, shared, local = (int(_seconds(value[name])) for name in ("registers", "shared", "local"))
    return ProgramKernel(
        _name(value["name"]), _text(value["arch"]), registers, shared, local, _seconds_or_none(value["occupancy"])
    )


# Fields of a line, of which the last ones are missing if an earlier judge wrote it; and what makes a value of a file,
# which anybody may have written, one that can be shown.
RECORDED = {
    **dict.fromkeys(("submission", "case", "device"), _name),
    **dict.fromkeys("BNd", _number),
    "seconds": _seconds_or_none,
    "verdict": _verdict,
    "detail": _text,
    "penalty": _seconds,
    "runs": _times,
    "points": _seconds,
    "memory": _bytes_or_none,
    "kernels": _kernels,
}


def record(result: Result) -> dict[str, object]:
    found = {name: getattr(result, name) for name in RECORDED}
    return found | {"kernels": [kernel._asdict() for kernel in result.kernels]}


def as_line(result: Result) -> dict[str, object]:
    """A result's line in the file: its record, and what was printed, which is too much for a scoreboard."""
    return record(result) | {"printed": result.printed}


def circumstances(rules: Rules, seed: int | None, device: str, containment: str) -> dict[str, Any]:
    """The settings of a judging, as JSON has them; those in `SAME` must agree for results to belong together.

    The ``secret`` among them makes the pseudonyms.
    """
    kept = {name: value for name, value in asdict(rules).items() if name not in IRRELEVANT}
    kept["cases"] = str(rules.cases.resolve())
    began = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found = {
        "seed": seed, "device": device, "rules": kept, "began": began, "containment": containment,
        "secret": secrets.token_hex(16),
    }  # fmt: skip
    return json.loads(json.dumps(found))


def _complete(conditions: dict[str, Any]) -> dict[str, Any]:
    """The circumstances in a file, with the defaults of those rules that its judge did not know yet."""
    rules = conditions.get("rules")
    return conditions | {"rules": _defaults() | rules} if isinstance(rules, dict) else conditions


def _defaults() -> dict[str, Any]:
    return json.loads(json.dumps({name: value for name, value in vars(Rules()).items() if name not in UNLIKE}))


def description(conditions: dict[str, object]) -> str:
    """The circumstances of a judging in a line, as far as a file has them: date, seed, and rules that were changed."""
    found = []
    if isinstance(began := conditions.get("began"), str):
        found.append(f"judged {began[:19].replace('T', ' ')} UTC")
    if type(seed := conditions.get("seed")) is int:
        found.append(f"seed {seed}")
    if (way := conditions.get("containment")) in NAMES:
        found.append(f"contained by {NAMES[way]}")
    if isinstance(rules := conditions.get("rules"), dict):
        changed = [
            f"{name} = {json.dumps(rules[name])}"
            for name, default in _defaults().items()
            if rules.get(name, default) != default
        ]
        found.append(f"rules: {', '.join(changed) or 'the defaults'}")
    return printable("; ".join(found))[:1000]


class Log:
    """A file of results that grows line by line, and that no other judging can have meanwhile. A context manager."""

    def __init__(self, path: Path, resume: bool) -> None:
        """``conditions`` and ``results`` are what is in it. A new judging needs a new file, or an empty one."""
        self._path = path
        flags = os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_APPEND
        with explained("create", path, CannotCreate):
            self._file: BinaryIO = open(os.open(path, flags, 0o666), "r+b", buffering=0)  # noqa: SIM115 (by __exit__)
        try:
            check_regular(path, self._file.fileno())
            self._lock()
            with explained("read", path):
                content = self._file.readall()
            self._check_usable(content, resume)
            complete = content[: content.rfind(b"\n") + 1]
            self.conditions, self.results = _parsed(path, complete) if complete else ({}, [])
            with explained("write", path):
                self._file.truncate(len(complete))  # without a line that was being written when it was cut off
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            hint = "wait for its end, or name another file."
            raise UsageError(f"another judging is writing the file of results {str(self._path)!r}.", hint) from None

    def _check_usable(self, content: bytes, resume: bool) -> None:
        if content and not resume:
            hint = "--resume goes on with the judging in it; or remove it, or name another."
            raise UsageError(f"the file of results {str(self._path)!r} is there already.", hint)
        if content and b"\n" not in content and not content.startswith(b'{"judging"'[: len(content)]):
            raise BadInput(f"{str(self._path)!r} is not a file of results: it has no line.", HINT)

    def begin(self, conditions: dict[str, object]) -> None:
        """Write, or compare, the circumstances. UsageError if those of the file are others."""
        if not self.conditions:
            self.conditions = conditions
            self.add({"judging": conditions})
        for name in SAME:
            if _complete(self.conditions).get(name) != conditions[name]:
                hint = "--resume goes on under the same conditions only; begin anew with another --results file."
                verb = "differ" if name == "rules" else "differs"
                raise UsageError(f"the results in {str(self._path)!r} are of another judging: its {name} {verb}.", hint)

    def add(self, line: dict[str, object]) -> None:
        """Append a line, in one piece."""
        data = memoryview(json.dumps(line).encode() + b"\n")
        with explained("write", self._path):
            while data:
                data = data[self._file.write(data) :]

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def read(path: Path) -> tuple[dict[str, Any], list[Result]]:
    """The circumstances and the results in a file. BadInput if it is something else."""
    content = read_regular(path)
    return _parsed(path, content[: content.rfind(b"\n") + 1])


def _parsed(path: Path, lines: bytes) -> tuple[dict[str, Any], list[Result]]:
    found: list[Any] = []
    for number, line in enumerate(lines.splitlines(), start=1):
        try:
            content = json.loads(line.decode(), parse_constant=_no_constant)
            found.append(_result(content) if found else dict(content["judging"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            said = getattr(error, "msg", error)  # without JSON's own number of the line, which is always 1
            where = printable(f"line {number}: {type(error).__name__}: {said}")
            raise BadInput(f"{str(path)!r} is not a file of results: {where}.", HINT) from error
    if not found:
        raise BadInput(f"{str(path)!r} is not a file of results: it has no line.", HINT)
    return found[0], found[1:]


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _result(line: dict) -> Result:
    values: dict[str, Any] = {}
    for name, checked in RECORDED.items():
        if name not in line and name in Result._field_defaults:
            continue  # what the judge that wrote it did not know yet
        try:
            values[name] = checked(line[name])
        except (ValueError, TypeError, OverflowError):
            raise ValueError(f"{name} is {str(line[name])[:LONGEST_NAME]!r}") from None
    if values["verdict"] == ACCEPTED and values["seconds"] is None:
        raise ValueError("it is accepted, and has no time")
    return Result(**values, printed=str(line.get("printed", "")))
