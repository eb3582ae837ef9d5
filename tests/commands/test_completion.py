"""How shells complete command lines, in a real bash."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from support import environment, flashcli, flashcli_in

from flashcli.cli import COMMANDS
from flashcli.kernels.attention import KERNELS

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash here")

# What happens when TAB is pressed after the words: the function is called, and leaves what it found in COMPREPLY.
PRESS_TAB = """
eval "$(_FLASHCLI_COMPLETE=bash_source flashcli)"
COMP_WORDS=(flashcli "$@")
COMP_CWORD=$#
_flashcli_completion flashcli
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With flashcli in bin/."""
    (tmp_path / "bin").mkdir()
    flashcli_in(tmp_path / "bin")
    return tmp_path


def press_tab(folder: Path, words: list[str], before: str = "") -> list[str]:
    """The words that are printed: what is offered, and what a bash that has run ``before`` says."""
    env = environment()
    env["PATH"] = f"{folder}/bin:{env['PATH']}"
    line = ["bash", "--norc", "-c", before + PRESS_TAB, "bash", *words]
    done = subprocess.run(line, cwd=folder, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return done.stdout.split()


@bash
@pytest.mark.parametrize(
    ("words", "completions"),
    [
        (["k"], ["kernels"]),
        ([""], list(COMMANDS)),
        (["run", "--max"], ["--max-device-memory"]),
        (["run", "--kernel", ""], list(KERNELS)),
        (["run", "--deb"], ["--debug"]),
        (["bench", "--case", "t3"], ["t30"]),
        (["generate", "x3.in", "--distribution", "no"], ["normal"]),
    ],
)
def test_what_is_offered(folder, words, completions):
    assert press_tab(folder, words) == completions


@bash
def test_a_manifest_that_cannot_be_read_offers_no_cases(folder):
    (folder / "testcases").mkdir()
    (folder / "testcases" / "manifest.toml").write_text("[")
    assert press_tab(folder, ["bench", "--case", "t3"]) == []


@bash
@pytest.mark.parametrize("words", [["run", "x"], ["run", "x1.in", "--trace", "x"], ["inspect", "--json", "x"]])
def test_files_are_left_to_the_shell(folder, words):
    """Which completes their names by itself, if it is told by compopt."""
    assert press_tab(folder, words, before='compopt() { echo compopt "$@"; }') == ["compopt", "-o", "default"]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_have_a_script_too(shell):
    done = flashcli(env={"_FLASHCLI_COMPLETE": f"{shell}_source"})
    assert (done.code, done.err) == (0, "")
    assert f"_FLASHCLI_COMPLETE={shell}_complete" in done.out


def test_the_help_says_how_to_have_it():
    assert 'eval "$(_FLASHCLI_COMPLETE=bash_source flashcli)"' in flashcli("--help").out
