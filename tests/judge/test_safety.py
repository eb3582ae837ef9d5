"""What a submission may do to the judge: each thing ends in a verdict, and the judging goes on."""

from __future__ import annotations

import os
import resource
import time
from pathlib import Path

import pytest
from support import script

from flashcli.judge import sandbox
from flashcli.judge.judging import Judging
from flashcli.judge.processes import CAPTURED, descendants, execute
from flashcli.judge.rules import Rules
from flashcli.judge.submissions import Submission


@pytest.fixture
def verdicts(compiled, case, tmp_path):
    """Judge a program, and after it one that is right: results of both."""

    def judge(program: Path, **rules: object):
        judging = Judging(Rules(**rules), tmp_path / "scratch", seed=7)
        judging.scratch.mkdir(exist_ok=True)
        submissions = [Submission("bad", (str(program),)), Submission("good", (str(compiled("right")),))]
        bad, good = judging.results([case], submissions)
        assert good.verdict == "accepted", "the judging goes on"
        assert not descendants(), "nothing runs any more"
        assert not [path for path in judging.scratch.rglob("*") if path.is_file()], "nothing is left behind"
        return bad

    return judge


def test_a_fork_bomb(compiled, verdicts):
    start = time.perf_counter()
    bad = verdicts(compiled("fork_bomb"), processes=50, time_limit=10)
    assert bad.verdict == "runtime error" and bad.detail == "more than 50 processes"
    assert time.perf_counter() - start < 5


def test_ten_gigabytes_of_output(compiled, verdicts):
    bad = verdicts(compiled("prints"), time_limit=1.5, grace=0.1)
    assert bad.verdict in ("accepted", "time limit exceeded")
    assert 0 < len(bad.printed) <= CAPTURED
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < 2**20  # KiB: 1 GiB


def test_sigterm_ignored(compiled, verdicts):
    start = time.perf_counter()
    bad = verdicts(compiled("hangs"), time_limit=0.3, grace=0.3)
    assert (bad.verdict, bad.seconds) == ("time limit exceeded", 0.3)
    assert 0.6 <= time.perf_counter() - start < 5


def test_sigterm_heard(tmp_path, verdicts):
    """The grace time is for those that clean up; those that do are not waited for any longer."""
    program = script(tmp_path / "polite", f"#!/bin/sh\ntrap 'touch {tmp_path}/heard; exit 0' TERM\nsleep 60 & wait\n")
    start = time.perf_counter()
    assert verdicts(program, time_limit=0.3, grace=30).verdict == "time limit exceeded"
    assert (tmp_path / "heard").exists() and time.perf_counter() - start < 5


def test_a_file_outside(compiled, tmp_path, verdicts):
    """Nothing prevents it; it does no harm to the judging."""
    outside = compiled("outside", TARGET=tmp_path / "outside.txt")
    assert verdicts(outside).verdict == "accepted"
    assert (tmp_path / "outside.txt").read_text() == "I was here"


def test_an_input_deleted(compiled, verdicts):
    """It was a link of its own."""
    assert verdicts(compiled("deletes_input")).verdict == "accepted"


def test_an_input_damaged(compiled, verdicts):
    bad = verdicts(compiled("damages_input"))
    assert (bad.verdict, bad.detail) == ("runtime error", "it changed its input file")


def test_a_given_input_damaged(compiled, case, tmp_path):
    """The judge's file is not what the program gets."""
    list(case.prepare())
    before = case.input.read_bytes()
    given = case.__class__("c1", case.shape, None, case.input, None, 20.0)
    judging = Judging(Rules(), tmp_path / "scratch", seed=7)
    judging.scratch.mkdir()
    programs = [Submission(name, (str(compiled(name)),)) for name in ("damages_input", "right")]
    assert [result.verdict for result in judging.results([given], programs)] == ["runtime error", "accepted"]
    assert case.input.read_bytes() == before


def test_children_left_behind(compiled, tmp_path, verdicts):
    bad = verdicts(compiled("leaves_children", PIDS=tmp_path / "pids"))
    pids = [int(line) for line in (tmp_path / "pids").read_text().split()]
    assert bad.verdict == "accepted" and bad.seconds < 10
    assert len(pids) == 3 and not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_file_too_large(compiled, verdicts):
    bad = verdicts(compiled("big_file"), file_size=2**20)
    assert (bad.verdict, bad.detail) == ("runtime error", "killed by SIGXFSZ")


def test_too_much_memory(compiled, verdicts):
    assert verdicts(compiled("hungry"), memory=2**30).verdict == "accepted"
    bad = verdicts(compiled("hungry"), memory=2**28)
    assert (bad.verdict, bad.detail) == ("runtime error", "exit code 8: out of memory")


def test_what_a_program_sees(compiled, verdicts, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "x")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    leak = os.dup(1)
    os.set_inheritable(leak, True)
    try:
        detail = verdicts(compiled("looks_around"), environment={"EXTRA": "7"}).printed
    finally:
        os.close(leak)
    files, folder, *variables = detail.replace(";", "").removeprefix("files ").replace("folder ", "").split()
    seen = dict(variable.split("=", 1) for variable in variables)
    assert files == "3"
    assert "SECRET_TOKEN" not in seen and "PYTHONPATH" not in seen
    assert seen["EXTRA"] == "7" and seen["CUDA_VISIBLE_DEVICES"] == "1"
    assert seen["HOME"] == seen["TMPDIR"] == folder and "/scratch/run-" in folder
    assert not Path(folder).exists()


@pytest.mark.parametrize(
    ("text", "verdict"),
    [
        ('mkfifo "$2"', "no output"),
        ('mkdir "$2"', "no output"),
        ('ln -s /dev/zero "$2"', "no output"),
        ('ln -s "$1" "$2"', "no output"),
        ('rm -rf "$(dirname "$(dirname "$2")")"', "runtime error"),
        ('d="$HOME"; for i in $(seq 300); do d="$d/deeper"; done; mkdir -p "$d"', "no output"),
        ('mkdir "$HOME/closed" && chmod 0 "$HOME/closed"', "no output"),
        ("kill -KILL $$", "runtime error"),
        ("printf '\\377\\000\\033[2J'; exit 1", "runtime error"),
    ],
)
def test_odd_things(tmp_path, verdicts, text, verdict):
    assert verdicts(script(tmp_path / "odd", f"#!/bin/sh\n{text}\n")).verdict == verdict


def test_a_program_that_is_none(tmp_path, verdicts):
    bad = verdicts(script(tmp_path / "odd", "#!/no/such/interpreter\n"))
    assert bad.verdict == "runtime error" and "odd" in bad.detail


def test_a_program_removed_meanwhile(tmp_path, verdicts):
    assert verdicts(tmp_path / "gone").verdict == "runtime error"


def test_the_time_is_exact(tmp_path):
    """Waiting is by pidfd: subprocess's own wait with a limit looks only every 50 ms."""
    times = [execute(["sleep", "0.101"], None, None, 10).seconds for _ in range(3)]
    assert 0.101 <= min(times) < 0.125


def test_limits_are_set_and_none_above_what_the_system_allows(monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda which: (100, 100))
    assert sandbox.prlimit({"core": 0, "nproc": 500, "as": None}) == ["prlimit", "--core=0", "--nproc=100", "--"]


def test_without_prlimit_there_are_no_limits(monkeypatch):
    monkeypatch.setattr(sandbox.shutil, "which", lambda name: None)
    assert sandbox.prlimit({"core": 0}) == []
