"""`flashcli run` as a user types it: what it prints, writes and refuses. How it stops: test_faults.py."""

from __future__ import annotations

import json
import os
import re
import resource
import shlex
import stat
import subprocess
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support import (
    SOON,
    Finished,
    command,
    environment,
    flashcli,
    random_qkv,
    read_floats,
    sparse_input,
    write_input,
)
from tolerances import assert_accurate

from flashcli.files.verify import reference

QKV = random_qkv(3, 100, 32)


def run(given: Path, out: Path | str, *options: object, **popen: object) -> Finished:
    return flashcli("run", given, out, "--backend", "cpu", *options, **popen)


def result(out: Path) -> np.ndarray:
    return read_floats(out, QKV[:, 0].shape)


# What it prints and writes


def test_the_output_is_right_and_nothing_is_on_stderr(given, out):
    done = run(given, out)
    assert (done.code, done.err) == (0, "")
    assert_accurate(result(out), QKV)
    assert os.listdir(out.parent) == ["x.out"]


def test_stdin_and_stdout_are_as_good_as_files(given, out):
    run(given, out)
    done = subprocess.run(
        command("run", "-", "-", "--backend", "cpu"), env=environment(), input=given.read_bytes(), capture_output=True
    )
    assert done.returncode == 0 and done.stdout == out.read_bytes()
    assert done.stderr.startswith(b"(B, N, d): (3, 100, 32)\n")


def test_the_first_five_lines_are_those_of_the_report(given, out):
    lines = run(given, out).out.splitlines()
    assert lines[0] == "(B, N, d): (3, 100, 32)"
    for line, label in zip(lines[1:5], ["Total", "Input", "Computation", "Output"], strict=True):
        assert re.fullmatch(rf"{label} Time: \d+\.\d{{3}} seconds", line)
    assert re.fullmatch(r"backend: cpu, NumPy \S+, \d+ threads? \(Br=192, Bc=512\)", lines[5])
    assert len(lines) == 6


def test_json_is_the_same_as_one_object(given, out):
    record = json.loads(run(given, out, "--json", "-", "--causal", "--scale", 0.5, "--threads", 1).out)
    assert [record[name] for name in ("B", "N", "d", "backend", "causal", "scale", "threads")] == [
        3, 100, 32, "cpu", True, 0.5, 1
    ]  # fmt: skip
    assert 0 < record["computation"] < record["total"] < 100
    assert record["input"] >= 0 and record["output"] >= 0


def test_total_time_includes_the_start_of_python(given, out):
    start = time.monotonic()
    record = json.loads(run(given, out, "--json", "-", cold=True).out)
    elapsed = time.monotonic() - start
    assert 0.3 * elapsed < record["total"] <= elapsed + 0.02


@pytest.mark.parametrize(
    ("options", "causal", "scale"), [(["--causal"], True, None), (["--scale", "0.01"], False, 0.01)]
)
def test_options_reach_the_computation(given, out, options, causal, scale):
    assert run(given, out, *options).code == 0
    assert_accurate(result(out), QKV, causal, scale)


def test_many_chunks_come_out_in_their_places(tmp_path, out):
    qkv = random_qkv(40, 64, 256)  # five chunks or so
    qkv = np.concatenate([qkv] * 10)
    qkv[:, 2] += np.arange(400, dtype=np.float32)[:, None, None]  # each batch differs from the others
    given = write_input(tmp_path / "many.in", qkv)
    assert run(given, out).code == 0
    got = read_floats(out, (400, 64, 256))
    for b in (0, 39, 200, 399):
        assert_accurate(got[b : b + 1], qkv[b : b + 1])
    np.testing.assert_allclose(got.mean(axis=(1, 2)), np.arange(400), atol=1)


@pytest.mark.parametrize("option", [["--serial"], ["--threads", "1"]])
def test_overlap_and_threads_change_no_more_than_rounding(given, out, option):
    assert run(given, out, *option).code == 0
    assert_accurate(result(out), QKV)


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
def test_one_warning_names_the_first_place_that_is_not_finite(tmp_path, out, value):
    qkv = QKV.copy()
    qkv[1, 1, 7, 3] = float(value)
    qkv[2] = np.nan
    given = write_input(tmp_path / "nan.in", qkv)
    done = run(given, out)
    assert done.code == 0
    assert done.err == (
        f"Warning: {given} holds a value that is not finite, first {value} in K at (batch, row, column) = (1, 7, 3); "
        "IEEE rules apply.\n"
    )
    assert np.isfinite(result(out)[0]).all() and np.isnan(result(out)[2]).all()


@pytest.mark.parametrize("kernel", [[], ["--kernel", "sequential"]], ids=["cpu", "sequential"])
def test_a_finite_input_has_a_finite_answer_or_a_warning(tmp_path, out, kernel):
    qkv = QKV.copy()
    qkv[1, :2] *= 1e20
    given = write_input(tmp_path / "huge.in", qkv)
    done = run(given, out, *kernel)
    assert done.code == 0
    if not kernel:
        assert done.err == ""
        assert_accurate(result(out)[[0, 2]], qkv[[0, 2]])
        np.testing.assert_allclose(result(out)[1], reference(qkv[1]), rtol=0, atol=1e-5)
    else:
        row, column = np.argwhere(~np.isfinite(result(out)[1]))[0]
        assert done.err == (
            f"Warning: the answer to {given} is not finite, first {result(out)[1, row, column]} at "
            f"(batch, row, column) = (1, {row}, {column}), though all it holds is: float32 has no room for its scores "
            "or sums.\n"
        )


def test_finite_values_whose_sum_overflows_are_no_cause_for_warning(tmp_path, out):
    qkv = QKV.copy()
    qkv[:, 2] = 3e38
    done = run(write_input(tmp_path / "large.in", qkv), out)
    assert (done.code, done.err) == (0, "")


# Where it writes to


def test_an_old_output_is_replaced(given, out):
    out.write_text("old")
    assert run(given, out).code == 0
    assert_accurate(result(out), QKV)


def test_a_fifo_gets_the_same_bytes(given, out):
    run(given, out)
    fifo = out.with_name("fifo")
    os.mkfifo(fifo)
    received = []
    reader = threading.Thread(target=lambda: received.append(fifo.read_bytes()))
    reader.start()
    done = run(given, fifo)
    reader.join(timeout=30)
    assert done.code == 0
    assert received == [out.read_bytes()]
    assert stat.S_ISFIFO(fifo.stat().st_mode)


def test_stdout_can_be_the_output(given, out):
    run(given, out)
    done = subprocess.run(
        command("run", given, "/dev/stderr", "--backend", "cpu"), env=environment(), capture_output=True, timeout=60
    )
    assert done.returncode == 0
    assert done.stderr == out.read_bytes()


@pytest.mark.parametrize(
    "line", ["echo before >log; {run} >>log; echo after >>log", "(echo before; {run}; echo after) >log"]
)
def test_what_is_open_already_is_written_through(given, out, line):
    run(given, out)
    call = shlex.join(command("run", given, "/dev/stdout", "--backend", "cpu"))
    subprocess.run(["sh", "-c", line.format(run=call)], cwd=given.parent, env=environment(), timeout=60, check=True)
    assert (given.parent / "log").read_bytes() == b"before\n" + out.read_bytes() + b"after\n"


@pytest.mark.parametrize("kind", ["a deleted file", "memory"])
def test_an_open_file_without_a_name_gets_the_same_bytes(given, out, kind):
    run(given, out)
    if kind == "memory":
        if not hasattr(os, "memfd_create"):
            pytest.skip("this system has no files in memory")
        file = os.memfd_create("answer")
    else:
        file = os.open(given.with_name("deleted"), os.O_RDWR | os.O_CREAT)
        given.with_name("deleted").unlink()
    before = sorted(os.listdir(given.parent))
    assert run(given, f"/dev/fd/{file}", pass_fds=[file]).code == 0
    assert os.pread(file, 10**6, 0) == out.read_bytes()
    assert sorted(os.listdir(given.parent)) == before
    os.close(file)


def test_a_reader_that_leaves_is_an_output_error(tmp_path, out):
    fifo = out.with_name("fifo")
    os.mkfifo(fifo)
    given = write_input(tmp_path / "large.in", random_qkv(20, 500, 64))  # more than a pipe holds
    reader = threading.Thread(target=lambda: fifo.open("rb").read(1))
    reader.start()
    done = run(given, fifo)
    reader.join(timeout=30)
    done.assert_error(74, "cannot write", "broken pipe")


def test_dev_null_takes_everything(given):
    assert run(given, "/dev/null").code == 0
    assert stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_a_full_device_is_an_output_error(given):
    done = run(given, "/dev/full")
    done.assert_error(74, "cannot write '/dev/full'", "no space left on device")
    assert done.out == ""


def test_a_missing_folder_cannot_be_written(given, tmp_path):
    run(given, tmp_path / "nowhere" / "x.out").assert_error(73, "nowhere", "no such file or directory")


def test_a_folder_cannot_be_the_output(given, tmp_path):
    run(given, tmp_path).assert_error(73, "it is a folder")


@pytest.mark.parametrize("arguments", [[""], ["folder/"], ["x.out", "--trace", ""], ["x.out", "--trace", "folder/"]])
def test_a_path_that_names_no_file_is_refused_before_the_work(given, tmp_path, monkeypatch, arguments):
    monkeypatch.chdir(tmp_path)
    run(given, *arguments).assert_error(73, f"cannot write {arguments[-1]!r}: it names no file.")
    assert os.listdir(tmp_path) == [given.name]


@pytest.mark.parametrize("name", ["x.in", "hard", "soft", "sub/../x.in"])
def test_the_input_is_never_overwritten(given, tmp_path, name):
    os.link(given, tmp_path / "hard")
    os.symlink(given, tmp_path / "soft")
    (tmp_path / "sub").mkdir()
    before = given.read_bytes()
    run(given, tmp_path / name).assert_error(2, "same file")
    assert given.read_bytes() == before


def test_a_read_only_folder_is_refused(given, out, ordinary_user):
    out.parent.chmod(0o555)
    run(given, out, **ordinary_user).assert_error(77, "results", "permission denied")
    assert not list(out.parent.iterdir())


def test_a_write_protected_output_is_refused(given, out, ordinary_user):
    out.write_text("old")
    out.chmod(0o444)
    run(given, out, **ordinary_user).assert_error(77, "x.out", "permission denied")
    assert out.read_text() == "old"


def test_an_unreadable_input_is_refused(given, out, ordinary_user):
    given.chmod(0)
    run(given, out, **ordinary_user).assert_error(77, "cannot read", "permission denied")
    assert not out.exists()


def test_the_output_is_tried_before_anything_is_computed(tmp_path):
    given = sparse_input(tmp_path / "long.in", 1, 200_000, 64)  # would take minutes
    start = time.monotonic()
    run(given, tmp_path / "nowhere" / "x.out").assert_error(73)
    assert time.monotonic() - start < SOON


# What it refuses


def test_a_foreign_file_leaves_the_old_output(tmp_path, out):
    out.write_text("old")
    given = tmp_path / "text.in"
    given.write_text("This is not an input file, is it?")
    run(given, out).assert_error(65, "text.in", "not an input file")
    assert out.read_text() == "old"


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--scale", "nan"], "must be finite"),
        (["--scale", "inf"], "must be finite"),
        (["--scale", "1e39"], "must be finite"),  # no float32 holds it
        (["--scale", "-2.36e38"], "must be finite, from -2.3587e+38 to 2.3587e+38."),  # nor this times log2(e)
        (["--scale", "x"], "not a valid float"),
        (["--threads", "0"], "x>=1"),
        (["--trace", "-"], "names a file"),
        (["--device", "-1"], "x>=0"),
        (["--kernel", "nonesuch"], "Invalid value for '--kernel'"),
        (["--backend", "tpu"], "Invalid value for '--backend'"),
        (["--nonesuch"], "No such option"),
        (["one", "too", "many"], "unexpected extra argument"),
    ],
)
def test_wrong_usage(given, out, options, complaint):
    done = flashcli("run", given, out, *options)
    assert done.code == 2
    assert complaint in done.err and "--help" in done.err and "Traceback" not in done.err
    assert not out.exists()


@pytest.mark.parametrize("options", [["--kernel", "q_in_registers"], ["--device", "0"], ["--precision", "fp16"]])
def test_what_only_a_gpu_has_is_refused_on_the_cpu(given, out, options):
    run(given, out, *options).assert_error(2)
    assert not out.exists()


@pytest.mark.parametrize(
    "options", [["--backend", "cuda"], ["--kernel", "sequential"], ["--kernel", "mma"], ["--device", "0"]]
)
def test_threads_are_refused_for_what_has_none_to_choose(given, out, options):
    done = flashcli("run", given, out, "--threads", 4, *options)
    done.assert_error(2, "--threads is for the cpu backend")
    assert not out.exists()


def test_too_little_memory_is_said_with_its_own_code(tmp_path, out):
    given = sparse_input(tmp_path / "large.in", 1, 2_000_000, 256)  # one batch: 6 GB
    limit = (3 * 2**30,) * 2
    done = run(given, out, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, limit))
    done.assert_error(71, "out of memory")
    assert not list(out.parent.iterdir())


@pytest.mark.parametrize("victim", ["input", "output"])
def test_a_trace_replaces_neither_input_nor_output(given, out, victim):
    flashcli("run", given, out)
    path = given if victim == "input" else out
    before = path.read_bytes()
    flashcli("run", given, out, "--trace", path).assert_error(2, "named twice")
    assert path.read_bytes() == before


def test_a_trace_that_cannot_be_written_is_told_before_computing(given, out, tmp_path):
    flashcli("run", given, out, "--trace", tmp_path / "missing" / "t.json").assert_error(73, "t.json")
    assert not out.exists()
