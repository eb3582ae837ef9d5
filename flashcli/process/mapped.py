"""Files that are mapped into memory: what happens where another process makes one shorter.

Reading what is gone raises SIGBUS in the thread that reads. Python would run a handler of its own after that reading,
so never. This handler is called at once, by the C library; it interrupts the copying of numbers, which holds no lock
that it might need, and it ends the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
import weakref

import numpy as np

from flashcli.errors import BadInput
from flashcli.process import signals

TOLD, HINT = "{!r} became shorter while it was read.", "do not change it meanwhile."

_mapped: list[weakref.ref[np.memmap]] = []
_telling = threading.Lock()
_callback = None  # to be kept for as long as the process lives


def mapped(path: str) -> np.memmap:
    """The bytes of a file, read where they are used."""
    found = np.memmap(path, np.uint8, mode="r")
    _mapped[:] = [one for one in _mapped if one() is not None] + [weakref.ref(found)]
    _watch()
    return found


def check() -> None:
    """Raise BadInput where a file has become shorter, whether what is gone has been read or not."""
    if (path := _shortened()) is not None:
        raise BadInput(TOLD.format(path), HINT)


def _shortened() -> str | None:
    """The first mapped file that is shorter than it was."""
    for found in (one() for one in _mapped):
        if found is not None and found._mmap.size() < found.size:  # type: ignore[attr-defined]  # that of the file now
            return str(found.filename)
    return None


def _watch() -> None:
    global _callback
    if _callback is None:
        _callback = ctypes.CFUNCTYPE(None, ctypes.c_int)(_unreadable)
        ctypes.CDLL(None).signal(signal.SIGBUS, _callback)


def _unreadable(number: int) -> None:
    """End the process: to return would be to read, and to be called, again and again. Of several threads one tells."""
    while not _telling.acquire(blocking=False):
        time.sleep(1)
    try:
        path = _shortened()
        signals.remove_half_written()
        if path is not None:
            os.write(2, f"Error: {TOLD.format(path)}\nHint: {HINT}\n".encode())
            os._exit(BadInput.exit_code)
    finally:
        os._exit(128 + number)  # something else, as a shell reports it
