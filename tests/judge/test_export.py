"""flashcli as a submission: what it exports is judged by its own judge, and built as the course does."""

from __future__ import annotations

import json
import os
import subprocess

import pytest
from support import ROOT, flashcli

from flashcli.errors import InputOutputError
from flashcli.files import testcases
from flashcli.files.cut import cut
from flashcli.judge.export import WARM_UP, export
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem
from flashcli.terminal import parameters


@pytest.fixture
def exported(tmp_path):
    folder = tmp_path / "it's $HOME, in a folder with spaces"
    done = flashcli("export-hw4", folder, "--backend", "cpu")
    assert done.code == 0 and done.out.splitlines() == [str(folder / "hw4"), str(folder / "Makefile")]
    return folder


def test_it_is_accepted_by_the_judge(exported):
    done = flashcli("judge", ROOT / "testcases", "--case", "t01", "--exe", exported / "hw4", "--json", "-")
    assert json.loads(done.out)["cases"][0]["verdict"] == "accepted", done.out


def test_a_disk_that_fills_up_leaves_no_half_of_it(tmp_path, monkeypatch):
    def write(file: int, data: memoryview, offset: int, write=os.pwrite) -> int:
        if b".PHONY" in bytes(data):
            raise OSError(28, "No space left on device")
        return write(file, data, offset)

    monkeypatch.setattr(os, "pwrite", write)
    with pytest.raises(InputOutputError, match="no space left"):
        export(tmp_path / "new", "cpu", None)
    assert os.listdir(tmp_path / "new") == []


def test_make_hw4(exported, tmp_path):
    """In a copy, as a judge does it, and with another environment; a folder flashcli beside it is not taken for it."""
    copy = tmp_path / "copy"
    (copy / "flashcli").mkdir(parents=True)
    for name in ("__init__.py", "__main__.py"):
        (copy / "flashcli" / name).write_text("raise SystemExit(3)")
    for file in exported.iterdir():
        (copy / file.name).write_text(file.read_text().replace(" ".join(WARM_UP), " ".join(WARM_UP[:2])))
    clean = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    subprocess.run(["make", "--silent", "hw4"], cwd=copy, env=clean, check=True, capture_output=True)
    arguments = [copy / "hw4", ROOT / "testcases" / "t01.in", tmp_path / "t01.out"]
    done = subprocess.run(arguments, cwd=copy, env=clean, capture_output=True, text=True, check=True)
    assert done.stdout.startswith("(B, N, d): (2, 128, 32)\n")
    assert flashcli("compare", tmp_path / "t01.out", ROOT / "testcases" / "t01.ref").code == 0
    assert not list(copy.glob(".warm*"))


@pytest.mark.parametrize("sms", [78, 114, 132])
@pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
def test_making_it_compiles_all_that_the_thirty_cases_need(kernel, sms):
    """On each Hopper GPU there is: H20, H100 PCIe, and H100 SXM, H200 and GH200."""

    def builds(shapes):
        chunks = [(cut(shape), shape) for shape in shapes]
        problems = [Problem(by.batches, by.rows, shape.N, shape.d, sms=sms) for by, shape in chunks]
        return {(problem.d, kernel.tiling(problem)) for problem in problems if not kernel.refuses(problem)}

    needed = builds(case.shape for case in testcases.load(ROOT / "testcases"))
    assert builds(parameters.SHAPE.convert(shape, None, None) for shape in WARM_UP) >= needed


def test_the_kernel_is_chosen_when_it_is_exported(tmp_path):
    flashcli("export-hw4", tmp_path / "x", "--kernel", next(iter(KERNELS)))
    assert f"--kernel {next(iter(KERNELS))} " in (tmp_path / "x" / "hw4").read_text()


def test_what_is_there_stays(exported):
    flashcli("export-hw4", exported).assert_error(2, "is there already")
    flashcli("export-hw4", exported / "hw4" / "x").assert_error(73, "cannot create")


def test_what_contradicts_itself_is_not_written(tmp_path):
    done = flashcli("export-hw4", tmp_path / "hw4", "--backend", "cpu", "--kernel", "mma")
    done.assert_error(2, "for GPUs, not for the cpu backend")
    assert not (tmp_path / "hw4").exists()
