"""Files to be read as a whole, such as manifests: a FIFO or a device would never end."""

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


def check_regular(path: Path, fd: int) -> None:
    """BadInput if an open file is no regular one."""
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        raise BadInput(f"{str(path)!r} is not a regular file.", "copy the data to a file first.")
