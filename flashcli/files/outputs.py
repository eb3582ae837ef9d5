"""Files that commands write: each appears under its name when it is complete, and never half-written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import stat

from flashcli import signals
from flashcli.errors import CannotCreate, UsageError, explained


class AtomicFile:
    """A file being written in pieces. It appears under its name when complete, and never half-written.

    A regular (or new) file is written under a temporary name in the same folder and renamed by `commit`; anything else,
    such as a FIFO or ``/dev/null``, is written through, in order. Opening it proves that the file can be created.

    Several processes can write it: one makes it, and tells the others what `share` gives; when they have written their
    parts, and committed, it commits.
    """

    def __init__(self, path: str | os.PathLike, size: int = 0, shared: str | None = None) -> None:
        """``size`` is how large it will be, in bytes, if that is known; ``shared`` what another process shares."""
        self.path, self._size = os.fspath(path), size
        self._temporary: str | None = None
        with explained("write", path, CannotCreate):
            self._target = None if shared else self._resolve_target()
            if self._target is None:
                self._fd = os.open(shared or self.path, os.O_WRONLY)
                self.in_order = not shared and not os.path.samestat(os.fstat(self._fd), os.stat(os.devnull))
            else:
                self._open_temporary(self._target)
                self.in_order = False
        try:
            if self._temporary is not None:
                with explained("write", path):
                    _reserve(self._fd, size)
        except BaseException:
            self.discard()
            raise

    def _resolve_target(self) -> str | None:
        """The regular file to replace, links followed; None if the output is something else and is written through."""
        if not os.path.basename(self.path):
            raise CannotCreate(f"cannot write {self.path!r}: it names no file.", "name a file.")
        try:
            mode = os.stat(self.path).st_mode
        except FileNotFoundError:
            return os.path.realpath(self.path)
        if stat.S_ISDIR(mode):
            raise CannotCreate(f"cannot write {self.path!r}: it is a folder.", "name a file in it.")
        if not stat.S_ISREG(mode):
            return None
        if not os.access(self.path, os.W_OK):
            raise PermissionError(13, "Permission denied")
        return os.path.realpath(self.path)

    def _open_temporary(self, target: str) -> None:
        folder, name = os.path.split(target)
        temporary = os.path.join(folder, f".{name[:50]}.{os.urandom(4).hex()}.tmp")
        signals.half_written.add(temporary)  # before it is there: a signal may come meanwhile
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as by open()
        self._temporary = temporary
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self._fd, stat.S_IMODE(os.stat(target).st_mode))  # those of the file it replaces

    def share(self) -> str:
        """Where other processes write their parts of it."""
        if self._temporary is None:
            return self.path
        with explained("write", self.path):
            os.ftruncate(self._fd, self._size)  # so that no process has to make it longer while others write to it
        return self._temporary

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write bytes. Where the target cannot seek, they must come in order. Safe to call from several threads."""
        with explained("write", self.path, CannotCreate):
            while view:
                written = os.write(self._fd, view) if self.in_order else os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written

    def commit(self) -> None:
        """Give the finished file its name."""
        fd, self._fd = self._fd, -1
        with explained("write", self.path, CannotCreate):
            os.close(fd)  # a full disk may show only here, on a network file system
            if self._temporary is not None:
                os.replace(self._temporary, self._target)
                self._forget_temporary()

    def discard(self) -> None:
        """Leave nothing behind; the old file, if any, stays as it was."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            with contextlib.suppress(OSError):  # its folder may be gone: what went wrong before is what to tell
                os.unlink(self._temporary)
            self._forget_temporary()

    def _forget_temporary(self) -> None:
        signals.half_written.discard(self._temporary)
        self._temporary = None

    def __enter__(self) -> AtomicFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()  # after commit() there is nothing left to discard


def _reserve(fd: int, size: int) -> None:
    """Set disk space aside where the file system can: too little shows before anything is computed.

    It also halves the time for writing, and on ext4 that for renaming onto an old file. (Not os.posix_fallocate, which
    writes zeros where the file system cannot.)
    """
    free = os.fstatvfs(fd)
    if free.f_blocks and size > free.f_bavail * free.f_frsize:  # fallocate() would fill the disk before it gives up
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    libc = ctypes.CDLL(None, use_errno=True)
    if not hasattr(libc, "fallocate"):  # not Linux
        return
    keep_size = 1
    failed = libc.fallocate(fd, keep_size, ctypes.c_long(0), ctypes.c_long(size))
    if failed and (number := ctypes.get_errno()) in (errno.ENOSPC, errno.EDQUOT):
        raise OSError(number, os.strerror(number))


def check_distinct(*paths: str | os.PathLike | None) -> None:
    """Refuse to overwrite one file of a command with another; None is a file that is not wanted."""
    for path, other in itertools.combinations((path for path in paths if path is not None), 2):
        with contextlib.suppress(OSError):
            same_path = os.path.realpath(path) == os.path.realpath(other)  # of files that are not there yet
            if same_path or os.path.samefile(path, other):
                raise UsageError(
                    f"{os.fspath(other)!r} is named twice: it is the same file.", "name another file to write."
                )


def check_creatable(path: str | os.PathLike) -> None:
    """Find out before the work whether `write_whole` will succeed after it; what is there stays as it is."""
    if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):  # to open a FIFO would be to write it
        AtomicFile(path).discard()


def write_whole(path: str | os.PathLike, content: str | bytes) -> None:
    """A small file, whole or not at all: until it is complete, an old file stays."""
    with AtomicFile(path) as file:
        file.write_at(0, memoryview(content.encode() if isinstance(content, str) else content))
        file.commit()
