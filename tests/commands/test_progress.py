"""The progress bar of `flashcli run`: on a terminal only, and only if there is something to wait for."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from support import environment, random_qkv, write_input

QKV = random_qkv(20, 60, 32)
# The command line with 20 small chunks, which has a progress bar after so many seconds, and waits for each chunk.
PROGRAM = """
import os, sys, time
import flashcli.commands.options, flashcli.files.cut
flashcli.commands.options.BAR_AFTER = {after}
flashcli.files.cut.CHUNK_BYTES = {chunk_bytes}
os.preadv = lambda *args, read=os.preadv: time.sleep({pause}) or read(*args)
from flashcli.cli import main
sys.exit(main())
"""


@pytest.fixture
def given(tmp_path: Path) -> Path:
    return write_input(tmp_path / "x.in", QKV)


def command(given: Path, out: Path | str, after: float, pause: float) -> list[str]:
    program = PROGRAM.format(after=after, chunk_bytes=QKV[0].nbytes, pause=pause)
    return [sys.executable, "-c", program, "run", str(given), str(out), "--backend", "cpu", "--serial"]


def on_terminal(arguments: list[str]) -> str:
    """What a run writes to stderr where that is a terminal."""
    ours, theirs = os.openpty()
    process = subprocess.Popen(arguments, env=environment(), stderr=theirs, stdout=subprocess.DEVNULL)
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 4096):
            shown += part
    except OSError:
        pass  # how a terminal says that nobody writes to it any more
    os.close(ours)
    process.wait(timeout=60)
    return shown.decode()


def test_it_shows_share_rate_and_time_left(given, tmp_path):
    shown = on_terminal(command(given, tmp_path / "x.out", after=1, pause=0.08))
    bars = re.findall(r"computing  \[#+-*\] +(\d+)%  00:00:0\d  \d+ MB/s", shown)
    assert 5 < int(bars[0]) < 100  # some 60 where nothing else runs
    assert re.search(r"\[#+\] +100%", shown)


def test_a_quick_run_shows_none(given, tmp_path):
    assert on_terminal(command(given, tmp_path / "x.out", after=60, pause=0)) == ""


def test_none_is_shown_off_a_terminal(given, tmp_path):
    done = subprocess.run(
        command(given, tmp_path / "x.out", after=0, pause=0), env=environment(), capture_output=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, b"")


def test_an_error_has_a_line_of_its_own(given):
    lines = on_terminal(command(given, "/dev/full", after=0, pause=0)).splitlines()
    assert "Error: cannot write '/dev/full': no space left on device." in lines
