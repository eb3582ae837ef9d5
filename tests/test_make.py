"""What `make` says and does where something is missing, in a virtual environment that only pretends to be one."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from types import SimpleNamespace

import pytest
from support import ROOT, reasons_of, script

pytestmark = pytest.mark.skipif(not shutil.which("make"), reason="there is no make")
PYTHON = """#!/bin/sh
echo "$@" >> {log}
case "$1 $2" in "-c import torch") exit {has_torch};; "-m pip") exit {pip};; esac
"""


def make(folder, *arguments: str, has_torch: bool = True, pip_works: bool = True):
    """``make ARGUMENTS``; gives what it did, and how the pretended Python and flashcli were called."""
    log, bin = folder / "log", folder / "bin"
    bin.mkdir()
    script(bin / "python", PYTHON.format(log=log, has_torch=int(not has_torch), pip=int(not pip_works)))
    script(bin / "flashcli", f'#!/bin/sh\necho flashcli "$@" >> {log}\n')
    (folder / ".ready").touch()
    os.utime(folder / ".ready", (2**32, 2**32))  # newer than pyproject.toml
    done = subprocess.run(["make", f"VENV={folder}", *arguments], cwd=ROOT, capture_output=True, text=True)
    return done, log.read_text().splitlines()


def test_pytorch_for_the_cpu_is_installed_where_there_is_none(tmp_path):
    done, called = make(tmp_path, "bench-cpu", has_torch=False)
    assert done.returncode == 0, done.stderr
    assert [
        line for line in called if "--extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0+cpu" in line
    ]
    assert called[-1].startswith("flashcli bench --backend cpu")


def test_a_pytorch_that_is_there_is_taken(tmp_path):
    done, called = make(tmp_path, "bench-cpu")
    assert done.returncode == 0 and not [line for line in called if "pip" in line]


def test_an_index_that_cannot_be_reached_is_told_with_what_to_do(tmp_path):
    done, called = make(tmp_path, "bench-cpu", "TORCH_INDEX=https://index.example", has_torch=False, pip_works=False)
    assert done.returncode == 2 and not [line for line in called if line.startswith("flashcli")]
    assert "is not to be had from https://index.example." in done.stderr and "TORCH_INDEX=URL" in done.stderr


@pytest.mark.parametrize("name", ["arrays", "models"])
def test_a_target_for_each_script_makes_its_record(tmp_path, name):
    done, called = make(tmp_path, f"bench-{name}")
    assert done.returncode == 0, done.stderr
    assert called == [f"-m bench.{name} --json cuda/records/{name}.json"]


def test_gpt2_has_a_record_for_one_sequence_for_several_and_for_steps(tmp_path):
    done, called = make(tmp_path, "bench-gpt2")
    assert done.returncode == 0, done.stderr
    assert [re.search(r"records/(\S+)\.json", line)[1] for line in called] == ["gpt2", "gpt2-batch", "gpt2-steps"]


def test_make_alone_names_every_target(tmp_path):
    (tmp_path / "log").touch()
    done, _ = make(tmp_path)
    [phony] = [line for line in (ROOT / "Makefile").read_text().splitlines() if line.startswith(".PHONY:")]
    assert {f"make {name} " for name in phony.split()[1:] if name != "help"} <= {
        f"{line.partition('  ')[0]} " for line in done.stdout.splitlines()
    }


def test_skipped_tests_are_told_in_a_line_for_each_reason():
    skipped = [SimpleNamespace(longrepr=("x.py", 3, f"Skipped: no {what}")) for what in ("MPI", "GPU", "GPU")]
    assert reasons_of(skipped) == ["skipped    2: no GPU", "skipped    1: no MPI"]
