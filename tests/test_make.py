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


def set_up(folder, *there: str, fails: str = ""):
    """The environment made anew where there are some ``there`` of nvcc and nvidia-smi; what one ``fails`` does."""
    log, tools, venv = folder / "log", folder / "tools", folder / "venv"
    tools.mkdir()
    for name in there:
        script(tools / name, "#!/bin/sh\n")
    made = script(folder / "flashcli", f'#!/bin/sh\necho flashcli "$@" >> {log}\nexit {int(fails == "warm")}\n')
    python = script(
        folder / "python",
        f'#!/bin/sh\necho "$@" >> {log}\ncase "$*" in *venv*) mkdir -p {venv}/bin; cp $0 {made} {venv}/bin;; '
        f"*'[cuda]'|*'[all]') exit {int(fails == 'pip')};; esac\n",
    )
    # Not where a toolkit usually is, either: the tools of this machine alone, by links.
    for name in ("sh", "cp", "mkdir", "touch", "make", "echo"):
        if not (tools / name).exists():
            (tools / name).symlink_to(shutil.which(name))
    makefile = folder / "Makefile"
    makefile.write_text((ROOT / "Makefile").read_text().replace("/usr/local/cuda", str(folder / "cuda")))
    done = subprocess.run(
        ["make", "-f", makefile, f"VENV={venv}", f"PYTHON={python}", f"{venv}/.ready"],
        cwd=ROOT, env={"PATH": str(tools)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0 and (venv / ".ready").exists(), done.stderr
    return done.stdout, log.read_text().splitlines()[2:]  # a Python that is new enough, and the environment


TESTS_ALONE = ["-m pip install --quiet --editable .[test]"]


@pytest.mark.parametrize("there", [(), ("nvcc",)])
def test_set_up_without_a_driver_installs_what_the_cpu_needs_and_compiles_nothing(tmp_path, there):
    told, called = set_up(tmp_path, *there)
    assert called == TESTS_ALONE and "No driver here" in told


@pytest.mark.parametrize("fails", ["", "pip", "warm"])
@pytest.mark.parametrize(("there", "wanted"), [((), "cuda-bindings[all]"), (("nvcc",), "--editable .[cuda]")])
def test_set_up_beside_a_gpu_compiles_usual_kernels_in_the_background_and_never_fails(tmp_path, there, wanted, fails):
    told, called = set_up(tmp_path, "nvidia-smi", *there, fails=fails)
    assert called == [*TESTS_ALONE, f"-m pip install --quiet {wanted}", "flashcli warm --background"]
    assert ("could not be installed" in told) == (fails == "pip")


def test_skipped_tests_are_told_in_a_line_for_each_reason():
    skipped = [SimpleNamespace(longrepr=("x.py", 3, f"Skipped: no {what}")) for what in ("MPI", "GPU", "GPU")]
    assert reasons_of(skipped) == ["skipped    2: no GPU", "skipped    1: no MPI"]
