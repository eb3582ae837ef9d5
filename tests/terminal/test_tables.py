"""Tables of text and of Markdown keep their columns, whatever their cells hold."""

from __future__ import annotations

import re

from flashcli.terminal import tables

LINES = [("name", "time", "n"), ("a", "1.25 s", "3"), ("longer", "2 s", "14")]


def test_columns_of_text_are_aligned():
    assert tables.text(LINES) == "name    time    n\na       1.25 s  3\nlonger  2 s     14"


def test_a_remark_does_not_widen_the_columns():
    assert tables.text([*LINES, ("c", "it was skipped, for it needs more", "")]).splitlines() == [
        *tables.text(LINES).splitlines(),
        "c       it was skipped, for it needs more",
    ]


def test_a_table_of_markdown():
    assert tables.markdown(LINES[:2]) == "| name | time | n |\n| --- | --- | --- |\n| a | 1.25 s | 3 |\n"


def test_no_cell_shifts_the_columns_of_markdown():
    *_, line = tables.markdown([*LINES, ("x", "failed: a | b\nand more", "0")]).splitlines()
    assert line == r"| x | failed: a \| b and more | 0 |"
    assert len(re.split(r"(?<!\\)\|", line)) == 5
