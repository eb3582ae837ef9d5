from __future__ import annotations

import resource
import subprocess

import numpy as np
import pytest
from support import command, environment, flashcli, input_bytes, random_qkv, read_floats, write_output
from tolerances import float64

from flashcli.asked.shape import Shape
from flashcli.commands.generate import DISTRIBUTIONS
from flashcli.files.distributions import draw


def test_what_it_prints_and_writes(tmp_path):
    done = flashcli("generate", "x.in", "--shape", "2,30,8", "--seed", 7, cwd=tmp_path)
    assert (done.code, done.err) == (0, "")
    assert done.out == "x.in: (B, N, d) = (2, 30, 8), uniform, seed 7, 5772 bytes\n"
    assert (tmp_path / "x.in").read_bytes() == input_bytes(draw(Shape(2, 30, 8), range(2), 7))


def test_the_help_says_what_every_distribution_is():
    lines = flashcli("generate", "--help").out.splitlines()
    for name, text in DISTRIBUTIONS.items():
        assert f"    {name:<10}{text}" in lines


def test_the_reference_is_the_float64_answer(tmp_path):
    done = flashcli("generate", tmp_path / "x.in", "--shape", "(3, 40, 8)", "--reference", tmp_path / "x.ref")
    assert done.code == 0
    want = float64(draw(Shape(3, 40, 8), range(3), 0)).astype(np.float32)
    np.testing.assert_array_equal(read_floats(tmp_path / "x.ref", (3, 40, 8)), want)


def test_input_and_reference_must_differ(tmp_path):
    path = tmp_path / "x.in"
    flashcli("generate", path, "--shape", "1,2,3", "--reference", path).assert_error(2, "same file")
    assert not path.exists()


def test_a_reference_that_cannot_be_written_leaves_no_input(tmp_path):
    flashcli("generate", tmp_path / "x.in", "--shape", "1,2,3", "--reference", tmp_path / "no" / "x.ref").assert_error(
        73
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "shape", ["1,2", "1,2,3,4", "a,b,c", "0,2,3", "1,-2,3", "1,2,257", "1,2,3.5", "1,3000000000,1"]
)
def test_an_impossible_shape_is_wrong_usage(tmp_path, shape):
    done = flashcli("generate", tmp_path / "x.in", "--shape", shape)
    assert done.code == 2
    assert "Invalid value for '--shape'" in done.err
    assert not list(tmp_path.iterdir())


def test_a_shape_too_large_for_memory_is_code_71(tmp_path):
    limit = (2 * 2**30,) * 2
    options = {"preexec_fn": lambda: resource.setrlimit(resource.RLIMIT_AS, limit)}
    flashcli("generate", tmp_path / "x.in", "--shape", "1,1000000,256", **options).assert_error(71)  # 3 GB
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "decode",
    [("4000000000,1000000,1,8",), ("1000000,1,1,8", "--lengths", 2147483647), ("1,1,4000000000,256",)],
    ids=str,
)
def test_what_paged_decode_needs_is_refused_before_memory_is_taken(tmp_path, decode):
    done = flashcli("generate", tmp_path / "x.safetensors", "--decode", *decode)
    done.assert_error(71, "out of memory: queries, block tables and a mark for each slot take")
    assert not list(tmp_path.iterdir())


def test_a_shape_too_large_for_the_disk_is_refused_at_once(tmp_path):
    done = flashcli("generate", tmp_path / "x.in", "--shape", "1000000,2147483647,256")  # 6 EB
    done.assert_error(74, "no space left on device")
    assert not list(tmp_path.iterdir())


def test_an_old_file_survives_a_failure(tmp_path):
    path = write_output(tmp_path / "x.in", random_qkv(1, 2, 3))
    before = path.read_bytes()
    assert flashcli("generate", path, "--shape", "1,2147483647,256", "--force").code == 74
    assert path.read_bytes() == before


@pytest.mark.parametrize("old", ["x.in", "x.ref"])
def test_nothing_is_overwritten_without_force(tmp_path, old):
    (tmp_path / old).write_text("precious")
    arguments = ["generate", "x.in", "--shape", "1,2,3", "--reference", "x.ref"]
    flashcli(*arguments, cwd=tmp_path).assert_error(2, f"'{old}' is there already.")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(old, "precious")]
    assert flashcli(*arguments, "--force", cwd=tmp_path).code == 0
    assert (tmp_path / old).read_bytes() != b"precious"


def test_devices_are_written_without_force():
    assert flashcli("generate", "/dev/null", "--shape", "1,2,3").code == 0


@pytest.mark.parametrize("name", ["-", "/dev/stdout"])
def test_to_stdout_with_the_report_on_stderr(tmp_path, name):
    want = input_bytes(draw(Shape(2, 30, 8), range(2), 0))
    arguments = [*command("generate"), name, "--shape", "2,30,8"]
    through_a_pipe = subprocess.run(arguments, env=environment(), capture_output=True)
    assert (through_a_pipe.returncode, through_a_pipe.stdout) == (0, want)
    assert through_a_pipe.stderr.decode() == "/dev/stdout: (B, N, d) = (2, 30, 8), uniform, seed 0, 5772 bytes\n"
    with open(tmp_path / "x.in", "wb") as file:
        assert subprocess.run(arguments, env=environment(), stdout=file).returncode == 0
    assert (tmp_path / "x.in").read_bytes() == want


def test_the_reference_alone_to_stdout(tmp_path):
    arguments = [*command("generate"), tmp_path / "x.in", "--shape", "2,30,8", "--reference", "-"]
    done = subprocess.run(arguments, env=environment(), capture_output=True)
    assert (done.returncode, len(done.stdout)) == (0, 2 * 30 * 8 * 4)
    assert (tmp_path / "x.in").exists()


def test_not_both_to_stdout(tmp_path):
    flashcli("generate", "-", "--shape", "1,2,3", "--reference", "-").assert_error(2, "named twice")
