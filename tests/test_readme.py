"""The README cannot drift from the program."""

from __future__ import annotations

import re

import pytest
from support import ROOT

from flashcli.cli import COMMANDS
from flashcli.kernels.attention import KERNELS
from flashcli.measure.records import BLOCK, refreshed

README = (ROOT / "README.md").read_text()


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_is_in_the_readme(name):
    assert f"flashcli {name}" in README


@pytest.mark.parametrize("name", KERNELS)
def test_every_kernel_is_in_the_readme(name):
    assert re.search(rf"\b{name}\b", README)


def test_every_command_in_the_readme_exists():
    assert set(re.findall(r"^(?:\$ )?flashcli ([a-z0-9-]+)", README, re.MULTILINE)) <= set(COMMANDS)


@pytest.mark.parametrize("code", [0, 1, 2, 65, 69, 70, 71, 73, 74, 77, 130, 143])
def test_every_exit_code_is_in_the_readme(code):
    assert re.search(rf"\|\s*{code}\s*\|", README)


def test_the_links_to_files_lead_somewhere():
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", README):
        assert (ROOT / target).exists(), target


@pytest.mark.parametrize("name", ["README.md", "cuda/README.md"])
def test_the_tables_are_those_of_the_records(name):
    document = ROOT / name
    assert BLOCK.search(document.read_text())
    assert document.read_text() == refreshed(document), f"run: python -m flashcli.measure.records {name}"
