"""What is installed: the lists in pyproject.toml have no gap that a checkout would hide."""

from __future__ import annotations

import tomllib
from pathlib import Path

from support import ROOT

from flashcli.compiler.compiler import SOURCES
from flashcli.files.testcases import OURS, load

SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
MAPPED = SETUPTOOLS["package-dir"]  # to folders outside of flashcli/


def data_of(package: str, folder: Path) -> set[Path]:
    return {path for pattern in SETUPTOOLS["package-data"].get(package, []) for path in folder.glob(pattern)}


def test_every_package_is_installed():
    packages = {".".join(path.parent.relative_to(ROOT).parts) for path in ROOT.glob("flashcli/**/__init__.py")}
    assert set(SETUPTOOLS["packages"]) == packages | set(MAPPED)


def test_what_measures_for_records_is_in_the_source_distribution_only():
    assert not [name for name in SETUPTOOLS["packages"] if name.startswith("bench")]
    assert "graft bench" in (ROOT / "MANIFEST.in").read_text().splitlines()


def test_every_file_that_is_no_module_is_installed():
    packages = [name for name in SETUPTOOLS["packages"] if name not in MAPPED]
    installed = set().union(*(data_of(name, ROOT / name.replace(".", "/")) for name in packages))
    others = {path for path in ROOT.glob("flashcli/**/*") if path.is_file() and path.suffix not in (".py", ".pyc")}
    assert installed == others


def test_every_source_of_a_kernel_is_installed():
    sources = {path for path in SOURCES.rglob("*") if path.suffix in (".cu", ".c", ".cuh", ".h")}
    assert len(sources) > 20 and sources <= data_of("flashcli.cuda", ROOT / MAPPED["flashcli.cuda"])


def test_the_thirty_cases_are_installed_by_their_manifest_alone(tmp_path):
    assert data_of("flashcli.testcases", ROOT / MAPPED["flashcli.testcases"]) == {OURS}
    assert len(load(tmp_path / "testcases")) == 30
