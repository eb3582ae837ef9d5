"""The record of a judging: a file with a line of JSON for its circumstances, then one for each result, as they come."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TextIO

from flashcli.errors import BadInput, CannotCreate, UsageError, explained
from flashcli.judge.judging import VERDICTS, Result
from flashcli.judge.rules import Rules

RECORDED = {  # what a line has, and of which type
    **dict.fromkeys(("submission", "case", "verdict", "detail", "device"), str),
    **dict.fromkeys(("B", "N", "d"), int),
    **dict.fromkeys(("seconds", "penalty"), (int, float)),
    "runs": list,
}
IRRELEVANT = ("ranking", "select", "penalty")  # rules that do not change what a verdict is


def record(result: Result) -> dict[str, object]:
    return {name: getattr(result, name) for name in RECORDED}


def as_line(result: Result) -> dict[str, object]:
    """A result's line in the file: its record, and what was printed, which is too much for a scoreboard."""
    return record(result) | {"printed": result.printed}


def circumstances(rules: Rules, seed: int | None, device: str) -> dict[str, object]:
    """What must be the same for results to belong together."""
    kept = {name: value for name, value in asdict(rules).items() if name not in IRRELEVANT}
    kept["cases"] = str(rules.cases.resolve())
    return json.loads(json.dumps({"seed": seed, "device": device, "rules": kept}))


class Log:
    """A file of results that grows line by line. Use as a context manager."""

    def __init__(self, file: TextIO) -> None:
        self._file = file

    def add(self, line: dict[str, object]) -> None:
        with explained("write", self._file.name):
            self._file.write(json.dumps(line) + "\n")
            self._file.flush()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, *exc: object) -> None:
        self._file.close()


def create(path: Path, conditions: dict[str, object]) -> Log:
    """A new file of results."""
    if path.exists():
        hint = "--resume goes on with the judging in it; or remove it, or name another."
        raise UsageError(f"the file of results {str(path)!r} is there already.", hint)
    with explained("create", path, CannotCreate):
        log = Log(open(path, "x"))  # noqa: SIM115 (closed by the Log)
    log.add({"judging": conditions})
    return log


def go_on(path: Path, conditions: dict[str, object]) -> Log:
    """A file of results, to be continued under the same conditions."""
    before = read(path)[0]
    for name, value in conditions.items():
        if before.get(name) != value:
            hint = "--resume goes on under the same conditions only; begin anew with another --results file."
            verb = "differ" if name == "rules" else "differs"
            raise UsageError(f"the results in {str(path)!r} are of another judging: its {name} {verb}.", hint)
    with explained("write", path, CannotCreate):
        file = open(path, "r+")  # noqa: SIM115 (closed by the Log)
        file.truncate(len(_complete_lines(path)))
        file.seek(0, 2)
    return Log(file)


def read(path: Path) -> tuple[dict[str, object], list[Result]]:
    """The circumstances and the results in a file. BadInput if it is something else."""
    hint = "`flashcli judge --results FILE` writes one."
    found = []
    for number, line in enumerate(_complete_lines(path).splitlines(), start=1):
        try:
            content = json.loads(line.decode())
            found.append(_result(content) if found else dict(content["judging"]))
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            said = getattr(error, "msg", error)  # without JSON's own number of the line, which is always 1
            where = f"line {number}: {type(error).__name__}"
            raise BadInput(f"{str(path)!r} is not a file of results: {where}: {said}.", hint) from error
    if not found:
        raise BadInput(f"{str(path)!r} is not a file of results: it has no line.", hint)
    return found[0], found[1:]


def _complete_lines(path: Path) -> bytes:
    """Without a last line that was being written when the judging was cut off."""
    with explained("read", path):
        content = path.read_bytes()
    return content[: content.rfind(b"\n") + 1]


def _result(line: dict) -> Result:
    for name, kind in RECORDED.items():
        if not isinstance(line[name], kind):
            raise ValueError(f"{name} is {line[name]!r}")
    if line["verdict"] not in VERDICTS:
        raise ValueError(f"there is no verdict {line['verdict']!r}")
    return Result(**{name: line[name] for name in RECORDED}, printed=str(line.get("printed", "")))
