"""Feedback: a file for each submission, with what its author may see and nothing of anybody else's."""

from __future__ import annotations

import json

import pytest
from support import flashcli, script
from test_scoreboard import result

from flashcli.judge import feedback, scoreboard


@pytest.fixture
def written(tmp_path):
    """``written(results)`` is the feedback on them, by the names of its files."""

    def write(results: list, key: str | None = None) -> dict[str, str]:
        feedback.write(tmp_path, scoreboard.boards(results, "passed"), key)
        return {path.name: path.read_text() for path in tmp_path.iterdir()}

    return write


def test_a_file_has_its_own_results_and_nobody_elses(written):
    good = result("alice", "a", 1.25)._replace(memory=3 * 2**20, printed="not needed")
    bad = result("bob", "a", None, detail="3 of 4 elements")._replace(printed="one\n\x1b[2Jtwo")
    found = written([good, bad], key="k")
    assert set(found) == {"alice.md", "bob.md"}
    assert "bob" not in found["alice.md"] and "alice" not in found["bob.md"]
    assert "rank 1 of 2, accepted 1 of 1, time 1.250 s, memory 3.0 MiB." in found["alice.md"]
    assert "| a | (2, 8, 4) | 1 | 1.250 s | 3.0 MiB | accepted |" in found["alice.md"]
    assert "not needed" not in found["alice.md"] and "### a: wrong answer\n\n3 of 4 elements." in found["bob.md"]
    assert "    one\n    \ufffd[2Jtwo\n" in found["bob.md"], "a block of code, without what could drive a terminal"
    assert "On boards without names: anon" in found["bob.md"]


def test_what_failed_alike_is_told_once_and_not_at_length(written):
    failed = [result("x", case, None, detail="d")._replace(printed="line\n" * 999) for case in "abc"]
    [text] = written(failed).values()
    assert text.count("### a, b, c: wrong answer") == 1 and text.count("    line\n") == feedback.LINES


def test_names_that_are_no_names_of_files_get_files_in_the_folder(written):
    names = ["../x", "./x", "a/b", "a_b", "", "é", "x" * 200, ".."]
    found = written([result(name, "a", 1.0) for name in names])
    assert len(found) == len(names) and all("/" not in name and name[0] != "." for name in found)
    assert {"_x.md", "_x-1.md", "a_b.md", "a_b-1.md", "é.md"} <= set(found)


def test_by_the_judge_and_by_the_scoreboard_it_is_the_same(cases, tmp_path):
    fails = script(tmp_path / "fails", "#!/bin/sh\necho hm\nexit 3\n")
    results = tmp_path / "results.jsonl"
    ours, theirs = tmp_path / "by" / "judge", tmp_path / "by-scoreboard"
    done = flashcli("judge", cases, "--exe", f"x={fails}", "--results", results, "--feedback", ours)
    assert done.code == 1 and "exit code 3: hm." in (ours / "x.md").read_text()
    assert flashcli("scoreboard", results, "--feedback", theirs).code == 0
    assert (ours / "x.md").read_bytes() == (theirs / "x.md").read_bytes()
    assert json.loads(results.read_text().splitlines()[0])["judging"]["secret"] not in (ours / "x.md").read_text()


def test_a_folder_that_cannot_be_made_is_told_before_anything_runs(cases, tmp_path):
    (tmp_path / "file").touch()
    program = script(tmp_path / "fails", f"#!/bin/sh\ntouch {tmp_path}/ran\n")
    done = flashcli("judge", cases, "--exe", program, "--feedback", tmp_path / "file" / "x")
    done.assert_error(73, "cannot create")
    assert not (tmp_path / "ran").exists()
