"""The homework's files. This is the only module that knows their bytes.

Input, little-endian::

    int32 B, N, d | batch 0: Q[N,d] K[N,d] V[N,d] | batch 1: Q K V | ...        float32, row-major

Output: ``O[B,N,d]``, float32, row-major, no header.

Readers and writers work on ranges of batches, so that memory stays bounded whatever the size of the file. All sizes are
Python integers, so none overflows.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import struct
from dataclasses import dataclass

import numpy as np

from flashcli.errors import BadInput, CannotCreate, UsageError, explained
from flashcli.kernels import MAX_D

FLOAT = np.dtype("<f4")
HEADER = struct.Struct("<3i")
MAX_INT32 = 2**31 - 1
FORMAT_HINT = "an input file is int32 B, N, d, then float32 Q, K, V of each batch; `flashcli generate` makes one."


@dataclass(frozen=True)
class Shape:
    """B batches of N rows of d numbers, and where their bytes are."""

    B: int
    N: int
    d: int

    @property
    def batch_floats(self) -> int:
        """Numbers in one of Q, K, V, O of one batch."""
        return self.N * self.d

    @property
    def input_batch_bytes(self) -> int:
        return 3 * self.batch_floats * FLOAT.itemsize

    @property
    def output_batch_bytes(self) -> int:
        return self.batch_floats * FLOAT.itemsize

    @property
    def input_bytes(self) -> int:
        return HEADER.size + self.B * self.input_batch_bytes

    @property
    def output_bytes(self) -> int:
        return self.B * self.output_batch_bytes

    def batch_ranges(self, max_bytes: int) -> list[range]:
        """Consecutive ranges of batches whose input is at most ``max_bytes`` each, but at least one batch."""
        step = max(1, max_bytes // self.input_batch_bytes)
        return [range(b, min(b + step, self.B)) for b in range(0, self.B, step)]

    def __str__(self) -> str:
        return f"({self.B}, {self.N}, {self.d})"


class InputFile:
    """An open, checked input file. Use as a context manager."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        with explained("read", path):
            self._file = open(self.path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115 (closed by close())
        try:
            with explained("read", path):
                self.shape = self._check()
        except BaseException:
            self._file.close()
            raise

    def _check(self) -> Shape:
        status = os.fstat(self._file.fileno())
        if not stat.S_ISREG(status.st_mode):
            raise BadInput(f"{self.path!r} is not a regular file.", "copy the data to a file first.")
        header = self._file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise BadInput(
                f"{self.path!r} has {len(header)} bytes, too few for the {HEADER.size}-byte header.", FORMAT_HINT
            )
        shape = Shape(*HEADER.unpack(header))
        if problem := shape_problem(shape):
            swapped = Shape(*struct.unpack(">3i", header))
            big_endian = not shape_problem(swapped) and swapped.input_bytes == status.st_size
            hint = "the file is big-endian; write it little-endian." if big_endian else FORMAT_HINT
            raise BadInput(f"{self.path!r} is not an input file: its header says {problem}.", hint)
        if status.st_size != shape.input_bytes:
            word, difference = ("short", shape.input_bytes - status.st_size)
            if difference < 0:
                word, difference = "long", -difference
            raise BadInput(
                f"{self.path!r} is {difference} bytes too {word}: (B, N, d) = {shape} needs "
                f"{shape.input_bytes} bytes, the file has {status.st_size}.",
                "was it cut off, or is the header wrong?" if word == "short" else FORMAT_HINT,
            )
        return shape

    def read(self, batches: range) -> np.ndarray:
        """Q, K and V of a range of batches as float32 [batches, 3, N, d]."""
        qkv = np.empty((len(batches), 3, self.shape.N, self.shape.d), FLOAT)
        self.read_into(batches, qkv)
        return qkv

    def read_into(self, batches: range, qkv: np.ndarray) -> None:
        """The same, into a contiguous array. Safe to call from several threads at a time."""
        with explained("read", self.path):
            self._pread(memoryview(qkv).cast("B"), HEADER.size + batches.start * self.shape.input_batch_bytes)

    def will_read(self) -> None:
        """Let the system fetch the file from disk while other things are set up."""
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_WILLNEED)

    def _pread(self, buffer: memoryview, offset: int) -> None:
        while buffer:
            count = os.preadv(self._file.fileno(), [buffer], offset)
            if count == 0:
                raise BadInput(f"{self.path!r} became shorter while it was read.", "do not change it meanwhile.")
            buffer, offset = buffer[count:], offset + count

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> InputFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open_at_once(path: str, flags: int) -> int:
    """Opening a FIFO would wait for a writer, only for it to be refused."""
    return os.open(path, flags | os.O_NONBLOCK)


def shape_problem(shape: Shape) -> str:
    """What is wrong with a header, in words; empty if nothing is."""
    if problems := [f"{name} = {value}" for name, value in vars(shape).items() if not 1 <= value <= MAX_INT32]:
        return " and ".join(problems)
    if shape.d > MAX_D:
        return f"d = {shape.d}, more than the largest head size, {MAX_D}"
    return ""


class BatchWriter:
    """A file being written batch by batch. It appears under its name when complete, and never half-written.

    A regular (or new) file is written under a temporary name in the same folder and renamed by `commit`; anything else,
    such as a FIFO or ``/dev/null``, is written through, in order. Opening it proves that the file can be created.
    """

    def __init__(self, path: str | os.PathLike, batches: int, batch_bytes: int, header: bytes = b"") -> None:
        self.path = os.fspath(path)
        self._batch_bytes = batch_bytes
        self._first_batch = len(header)
        self._temporary: str | None = None
        with explained("write", path, CannotCreate):
            self._target = self._resolve_target()
            if self._target is None:
                self._fd = os.open(self.path, os.O_WRONLY)
            else:
                self._open_temporary(self._target)
        try:
            if self._temporary is not None:
                with explained("write", path):
                    _reserve(self._fd, len(header) + batches * batch_bytes)
            self._pwrite(memoryview(header), 0)
        except BaseException:
            self.discard()
            raise

    def _resolve_target(self) -> str | None:
        """The regular file to replace, links followed; None if the output is something else and is written through."""
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
        self._fd = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)  # less the umask, as by open()
        self._temporary = temporary
        with contextlib.suppress(FileNotFoundError):
            os.fchmod(self._fd, stat.S_IMODE(os.stat(target).st_mode))  # those of the file it replaces

    @property
    def in_order(self) -> bool:
        """Whether ranges must come one after another, because the target cannot seek."""
        return self._temporary is None

    def write(self, batches: range, values: np.ndarray) -> None:
        """Write the numbers of a range of batches. Where the target is a pipe, ranges must come in order."""
        view = memoryview(np.ascontiguousarray(values, FLOAT)).cast("B")
        if len(view) != len(batches) * self._batch_bytes:
            raise ValueError(f"{len(view)} bytes for {len(batches)} batches of {self._batch_bytes} bytes")
        self._pwrite(view, self._first_batch + batches.start * self._batch_bytes)

    def _pwrite(self, view: memoryview, offset: int) -> None:
        with explained("write", self.path, CannotCreate):
            while view:
                written = os.write(self._fd, view) if self._temporary is None else os.pwrite(self._fd, view, offset)
                view, offset = view[written:], offset + written

    def commit(self) -> None:
        """Give the finished file its name."""
        fd, self._fd = self._fd, -1
        with explained("write", self.path, CannotCreate):
            os.close(fd)  # a full disk may show only here, on a network file system
            if self._temporary is not None:
                os.replace(self._temporary, self._target)
                self._temporary = None

    def discard(self) -> None:
        """Leave nothing behind; the old file, if any, stays as it was."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                os.close(self._fd)
            self._fd = -1
        if self._temporary is not None:
            with contextlib.suppress(OSError):  # its folder may be gone: what went wrong before is what to tell
                os.unlink(self._temporary)
            self._temporary = None

    def __enter__(self) -> BatchWriter:
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


def create_input(path: str | os.PathLike, shape: Shape) -> BatchWriter:
    """An input file to be written: its batches are float32 [3, N, d] (Q, K, V)."""
    return BatchWriter(path, shape.B, shape.input_batch_bytes, HEADER.pack(shape.B, shape.N, shape.d))


def create_output(path: str | os.PathLike, shape: Shape) -> BatchWriter:
    """An output file to be written: its batches are float32 [N, d]."""
    return BatchWriter(path, shape.B, shape.output_batch_bytes)


def check_distinct(path: str | os.PathLike, other: str | os.PathLike) -> None:
    """Refuse to overwrite one file of a command with another."""
    with contextlib.suppress(OSError):
        same_path = os.path.realpath(path) == os.path.realpath(other)  # of files that are not there yet
        if same_path or os.path.samefile(path, other):
            raise UsageError(
                f"{os.fspath(other)!r} is named twice: it is the same file.", "name another file to write."
            )


def check_creatable(path: str | os.PathLike) -> None:
    """Find out before the work whether `write_whole` will succeed after it; what is there stays as it is."""
    if not os.path.exists(path) or os.path.isfile(path) or os.path.isdir(path):  # to open a FIFO would be to write it
        BatchWriter(path, 0, 0).discard()


def write_whole(path: str | os.PathLike, text: str) -> None:
    """A small file of text, whole or not at all: until it is complete, an old file stays."""
    with BatchWriter(path, 0, 0, text.encode()) as file:
        file.commit()


def read_output(path: str | os.PathLike, shape: Shape, batches: range) -> np.ndarray:
    """O of a range of batches as float32 [batches, N, d]; the file's size must be exactly that of ``shape``."""
    with explained("read", path):
        size = os.stat(path).st_size
        if size != shape.output_bytes:
            raise BadInput(
                f"{str(path)!r} has {size} bytes; an output of (B, N, d) = {shape} has {shape.output_bytes}.",
                "was the program stopped before it had written everything?",
            )
        count = len(batches) * shape.batch_floats
        o = np.fromfile(path, FLOAT, count, offset=batches.start * shape.output_batch_bytes)
        if o.size != count:
            raise BadInput(f"{str(path)!r} became shorter while it was read.", "do not change it meanwhile.")
    return o.reshape(len(batches), shape.N, shape.d)


def flat_shape(path: str | os.PathLike) -> Shape:
    """A shape for an output file about which nothing is known: one column, as many rows as it has numbers."""
    with explained("read", path):
        size = os.stat(path).st_size
    if size == 0 or size % FLOAT.itemsize:
        raise BadInput(f"{str(path)!r} has {size} bytes, which is no number of floats.", "is it an output file?")
    return Shape(1, size // FLOAT.itemsize, 1)
