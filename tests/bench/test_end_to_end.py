"""Timing whole commands: on a tiny case, without the C++ program; and what is said where something is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest
from support import ROOT, Finished, python, random_qkv, script, write_input

from bench import end_to_end, views
from bench.records import read
from bench.rows import WholeCommand
from flashcli.asked.shape import Shape
from flashcli.compiler.compiler import find_nvcc
from flashcli.errors import BadInput, FlashError
from flashcli.measure import race

KERNEL = [
    ROOT / "cuda" / name
    for name in (
        "attention/12_o_in_registers.cu",
        "attention/attention.cuh",
        "attention/arguments.h",
        "bias.cuh",
        "common.cuh",
        "numbers.cuh",
        "packed.cuh",
    )
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cases").mkdir()
    write_input(tmp_path / "cases" / "tiny.in", random_qkv(2, 16, 8))
    return tmp_path / "cases"


def run(folder: Path, *options: object) -> Finished:
    return python("-m", "bench.end_to_end", "--folder", folder, *options)


def test_a_table_and_a_record(folder, tmp_path):
    path = tmp_path / "record.json"
    done = run(folder, "--backend", "cpu", "--case", "tiny", "--runs", 2, "--json", path)
    assert (done.code, done.err) == (0, "tiny done\n")
    record = read(path.read_text())
    assert [row.contender for row in record.rows] == ["run", "run --serial"]
    for row in record.rows:
        assert (row.case, row.shape, row.runs) == ("tiny", Shape(2, 16, 8), 2)
        assert 0 < row.computation < row.total < row.max + 0.02  # the process's start is known to 0.01 s
        assert row.min <= row.seconds <= row.max
        assert 10 < row.peak_mib < 1000
    assert record.circumstances["threads"] and record.circumstances["date"]
    assert record.circumstances["command"] == (
        f"python -m bench.end_to_end --folder {folder} --backend cpu --case tiny --runs 2"
    )
    assert done.out.startswith(views.VIEWS["end_to_end"](record.rows))


def test_the_table_compares_the_first_with_the_last():
    times = {"seconds": 0.2, "min": 0.1, "max": 0.5, "runs": 10, "peak_mib": 99.6}
    run = WholeCommand(case="t10", B=10, N=2048, d=64, contender="run", device_mib=7.1, **times)
    hw4 = replace(run, contender="hw4 (C++)", seconds=0.4, device_mib=None)
    large = replace(run, case="20 GB", B=1, N=2, d=3, device_mib=None)
    assert views.VIEWS["end_to_end"]([run, hw4, large]).splitlines() == [
        "| case | (B, N, d) | run, s | hw4 (C++), s | run over hw4 (C++) | peak memory, MiB | of the GPU's |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        "| t10 | (10, 2048, 64) | 0.20 (0.10 to 0.50) | 0.40 (0.10 to 0.50) | 0.50x | 100 / 100 | 7 |",
        "| 20 GB | (1, 2, 3) | 0.20 (0.10 to 0.50) |  |  | 100 |  |",
    ]


def test_a_missing_case_is_generated(tmp_path):
    (tmp_path / "manifest.toml").write_text("[small]\nshape = [2, 8, 4]\nseed = 3\n")
    assert run(tmp_path, "--backend", "cpu", "--case", "small", "--runs", 1).code == 0
    assert (tmp_path / "large" / "small.in").stat().st_size == 12 + 3 * 2 * 8 * 4 * 4


def test_a_large_case(tmp_path):
    case = end_to_end.zeros(tmp_path, 1)
    assert case.is_ready() and 1e9 <= case.input.stat().st_size < 1.01e9
    assert case.input.stat().st_blocks < 100  # sparse


def test_a_case_that_there_is_not(folder):
    run(folder, "--backend", "cpu", "--case", "t99").assert_error(65, "there is no case t99")


@pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc")
def test_the_homeworks_program_builds_in_a_folder_of_its_own(tmp_path):
    for file in (ROOT / "testcases" / "hw4" / "hw4.cu", ROOT / "testcases" / "hw4" / "Makefile", *KERNEL):
        shutil.copy(file, tmp_path)
    path = {"PATH": f"{find_nvcc().parent}{os.pathsep}{os.environ['PATH']}"}
    subprocess.run(["make", "ARCH=sm_80"], cwd=tmp_path, env={**os.environ, **path}, check=True, capture_output=True)
    assert subprocess.run([tmp_path / "hw4"], capture_output=True).returncode == 2  # it wants two files


def test_a_program_that_is_not_built(folder):
    run(folder, "--case", "tiny", "--hw4", folder / "hw4").assert_error(65, "hw4' is not there.")


def test_a_program_that_fails_ends_the_race(folder, tmp_path):
    broken = script(tmp_path / "broken", "#!/bin/sh\necho no device\nexit 3\n")
    with pytest.raises(FlashError, match="broken failed: no device"):
        race.succeed([broken])


def test_an_output_that_differs_ends_the_race(folder, tmp_path):
    [case] = end_to_end.load(folder)
    zeros = script(tmp_path / "zeros", '#!/bin/sh\nhead -c 1024 /dev/zero > "$2"\n')
    commands = end_to_end.contenders("cpu", zeros) | {"zeros": [str(zeros)]}
    with pytest.raises(FlashError, match="DIFFER"):
        list(end_to_end.rows_of(case, commands, 1, tmp_path))


def test_each_command_follows_each_other_one(folder, tmp_path):
    [case] = end_to_end.load(folder)
    log = tmp_path / "log"
    commands = {
        name: [str(script(tmp_path / name, f'#!/bin/sh\necho {name} >> {log}\nhead -c 1024 /dev/zero > "$2"\n'))]
        for name in ("run", "other", "third")
    }
    rows = list(end_to_end.rows_of(case, commands, 4, tmp_path))
    assert [(row.contender, row.runs) for row in rows] == [("run", 4), ("other", 4), ("third", 4)]
    first = ["run", "other", "third"]
    turns = [*first, *first, "other", "third", "run", "third", "run", "other", *first]  # the first is not timed
    assert log.read_text().split() == turns


def test_the_contenders_on_a_gpu(tmp_path):
    with pytest.raises(BadInput):
        end_to_end.contenders("cuda", tmp_path / "hw4")
    (tmp_path / "hw4").touch()
    assert list(end_to_end.contenders("cuda", tmp_path / "hw4")) == ["run", "run --serial", "hw4 (C++)"]
