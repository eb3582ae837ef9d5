"""What the command line can ask of a judging, and what is shown meanwhile."""

from __future__ import annotations

import contextlib
import io
import json
import time
from dataclasses import replace

import pytest
from support import flashcli, random_qkv, script, write_input

from flashcli.commands import judge as command
from flashcli.commands.status_line import StatusLine
from flashcli.errors import UsageError
from flashcli.judge.rules import Rules
from flashcli.judge.sandbox import Machine
from flashcli.judge.submissions import Submission


def hashes(done) -> dict[tuple[str, str], str]:
    return {(found["submission"], found["case"]): found["detail"] for found in json.loads(done.out)["cases"]}


@pytest.fixture
def spies(tmp_path):
    """Two submissions that fail with a checksum of their input."""
    (tmp_path / "spies").mkdir()
    for name in ("a", "b"):
        script(tmp_path / "spies" / name, '#!/bin/sh\nsha256sum < "$1"\nexit 1\n')
    return tmp_path / "spies"


def test_submissions_can_have_inputs_of_their_own(cases, spies, tmp_path):
    """Then one cannot copy the other's answer."""
    rules = tmp_path / "rules.toml"
    for text, different in (('inputs = "each"', True), ("", False)):
        rules.write_text(f'cases = "cases"\n{text}\n')
        found = hashes(flashcli("judge", rules, "--exe", spies, "--seed", 4, "--json", "-"))
        assert (found["a", "c1"] != found["b", "c1"]) == different
        assert found["a", "c1"] != found["a", "c2"]


def test_a_case_counts_what_its_manifest_or_the_rules_say(cases, spies, tmp_path):
    (cases / "manifest.toml").write_text(
        (cases / "manifest.toml").read_text().replace("seed = 1", "seed = 1\npoints = 3")
    )
    rules = tmp_path / "rules.toml"
    for text, worth in (("", [3, 1]), ("[case.c2]\npoints = 2.5", [3, 2.5]), ("points = 2", [2, 2])):
        rules.write_text(f'cases = "cases"\n{text}\n')
        found = json.loads(flashcli("judge", rules, "--exe", spies / "a", "--json", "-").out)["cases"]
        assert [one["points"] for one in found] == worth
        assert all(one["memory"] > 0 for one in found)


def test_each_has_its_own_right_answer(case, judging, compiled):
    programs = [Submission(name, (str(compiled("right")),)) for name in "ab"]
    assert [found.verdict for found in judging(inputs="each").results([case], programs)] == ["accepted"] * 2


def test_a_file_as_it_is_is_the_same_for_all(spies, tmp_path):
    write_input(tmp_path / "x.in", random_qkv(1, 8, 4))
    (tmp_path / "rules.toml").write_text('cases = "."\ninputs = "each"\n')
    done = flashcli("judge", tmp_path / "rules.toml", "--exe", spies)
    done.assert_error(65, "x is a file as it is: submissions cannot have different inputs")


def test_no_seed_is_told_where_files_are_used_as_they_are(cases, spies, tmp_path):
    write_input(tmp_path / "x.in", random_qkv(1, 8, 4))
    assert flashcli("judge", tmp_path, "--exe", spies).err == ""
    assert "inputs made from seed" in flashcli("judge", cases, "--exe", spies).err


def test_a_submission_that_is_too_slow_is_given_up(cases, tmp_path):
    slow = script(tmp_path / "slow", "#!/bin/sh\nsleep 60\n")
    where = "judge", cases, "--exe", slow, "--time-limit", 0.2, "--give-up", 1, "--results", tmp_path / "r.jsonl"
    done = flashcli(*where)
    first, second, _ = done.out.splitlines()
    assert "time limit exceeded" in first and second.endswith("not run: it has exceeded 1 time limit")
    again = flashcli(*where, "--resume")
    assert again.code == 1 and again.out.startswith("0 of 2 accepted")


def test_a_time_limit_before_an_interruption_counts(case, judging, tmp_path):
    submission = [Submission("x", (str(script(tmp_path / "slow", "#!/bin/sh\nsleep 60\n")),))]
    rules = {"give_up": 1, "time_limit": 0.2, "grace": 0.0}
    [late] = judging(**rules).results([case], submission)
    [found] = judging(**rules).results([case, replace(case, name="c2")], submission, [late])
    assert (found.case, found.verdict, found.seconds) == ("c2", "not run", None)


def test_several_submissions_run_at_a_time(cases, tmp_path):
    """Each waits for the other."""
    folder = tmp_path / "course"
    folder.mkdir()
    for own, other in (("a", "b"), ("b", "a")):
        text = f"touch {tmp_path}/{own}; for i in $(seq 500); do [ -e {tmp_path}/{other} ] && exit 5; sleep 0.02; done"
        script(folder / own, f"#!/bin/sh\n{text}\n")
    env = {"CUDA_VISIBLE_DEVICES": ""}
    found = hashes(flashcli("judge", cases, "--exe", folder, "--case", "c1", "--jobs", 2, "--json", "-", env=env))
    assert found == {("a", "c1"): "exit code 5", ("b", "c1"): "exit code 5"}


def test_submissions_do_not_share_a_gpu():
    with pytest.raises(UsageError, match="2 programs at a time would share the GPU"):
        command._check_jobs(2, Machine("H200", True, "namespace"), Rules())
    command._check_jobs(2, Machine("H200", True, "namespace"), Rules(launcher=("srun",)))
    command._check_jobs(2, Machine("EPYC", False, "namespace"), Rules())


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_status_line_tells_what_is_going_on_and_is_gone(monkeypatch):
    now, terminal = [0.0], Terminal()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    with contextlib.redirect_stderr(terminal), StatusLine(3) as status:
        status.tell("making the input of c1")
        now[0] = 60.0
        status.done("c1 accepted")
        status.tell("building alice")
    clear = "\r\x1b[K"
    assert terminal.getvalue().split(clear) == [
        "", "[1/3] making the input of c1", "", "[2/3] building alice, about 2 min left", ""
    ]  # fmt: skip


def test_without_a_terminal_there_is_no_status_line(capsys):
    with StatusLine(1) as status:
        status.tell("c1: alice")
        status.done("c1")
    assert capsys.readouterr() == ("c1\n", "")


def test_what_is_being_done_is_told(case, judging, tmp_path):
    (tmp_path / "alice").mkdir()
    script(tmp_path / "alice" / "hw4", "#!/bin/sh\nexit 1\n")
    told = []
    made = judging(build=":")
    made.tell = told.append
    list(made.results([case], [Submission("alice", (str(tmp_path / "alice" / "hw4"),), tmp_path / "alice")]))
    assert told == ["building alice", "making the input of c1", "c1: alice", "c1: alice"]


def test_verdicts_have_a_colour_where_colour_is_wanted(case, judging, compiled, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    [found] = judging().results([case], [Submission("x", (str(compiled("right")),))])
    assert "\x1b[32maccepted\x1b[0m" in command._line(found, width=0, about=False)
    assert "\x1b[31mwrong" in command._line(found._replace(verdict="wrong answer"), width=0, about=False)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in command._line(found, width=0, about=False)
