"""Commands in processes of their own: what is told of them, and when they are stopped."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

import pytest
from support import script

from flashcli.errors import FlashError
from flashcli.measure import race


def test_a_command_is_told_of_when_it_has_finished():
    done = race.finish(["sh", "-c", "echo one; echo two >&2; exit 3"])
    assert (done.code, done.out, done.err) == (3, "one\n", "two\n")
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB, with which a process begins that is forked
    assert 0 < done.seconds < 60 and 0.1 < done.peak_mib < own + 1000


def test_much_output_does_not_block_it():
    done = race.finish([sys.executable, "-c", "import sys; sys.stderr.write('x' * 2**20); print('y' * 2**20)"])
    assert (len(done.out), len(done.err)) == (2**20 + 1, 2**20)


def test_a_signal_that_ended_it_is_told():
    assert race.finish(["sh", "-c", "kill -KILL $$"]).code == -signal.SIGKILL


def test_one_that_takes_too_long_is_stopped():
    with pytest.raises(race.TookTooLong, match="more than 0 s"):
        race.finish(["sleep", 60], limit=0.05)


def test_an_interruption_stops_it_too(tmp_path):
    program = script(
        tmp_path / "program", f"#!/bin/sh\necho $$ > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nexec sleep 60\n"
    )

    def it_waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_code is race.finish.__code__ and "watch" in frame.f_locals

    def interrupt() -> None:
        while not ((tmp_path / "pid").exists() and it_waits()):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        race.finish([program])
    interrupter.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["sh", "-c", "echo Error: no. >&2; echo Hint: yes. >&2; exit 1"], "failed: no."),
        (["sh", "-c", "echo it differs; exit 1"], "failed: it differs"),
        (["sh", "-c", "exit 9"], "failed: exit code 9"),
        ([*race.FLASHCLI, "inspect", "/missing"], "flashcli inspect failed: cannot read '/missing'"),
    ],
)
def test_the_first_line_says_why_one_failed(words, complaint):
    with pytest.raises(FlashError, match=complaint):
        race.succeed(words)
