from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import ROOT

from flashcli.files.testcases import Case
from flashcli.shape import Shape

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


@pytest.fixture
def cases(tmp_path: Path) -> Path:
    """A folder with two small cases, c1 and c2."""
    folder = tmp_path / "cases"
    folder.mkdir()
    (folder / "manifest.toml").write_text(
        "time_limit = 20\n[c1]\nshape = [2, 24, 8]\nseed = 1\n[c2]\nshape = [3, 40, 16]\nseed = 2\n"
    )
    return folder


@pytest.fixture
def case(tmp_path: Path) -> Case:
    """One small case, its input not made yet."""
    return Case("c1", Shape(2, 24, 8), 1, tmp_path / "c1.in", None, 20.0)


@pytest.fixture(scope="session")
def testcases() -> Path:
    return ROOT / "testcases"
