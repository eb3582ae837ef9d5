"""`flashcli judge` on flashcli itself. How it judges the programs of others, tests/judge/ says."""

from __future__ import annotations

import re
import shutil
import signal
import subprocess
import sys

import pytest
from conftest import until
from support import ROOT, command, environment, flashcli, random_qkv, script, write_input, write_output
from tolerances import float64

from flashcli.cli import group
from flashcli.errors import BackendUnavailable

LINE = r"{name}  \(2, 128, {d}\) +\d+\.\d\d s  accepted"


def test_its_own_answers_are_accepted():
    done = flashcli("judge", ROOT / "testcases", "--backend", "cpu", "--case", "t01", "--case", "t02")
    assert (done.code, done.err) == (0, "")
    backend, first, second, summary = done.out.splitlines()
    assert backend.startswith("backend: cpu, NumPy ")
    assert re.fullmatch(LINE.format(name="t01", d=32), first)
    assert re.fullmatch(LINE.format(name="t02", d=64), second)
    assert re.fullmatch(r"2 of 2 accepted, \d+\.\d\d s in all", summary)


def test_a_machine_without_a_gpu_is_told_once(no_pycuda):
    done = flashcli("judge", ROOT / "testcases", "--case", "t01", "--case", "t02")
    assert done.code == 0
    assert (done.out + done.err).count("Notice: no usable GPU, computing on the CPU") == 1


def test_cases_are_generated_on_first_use(tmp_path):
    shutil.copy(ROOT / "testcases" / "manifest.toml", tmp_path)
    assert flashcli("judge", tmp_path, "--backend", "cpu", "--case", "t03").code == 0
    assert (tmp_path / "large" / "t03.in").read_bytes() == (ROOT / "testcases" / "t03.in").read_bytes()


def test_a_wrong_reference_is_a_wrong_answer(tmp_path):
    qkv = random_qkv(2, 30, 8)
    write_input(tmp_path / "a.in", qkv)
    write_output(tmp_path / "a.ref", float64(qkv)[::-1])
    done = flashcli("judge", tmp_path, "--backend", "cpu")
    assert done.code == 1
    assert "wrong answer: 480 of 480 elements, " in done.out
    assert "first at (batch, row, column) = (0, 0, 0)" in done.out
    assert done.out.splitlines()[-1].startswith("0 of 1 accepted, ")


@pytest.mark.parametrize("option", [["--backend", "cuda"], ["--kernel", "wgmma"]])
def test_a_backend_that_is_missing_ends_it_at_once(tmp_path, no_pycuda, option):
    for name in "ab":
        write_input(tmp_path / f"{name}.in", random_qkv(1, 8, 4))
    done = flashcli("judge", tmp_path, *option)
    done.assert_error(69, "there is no NVIDIA driver here")
    assert not done.out


def test_a_folder_named_flashcli_where_it_is_called_is_not_judged(tmp_path):
    (tmp_path / "flashcli").mkdir()
    (tmp_path / "flashcli" / "__init__.py").touch()
    (tmp_path / "flashcli" / "__main__.py").write_text("raise SystemExit(3)")
    arguments = ["judge", ROOT / "testcases", "--backend", "cpu", "--case", "t01"]
    command = [sys.executable, "-P", "-m", "flashcli", *map(str, arguments)]
    done = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_flashcli_is_found_where_only_the_working_directory_has_it():
    """A checkout that is not installed."""
    done = flashcli("judge", "--backend", "cpu", "--case", "t01", cwd=ROOT, env={"PYTHONPATH": ""})
    assert done.code == 0, done.out


def test_without_cases_it_says_where_there_are_some(tmp_path):
    for place in (".", "nowhere"):
        done = flashcli("judge", place, cwd=tmp_path)
        done.assert_error(65)
        assert "the thirty cases" in done.err and "flashcli generate" in done.err


def test_the_thirty_cases_are_there_wherever_flashcli_is(tmp_path):
    for _ in range(2):  # then the folder is there, but has no manifest
        assert flashcli("judge", "testcases", "--backend", "cpu", "--case", "t01", cwd=tmp_path).code == 0
    made = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert made == [tmp_path / "testcases" / "large" / "t01.in"]
    assert made[0].read_bytes() == (ROOT / "testcases" / "t01.in").read_bytes()


def test_it_needs_linux(monkeypatch):
    monkeypatch.setattr(sys, "platform", "darwin")
    with (
        pytest.raises(BackendUnavailable, match="needs Linux"),
        group.make_context("flashcli", ["judge", "nowhere"]) as context,
    ):
        group.invoke(context)


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["nowhere"], 65, "'nowhere' is not a folder of test cases"),
        (["."], 65, "neither a manifest.toml nor any .in file"),
        ([ROOT / "testcases", "--case", "t01", "--case", "t99"], 2, "there is no case t99"),
        ([ROOT / "testcases", "--build", "make"], 2, "--build is for the programs of --exe"),
        ([ROOT / "testcases", "--exe", "./x", "--backend", "cpu"], 2, "for flashcli itself"),
        ([ROOT / "testcases", "--exe", "./x", "--kernel", "q_in_registers"], 2, "for flashcli itself"),
    ],
)
def test_what_it_refuses(tmp_path, arguments, code, complaint):
    flashcli("judge", *arguments, cwd=tmp_path).assert_error(code, complaint)


@pytest.mark.parametrize(
    "option",
    [
        *(["--time-limit", seconds] for seconds in ("0", "nan", "inf")),
        *(["--tolerance", number] for number in ("-1", "nan")),
        ["--backend", "tpu"],
    ],
)
def test_wrong_usage(option):
    assert flashcli("judge", *option).code == 2


def test_a_bad_manifest_is_bad_input(tmp_path):
    (tmp_path / "manifest.toml").write_text("[t01]\nseed = 1\n")
    flashcli("judge", tmp_path).assert_error(65, "is not a manifest of test cases")


def test_a_folder_that_cannot_be_read_is_no_permission(tmp_path, ordinary_user):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0)
    flashcli("judge", locked, **ordinary_user).assert_error(77, "locked", "permission denied")


def test_ctrl_c_ends_it_and_the_program(tmp_path, survivors):
    write_input(tmp_path / "a.in", random_qkv(1, 8, 4))
    exe = script(tmp_path / "slow", "#!/bin/sh\nexec sleep 60\n")
    judge = subprocess.Popen(
        command("judge", tmp_path, "--exe", exe),
        env=environment(TMPDIR=str(tmp_path)),
        stderr=subprocess.PIPE,
    )
    assert until(survivors)
    judge.send_signal(signal.SIGINT)
    _, stderr = judge.communicate(timeout=20)
    assert judge.returncode == 130
    assert b"Error: interrupted" in stderr and b"Traceback" not in stderr
    assert not survivors()
