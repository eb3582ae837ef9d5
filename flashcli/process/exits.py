"""How a process ends: by its own will, or by that of a library that gives up, as OpenBLAS does without memory."""

from __future__ import annotations

import ctypes
import os
import sys
import time

from flashcli.process import signals

OUT_OF_MEMORY = 71
THREADS = 256  # that may give up at the same time: each calls what no other has called yet
TOLD = b"""\
Error: out of memory: a library gave up and ended the process.
Hint: use a larger machine, or fewer --threads.
"""

_at_will = False  # whether the process ends by its own will
_told = False  # whether a thread tells that it does not
_callback = None  # to be kept for as long as the process lives


def watch_libraries() -> None:
    """Leave nothing half-written from now on when a library ends the process, and tell why by the exit code.

    Such a library calls exit(), which calls what is registered here. Python must not be taken down before that: the
    process has to be left by `leave`.
    """
    global _callback
    libc = ctypes.CDLL(None)
    if hasattr(libc, "on_exit"):  # not in every C library
        _callback = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_void_p)(_ended)
        for _ in range(THREADS):
            libc.on_exit(_callback, None)


def leave(code: int, quickly: bool) -> None:
    """End the process; less ``quickly``, what libraries have registered is done first."""
    global _at_will
    _at_will = True
    if quickly:
        os._exit(code)
    for stream in filter(None, (sys.stdout, sys.stderr)):
        try:
            stream.flush()
        except (OSError, ValueError):
            """Nobody reads it."""
    ctypes.CDLL(None).exit(code)


def _ended(status: int, argument: int | None) -> None:
    global _told
    if _at_will:
        return
    if _told:
        time.sleep(60)  # the thread that tells is about to end the process
    _told = True
    signals.remove_half_written()
    try:
        os.write(2, TOLD)
    finally:
        os._exit(OUT_OF_MEMORY)
