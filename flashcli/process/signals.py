"""The signals that end a command: heard from the first moment on, and raised as an exception where that does no harm.

Code that is being imported, or that a destructor runs, may swallow an exception. So none is raised while anything is
imported, and the timer of the system is set to raise another if nobody has the first any more.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import time
import weakref
from types import FrameType

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)
LOOK_AGAIN = 0.02  # seconds after which to see whether an exception was lost, or can be raised now
STUCK = 2.0  # seconds after which another signal ends a process that has not been able to heed the first

half_written: set[str] = set()  # files to remove at once, since there may be no time to unwind
complete: list[str] = []  # the file that a command was to write, once it has its name


class Interrupted(KeyboardInterrupt):
    """SIGINT arrived: unwind, clean up, leave. (Unlike its base, it can be weakly referred to.)"""


class Terminated(BaseException):
    """The signal ``args[0]`` arrived: unwind, clean up, leave."""


class _Listener:
    def __init__(self) -> None:
        self.heard = 0  # the first signal
        self.heeds = False  # whether an exception may be raised
        self.thread = 0  # in which signals are heard
        self.holds = 0  # how many `held` blocks this is in
        self._since = 0.0
        self._raised: weakref.ref[BaseException] | None = None

    def hear(self, number: int, frame: FrameType | None) -> None:
        if self.heard:  # once is enough: cleaning up is not to be interrupted
            if self.heeds and self._raised is None and time.monotonic() > self._since + STUCK:
                os._exit(128 + number)
            return
        self.heard, self._since = number, time.monotonic()
        sys.unraisablehook = _keep_quiet
        signal.signal(signal.SIGALRM, self.look)
        signal.setitimer(signal.ITIMER_REAL, LOOK_AGAIN, LOOK_AGAIN)
        self.look(number, frame)

    def look(self, number: int, frame: FrameType | None) -> None:
        """Raise what was heard, unless that was done, or cannot be done now."""
        if self.holds:
            return
        remove_half_written()  # first of all: mpirun kills what has not ended 0.3 s later
        lost = self._raised is None or self._raised() is None
        if self.heeds and not _importing(frame) and lost and (error := ending()) is not None:
            self._raised = weakref.ref(error)
            try:
                raise error
            finally:
                del error  # which its own traceback would keep alive otherwise


_listener = _Listener()


def listen() -> None:
    """Hear signals from now on, in this thread; they are raised as soon as they are heeded."""
    _listener.thread = _thread.get_ident()
    for number in ENDING:
        if signal.getsignal(number) != signal.SIG_IGN:  # as a shell's background jobs are to ignore Ctrl-C
            signal.signal(number, _listener.hear)


def heed() -> None:
    """Raise what is heard, and what was heard before."""
    _listener.heeds = True
    if _listener.heard:
        _listener.look(_listener.heard, None)


def ignore_from_now_on() -> None:
    _listener.heeds = False
    if _listener.heard:
        signal.setitimer(signal.ITIMER_REAL, 0)


def ending() -> BaseException | None:
    """The exception that stands for the first signal heard; None if there was none."""
    if not _listener.heard:
        return None
    return Interrupted() if _listener.heard == signal.SIGINT else Terminated(_listener.heard)


class held:
    """A block in which nothing is raised, only after it: so it is known whether its step was done.

    In other threads than the one that listens nothing is ever raised.
    """

    def __enter__(self) -> None:
        if _thread.get_ident() == _listener.thread:
            _listener.holds += 1

    def __exit__(self, *exc: object) -> None:
        if _thread.get_ident() != _listener.thread:
            return
        _listener.holds -= 1
        if _listener.heard:
            _listener.look(_listener.heard, sys._getframe())


def remove_half_written() -> None:
    """Remove what is half-written, though it may still be written to."""
    for name in tuple(half_written):
        try:
            os.unlink(name)
        except OSError:
            """It is not there yet, or no more."""


def _importing(frame: FrameType | None) -> bool:
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _keep_quiet(unraisable: sys.UnraisableHookArgs) -> None:
    """Do not tell that a destructor has swallowed what a signal raised: another will be raised."""
    if not isinstance(unraisable.exc_value, Interrupted | Terminated):
        sys.__unraisablehook__(unraisable)
