"""Files that commands write: each appears under its name when it is complete, and never half-written."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import re
import stat
from typing import Self

from flashcli.errors import CannotCreate, UsageError, explained
from flashcli.process import signals

MOST_LINKS = 40  # that lead from one to the next, as in Linux


class AtomicFile:
    """A file being written in pieces. It appears under its name when complete, and never half-written.

    A regular (or new) file is written under a temporary name in the same folder and renamed by `commit`. Anything else
    is written through, in order: a FIFO, ``/dev/null``, and what is open already, such as ``/dev/stdout``, whatever it
    leads to. Opening it proves that the file can be created.

    Several processes can write it: one makes it, and tells the others what `share` gives; when they have written their
    parts, and committed, it commits.
    """

    def __init__(self, path: str | os.PathLike, size: int = 0, shared: str | None = None, header: bytes = b"") -> None:
        """``size`` is how large it will be, in bytes, if that is known; ``shared`` what another process shares.

        A ``header`` is written at once.
        """
        self.path, self._size = os.fspath(path), size
        self._fd, self.in_order = -1, False
        self._target = ""
        self._temporary: str | None = None
        try:
            with explained("write", path, CannotCreate):
                if shared is None:
                    self._open()
                else:
                    self._fd = os.open(shared, os.O_WRONLY)
            if self._temporary is not None:
                with explained("write", path):
                    _reserve(self._fd, size)
            self.write_at(0, memoryview(header))
        except BaseException:
            self.discard()
            raise

    def _open(self) -> None:
        if not os.path.basename(self.path):
            raise CannotCreate(f"cannot write {self.path!r}: it names no file.", "name a file.")
        status = _status(self.path)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise CannotCreate(f"cannot write {self.path!r}: it is a folder.", "name a file in it.")
        leads_to = follow(self.path)
        if is_descriptor(leads_to):
            self._fd = open_again(leads_to)
        elif status is not None and not stat.S_ISREG(status.st_mode):
            self._fd = os.open(leads_to, os.O_WRONLY)
        else:
            self._target = leads_to
            self._open_temporary(status)
            return
        self.in_order = not os.path.samestat(os.fstat(self._fd), os.stat(os.devnull))

    def _open_temporary(self, replaced: os.stat_result | None) -> None:
        """A file that will take the place of another, or of none, and gets its owner and permissions."""
        folder, name = os.path.split(self._target)
        if replaced is not None:
            _check_replaceable(self._target, replaced)
        temporary = os.path.join(folder, f".{name[:50]}.{os.urandom(4).hex()}.tmp")
        signals.half_written.add(temporary)  # before it is there: a signal may come meanwhile
        try:
            self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as by open()
        except FileExistsError:
            signals.half_written.discard(temporary)  # it is another's
            raise
        self._temporary = temporary
        if replaced is not None:
            with contextlib.suppress(OSError):  # root may; others have what is theirs
                os.fchown(self._fd, replaced.st_uid, replaced.st_gid)
            os.fchmod(self._fd, stat.S_IMODE(replaced.st_mode))

    def share(self) -> str:
        """The path at which other processes write their parts of the file."""
        if self._temporary is None:
            return self.path
        with explained("write", self.path):
            os.ftruncate(self._fd, self._size)  # so that no process has to make it longer while others write to it
        return self._temporary

    def write_at(self, offset: int, view: memoryview) -> None:
        """Write bytes. Where the target cannot seek, they must come in order. Safe to call from several threads."""
        with explained("write", self.path, CannotCreate):
            while view:
                written = self._write(view) if self.in_order else os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written

    def _write(self, view: memoryview) -> int:
        try:
            return os.write(self._fd, view)
        except BlockingIOError:  # somebody has set the open file so, and it is not for us to change that
            import select

            select.select([], [self._fd], [])
            return 0

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

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.discard()  # after commit() there is nothing left to discard


def _status(path: str) -> os.stat_result | None:
    """The `os.stat` of a path, links followed; None if nothing is there."""
    try:
        return os.stat(path)
    except FileNotFoundError:
        return None


def follow(path: str) -> str:
    """The file that symbolic links lead to; not beyond an open descriptor, whose link may name a file of the past."""
    for _ in range(MOST_LINKS):
        folder, name = os.path.split(path)
        path = os.path.join(os.path.realpath(folder), name)
        if is_descriptor(path) or not os.path.islink(path):
            return path
        path = os.path.join(os.path.dirname(path), os.readlink(path))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def is_descriptor(path: str) -> bool:
    """Whether it is /proc/PID/fd/N, where /dev/stdout and the like lead to."""
    parts = path.split("/")
    return parts[:2] == ["", "proc"] and parts[-2:-1] == ["fd"] and parts[-1].isdecimal()


def open_again(descriptor: str) -> int:
    """An open file, to go on writing where others have stopped."""
    _, _, process, *_, number = descriptor.split("/")
    return os.dup(int(number)) if int(process) == os.getpid() else os.open(descriptor, os.O_WRONLY | os.O_APPEND)


def _check_replaceable(path: str, status: os.stat_result) -> None:
    """Find out before the work what renaming would refuse after it, and what writing would."""
    if not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    folder = os.stat(os.path.dirname(path))
    if folder.st_mode & stat.S_ISVTX and os.geteuid() not in (0, folder.st_uid, status.st_uid):
        raise PermissionError(errno.EPERM, "it is another user's, in a folder where only that user may replace it")
    if path in _mount_points():
        raise CannotCreate(f"cannot write {path!r}: something is mounted on it.", "write another file, and copy it.")


def _mount_points() -> set[str]:
    try:
        with open("/proc/self/mountinfo", errors="surrogateescape") as file:
            fields = [line.split(" ")[4] for line in file]
    except OSError:  # not Linux
        return set()
    return {re.sub(r"\\(\d{3})", lambda octal: chr(int(octal[1], 8)), field) for field in fields}


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
