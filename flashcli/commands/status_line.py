"""A line at the bottom of a terminal that tells what is going on, and is gone before anything else is printed."""

from __future__ import annotations

import shutil
import sys
import threading
import time

import click

CLEAR = "\r\x1b[K"


class StatusLine:
    """How many of ``total`` are done, what is being done, and about how long the rest will take.

    It is shown on stderr, if that is a terminal. Use as a context manager; `tell` may be called from several threads.
    """

    def __init__(self, total: int) -> None:
        self._total, self._done, self._start = total, 0, time.monotonic()
        self._shown = sys.stderr is not None and sys.stderr.isatty()
        self._lock = threading.Lock()

    def tell(self, about: str) -> None:
        text = f"[{self._done + 1}/{self._total}] {about}{self._left()}"
        self._write(CLEAR + text[: shutil.get_terminal_size().columns - 1])

    def _left(self) -> str:
        if not self._done:
            return ""
        seconds = (time.monotonic() - self._start) / self._done * (self._total - self._done)
        return f", about {seconds / 60:.0f} min left" if seconds >= 90 else f", about {seconds:.0f} s left"

    def done(self, line: str | None) -> None:
        """One more is done; print a line about it to stdout, if there is one."""
        self._done += 1
        self._write(CLEAR)
        if line is not None:
            click.echo(line)

    def _write(self, text: str) -> None:
        if self._shown:
            with self._lock:
                click.echo(text, nl=False, err=True)

    def __enter__(self) -> StatusLine:
        return self

    def __exit__(self, *exc: object) -> None:
        self._write(CLEAR)
