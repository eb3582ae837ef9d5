"""The homework's files. This is the only module that knows their bytes.

Input, little-endian::

    int32 B, N, d | batch 0: Q[N,d] K[N,d] V[N,d] | batch 1: Q K V | ...        float32, row-major

Output: ``O[B,N,d]``, float32, row-major, no header.

An input is a matrix of 3·B·N rows of d numbers, an output one of B·N rows. Readers and writers work on `Chunk`s of
them, so that memory stays bounded whatever the size of the file. All sizes are Python integers, so none overflows.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable

import numpy as np

from flashcli.asked.shape import Chunk, Shape, shape_problem
from flashcli.errors import BadInput, explained
from flashcli.files.outputs import AtomicFile
from flashcli.files.regular import check_regular

FLOAT = np.dtype("<f4")
HEADER = struct.Struct("<3i")
PIECES, PIECE_BYTES = 16, 4096  # of a fingerprint
NPY, NPY_HINT = b"\x93NUMPY", "it is a .npy file: write the bytes alone, by array.tofile(FILE), as the README shows."
INSPECT_OUTPUT = "`flashcli inspect FILE --shape B,N,d`"
FORMAT_HINT = "an input file is int32 B, N, d, then float32 Q, K, V of each batch; `flashcli generate` makes one."


class InputFile:
    """An open, checked input file. Use as a context manager."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        try:
            with explained("read", path):
                self._file = open(self.path, "rb", buffering=0, opener=_open_at_once)  # noqa: SIM115 (closed by close())
        except BadInput as error:
            if not os.path.exists(os.path.join(os.path.dirname(self.path), "manifest.toml")):
                raise
            raise BadInput(str(error), "large cases are made in large/ beside the manifest: make testcases.") from error
        try:
            with explained("read", path):
                self.shape = self._check()
        except BaseException:
            self._file.close()
            raise

    def _check(self) -> Shape:
        size = check_regular(self.path, self._file.fileno())
        header = self._file.read(HEADER.size)
        if len(header) < HEADER.size:
            raise BadInput(
                f"{self.path!r} has {len(header)} bytes, too few for the {HEADER.size}-byte header.", FORMAT_HINT
            )
        shape = Shape(*HEADER.unpack(header))
        if problem := shape_problem(shape):
            told = f"{self.path!r} is not an input file: its header says {problem}."
            raise BadInput(told, _hint_of_another(self.path, header, size))
        if size != shape.input_bytes:
            word, difference = ("short", shape.input_bytes - size)
            if difference < 0:
                word, difference = "long", -difference
            raise BadInput(
                f"{self.path!r} is {difference} bytes too {word}: (B, N, d) = {shape} needs "
                f"{shape.input_bytes} bytes, the file has {size}.",
                "was it cut off, or is the header wrong?" if word == "short" else FORMAT_HINT,
            )
        return shape

    def read(self, batches: range) -> np.ndarray:
        """Q, K and V of a range of batches as float32 [batches, 3, N, d]."""
        qkv = np.empty((len(batches), 3, self.shape.N, self.shape.d), FLOAT)
        self.read_into(self.shape.whole(batches), qkv)
        return qkv

    def read_into(self, chunk: Chunk, floats: np.ndarray) -> None:
        """A chunk into a contiguous array of its size. Safe to call from several threads at a time."""
        with explained("read", self.path):
            first = self.shape.input_rows(chunk).start
            self._pread(floats.data.cast("B"), HEADER.size + first * self.shape.row_bytes)

    def will_read(self, batches: range) -> None:
        """Let the system fetch some batches from disk while other things are set up."""
        if hasattr(os, "posix_fadvise"):
            one = self.shape.input_batch_bytes
            where = HEADER.size + batches.start * one, len(batches) * one
            os.posix_fadvise(self._file.fileno(), *where, os.POSIX_FADV_WILLNEED)

    def fingerprint(self) -> bytes:
        """SHA-256 of a few pieces spread over the file: tells different files apart, not single changed values."""
        import hashlib  # here, since one process alone asks for none, and it takes a millisecond

        last = self.shape.input_bytes - PIECE_BYTES
        offsets = [max(0, last * piece // (PIECES - 1)) for piece in range(PIECES)]
        with explained("read", self.path):
            pieces = [os.pread(self._file.fileno(), PIECE_BYTES, offset) for offset in offsets]
        return hashlib.sha256(b"".join(pieces)).digest()

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


def _hint_of_another(path: str, header: bytes, size: int) -> str:
    """A hint for a file that is no input: which file it may be, and what to do with it."""
    if path.endswith(".safetensors") or header.endswith(b'{"', 0, 10):  # after the 8 bytes of a length, JSON
        return "it is a .safetensors file: use `flashcli decode`."
    if header.startswith(NPY):
        return NPY_HINT
    swapped = Shape(*struct.unpack(">3i", header))
    if not shape_problem(swapped) and swapped.input_bytes == size:
        return "the file is big-endian; write it little-endian."
    output = "" if size % FLOAT.itemsize else f" An output has no header: {INSPECT_OUTPUT} shows it."
    return FORMAT_HINT + output


def _open_at_once(path: str, flags: int) -> int:
    """Opening a FIFO would wait for a writer, only for it to be refused."""
    return os.open(path, flags | os.O_NONBLOCK)


class ChunkWriter(AtomicFile):
    """A file of float32 rows being written chunk by chunk; it appears under its name when complete."""

    def __init__(
        self,
        path: str | os.PathLike,
        size: int,
        row_bytes: int,
        rows_of: Callable[[Chunk], range],
        header: bytes = b"",
        shared: str | None = None,
    ) -> None:
        """``rows_of`` a chunk says which rows of the file it is."""
        super().__init__(path, size, shared, header)
        self._row_bytes, self._rows_of, self._first = row_bytes, rows_of, len(header)

    def write(self, chunk: Chunk, values: np.ndarray) -> None:
        """Write the numbers of a chunk. Where the target cannot seek, chunks must come in order."""
        view, rows = np.ascontiguousarray(values, FLOAT).data.cast("B"), self._rows_of(chunk)
        if len(view) != len(rows) * self._row_bytes:
            raise ValueError(f"{len(view)} bytes for {len(rows)} rows of {self._row_bytes} bytes")
        self.write_at(self._first + rows.start * self._row_bytes, view)


def create_input(path: str | os.PathLike, shape: Shape) -> ChunkWriter:
    """An input file to be written."""
    header = HEADER.pack(shape.B, shape.N, shape.d)
    return ChunkWriter(path, shape.input_bytes, shape.row_bytes, shape.input_rows, header)


def create_output(path: str | os.PathLike, shape: Shape, shared: str | None = None) -> ChunkWriter:
    """An output file to be written; or, where another process has made it, what that one `AtomicFile.share`s."""
    return ChunkWriter(path, shape.output_bytes, shape.row_bytes, shape.output_rows, shared=shared)


def read_output(path: str | os.PathLike, shape: Shape, batches: range, rows: range | None = None) -> np.ndarray:
    """O of a range of batches as float32 [batches, N, d], or some rows of a single batch as [1, rows, d].

    The file's size must be exactly that of ``shape``.
    """
    rows = range(shape.N) if rows is None else rows
    with explained("read", path):
        size = check_regular(path)
        if size != shape.output_bytes:
            told = f"{str(path)!r} has {size} bytes; an output of (B, N, d) = {shape} has {shape.output_bytes}."
            raise BadInput(told, _hint_of_size(path, size, shape.output_bytes))
        count = len(batches) * len(rows) * shape.d
        o = np.fromfile(path, FLOAT, count, offset=(batches.start * shape.N + rows.start) * shape.row_bytes)
        if o.size != count:
            raise BadInput(f"{str(path)!r} became shorter while it was read.", "do not change it meanwhile.")
    return o.reshape(len(batches), len(rows), shape.d)


def _hint_of_size(path: str | os.PathLike, size: int, wanted: int) -> str:
    """How an output may have come to another size than is wanted."""
    with open(path, "rb") as file:
        if file.read(len(NPY)) == NPY:
            return NPY_HINT
    if size == 2 * wanted:
        return "twice the bytes: are its numbers float64? Write float32, or name the right case."
    if 2 * size == wanted:
        return "half the bytes: are its numbers float16? Write float32; or was the program stopped?"
    return "was the program stopped before it had written everything?" if size < wanted else "is it another case's?"


def flat_shape(path: str | os.PathLike) -> Shape:
    """A shape for an output file about which nothing is known: one column, as many rows as it has numbers."""
    with explained("read", path):
        size = check_regular(path)
    if size == 0 or size % FLOAT.itemsize:
        raise BadInput(f"{str(path)!r} has {size} bytes, which is no number of floats.", "is it an output file?")
    return Shape(1, size // FLOAT.itemsize, 1)
