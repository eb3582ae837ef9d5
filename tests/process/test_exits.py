"""A library that ends the process, as OpenBLAS does without memory, in several threads at once."""

from __future__ import annotations

import ctypes

import pytest
from support import python

from flashcli.process import exits

# The first thread is slow to leave, so that all others have called what is registered for them by then.
PROGRAM = """
import ctypes, threading, time
from flashcli.process import exits, signals

signals.remove_half_written = lambda: time.sleep(0.2)
exits.watch_libraries()
together = threading.Barrier({threads})

def give_up():
    together.wait()
    ctypes.CDLL(None).exit(1)

for _ in range({threads}):
    threading.Thread(target=give_up).start()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "on_exit"), reason="this C library has no on_exit")
def test_a_library_that_gives_up_in_many_threads_at_once_is_told_once():
    done = python("-c", PROGRAM.format(threads=40), cold=True, timeout=30)
    assert (done.code, done.err) == (exits.OUT_OF_MEMORY, exits.TOLD.decode())
