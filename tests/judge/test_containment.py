"""No process outlives its run, and none outlives the judge, by whatever means the system gives."""

from __future__ import annotations

import os
import signal
import subprocess
import threading

import pytest
from conftest import until
from support import command, environment, flashcli, give_up_roots_powers, script, supervisors

from flashcli.judge.submissions import Submission
from flashcli.judge.supervision import Request
from flashcli.judge.supervisor import load_gpu_driver


@pytest.fixture
def judged(case, judging, way):
    """Judge one program; its result."""

    def judge(program, **rules):
        [found] = judging(containment=way, **rules).results([case], [Submission("bad", (str(program),))])
        return found

    return judge


def test_work_that_goes_on_behind_a_program_that_has_ended(compiled, judged, way, survivors):
    """It counts, if it is not cut off: what is held by the kernel ends at once, what must be found first takes time."""
    found = judged(compiled("chain"), time_limit=10)
    assert not survivors()
    if way == "freezing" and found.verdict == "accepted":
        assert found.seconds > 0.05
    else:
        assert found.verdict == "no output" and found.seconds < 5


@pytest.mark.parametrize("number", ["TERM", "KILL"])
def test_a_program_that_ends_its_parent(judged, way, survivors, tmp_path, number):
    program = script(tmp_path / "parricide", f"#!/bin/sh\nkill -{number} $PPID\nsleep 60 & setsid sleep 60\n")
    found = judged(program, time_limit=0.2, grace=0)
    assert found.verdict in ("time limit exceeded", "runtime error") and not survivors()
    assert way != "namespace" or found.verdict == "time limit exceeded", "its parent is an init, which none can end"


def test_a_judge_that_is_killed_leaves_no_program(cases, tmp_path, way, survivors):
    rules = tmp_path / "rules.toml"
    rules.write_text(f'cases = "cases"\ncontainment = "{way}"\ntime_limit = 60\n')
    program = script(tmp_path / "sleeps", "#!/bin/sh\nsetsid sleep 60 & exec sleep 60\n")
    judge = subprocess.Popen(
        command("judge", rules, "--exe", program), env=environment(TMPDIR=str(tmp_path)), stderr=subprocess.DEVNULL
    )
    assert until(lambda: len(survivors()) == 2)
    judge.kill()
    judge.wait()
    assert until(lambda: not survivors(), seconds=20)


def test_a_supervisor_that_is_killed_takes_its_program_along(case, judging, survivors, tmp_path, way):
    made, found = judging(containment=way), []
    program = script(tmp_path / "sleeps", "#!/bin/sh\nexec sleep 60\n")
    thread = threading.Thread(target=lambda: found.extend(made.results([case], [Submission("x", (str(program),))])))
    thread.start()
    assert until(survivors)
    [supervisor] = supervisors()
    os.kill(supervisor, signal.SIGKILL)
    assert until(lambda: not survivors(), seconds=10)
    thread.join()
    assert (found[0].verdict, found[0].detail) == ("runtime error", "what watched it was killed")


def test_a_program_sees_no_process_but_its_own(supervision):
    text = "ls -d /proc/[0-9]* | wc -l"
    found = supervision.run(Request(["sh", "-c", text], None, dict(os.environ), 10.0))
    if found.containment != "namespace":
        pytest.skip("there is no PID namespace here")
    assert int(found.printed) <= 4  # init, the shell, ls and wc


def test_a_supervisor_that_is_killed_is_replaced(supervision):
    def run(*words):
        return supervision.run(Request(list(words), None, dict(os.environ), 10.0))

    run("true")
    [supervisor] = supervisors()
    os.kill(supervisor, signal.SIGKILL)
    until(lambda: not supervisors())
    with pytest.raises(Exception, match="supervisor started nothing"):
        run("true")
    assert run("true").returncode == 0


def test_the_way_that_is_asked_for_is_gone_or_refused(cases, tmp_path, monkeypatch):
    rules = tmp_path / "rules.toml"
    rules.write_text('cases = "cases"\ncontainment = "cgroup"\n')
    program = script(tmp_path / "fails", "#!/bin/sh\nexit 1\n")
    done = flashcli("judge", rules, "--exe", program, "--case", "c1", preexec_fn=give_up_roots_powers)
    if done.code == 1:
        assert "0 of 1 accepted" in done.out
    else:
        done.assert_error(69, "cannot be contained: cgroup: ")


def test_the_gpus_driver_is_loaded_before_a_namespace_makes_that_impossible(tmp_path, monkeypatch):
    script(tmp_path / "nvidia-modprobe", f'#!/bin/sh\necho "$@" >> {tmp_path}/called\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    load_gpu_driver(str(tmp_path / "nvidia-uvm"))
    load_gpu_driver(str(tmp_path))
    assert (tmp_path / "called").read_text() == "-u -c=0\n"
    monkeypatch.setenv("PATH", "/nowhere")
    load_gpu_driver(str(tmp_path / "nvidia-uvm"))
