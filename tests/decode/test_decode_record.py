"""The record of paged decode: its rows, and the table made of them."""

from __future__ import annotations

from flashcli.measure import decode, records, rows
from flashcli.measure.rows import Decoded, Skipped

ABOUT = {"case": "8x4096", "B": 8, "N": 4096, "d": 128}
TIMED = {"layout": "hnd", "bytes": 134217728, "min": 3.6e-5, "max": 4.2e-5, "runs": 20}
ROWS = [
    Decoded(**ABOUT, contender="read", seconds=3.7e-5, **TIMED),
    Skipped(**ABOUT, contender="paged_v1", skipped="too long"),
    Decoded(**ABOUT, contender="tensor", seconds=4.0e-5, relative_l2=2e-4, **TIMED),
]


def test_rows_are_read_as_they_were_written():
    assert [rows.read(row.written()) for row in ROWS] == ROWS


def test_the_table_has_a_column_for_each_that_was_timed():
    assert records.VIEWS["decode"](ROWS) == (
        "| batch | MB | read | tensor |\n| --- | --- | --- | --- |\n| 8x4096 | 134 | 37.0 | 40.0 |\n"
    )


def test_each_row_is_told_in_a_line():
    read, skipped, tensor = map(decode.told, ROWS)
    assert "37.0 us (least 36.0), 3.63 TB/s" in read and "relative" not in read
    assert "skipped: too long" in skipped and "relative L2 2.0e-04" in tensor
