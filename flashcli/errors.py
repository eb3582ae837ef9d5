"""The ways flashcli can fail: each with its exit code (after BSD sysexits.h), one sentence, and a hint."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator

MISMATCH = 1  # not an error: the answer is no
INTERRUPTED = 130  # 128 + SIGINT, as shells report it


class FlashError(Exception):
    """Something the user can act on. ``str(error)`` is one sentence; ``hint`` says what to do about it.

    A traceback shows the hint too, in Python's words; whoever prints it otherwise leaves that note out.
    """

    exit_code = 70

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint
        if hint:
            self.add_note("Hint: " + hint.replace("--backend cpu", 'backend="cpu"'))


def later_notes(error: BaseException) -> list[str]:
    """The notes of an error but for the hint that a `FlashError` is made with."""
    notes = getattr(error, "__notes__", [])
    return notes[1:] if isinstance(error, FlashError) and error.hint else notes


class UsageError(FlashError, ValueError):
    exit_code = 2


class BadInput(FlashError):
    exit_code = 65


class BackendUnavailable(FlashError):
    exit_code = 69


class KernelFailure(FlashError):
    exit_code = 70


class OutOfMemory(FlashError):
    exit_code = 71


class CannotCreate(FlashError):
    exit_code = 73


class InputOutputError(FlashError):
    exit_code = 74


class NoPermission(FlashError):
    exit_code = 77


class Stopped(Exception):
    """Work is given up because other work that belongs to it has failed, or was interrupted."""


class AlreadyTold(Exception):
    """An end of this process because of ``args[0]``, an error already told to the user, here or by another process."""


SHORT_OF = (errno.ENOMEM, errno.EMFILE, errno.ENFILE)  # memory, or open files


@contextlib.contextmanager
def explained(doing: str, path: str | os.PathLike, missing: type[FlashError] = BadInput) -> Iterator[None]:
    """Turn the OSError of a system call on ``path`` into a FlashError that says what was being done.

    ``missing`` is the kind to raise where the path leads nowhere: bad input when reading, cannot create when writing.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        message = f"cannot {doing} {str(path)!r}: {reason}."
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise NoPermission(message, "check the permissions of the file and its folder (ls -ld).") from error
        if error.errno in SHORT_OF:
            raise OutOfMemory(message, "raise the limits (ulimit -a), or use a larger machine.") from error
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise InputOutputError(message, "free some space, or write to another file system.") from error
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.ENAMETOOLONG, errno.ELOOP):
            raise missing(message, "check the path.") from error
        if error.errno == errno.EPIPE:
            raise InputOutputError(message, "the reader closed the pipe.") from error
        raise InputOutputError(message, "check the disk or file system.") from error
