"""`-` in the place of a file's name: standard input, or standard output."""

from __future__ import annotations

import os
import stat
from typing import Any

from flashcli.errors import CannotCreate, UsageError, explained

NAME, STDIN, STDOUT = "-", "/dev/stdin", "/dev/stdout"


def to_read(*paths: str | None) -> list[Any]:
    """The paths, with `STDIN` in the place of `NAME`; and that is a file then, for files are read in any order."""
    if paths.count(NAME) > 1:
        raise UsageError("- is named twice, but stdin can be read only once.", "name a file for the other.")
    if NAME in paths:
        _make_stdin_a_file()
    return [STDIN if path == NAME else path for path in paths]


def to_write(*paths: str | None) -> list[Any]:
    return [STDOUT if path == NAME else path for path in paths]


def is_stdout(path: str) -> bool:
    """Whether a path leads to where stdout goes, and what is written there is not thrown away."""
    try:
        return os.path.samestat(os.stat(path), os.fstat(1)) and not os.path.samefile(path, os.devnull)
    except OSError:
        return False


def _make_stdin_a_file() -> None:
    with explained("read", STDIN):
        if stat.S_ISREG(os.fstat(0).st_mode):
            return
    import shutil
    import tempfile

    folder = tempfile.gettempdir()
    with explained("keep what stdin gives in", folder, CannotCreate), tempfile.TemporaryFile(dir=folder) as file:
        with open(0, "rb", closefd=False) as stdin:
            shutil.copyfileobj(stdin, file, 2**20)
        file.flush()
        os.dup2(file.fileno(), 0)
