"""The signals that end a command."""

from __future__ import annotations

import signal

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Terminated(BaseException):
    """The signal ``args[0]`` arrived: unwind, clean up, leave."""


def ignore_from_now_on() -> None:
    for number in ENDING:
        signal.signal(number, signal.SIG_IGN)
