"""Behind a launcher: time, limits and containment are the node's; it is asked to end before it is made to."""

from __future__ import annotations

import json
import signal
import subprocess

import pytest
from conftest import until
from support import command, environment, flashcli, script

from flashcli.judge import supervision as module


@pytest.fixture
def rules(tmp_path, cases):
    """``rules(text)`` is a rules file whose launcher does what the text says, then notes and runs its command."""

    def write(text: str, more: str = ""):
        there = script(tmp_path / "there", f'#!/bin/sh\n{text}\necho "$*" >> {tmp_path}/notes\nexec "$@"\n')
        path = tmp_path / "rules.toml"
        path.write_text(f'cases = "cases"\nselect = ["c1"]\nlauncher = ["{there}"]\n{more}\n')
        return path

    return write


def judged(rules, program, **options) -> dict:
    done = flashcli("judge", rules, "--exe", program, "--json", "-", **options)
    assert done.code in (0, 1), done.err
    [found] = json.loads(done.out)["cases"]
    return found


def test_the_device_is_asked_for_where_the_program_runs(rules, tmp_path):
    """What runs on another machine must be named after that machine."""
    (tmp_path / "node").mkdir()
    script(tmp_path / "node" / "nvidia-smi", "#!/bin/sh\necho GPU over there\n")
    path = rules(f"export PATH={tmp_path}/node:$PATH CUDA_VISIBLE_DEVICES=0 NODE=n1")
    spy = script(tmp_path / "spy", '#!/bin/sh\necho "$NODE $CUDA_VISIBLE_DEVICES $HOME"\nexit 1\n')
    found = judged(path, spy, env={"CUDA_VISIBLE_DEVICES": ""})
    assert found["device"] == "GPU over there"
    assert found["detail"].startswith("exit code 1: n1 0 /"), "the program has the environment of the node"
    assert len((tmp_path / "notes").read_text().splitlines()) == 2


def test_flashcli_itself_is_run_there_too(rules, tmp_path):
    path = rules("")
    done = flashcli("judge", path, "--backend", "cpu")
    assert done.code == 0, done.err
    assert len((tmp_path / "notes").read_text().splitlines()) == 2, "the device, and the case"


def test_waiting_for_a_node_is_not_the_programs_time(rules, compiled):
    found = judged(rules("sleep 0.5"), compiled("right"))
    assert found["verdict"] == "accepted" and found["seconds"] < 0.5


def test_what_the_launcher_says_is_not_the_programs(rules, tmp_path):
    fails = script(tmp_path / "fails", "#!/bin/sh\necho mine\nexit 4\n")
    assert judged(rules("echo 'srun: error: hm' >&2"), fails)["detail"] == "exit code 4: mine"


def test_limits_hold_there(rules, compiled):
    path = rules("", "processes = 50\ntime_limit = 10\nfile_size = 1048576\n")
    assert judged(path, compiled("fork_bomb"))["detail"] == "more than 50 processes"
    assert (
        judged(path, compiled("big_file"))["detail"]
        == "killed by SIGXFSZ, for it wrote a file larger than the rules allow"
    )


def test_a_time_limit_ends_the_program_and_not_the_launcher(rules, tmp_path):
    text = f"trap 'echo stopped >> {tmp_path}/notes' TERM; \"$@\"; echo ended >> {tmp_path}/notes; exit"
    path = rules(text, "time_limit = 0.2\ngrace = 0.1\n")
    found = judged(path, script(tmp_path / "hangs", "#!/bin/sh\ntrap '' TERM\nsleep 60 & sleep 60\n"))
    assert found["verdict"] == "time limit exceeded" and found["seconds"] == 0.2
    assert (tmp_path / "notes").read_text() == "ended\nended\n"


@pytest.mark.parametrize("text", ["echo 'srun: error: no such partition' >&2; exit 1", "exit 1"])
def test_a_launcher_that_starts_nothing_is_no_verdict(rules, compiled, text):
    done = flashcli("judge", rules(text), "--exe", compiled("right"))
    done.assert_error(69, "started nothing")
    assert "no such partition" in done.err or "exit" in text.split(";")[0]
    assert not done.out


def test_a_job_that_waits_in_the_queue_is_asked_to_end(rules, tmp_path, compiled):
    path = rules(f"trap 'echo stopped >> {tmp_path}/notes; exit 1' TERM; echo > {tmp_path}/waits; sleep 60 & wait")
    judge = subprocess.Popen(
        command("judge", path, "--exe", compiled("right")), env=environment(), stderr=subprocess.PIPE
    )
    assert until((tmp_path / "waits").exists)
    judge.send_signal(signal.SIGINT)
    assert b"interrupted" in judge.communicate(timeout=30)[1]
    assert (tmp_path / "notes").read_text() == "stopped\n"


def test_what_a_launcher_leaves_is_cancelled(tmp_path, monkeypatch):
    """One that listens to nothing is killed, and Slurm is told to end its job, by the name that it was given."""
    monkeypatch.setattr(module, "POLITE", 0.05)
    monkeypatch.setattr(module, "LEAVE", 0.1)
    srun = script(
        tmp_path / "srun",
        f"#!/bin/sh\ntrap '' TERM\necho $SLURM_JOB_NAME > {tmp_path}/job\nwhile :; do sleep 0.1; done\n",
    )
    script(tmp_path / "scancel", f'#!/bin/sh\necho "$@" > {tmp_path}/cancelled\n')
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    supervisor = module.Supervisor((str(srun),), {"PATH": "/usr/bin:/bin"})
    assert until(lambda: (tmp_path / "job").exists() and (tmp_path / "job").read_text())
    supervisor.close()
    assert (tmp_path / "cancelled").read_text() == f"--name={(tmp_path / 'job').read_text()}"
