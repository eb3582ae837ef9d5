"""Regular files, and no others: to read a FIFO or a device may never end."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashcli.errors import BadInput, explained


def read_regular(path: Path) -> bytes:
    """Read the bytes of a regular file; BadInput if it is another kind of file."""
    with explained("read", path), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb") as file:
        check_regular(path, file.fileno())
        return file.read()


def check_regular(path: str | os.PathLike, opened: int | None = None) -> int:
    """Return the bytes of a regular file, which may be ``opened``; BadInput for any other kind of file."""
    status = os.stat(path if opened is None else opened)
    if not stat.S_ISREG(status.st_mode):
        raise BadInput(f"{str(path)!r} is not a regular file.", "copy the data to a file first.")
    return status.st_size


def stamp(path: str | os.PathLike) -> tuple[int, ...] | None:
    """Something that is no longer the same if a file was changed, replaced or removed; no link is followed."""
    try:
        status = os.lstat(path)
    except OSError:
        return None
    return status.st_mode, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
