"""Whole commands raced in turn."""

from __future__ import annotations

import os
import resource
import signal
import sys
import threading
import time

import pytest
from support import script

from bench.race import compete, succeed


def test_each_has_its_turn_and_none_is_always_behind_the_same():
    taken = compete({name: ["sh", "-c", f"echo {name}; date +%s%N"] for name in "ab"}, 3)
    started = sorted((int(done.out.split()[1]), name) for name, some in taken.items() for done in some)
    assert "".join(name for _, name in started) == "abbaab"


def test_time_and_memory_are_told():
    done = succeed(["sh", "-c", "echo $ONE"], os.environ | {"ONE": "one"})
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024  # MiB, with which a process begins that is forked
    assert done.out == "one\n" and 0 < done.seconds < 60 and 0.1 < done.peak_mib < own + 1000


def test_an_interruption_stops_a_command(tmp_path):
    program = script(
        tmp_path / "program", f"#!/bin/sh\necho $$ > {tmp_path}/new\nmv {tmp_path}/new {tmp_path}/pid\nexec sleep 60\n"
    )

    def it_waits() -> bool:
        frame = sys._current_frames()[threading.main_thread().ident]
        return frame.f_code is succeed.__code__ and "process" in frame.f_locals

    def interrupt() -> None:
        while not ((tmp_path / "pid").exists() and it_waits()):
            time.sleep(0.005)
        os.kill(os.getpid(), signal.SIGINT)

    interrupter = threading.Thread(target=interrupt)
    interrupter.start()
    with pytest.raises(KeyboardInterrupt):
        succeed([program])
    interrupter.join()
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)
