"""The test cases of a folder: what its manifest says, and the files, generated on first use where they are missing."""

from __future__ import annotations

import math
import os
import shutil
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

from flashcli.asked.shape import Shape, shape_problem
from flashcli.errors import BadInput, FlashError, explained
from flashcli.files.distributions import generate
from flashcli.files.fileformat import InputFile, read_output
from flashcli.files.regular import read_regular

MANIFEST = "manifest.toml"
FOLDER = "testcases"  # that of the thirty cases; its manifest is in flashcli/ once installed
OURS = next(
    path
    for path in (Path(__file__).parents[1] / FOLDER / MANIFEST, Path(__file__).parents[2] / FOLDER / MANIFEST)
    if path.exists()
)
GENERATED = "large"
REPORT_CASES = ("t10", "t11", "t22", "t29", "t30")  # those that the course's report has times of
TIME_LIMIT = 120.0
LONGEST_NAME = 200  # bytes, so that a suffix has room in a file name
CASE_HINT = "a case is a table with shape = [B, N, d] and seed."
WHERE = "a folder named testcases gets the thirty cases; `flashcli generate` makes files for any other (.in and .ref)."


@dataclass(frozen=True)
class Case:
    """One case. Without a ``seed`` its input file is given; without a reference it is checked on a sample of rows."""

    name: str
    shape: Shape
    seed: int | None
    input: Path
    reference: Path | None
    time_limit: float
    original: Path | None = None  # the file that ``input`` is to be a copy of
    points: float = 1.0  # what it counts in a ranking

    def is_ready(self) -> bool:
        """Whether the input file is there and has the shape it should have."""
        try:
            with InputFile(self.input) as source:
                return source.shape == self.shape
        except FlashError:
            return False

    def prepare(self) -> Iterator[int]:
        """Generate the input file, or copy it; yields the number of batches done, step by step."""
        with explained("create", self.input.parent):
            self.input.parent.mkdir(parents=True, exist_ok=True)
        if self.original:
            with explained("copy", self.original), open(self.original, "rb") as old, _new_file(self.input) as new:
                shutil.copyfileobj(old, new, 2**20)
            yield self.shape.B
        elif self.seed is not None:
            yield from generate(str(self.input), self.shape, self.seed, "uniform")

    def anew(self, folder: Path, seed: int) -> Case:
        """Copy a case to another folder: with new values, or if its input was given, with a copy of that input."""
        path = folder / f"{self.name}.in"
        if self.seed is None:
            return replace(self, input=path, original=self.input)
        return replace(self, input=path, seed=seed, reference=None)


def _new_file(path: Path) -> BinaryIO:
    """Create a file where there is nothing yet, not even a link that would lead elsewhere."""
    return open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666), "wb")


def load(folder: Path, hint: str = WHERE) -> list[Case]:
    """The cases of a folder: those of its manifest.toml, else every NAME.in in it (with NAME.ref, if there is one).

    A folder testcases that has neither, or is not there, is for the thirty cases. ``hint`` says where to find cases, if
    there are none.
    """
    with explained("read", folder):
        names = os.listdir(folder) if folder.is_dir() else []
    if MANIFEST in names:
        return _from_manifest(folder, folder / MANIFEST)
    if folder.name == FOLDER and not any(name.endswith(".in") for name in names):
        return _from_manifest(folder, OURS)
    if not folder.is_dir():
        raise BadInput(f"{str(folder)!r} is not a folder of test cases.", hint)
    cases = [_from_file(path) for path in sorted(folder.glob("*.in"))]
    if not cases:
        raise BadInput(f"{str(folder)!r} has neither a {MANIFEST} nor any .in file.", hint)
    return cases


def _from_file(path: Path) -> Case:
    try:
        _check_name(path.stem)
    except ValueError as error:
        raise BadInput(f"{str(path)!r} cannot be a case: {error}.", "rename it.") from error
    with InputFile(path) as source:
        return Case(path.stem, source.shape, None, path, _reference(path, source.shape), TIME_LIMIT)


def _check_name(name: str) -> None:
    """A case's name becomes that of files, also in folders where programs of others run; and it is printed."""
    if not 1 <= len(name.encode(errors="replace")) <= LONGEST_NAME:
        raise ValueError(f"the name of a case has 1 to {LONGEST_NAME} bytes")
    if "/" in name or name.startswith(".") or not name.isprintable():
        raise ValueError(f"{name!r} is no name of a case: it has a '/', a '.' in front, or what cannot be printed")


def _from_manifest(folder: Path, path: Path) -> list[Case]:
    """The cases that the manifest at ``path`` tells of, whose files are in ``folder``, or to be made there."""
    try:
        manifest = tomllib.loads(read_regular(path).decode())
        limit = _number("time_limit", manifest.pop("time_limit", TIME_LIMIT))
        cases = [_from_entry(folder, name, entry, limit) for name, entry in manifest.items()]
    except ValueError as error:  # TOMLDecodeError is one
        raise BadInput(f"{str(path)!r} is not a manifest of test cases: {error}.", CASE_HINT) from error
    if not cases:
        raise BadInput(f"{str(path)!r} has no cases.", CASE_HINT)
    return cases


def _number(name: str, value: Any) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a number above 0, not {value!r}")
    return float(value)


def _from_entry(folder: Path, name: str, entry: object, limit: float) -> Case:
    _check_name(name)
    if not isinstance(entry, dict):
        raise ValueError(f"{name} is no table")
    numbers, seed = entry.get("shape"), entry.get("seed")
    if not isinstance(numbers, list) or [type(number) for number in numbers] != [int] * 3:
        raise ValueError(f"{name}: shape must be three whole numbers, [B, N, d], not {numbers!r}")
    if type(seed) is not int or seed < 0:
        raise ValueError(f"{name}: seed must be a whole number, 0 or more, not {seed!r}")
    shape = Shape(*numbers)
    if problem := shape_problem(shape):
        raise ValueError(f"{name}: {problem}")
    points = _number(f"{name}: points", entry.get("points", 1))
    given = folder / f"{name}.in"
    made = Case(name, shape, seed, folder / GENERATED / given.name, _reference(given, shape), limit, points=points)
    if not given.exists():
        return made
    with InputFile(given) as source:
        if source.shape != shape:  # it is somebody's file: not to be made anew
            hint = f"correct {MANIFEST}, or move the file away to have it generated."
            raise BadInput(f"{str(given)!r} has shape {source.shape}, not {shape} as {MANIFEST} says.", hint)
    return replace(made, input=given)


def _reference(given: Path, shape: Shape) -> Path | None:
    """The reference next to an input file, if there is one. A damaged one must not cost anybody the case."""
    path = given.with_suffix(".ref")
    if not path.exists():
        return None
    read_output(path, shape, range(0))  # nothing of it, but that checks its size and that it can be read
    return path
