"""Files of paged decode: `.safetensors`, by their header, whatever they are called.

A file is 8 bytes that say how long the header is, the header, JSON that names each tensor's type, shape and place, and
the tensors' bytes. Inputs are mapped: a tensor is read where it is used, and only so far as it is. `INPUT` has the
tensors; what else there is to say stands in the header's metadata, as text (see `_metadata`).
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import reprlib
import stat
import struct
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from flashcli.asked.decode import FACTORS, LAYOUTS, BlockSparse, default_scale, ragged_problem
from flashcli.asked.shape import round_up
from flashcli.cpu.pages import DecodeArrays
from flashcli.cpu.pages import decode_problem as problem
from flashcli.errors import BackendUnavailable, BadInput, FlashError, explained
from flashcli.files.outputs import AtomicFile
from flashcli.files.regular import check_regular
from flashcli.process import mapped

TYPES = {
    "F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "I8": "int8", "I32": "int32", "F64": "float64", "I64": "int64", "U8": "uint8",
}  # fmt: skip
NAMES = {name: tag for tag, name in TYPES.items()}
REQUIRED = ("query", "key_cache", "value_cache", "block_tables", "seq_lens")
RARER = ("query_starts", "alibi_slopes", "sinks")
OPTIONAL = (*RARER, *FACTORS)
SPARSE = ("vert_stride", "block_size", "local_blocks", "head_sliding_step", "tp_rank")
METADATA = ("layout", "scale", "sliding_window", "softcap", "causal", "max_query_len", *SPARSE)
FIRST_AXIS = "first_axis"  # metadata of an answer to ragged queries: it has a row for each query token
SAID_BY_OTHERS = "format"  # metadata that PyTorch's users write: the library that a file was saved by
LENGTH = struct.Struct("<Q")
BEGINNINGS = (b'{"', b"{}", b"{ ", b"{\t", b"{\r", b"{\n")  # of a header
MAX_HEADER = 100_000_000  # bytes; the library refuses a longer one
MOST_TOLD = 100  # characters of a name
ALIGNMENT = 64  # of the first tensor's bytes in a file of ours, and so of those whose sizes are multiples of it
HINT = "`flashcli generate --decode` makes such a file; docs/decode.md says what is in one."


def dtype(name: str) -> np.dtype:
    """NumPy's type of a name such as "float16" or "bfloat16"."""
    if name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        return np.dtype(name)
    try:
        import ml_dtypes
    except ImportError as error:
        raise BackendUnavailable(
            f"NumPy knows {name} by ml_dtypes, which is missing.", "pip install ml_dtypes."
        ) from error
    return np.dtype(getattr(ml_dtypes, name))


def has_tensors(path: str | os.PathLike) -> bool:
    """Whether a file begins as `.safetensors` does, or has its name. False for what is no regular file.

    No input of attention can begin so, for d would be above 256; nor does an output, unless its first two numbers are
    (almost) zero.
    """
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            return False
        with open(path, "rb") as file:
            beginning = file.read(LENGTH.size + 2)
    except OSError:
        return False  # whoever reads it next will say why
    if os.fspath(path).endswith(".safetensors"):
        return True  # and if it is broken, this format's reader says how
    if beginning[LENGTH.size :] not in BEGINNINGS:
        return False
    return 2 <= LENGTH.unpack_from(beginning)[0] <= MAX_HEADER


class Tensors:
    """The tensors of a `.safetensors` file as arrays that are mapped from it, and its metadata."""

    def __init__(self, path: str | os.PathLike) -> None:
        self.path = os.fspath(path)
        header, self._start = self._checked_header()
        self.metadata: dict[str, str] = header.pop("__metadata__", None) or {}
        self._header = header
        with explained("read", path):
            self._bytes = mapped.mapped(self.path)

    def __contains__(self, name: str) -> bool:
        return name in self._header

    def __iter__(self) -> Iterator[str]:
        return iter(self._header)

    def __getitem__(self, name: str) -> np.ndarray:
        entry = self._header[name]
        if entry["dtype"] not in TYPES:
            raise BadInput(f"{self.path!r} has {name} of type {entry['dtype']}, which is not known here.", HINT)
        first, last = (self._start + offset for offset in entry["data_offsets"])
        kind = dtype(TYPES[entry["dtype"]])
        # Not .view(): the format does not promise that tensors start where their type would have them.
        flat: np.ndarray = np.frombuffer(self._bytes, kind, (last - first) // kind.itemsize, first)
        try:
            return flat.reshape(entry["shape"])
        except ValueError as error:  # NumPy has 64 dimensions, and empty arrays only of what would fit into memory
            told = f"{self.path!r} has {name} of a shape that no array has, {reprlib.repr(entry['shape'])}."
            raise BadInput(told, HINT) from error

    def _checked_header(self) -> tuple[dict, int]:
        """The header, and where the tensors begin; the library makes sure of what they say of sizes and places."""
        try:
            from safetensors import SafetensorError, safe_open
        except ImportError as error:
            raise BackendUnavailable(
                "the library safetensors is missing.", "pip install safetensors ml_dtypes."
            ) from error
        with explained("read", self.path):
            check_regular(self.path)
            with open(self.path, "rb") as file:  # by us first: the library does not say why it cannot be opened
                beginning = file.read(LENGTH.size)
                try:
                    with safe_open(self.path, framework="np"):
                        pass
                except SafetensorError as error:
                    told = f"{self.path!r} is not a whole .safetensors file: {_short(str(error).rpartition(': ')[2])}."
                    raise BadInput(told, _hint_of_another(self.path)) from error
                size = LENGTH.unpack(beginning)[0]
                return json.loads(file.read(size)), LENGTH.size + size


def _short(text: str) -> str:
    """The text, cut where it is longer than anybody reads: a file can make names of any length."""
    return text if len(text) <= MOST_TOLD else f"{text[:MOST_TOLD]} .."


def _hint_of_another(path: str) -> str:
    """A hint for a file that is no `.safetensors` file: which file it may be, and what to do with it."""
    from flashcli.files.fileformat import InputFile

    with contextlib.suppress(FlashError), InputFile(path):
        return "it is an input of (B, N, d): use `flashcli run`."
    return HINT


def read_decode(
    path: str | os.PathLike, notice: Callable[[str], None] = lambda text: None
) -> tuple[DecodeArrays, tuple[int, ...]]:
    """Read and check a paged decode file; also returns the shape of its query, which has three or four axes.

    ``notice`` is told of names in the file that mean nothing here, such as misspelled ones.
    """
    tensors = Tensors(path)
    if missing := [name for name in REQUIRED if name not in tensors]:
        raise BadInput(f"{tensors.path!r} has no tensor {missing[0]}.", HINT)
    query = tensors["query"]
    arrays: dict[str, Any] = {name: tensors[name] for name in (*REQUIRED[1:], *RARER) if name in tensors}
    if wrong := ragged_problem(query.shape, arrays["query_starts"].shape if "query_starts" in arrays else None):
        raise BadInput(f"{tensors.path!r} cannot be decoded: {wrong}.", HINT)
    scales: dict[str, Any] = {name: _number_of(tensors, name) for name in FACTORS if name in tensors}
    asked = DecodeArrays(
        query[:, None] if query.ndim == 3 else query, **arrays, **scales, **_metadata(tensors, query.shape)
    )
    if wrong := problem(asked):
        raise BadInput(f"{tensors.path!r} cannot be decoded: {wrong}.", HINT)
    for name in () if asked.is_scaled else scales:
        told = f"a factor on numbers of fp8 or int8, and the cache is {asked.key_cache.dtype}"
        notice(f"{tensors.path!r} has a tensor {name}, {told}: it is left out.")
    for name in sorted({*tensors} - {*REQUIRED, *OPTIONAL}):
        notice(f"{tensors.path!r} has a tensor {_short(name)}, which means nothing here: it is left out.")
    for name in sorted({*tensors.metadata} - {*METADATA, SAID_BY_OTHERS}):
        notice(f"{tensors.path!r} has {_short(name)} in its metadata, which means nothing here: it is left out.")
    return asked, query.shape


def _number_of(tensors: Tensors, name: str) -> float:
    values = tensors[name]
    if values.dtype != np.float32 or values.size != 1:
        raise BadInput(
            f"{tensors.path!r} has {name} of {values.size} numbers of {values.dtype}, not one float32.", HINT
        )
    return float(values.reshape(()))


def _metadata(tensors: Tensors, query_shape: tuple[int, ...]) -> dict[str, Any]:
    """The options in the file's metadata, which is text: those of `METADATA`."""
    given = tensors.metadata

    def number(name: str, otherwise: float, kind: type = int) -> float:
        try:
            return kind(given.get(name, otherwise))
        except ValueError:
            wanted = "a whole number" if kind is int else "a number"
            raise BadInput(
                f"{tensors.path!r} has {name} = {reprlib.repr(given[name])} in its metadata, not {wanted}.", HINT
            ) from None

    layout = given.get("layout", "vllm")
    if layout not in LAYOUTS:
        raise BadInput(f"{tensors.path!r} has layout {reprlib.repr(layout)}, not {', '.join(LAYOUTS)}.", HINT)
    sparse: dict[str, Any] = {name: number(name, 0) for name in SPARSE}
    return {
        "layout": layout,
        "scale": number("scale", default_scale(query_shape), float),
        "window": number("sliding_window", 0),
        "softcap": number("softcap", 0, float),
        "causal": bool(number("causal", 1)),
        "max_query_len": number("max_query_len", 0) if "max_query_len" in given else None,
        "sparse": BlockSparse(**sparse) if sparse["vert_stride"] > 1 else None,
    }


def metadata(asked: DecodeArrays) -> dict[str, str]:
    """The metadata of a paged decode file: the inverse of `_metadata`."""
    sparse = {name: getattr(asked.sparse, name) for name in SPARSE} if asked.sparse else {}
    rare: dict[str, Any] = {
        "sliding_window": asked.window,
        "softcap": asked.softcap,
        "max_query_len": asked.max_query_len,
    }
    rare = {name: value for name, value in rare.items() if value} | ({} if asked.causal else {"causal": 0})
    return {
        name: str(value) for name, value in {"layout": asked.layout, "scale": asked.scale, **rare, **sparse}.items()
    }


class TensorWriter(AtomicFile):
    """A `.safetensors` file being written tensor by tensor, in any order; it appears under its name when complete."""

    def __init__(
        self, path: str | os.PathLike, tensors: dict[str, tuple[str, tuple[int, ...]]], metadata: dict[str, str]
    ) -> None:
        """``tensors`` says the type and shape of each, in the file's order."""
        header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
        end = 0
        for name, (kind, shape) in tensors.items():
            first, end = end, end + math.prod(shape) * dtype(kind).itemsize
            header[name] = {"dtype": NAMES[kind], "shape": list(shape), "data_offsets": [first, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (round_up(LENGTH.size + len(text), ALIGNMENT) - LENGTH.size - len(text))
        self._first = LENGTH.size + len(text)
        self._places = {name: entry["data_offsets"][0] for name, entry in header.items() if name != "__metadata__"}
        super().__init__(path, self._first + end, header=LENGTH.pack(len(text)) + text)

    def write(self, name: str, values: np.ndarray, skip: int = 0) -> None:
        """Numbers of a tensor, from the one after the first ``skip`` on. Where the file cannot seek, in its order."""
        offset = self._first + self._places[name] + skip * values.itemsize
        self.write_at(offset, np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)


def create_answer(path: str | os.PathLike, kind: str, query_shape: tuple[int, ...], ragged: bool) -> TensorWriter:
    """The file of an answer: ``out``, of the query's shape and type, and ``lse``, one float32 a head."""
    tensors = {"out": (kind, query_shape), "lse": ("float32", query_shape[:-1])}
    return TensorWriter(path, tensors, {FIRST_AXIS: "token"} if ragged else {})
