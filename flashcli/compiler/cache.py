"""Compiled kernels, kept between runs: a file is taken as it was stored, or not at all.

Behind the code stands its checksum. A copy that was cut off, a bad disk or another program may have left anything
under the name of a kernel, and to run that would crash the process, or worse, give wrong numbers.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

CHECKSUM_BYTES = 32
LARGEST = 2**26  # bytes of a file; kernels have some 10^5


def folders() -> list[Path]:
    """The cache's folders, of which the first is written: $FLASHCLI_CACHE_DIR, or flashcli in the user's cache folder.

    Further folders in $FLASHCLI_CACHE_DIR, with colons between, are only read: those that a class or a cluster shares.
    """
    named = [Path(name) for name in os.environ.get("FLASHCLI_CACHE_DIR", "").split(os.pathsep) if name]
    return named or [Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")) / "flashcli"]


def folder() -> Path:
    """The folder in which new kernels are kept."""
    return folders()[0]


def kept(pattern: str) -> Iterator[tuple[Path, bytes]]:
    """The kernels whose file's name matches a pattern, whole ones only, of the first folder first."""
    for path in (path for there in folders() for path in sorted(there.glob(pattern))):
        if code := load(path):
            yield path, code


def load(path: Path) -> bytes | None:
    """The code that `store` wrote to a path; None if there is none or its checksum does not match."""
    with contextlib.suppress(OSError), open(os.open(path, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        status = os.fstat(file.fileno())  # a FIFO would give nothing, and a device no end
        if stat.S_ISREG(status.st_mode) and CHECKSUM_BYTES < status.st_size <= LARGEST:
            return unsealed(file.read())
    return None


def sealed(code: bytes) -> bytes:
    """Code with its checksum behind it."""
    return code + hashlib.sha256(code).digest()


def unsealed(sealed: bytes) -> bytes | None:
    """The code before its checksum; None if that is not its checksum."""
    code, checksum = sealed[:-CHECKSUM_BYTES], sealed[-CHECKSUM_BYTES:]
    return code if checksum == hashlib.sha256(code).digest() else None


def store(path: Path, code: bytes) -> None:
    """Write code and its checksum, whole or not at all: parallel runs read no torn file. Failing to is no error."""
    import tempfile  # here, because a warm start compiles nothing

    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, temporary = tempfile.mkstemp(dir=path.parent)
        try:
            with os.fdopen(fd, "wb") as file:
                file.write(sealed(code))
            os.replace(temporary, path)
        except BaseException:
            os.unlink(temporary)
            raise


@contextlib.contextmanager
def alone(name: str) -> Iterator[None]:
    """Be the only process, and thread, that makes the kernel of that name during a ``with`` block: others wait for it.

    The system ends the wait for a process that dies. Where nothing can be written, nobody waits.
    """
    import fcntl

    path = folder() / f"{name}.lock"
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(OSError):
            path.parent.mkdir(parents=True, exist_ok=True)
            fcntl.flock(stack.enter_context(open(path, "wb")), fcntl.LOCK_EX)
            stack.callback(path.unlink, missing_ok=True)
        yield


def try_to_write() -> None:
    """Raise the OSError that keeps a kernel from being stored, if there is one; nothing is left behind."""
    import tempfile

    existing = next(path for path in (folder(), *folder().parents) if os.path.exists(path))
    with tempfile.TemporaryFile(dir=existing) as file:
        file.write(bytes(2**18))
