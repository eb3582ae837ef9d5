"""Threads that the main one can wait for while signals may be raised in it."""

from __future__ import annotations

import subprocess
import sys
import threading

import pytest
from support import environment

from flashcli.process import signals
from flashcli.process.pool import Pool, awaited

# Signals come all the time while futures are made and waited for, and each is raised as soon as it may be. What takes a
# lock of the library's and is interrupted there never gives it back: then a thread, or this one, waits for ever.
STORM = """
import itertools, signal
from flashcli.process import signals
from flashcli.process.pool import Pool, awaited

def compute(pool):  # a loop in the try itself is left out of it, by Python 3.12 and later, where it goes back
    for number in itertools.count():
        future = pool.submit(int, number)
        assert awaited(future) == number

signals.listen()
signals.heed()
signal.signal(signal.SIGALRM, lambda number, frame: signals._listener.hear(signal.SIGTERM, frame))
raised = 0
with Pool(2) as pool:
    for turn in range(400):
        signals._listener.__init__()
        signals.listen()
        signals.heed()
        try:
            signal.setitimer(signal.ITIMER_REAL, 1e-5 + turn % 40 * 5e-6)
            compute(pool)
        except signals.Terminated:
            raised += 1
        signals.ignore_from_now_on()
        signal.signal(signal.SIGALRM, lambda number, frame: signals._listener.hear(signal.SIGTERM, frame))
print(raised)
"""


def test_no_signal_leaves_a_lock_behind():
    done = subprocess.run([sys.executable, "-c", STORM], env=environment(), capture_output=True, text=True, timeout=60)
    assert done.stdout == "400\n", done.stderr


# A signal that another thread hears does not wake the one that sleeps, nor does one that comes just before it sleeps.
ELSEWHERE = """
import signal, threading, time
from flashcli.process import signals
from flashcli.process.pool import Pool, awaited

def work():
    time.sleep(0.2)
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)
    never.wait(60)

never = threading.Event()
signals.listen()
signals.heed()
with Pool(1) as pool:
    try:
        awaited(pool.submit(work))
    except signals.Terminated:
        print("heard")
    never.set()
"""


def test_a_signal_that_wakes_nobody_is_heard():
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE], env=environment(), capture_output=True, text=True, timeout=50
    )
    assert done.stdout == "heard\n", done.stderr


def test_results_come_in_order_and_stop_at_an_error():
    with Pool(3) as pool:
        assert list(pool.results(divmod, range(50), [7] * 50)) == [divmod(n, 7) for n in range(50)]
        with pytest.raises(ZeroDivisionError):
            list(pool.results(divmod, [1, 1, 1], [1, 0, 1]))


def test_an_error_is_raised_where_it_is_awaited():
    with Pool(1) as pool, pytest.raises(ValueError, match="invalid literal"):
        awaited(pool.submit(int, "x"))


def test_what_has_not_begun_is_dropped_at_an_error():
    begun, go_on = [], threading.Event()

    def work(number: int) -> None:
        begun.append(number)
        if number == 0:
            raise OSError
        go_on.wait()

    with Pool(2) as pool:
        with pytest.raises(OSError):
            list(pool.results(work, range(100)))
        go_on.set()
    assert len(begun) < 100


def test_other_threads_hold_no_signals():
    with Pool(1) as pool, Pool(1) as other:
        assert awaited(pool.submit(lambda: awaited(other.submit(int, "3")))) == 3
    assert signals._listener.holds == 0
