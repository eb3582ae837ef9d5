"""Commands in processes of their own: what is told of them, and when they are stopped."""

from __future__ import annotations

import signal
import sys

import pytest

from flashcli.errors import FlashError
from flashcli.measure import race


def test_a_command_is_told_of_when_it_has_finished():
    done = race.finish(["sh", "-c", "echo one; echo two >&2; exit 3"])
    assert (done.code, done.out, done.err) == (3, "one\n", "two\n")


def test_much_output_does_not_block_it():
    done = race.finish([sys.executable, "-c", "import sys; sys.stderr.write('x' * 2**20); print('y' * 2**20)"])
    assert (len(done.out), len(done.err)) == (2**20 + 1, 2**20)


def test_a_signal_that_ended_it_is_told():
    assert race.finish(["sh", "-c", "kill -KILL $$"]).code == -signal.SIGKILL


def test_one_that_takes_too_long_is_stopped():
    with pytest.raises(race.TookTooLong, match="more than 0 s"):
        race.finish(["sleep", 60], limit=0.05)


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
