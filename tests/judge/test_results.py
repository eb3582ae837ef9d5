"""The file of results: one line at a time, taken up where it stopped, never mixed with another judging's."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time

import pytest
from conftest import two_cases
from support import command, environment, flashcli, script

from flashcli.errors import BadInput
from flashcli.judge import results


def spy_in(folder):
    """A submission that fails at once, and notes that it was run."""
    return script(folder / "spy", f'#!/bin/sh\nbasename "$1" >> {folder}/runs\nsha256sum < "$1"\nexit 1\n')


@pytest.fixture
def spy(tmp_path):
    return spy_in(tmp_path)


def runs(tmp_path) -> list[str]:
    return (tmp_path / "runs").read_text().split()


def test_resume_judges_only_what_is_missing_on_the_same_inputs(cases, spy, tmp_path):
    file = tmp_path / "results.jsonl"
    assert flashcli("judge", cases, "--exe", spy, "--results", file).code == 1
    whole = file.read_text()
    lines = whole.splitlines(keepends=True)
    assert len(lines) == 3 and runs(tmp_path) == ["c1.in", "c2.in"]
    file.write_text("".join(lines[:2]) + lines[2][:20])  # cut off while the last line was being written
    done = flashcli("judge", cases, "--exe", spy, "--results", file, "--resume", "--json", "-")
    assert runs(tmp_path) == ["c1.in", "c2.in", "c2.in"]

    def details(text):
        return [json.loads(line)["detail"] for line in text.splitlines()[1:]]

    assert details(file.read_text()) == details(whole), "the seed is in the file"
    assert [found["case"] for found in json.loads(done.out)["cases"]] == ["c1", "c2"]


def test_resume_counts_only_the_programs_that_are_judged_now(cases, spy, compiled, tmp_path):
    arguments = "judge", cases, "--exe", compiled("right"), "--results", tmp_path / "results.jsonl"
    assert flashcli(*arguments, "--exe", spy).code == 1
    done = flashcli(*arguments, "--resume")
    assert done.code == 0 and done.out.startswith("2 of 2 accepted, ")


def test_a_judge_killed_half_way(cases, tmp_path):
    """With SIGKILL, so that it has no chance to tidy up."""
    file = tmp_path / "results.jsonl"
    slow = script(
        tmp_path / "slow", f'#!/bin/sh\ncase "$1" in */c2.in) [ -e {tmp_path}/go ] || exec sleep 5;; esac\nexit 1\n'
    )
    arguments = command("judge", cases, "--exe", slow, "--results", file)
    env = environment(TMPDIR=str(tmp_path))  # where it leaves its scratch folder
    judge = subprocess.Popen(arguments, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 30
    while not (file.exists() and file.read_text().count("\n") == 2) and time.monotonic() < deadline:
        time.sleep(0.02)
    judge.kill()
    judge.wait()
    (tmp_path / "go").touch()
    [left] = tmp_path.glob("flashcli-judging-*")
    done = flashcli("judge", cases, "--exe", slow, "--results", file, "--resume", env={"TMPDIR": str(tmp_path)})
    assert not left.exists(), "the next one removes what it could not"
    assert done.code == 1 and done.out.startswith("c2 ") and "0 of 2 accepted" in done.out


def test_interrupted_by_the_keyboard_nothing_is_left(cases, tmp_path):
    hangs = script(tmp_path / "hangs", f"#!/bin/sh\ntrap '' INT TERM\necho $$ > {tmp_path}/pid\nsleep 60 & sleep 60\n")
    folder = tmp_path / "tmp"
    folder.mkdir()
    judge = subprocess.Popen(
        command("judge", cases, "--exe", hangs), env=environment(TMPDIR=str(folder)), stderr=subprocess.PIPE
    )
    deadline = time.monotonic() + 30
    while not (tmp_path / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    judge.send_signal(signal.SIGINT)
    assert b"interrupted" in judge.communicate(timeout=30)[1] and judge.returncode == 130
    assert not list(folder.iterdir())


@pytest.fixture(scope="module")
def judged(tmp_path_factory):
    """A judging's file of results, as bytes; those who read it need not wait for another."""
    folder = tmp_path_factory.mktemp("judged")
    file = folder / "results.jsonl"
    flashcli("judge", two_cases(folder / "cases"), "--exe", spy_in(folder), "--results", file, "--seed", 4)
    return file.read_bytes()


@pytest.fixture
def finished(judged, tmp_path):
    (tmp_path / "results.jsonl").write_bytes(judged)
    return tmp_path / "results.jsonl"


def test_what_was_printed_is_in_the_file_and_in_no_scoreboard(finished, tmp_path):
    [_, (first, _)] = results.read(finished)
    assert re.fullmatch(r"[0-9a-f]{64}  -", first.printed)
    flashcli("scoreboard", finished, "--board", tmp_path / "board.json")
    assert '"printed"' not in (tmp_path / "board.json").read_text()


def test_results_are_not_overwritten(cases, spy, finished):
    before = finished.read_text()
    flashcli("judge", cases, "--exe", spy, "--results", finished).assert_error(2, "is there already")
    assert finished.read_text() == before


def test_a_file_from_before_a_rule_was_known_is_gone_on_with(cases, spy, tmp_path):
    """Its judge did as the default says."""
    file = tmp_path / "results.jsonl"
    flashcli("judge", cases, "--exe", spy, "--results", file)
    first, second, _ = file.read_text().splitlines(keepends=True)
    judging = json.loads(first)
    del judging["judging"]["rules"]["readable"]
    file.write_text(json.dumps(judging) + "\n" + second)
    done = flashcli("judge", cases, "--exe", spy, "--results", file, "--resume")
    assert done.code == 1 and runs(tmp_path) == ["c1.in", "c2.in", "c2.in"], done.err


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"args": ["--seed", "5"]}, "its seed differs"),
        ({"args": ["--time-limit", "5"]}, "its rules differ."),
        ({"gpu": "NVIDIA Other"}, "its device differs"),
    ],
)
def test_resume_under_other_conditions_is_refused(cases, spy, finished, tmp_path, changes, said):
    env = {}
    if "gpu" in changes:
        script(tmp_path / "nvidia-smi", f"#!/bin/sh\necho {changes['gpu']}\n")
        env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "0"}
    args = changes.get("args", [])
    done = flashcli("judge", cases, "--exe", spy, "--results", finished, "--resume", *args, env=env)
    done.assert_error(2, "another judging", said)


def test_a_board_does_not_replace_results(cases, spy, finished):
    before = finished.read_bytes()
    board = finished.rename(finished.with_suffix(".json"))
    flashcli("scoreboard", board, "--board", board).assert_error(2, "is named twice")
    flashcli("judge", cases, "--exe", spy, "--results", board, "--resume", "--board", board).assert_error(
        2, "named twice"
    )
    assert board.read_bytes() == before


def test_results_carry_the_name_of_the_gpu(cases, spy, tmp_path):
    script(tmp_path / "nvidia-smi", '#!/bin/sh\necho "NVIDIA $1"\n')
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CUDA_VISIBLE_DEVICES": "3,1"}
    done = flashcli("judge", cases, "--exe", spy, "--json", "-", env=env)
    assert {found["device"] for found in json.loads(done.out)["cases"]} == {"NVIDIA --id=3"}


@pytest.mark.parametrize(
    "text",
    ["", "{}\n", "[1]\n", '{"judging": {}}\n{"submission": "x"}\n', "\xff\n", '{"judging": 3}\n', "[" * 100000 + "\n"],
)
def test_other_files_are_refused(tmp_path, text):
    (tmp_path / "x").write_text(text, encoding="latin-1")
    with pytest.raises(BadInput, match="is not a file of results"):
        results.read(tmp_path / "x")


@pytest.mark.parametrize("change", [{"seconds": "<b>"}, {"verdict": "splendid"}, {"B": None}, {"detail": 3}])
def test_a_line_with_a_wrong_value_is_refused(finished, change):
    first, second = finished.read_text().splitlines()[:2]
    finished.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    flashcli("scoreboard", finished).assert_error(65, "is not a file of results")


def test_the_line_that_is_damaged_is_told(finished):
    first, second, third = finished.read_text().splitlines()
    finished.write_text(f"{first}\n{second}\n{third[:-5]}\n")
    with pytest.raises(BadInput, match=r"line 3: JSONDecodeError: (?!.*line 1)"):
        results.read(finished)


def test_a_file_without_results(finished, tmp_path):
    finished.write_text(finished.read_text().splitlines(keepends=True)[0])
    done = flashcli("scoreboard", finished)
    assert (done.code, done.out) == (0, "no results yet\n")
    (tmp_path / "empty").touch()
    flashcli("scoreboard", tmp_path / "empty").assert_error(65, "is not a file of results: it has no line")


def test_two_judgings_cannot_write_one_file(cases, spy, tmp_path):
    file = tmp_path / "results.jsonl"
    judge = "judge", cases, "--exe", spy, "--results", file
    flashcli(*judge)
    before = file.read_bytes()
    with results.Log(file, resume=True):
        flashcli(*judge, "--resume").assert_error(2, "another judging is writing the file of results")
    assert file.read_bytes() == before
    assert flashcli(*judge, "--resume").code == 1, "it is free again"


@pytest.mark.parametrize("resume", [[], ["--resume"]])
@pytest.mark.parametrize("content", ["", '{"judging": {"seed": 4, "dev'])
def test_a_file_that_was_cut_off_at_its_beginning(cases, spy, tmp_path, resume, content):
    """As a judge that was killed at once leaves it."""
    file = tmp_path / "results.jsonl"
    file.write_text(content)
    done = flashcli("judge", cases, "--exe", spy, "--results", file, *resume)
    if content and not resume:
        done.assert_error(2, "is there already")
    else:
        assert done.code == 1 and len(results.read(file)[1]) == 2


def test_a_file_that_is_none_of_results_is_not_begun_anew(cases, spy, tmp_path):
    (tmp_path / "notes").write_text("milk, eggs")
    flashcli("judge", cases, "--exe", spy, "--results", tmp_path / "notes", "--resume").assert_error(
        65, "it has no line"
    )
    assert (tmp_path / "notes").read_text() == "milk, eggs"


def test_a_fifo_is_refused_and_not_waited_for(cases, spy, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for resume in ([], ["--resume"]):
        done = flashcli("judge", cases, "--exe", spy, "--results", tmp_path / "fifo", *resume)
        done.assert_error(65, "fifo' is not a regular file")
    flashcli("scoreboard", tmp_path / "fifo").assert_error(65, "fifo' is not a regular file")
    os.mkfifo(tmp_path / "rules.toml")
    flashcli("judge", tmp_path / "rules.toml").assert_error(65, "is not a regular file")


@pytest.mark.parametrize(
    "change",
    [
        *({"seconds": value} for value in (float("inf"), float("nan"), 10**400, -1, True, "1")),
        *({"runs": [value]} for value in (float("inf"), -1, None)),
        *({"penalty": value} for value in (float("nan"), None)),
        *({"B": value} for value in (True, 0, 2**31, 1.0)),
        *({"submission": value} for value in ("", " ", "x" * 201)),
        {"verdict": "accepted", "seconds": None},
    ],
    ids=str,
)
def test_a_line_with_a_value_that_nobody_measured_is_refused(finished, change):
    first, second = finished.read_text().splitlines()[:2]
    finished.write_text(f"{first}\n{json.dumps(json.loads(second) | change)}\n")
    with pytest.raises(BadInput, match="line 2"):
        results.read(finished)


def test_texts_of_foreign_results_cannot_drive_a_terminal(finished):
    first, second = finished.read_text().splitlines()[:2]
    odd = dict.fromkeys(("submission", "case", "device", "detail"), "a\x1b[2J\nb�\u202e")
    finished.write_text(f"{first}\n{json.dumps(json.loads(second) | odd)}\n")
    [found] = results.read(finished)[1]
    assert {getattr(found, name) for name in odd} == {"a\ufffd[2J\ufffdb\ufffd\ufffd"}
    done = flashcli("scoreboard", finished)
    assert done.code == 0 and "\x1b" not in done.out


def test_what_was_not_run_has_no_time(cases, tmp_path):
    """null, which is neither the best time nor the worst."""
    (tmp_path / "alice").mkdir()
    file = tmp_path / "results.jsonl"
    flashcli("judge", cases, "--exe", f"alice={tmp_path / 'alice'}", "--build", "false", "--results", file)
    assert [json.loads(line)["seconds"] for line in file.read_text().splitlines()[1:]] == [None, None]
    assert flashcli("scoreboard", file).out.splitlines()[-1].split() == ["-", "alice", "0", "of", "2", "-"]


def test_the_circumstances_are_on_the_board(cases, spy, tmp_path):
    boards = [tmp_path / f"board{suffix}" for suffix in (".html", ".md", ".json")]
    file = tmp_path / "results.jsonl"
    done = flashcli("judge", cases, "--exe", spy, "--results", file, "--seed", 4, "--time-limit", 3)
    assert done.code == 1
    done = flashcli("scoreboard", file, *(word for board in boards for word in ("--board", board)))
    [about] = json.loads(boards[2].read_text())[0]["judgings"]
    date, seed, contained, rules = about.split("; ")
    assert re.fullmatch(r"judged \d{4}-\d\d-\d\d \d\d:\d\d:\d\d UTC", date)
    assert seed == "seed 4" and contained.startswith("contained by ") and rules == "rules: time_limit = 3.0"
    assert about in done.out.splitlines() and about in boards[0].read_text()
    assert "seed 4" in boards[1].read_text()
