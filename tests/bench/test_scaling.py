"""Timing runs on several GPUs: on a tiny case with one process, without any GPU; and the table."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import python, script

from bench import scaling, views
from bench.records import read
from bench.rows import PlainFiles, Scaled
from flashcli.asked.shape import Shape
from flashcli.errors import FlashError
from flashcli.files.fileformat import InputFile


def test_a_table_and_a_record(tmp_path):
    path = tmp_path / "record.json"
    done = python(
        "-m", "bench.scaling", "--backend", "cpu", "--shape", "2,20,8", "--bytes", "3M",
        "--count", "1", "--runs", "1", "--folder", tmp_path, "--json", path,
    )  # fmt: skip
    assert (done.code, done.err) == (0, "compute done\nfiles done\n")
    record = read(path.read_text())
    assert [(row.case, row.contender, row.count) for row in record.rows] == [
        ("compute", "alone", 1), ("files", "alone", 1), ("files", "plain files", 1)
    ]  # fmt: skip
    for row in record.rows[:2]:
        assert 0 < row.busy <= row.pipeline < row.seconds
        assert row.min <= row.seconds <= row.max
    assert all(row.reads > 0 and row.writes > 0 for row in record.rows)
    assert done.out.startswith(views.VIEWS["scaling"](record.rows))
    assert [file.name for file in tmp_path.iterdir()] == ["record.json"]


def test_the_contenders_on_gpus():
    found = list(scaling.contenders("cuda", (1, 2)))
    assert [(name, count) for name, count, _ in found][:2] == [("--devices", 1), ("--devices", 2)]
    assert found[1][2][-2:] == ["--devices", "0,1"]


def test_other_bytes_end_the_race(tmp_path, monkeypatch):
    programs = [script(tmp_path / name, f'#!/bin/sh\necho {name} > "$2"\n') for name in ("one", "two")]
    monkeypatch.setattr(scaling, "contenders", lambda *_: [(path.name, 1, [str(path)]) for path in programs])
    with pytest.raises(FlashError, match="two gives other bytes"):
        list(scaling.rows_of("", Shape(1, 1, 1), tmp_path / "x.in", "cpu", (1,), 1))


def test_a_filled_input_is_one_whose_batches_differ(tmp_path: Path):
    shape = Shape(50, 2048, 64)
    scaling.fill(tmp_path / "x.in", shape)
    with InputFile(tmp_path / "x.in") as file:
        assert file.shape == shape
        assert [file.read(range(b, b + 1))[0, 0, 0, 0] for b in range(50)] == pytest.approx(
            [b / 500 for b in range(50)]
        )


def test_the_table_says_how_many_times_as_fast():
    about = {"case": "compute", "B": 8, "N": 65536, "d": 64, "reads": 5.0, "writes": 2.0}
    times = {"busy": 0.8, "pipeline": 1.0, "seconds": 2.0, "min": 2.0, "max": 2.0, "runs": 3, "total": 2.0}
    phases = {"input": 0.1, "computation": 0.8, "output": 0.1}
    one = Scaled(**about, **times, **phases, contender="--devices", count=1)
    two = replace(one, count=2, **{name: times[name] / 2 for name in ("busy", "pipeline", "seconds")})
    rows = [one, two, PlainFiles(**about, contender="plain files", count=1)]
    assert views.VIEWS["scaling"](rows).splitlines()[2:] == [
        "| (8, 65536, 64) | `--devices` | 1 | 0.800 (1.00x) | 1.000 (1.00x) | 2.000 (1.00x) | 5.0 | 2.0 |",
        "| (8, 65536, 64) | `--devices` | 2 | 0.400 (2.00x) | 0.500 (2.00x) | 1.000 (2.00x) | 5.0 | 2.0 |",
        "| (8, 65536, 64) | `plain files` | 1 |  |  |  | 5.0 | 2.0 |",
    ]
