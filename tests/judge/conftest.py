from __future__ import annotations

import contextlib
import functools
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support import ROOT

from flashcli.asked.shape import Shape
from flashcli.errors import BackendUnavailable
from flashcli.files.testcases import Case
from flashcli.judge import containment
from flashcli.judge.judging import Judging
from flashcli.judge.rules import Rules
from flashcli.judge.scratch import Scratch
from flashcli.judge.supervision import Request, Supervision

PROGRAMS = Path(__file__).parent / "programs"


@pytest.fixture(scope="session")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``compiled("cheats", REFERENCES=folder)`` is the executable of programs/cheats.c, with this text as a macro."""
    compiler, folder = shutil.which("cc"), tmp_path_factory.mktemp("programs")
    if compiler is None:
        pytest.skip("no C compiler (cc) to make the submissions with")

    def compile(name: str, into: Path = folder, **macros: Path) -> Path:
        target = into / name
        if macros or not target.exists():
            definitions = [f'-D{macro}="{value}"' for macro, value in macros.items()]
            subprocess.run([compiler, "-O2", *definitions, "-o", target, PROGRAMS / f"{name}.c", "-lm"], check=True)
        return target

    return compile


def two_cases(folder: Path) -> Path:
    """Two small ones, c1 and c2, in a new folder."""
    folder.mkdir()
    (folder / "manifest.toml").write_text(
        "time_limit = 20\n[c1]\nshape = [2, 24, 8]\nseed = 1\n[c2]\nshape = [3, 40, 16]\nseed = 2\n"
    )
    return folder


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    return two_cases(tmp_path / "cases")


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """One small case, its input not made yet."""
    return Case("c1", Shape(2, 24, 8), 1, tmp_path / "c1.in", None, 20.0)


@pytest.fixture
def supervision() -> Iterator[Supervision]:
    with Supervision() as supervision:
        yield supervision


@pytest.fixture
def judging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, supervision: Supervision) -> Iterator[Callable]:
    """``judging(time_limit=1)`` is a judging by these rules, with a scratch folder in tmp_path/scratch."""
    (tmp_path / "scratch").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    with Scratch() as scratch:
        yield lambda **rules: Judging(Rules(**rules), scratch, supervision, seed=7)


@functools.cache
def possible(way: str) -> bool:
    """Whether processes can be contained like this here."""
    try:
        with Supervision() as supervision:
            return supervision.run(Request(["true"], None, {}, 10.0, containment=way)).returncode == 0
    except BackendUnavailable:
        return False


@pytest.fixture(params=containment.WAYS)
def way(request: pytest.FixtureRequest) -> str:
    """Each way to hold processes that can be gone here."""
    if not possible(request.param):
        pytest.skip(f"processes cannot be contained by {containment.NAMES[request.param]} here")
    return request.param


@pytest.fixture
def survivors(tmp_path: Path) -> Callable[[], list[str]]:
    """The command lines of all programs that still run for a judge, whose folders, in tmp_path, are their HOME."""

    def find() -> list[str]:
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if f"HOME={tmp_path}/".encode() in (folder / "environ").read_bytes():
                    found.append((folder / "cmdline").read_text())
        return found

    return find


def until(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    """Wait until something is so; whether it is."""
    deadline = time.monotonic() + seconds
    while not (so := condition()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return bool(so)


@pytest.fixture(scope="session")
def testcases() -> Path:
    return ROOT / "testcases"
