"""Tables in documents are made of the records that stand beside them."""

from __future__ import annotations

import json

from support import python

from bench.documents import refreshed
from bench.views import VIEWS
from flashcli.asked.shape import Shape
from flashcli.measure.records import Record
from flashcli.measure.rows import Row, Rung

ROW = Rung(
    **vars(Row.about("t10", Shape(10, 2048, 64), "float4", False)), relative_l2=1e-7, max_abs=1e-6,
    seconds=2.5e-3, min=2.4e-3, max=2.6e-3, runs=20, tflops=4.295,
    total=0.4321, input=0.001, computation=0.41, output=0.002, commands=2,
)  # fmt: skip


def test_a_document_shows_a_ladder(tmp_path):
    (tmp_path / "x.json").write_text(json.dumps(Record({"gpu": "GPU 1"}, [ROW]).written()))
    document = tmp_path / "x.md"
    document.write_text("before\n<!-- ladder: x.json -->\nold\n<!-- end -->\nafter\n")
    table = VIEWS["ladder"]([ROW])
    assert refreshed(document) == (f"before\n<!-- ladder: x.json -->\n{table}\nGPU 1\n<!-- end -->\nafter\n")


def test_a_document_shows_a_profile(tmp_path):
    row = {"case": "t10", "B": 10, "N": 2048, "d": 64, "contender": "mma", "function": "attention", "launches": 1,
           "registers": 64}  # fmt: skip
    (tmp_path / "x.json").write_text(json.dumps({"circumstances": {"gpu": "GPU 1"}, "rows": [row]}))
    document = tmp_path / "x.md"
    document.write_text("<!-- profile: x.json -->\n<!-- end -->\n")
    assert refreshed(document).splitlines() == [
        "<!-- profile: x.json -->", "**t10 (10, 2048, 64)**", "", "| rung | function | registers |",
        "| --- | --- | --- |", "| mma | attention | 64 |", "", "GPU 1", "<!-- end -->",
    ]  # fmt: skip


def test_a_table_whose_record_is_not_there_yet_stays_as_it_is(tmp_path):
    document = tmp_path / "page.md"
    document.write_text("<!-- ladder: missing.json -->\nby hand\n<!-- end -->\n")
    assert refreshed(document) == document.read_text()


def test_a_document_that_is_not_there_is_wrong_usage():
    done = python("-m", "bench.documents", "nowhere.md")
    assert done.code == 2 and "'nowhere.md' does not exist" in done.err and "Traceback" not in done.err
