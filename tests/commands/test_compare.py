from __future__ import annotations

import json
import os
import shlex
import subprocess

import numpy as np
import pytest
from support import command, environment, flashcli, random_qkv, write_input, write_output
from tolerances import float64, naive_fp32

QKV = random_qkv(3, 64, 32)


@pytest.fixture
def folder(tmp_path):
    """x.in with its answer in x.ref."""
    write_input(tmp_path / "x.in", QKV)
    write_output(tmp_path / "x.ref", float64(QKV))
    return tmp_path


def wrong(folder) -> np.ndarray:
    values = float64(QKV)
    values[1, 2, 3] = values[2, 63, 31] = 9
    write_output(folder / "got", values)
    return values


def test_a_match(folder):
    write_output(folder / "got", naive_fp32(QKV))
    done = flashcli("compare", "got", "x.ref", cwd=folder)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0] == "got and x.ref match: 0 of 6144 elements off by more than 0.0001 + 0.0001·|want|"
    assert [line.partition(":")[0] for line in lines[1:4]] == ["max abs error", "max rel error", "relative L2 error"]
    assert 0 < float(lines[3].partition(": ")[2]) < 1e-5
    assert lines[4] == "NaN or Inf: 0 in got, 0 in x.ref"
    got, want = (np.fromfile(folder / name, "<f4").astype(float).reshape(3, 64, 32) for name in ("got", "x.ref"))
    error = np.abs(got - want) / (1 + np.abs(want))
    worst = tuple(map(int, np.unravel_index(error.argmax(), error.shape)))
    assert lines[2] == f"max rel error: {error.max():.3e} of 1 + |want|"
    assert lines[5:] == [f"worst at (batch, row, column) = {worst}: got {got[worst]:.9g}, want {want[worst]:.9g}"]


def test_the_same_bytes_have_no_worst_place(folder):
    assert "worst" not in flashcli("compare", "x.ref", "x.ref", cwd=folder).out


def test_the_relative_error_alarms_nobody_where_all_is_right(tmp_path):
    """It is at most the tolerance if and only if the answer is yes, though a right answer be close to 0."""
    write_output(tmp_path / "want", np.array([1e-9, 1.0, 100.0]))
    write_output(tmp_path / "got", np.array([9e-5, 1.0, 100.0]))
    record = json.loads(flashcli("compare", "got", "want", "--json", "-", cwd=tmp_path).out)
    assert record["matches"] and 8e-5 < record["max_rel"] < record["tolerance"]


def test_a_mismatch_names_the_places(folder):
    wrong(folder)
    want = float64(QKV).astype(np.float32)
    done = flashcli("compare", "got", "x.ref", cwd=folder)
    assert (done.code, done.err) == (1, "")
    lines = done.out.splitlines()
    assert lines[0] == "got and x.ref DIFFER: 2 of 6144 elements off by more than 0.0001 + 0.0001·|want|"
    first = f"(batch, row, column) = (1, 2, 3): got 9, want {want[1, 2, 3]:.9g}"
    second = f"(batch, row, column) = (2, 63, 31): got 9, want {want[2, 63, 31]:.9g}"
    error = abs(want[1, 2, 3] - 9) / (1 + abs(want[1, 2, 3]))
    assert lines[5:] == [
        f"worst at {second if abs(want[2, 63, 31] - 9) / (1 + abs(want[2, 63, 31])) > error else first}",
        f"  off at {first}",
        f"  off at {second}",
    ]


def test_json(folder):
    wrong(folder)
    done = flashcli("compare", "--json", "-", folder / "got", folder / "x.ref")
    record = json.loads(done.out)
    assert done.code == 1
    assert (record["matches"], record["count"], record["mismatches"]) == (False, 6144, 2)
    assert [(place["batch"], place["row"], place["column"]) for place in record["places"]] == [(1, 2, 3), (2, 63, 31)]


def test_json_stays_json_with_nan(folder):
    values = float64(QKV)
    values[0, 0, 0] = np.nan
    write_output(folder / "got", values)
    done = flashcli("compare", "--json", "-", folder / "got", folder / "x.ref")
    record = json.loads(done.out, parse_constant=pytest.fail)
    assert record["got_nonfinite"] == 1 and record["places"][0]["got"] is None


@pytest.mark.parametrize(
    "make", [np.zeros_like, lambda want: np.broadcast_to(want.mean(axis=1, keepdims=True), want.shape), np.flip]
)
def test_plausible_nonsense_fails(folder, make):
    write_output(folder / "got", make(float64(QKV)))
    assert flashcli("compare", folder / "got", folder / "x.ref").code == 1


@pytest.mark.parametrize(("tolerance", "code"), [("1e-3", 1), ("0.5", 0)])
def test_the_tolerance_can_be_chosen(folder, tolerance, code):
    write_output(folder / "got", float64(QKV) + 0.3)
    assert flashcli("compare", folder / "got", folder / "x.ref", "--tolerance", tolerance).code == code


@pytest.mark.parametrize("how", [["--shape", "3,64,32"], ["--input", "x.in"]])
def test_the_shape_can_be_told(folder, how):
    wrong(folder)
    (folder / "x.ref").rename(folder / "other")
    done = flashcli("compare", "got", "other", *how, cwd=folder)
    assert "(batch, row, column) = (1, 2, 3)" in done.out


def test_without_a_shape_a_place_is_the_number_of_the_element(folder):
    wrong(folder)
    (folder / "x.ref").rename(folder / "other")
    done = flashcli("compare", "got", "other", cwd=folder)
    assert done.code == 1
    assert f"(batch, row, column) = (0, {(64 + 2) * 32 + 3}, 0)" in done.out


@pytest.mark.parametrize("content", [b"", bytes(4 * 6143), bytes(4 * 6144 + 1)])
def test_an_output_of_another_size_is_bad_input(folder, content):
    (folder / "got").write_bytes(content)
    flashcli("compare", folder / "got", folder / "x.ref").assert_error(65, f"has {len(content)} bytes")


def test_an_output_of_the_largest_shape_is_not_waited_for(folder):
    largest = "2147483647,2147483647,256"
    flashcli("compare", "x.ref", "x.ref", "--shape", largest, cwd=folder, timeout=20).assert_error(65, "bytes; an out")


@pytest.mark.parametrize(
    ("got", "want"), [("no", "x.ref"), ("x.ref", "no"), (".", "x.ref"), ("x.ref", "."), ("x.ref", "")]
)
def test_a_path_that_leads_to_no_file_is_bad_input(folder, got, want):
    flashcli("compare", got, want, cwd=folder).assert_error(65)


def test_a_missing_reference_beside_its_input_is_bad_input(folder):
    (folder / "x.ref").unlink()
    write_output(folder / "got", float64(QKV))
    flashcli("compare", folder / "got", folder / "x.ref").assert_error(65, "x.ref", "no such file")


@pytest.mark.parametrize("value", ["nan", "inf", "-1"])
def test_a_tolerance_is_a_finite_number(folder, value):
    assert flashcli("compare", folder / "got", folder / "want", "--tolerance", value).code == 2


@pytest.mark.parametrize("name", ["folder", "fifo"])
@pytest.mark.parametrize("shape", [[], ["--shape", "1,2,3"]], ids=["flat", "shape"])
def test_what_is_no_file_has_no_output(tmp_path, name, shape):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    path = tmp_path / name
    flashcli("compare", path, path, *shape).assert_error(65, f"{name}' is not a regular file.")


@pytest.mark.parametrize(("got", "want", "given"), [("-", "x.ref", "got"), ("got", "-", "x.ref")])
def test_one_of_the_files_can_be_stdin(folder, got, want, given):
    wrong(folder)
    options = {"env": environment(), "cwd": folder, "capture_output": True}
    line = command("compare", got, want, "--input", "x.in")
    through_a_pipe = subprocess.run(line, input=(folder / given).read_bytes(), **options)
    with open(folder / given, "rb") as file:
        from_a_file = subprocess.run(line, stdin=file, **options)
    errors = flashcli("compare", "got", "x.ref", "--input", "x.in", cwd=folder).out.splitlines()[1:4]
    for done in (through_a_pipe, from_a_file):
        assert (done.returncode, done.stderr) == (1, b"")
        assert done.stdout.decode().splitlines()[1:4] == errors


def test_stdin_can_be_read_only_once(folder):
    flashcli("compare", "-", "-", cwd=folder).assert_error(2, "named twice")
    flashcli("compare", "-", "x.ref", "--input", "-", cwd=folder).assert_error(2, "named twice")


def test_a_stdin_that_finds_no_room_is_an_output_error(folder):
    env = environment(TMPDIR="/dev/shm")
    limit = f"ulimit -f 1; exec {shlex.join(command('compare', '-', 'x.ref'))}"
    content = (folder / "x.ref").read_bytes()
    done = subprocess.run(["bash", "-c", limit], env=env, cwd=folder, capture_output=True, input=content)
    assert done.returncode == 74 and b"cannot keep what stdin gives in '/dev/shm'" in done.stderr


@pytest.mark.parametrize(("kind", "hint"), [("<f8", "are its numbers float64?"), ("<f2", "are its numbers float16?")])
def test_an_output_of_another_type_is_told_as_what_it_may_be(folder, kind, hint):
    float64(QKV).astype(kind).tofile(folder / "got")
    (done := flashcli("compare", "got", "x.ref", cwd=folder)).assert_error(65, "has")
    assert hint in done.err


def test_npy_files_are_told_as_such(folder):
    np.save(folder / "got.npy", float64(QKV).astype(np.float32))
    for arguments in (["compare", "got.npy", "x.ref"], ["run", "got.npy", "y"]):
        (done := flashcli(*arguments, cwd=folder)).assert_error(65, "got.npy")
        assert "write the bytes alone, by array.tofile(FILE)" in done.err
