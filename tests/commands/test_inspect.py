from __future__ import annotations

import json
import subprocess

import numpy as np
import pytest
from support import command, environment, flashcli, sparse_input, write_input, write_output

from flashcli.asked.shape import Shape
from flashcli.files.summary import course_bounds_broken


def values() -> np.ndarray:
    qkv = np.zeros((2, 3, 128, 32), np.float32)
    qkv[0, 0, 0, 0], qkv[1, 0, 5, 6] = -3, 2.5
    qkv[1, 1, 127, 31] = 1.25
    qkv[0, 2] = 0.5
    return qkv


def test_what_it_prints(tmp_path):
    done = flashcli("inspect", write_input(tmp_path / "x.in", values()))
    assert (done.code, done.err) == (0, "")
    assert done.out.splitlines() == [
        "(B, N, d): (2, 128, 32)",
        "size: 98316 bytes, as the header says",
        "Q: -3 to 2.5",
        "K: 0 to 1.25",
        "V: 0 to 0.5",
        "NaN or Inf: 0",
        "course bounds: kept",
    ]


def test_json_has_the_same(tmp_path):
    done = flashcli("inspect", "--json", "-", write_input(tmp_path / "x.in", values()))
    assert json.loads(done.out) == {
        "B": 2, "N": 128, "d": 32, "bytes": 98316, "Q_min": -3, "Q_max": 2.5, "K_min": 0, "K_max": 1.25,
        "V_min": 0, "V_max": 0.5, "nonfinite": 0, "place": "", "course_bounds_broken": [],
    }  # fmt: skip


def test_nan_and_inf_are_counted_and_the_first_is_named(tmp_path):
    qkv = values()
    qkv[0, 1, 3, 2], qkv[1, 2, 9, 9], qkv[1, 2, 9, 10] = np.inf, np.nan, -np.inf
    lines = flashcli("inspect", write_input(tmp_path / "x.in", qkv)).out.splitlines()
    assert lines[2:] == [
        "Q: -3 to 2.5",
        "K: 0 to inf",
        "V: -inf to 0.5",
        "NaN or Inf: 3, first inf in K at (batch, row, column) = (0, 3, 2)",
        "course bounds: broken by values outside [-3, 3]",
    ]


def test_json_stays_json_with_nothing_but_nan(tmp_path):
    done = flashcli("inspect", "--json", "-", write_input(tmp_path / "x.in", np.full((1, 3, 2, 2), np.nan, np.float32)))
    assert done.err == ""
    record = json.loads(done.out, parse_constant=pytest.fail)
    assert record["nonfinite"] == 12 and record["Q_min"] is None


def test_a_sparse_20_gigabyte_file_by_its_header(tmp_path):
    try:
        path = sparse_input(tmp_path / "x.in", 14000, 2048, 64)
    except OSError as error:
        pytest.skip(f"no sparse files here: {error}")
    done = flashcli("inspect", "--header-only", path)
    assert done.code == 0
    assert done.out.splitlines() == [
        "(B, N, d): (14000, 2048, 64)",
        "size: 22020096012 bytes, as the header says",
        "course bounds: broken by B*N*d not below 56000000",
    ]


@pytest.mark.parametrize(
    ("shape", "largest", "broken"),
    [
        ((2, 128, 32), 3.0, []),
        ((14000, 128, 32), 0, ["B*N*d not below 56000000"]),
        ((13600, 128, 32), 0, []),
        ((1, 128, 32), 0, ["B outside 2 to 14000"]),
        ((14001, 128, 64), 0, ["B outside 2 to 14000", "B*N*d not below 56000000"]),
        ((2, 32768, 64), 0, []),
        ((2, 65536, 64), 0, ["N not 128 * 2^k, k = 0..8"]),
        ((2, 129, 33), 3.1, ["N not 128 * 2^k, k = 0..8", "d neither 32 nor 64", "values outside [-3, 3]"]),
        ((500, 2048, 64), 0, ["B*N*d not below 56000000"]),  # the course's own t22
    ],
)
def test_the_bounds_of_the_course(shape, largest, broken):
    assert course_bounds_broken(Shape(*shape), largest) == broken


def test_of_stdin(tmp_path):
    path = write_input(tmp_path / "x.in", values())
    want = flashcli("inspect", path).out
    with open(path, "rb") as file:
        from_a_file = subprocess.run(command("inspect", "-"), env=environment(), stdin=file, capture_output=True)
    through_a_pipe = subprocess.run(
        command("inspect", "-"), env=environment(), input=path.read_bytes(), capture_output=True
    )
    for done in (from_a_file, through_a_pipe):
        assert (done.returncode, done.stdout.decode(), done.stderr) == (0, want, b"")


def test_a_stdin_that_is_cut_off_is_bad_input(tmp_path):
    content = write_input(tmp_path / "x.in", values()).read_bytes()[:-1]
    done = subprocess.run(command("inspect", "-"), env=environment(), input=content, capture_output=True)
    assert done.returncode == 65 and b"'/dev/stdin' is 1 bytes too short" in done.stderr


def test_an_output_is_shown_by_the_shape_that_is_said(tmp_path):
    out = np.linspace(-1, 2, 2 * 5 * 4, dtype=np.float32).reshape(2, 5, 4)
    out[1, 3, 2] = np.nan
    path = write_output(tmp_path / "x.out", out)
    assert flashcli("inspect", path, "--shape", "2,5,4").out.splitlines() == [
        "(B, N, d): (2, 5, 4)",
        "size: 160 bytes, as an output of this shape has",
        "O: -1 to 2",
        "NaN or Inf: 1, first nan at (batch, row, column) = (1, 3, 2)",
    ]
    record = json.loads(flashcli("inspect", path, "--shape", "2,5,4", "--json", "-").out)
    assert (record["O_max"], record["nonfinite"], record["bytes"]) == (2, 1, 160)
    flashcli("inspect", path, "--shape", "2,5,5").assert_error(65, "an output of (B, N, d) = (2, 5, 5) has 200")
    flashcli("inspect", path, "--shape", "2,5,4", "--header-only").assert_error(2, "has no header")
