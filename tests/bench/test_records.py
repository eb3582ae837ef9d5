"""Records: rows that are written and read again, each as what it was, and their tables."""

from __future__ import annotations

import dataclasses
import json

import pytest
from support import ROOT

from bench import rows, views
from bench.records import read
from flashcli.measure import machine, records
from flashcli.measure.rows import Failure, Profiled, Timed

ABOUT = {"case": "t10", "B": 10, "N": 2048, "d": 64, "contender": "mma"}
KEPT = sorted((ROOT / "cuda" / "records").glob("*.json"))


@pytest.mark.parametrize("kind", rows.KINDS)
@pytest.mark.parametrize("everything", [True, False])
def test_a_row_is_read_as_the_kind_that_was_written(kind, everything):
    fields = dataclasses.fields(kind)
    some = {field.name: 1 for field in fields if everything or field.default is dataclasses.MISSING}
    row = kind(**some | ABOUT)
    again = rows.read(json.loads(json.dumps(row.written())))
    assert again == row and type(again) is kind


@pytest.mark.parametrize("found", [{}, ABOUT, ABOUT | {"error": "no", "color": 1}, {"error": "no"}])
def test_what_is_no_row_is_refused(found):
    with pytest.raises(ValueError, match="no kind of row"):
        rows.read(found)


@pytest.mark.parametrize("path", KEPT, ids=lambda path: path.name)
def test_the_records_that_are_kept_keep_their_keys(path):
    kept = json.loads(path.read_text())
    assert read(path.read_bytes()).written() == kept


def test_neighbours_are_told_apart_by_what_came_of_them():
    timed = {"seconds": 2e-3, "min": 1e-3, "max": 3e-3, "runs": 20, "tflops": 1.5}
    rows = [
        Timed(**ABOUT, relative_l2=1e-7, max_abs=1e-6, **timed, floor_bytes=1e-3, floor_operations=5e-4),
        Timed(**ABOUT | {"case": "(1, 2, 3)", "B": 1, "N": 2, "d": 3}, relative_l2=1e-7, max_abs=1e-6, **timed),
        Failure(**ABOUT, error="a | b"),
    ]
    assert views.VIEWS["table"](rows).splitlines()[2:] == [
        "| t10 | (10, 2048, 64) | mma | 2.000 ms | 1.000 to 3.000 | 1.5 | 50 % | 1.0e-07 | 1.0e-06 |",
        "|  | (1, 2, 3) | mma | 2.000 ms | 1.000 to 3.000 | 1.5 |  | 1.0e-07 | 1.0e-06 |",
        r"| t10 | (10, 2048, 64) | mma | a \| b |  |  |  |  |  |",
    ]


def test_what_was_not_counted_has_no_cell():
    row = Profiled(**ABOUT, function="attention", launches=1, registers=64, shared_load=1e9)
    [(title, [head, cells])] = records.profile_tables([row])
    assert title == "t10 (10, 2048, 64)"
    assert dict(zip(head, cells, strict=True)) == {"rung": "mma", "function": "attention", "registers": "64"}


def test_a_records_command_can_be_given_to_a_shell_again():
    given = ["bench", "--name", "paged, graph", "--json", "a file.json", "--plot", "x.png", "--runs", "2"]
    assert machine.repeatable(given) == "flashcli bench --name 'paged, graph' --runs 2"
