"""Seeded inputs for paged decode: the same seed gives the same file.

Slots that no sequence uses hold NaN, or the largest number of int8, and unused places of the tables -1, so that whoever
reads them shows it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from flashcli.asked.attention import contiguous
from flashcli.asked.decode import CHUNK_BYTES, FACTORS, LAYOUTS, SCALED_TYPES, BlockSparse, cache_shapes
from flashcli.asked.shape import MAX_INT32, ceil_div
from flashcli.cpu.pages import DecodeArrays
from flashcli.cpu.pages import decode_problem as problem
from flashcli.cpu.write_kv import stored
from flashcli.errors import UsageError
from flashcli.files.decode.tensors import RARER, TensorWriter, dtype, metadata

CACHES = ("key_cache", "value_cache")
# Standard deviations of keys and values as they are stored, in types that have scales.
STORED = {"float8_e4m3fn": (2.0, 4.0), "float8_e5m2": (2.0, 4.0), "int8": (32.0, 32.0)}
STEP = 2**22  # numbers that are drawn at a time
LARGEST_DRAWN = 8.0  # of numbers of the normal distribution: in 10^15 there is one beyond
MAX_FLOAT16 = 65504.0
MAX_BFLOAT16 = 2.0**127 * (2 - 2**-7)
LENGTHS_HINT = "say 4096, a list such as 131072,64x255 (255 times 64), uniform:2000 or skewed:100000."


@dataclass(frozen=True)
class Case:
    """A file to make: S sequences, H and Hkv heads of D; queries are normal numbers times ``sharpness``.

    With numbers of the normal distribution in queries and keys, that is the standard deviation of a row's scores.
    ``pages`` are "unique", each once, in random order; "reversed", each once, the last first; or "shared", those of the
    longest sequence for all, as if they began alike.
    """

    S: int
    H: int
    Hkv: int
    D: int
    lengths: str = "1024"
    T: int = 1
    page: int = 16
    layout: str = "vllm"
    query_type: str = "float16"
    cache_type: str = ""
    pages: str = "unique"
    sharpness: float = 3.0
    value_scale: float = 1.0
    alibi: bool = False
    window: int = 0
    sparse: BlockSparse | None = None
    seed: int = 0
    queries: str = ""  # ragged: query tokens of each sequence, written as lengths are
    softcap: float = 0.0
    sinks: bool = False
    causal: bool = True

    def counts(self) -> np.ndarray:
        """The number of query tokens of each sequence."""
        return lengths(self.queries or str(self.T), self.S, self.seed, "queries").astype(np.int64)


def lengths(text: str, S: int, seed: int, called: str = "lengths") -> np.ndarray:
    """S lengths: a number for all, a list with LENGTHxTIMES for repeated ones, ``uniform:MOST`` or ``skewed:MOST``.

    Uniform ones are drawn from 1 to MOST; of skewed ones the first is MOST, and the others are mostly far shorter.
    """
    rng = np.random.default_rng([seed, 0])
    if match := re.fullmatch(r"(uniform|skewed):(\d{1,18})", text):
        most = int(match[2])
        if not 1 <= most <= MAX_INT32:
            raise UsageError(f"{called} {text!r} must be from 1 to {MAX_INT32}.", LENGTHS_HINT)
        if match[1] == "uniform":
            return rng.integers(1, most, S, np.int32, endpoint=True)
        drawn = np.maximum(1, most * rng.random(S) ** 8).astype(np.int32)
        drawn[0] = most
        return drawn
    if not re.fullmatch(r"\d{1,18}(x\d{1,18})?(,\d{1,18}(x\d{1,18})?)*", text):
        raise UsageError(f"{text!r} is no list of {called}.", LENGTHS_HINT)
    parts = [(int(length), int(times or 1)) for length, _, times in (part.partition("x") for part in text.split(","))]
    if len(parts) == 1 and "x" not in text:
        parts = [(parts[0][0], S)]
    count = sum(times for _, times in parts)
    if count != S or max(length for length, _ in parts) > MAX_INT32:
        swapped = sum(length if times > 1 else 1 for length, times in parts)
        hint = "64x255 is 255 sequences of 64 tokens: the length comes first." if swapped == S else LENGTHS_HINT
        raise UsageError(f"{text!r} are {count} {called} for {S} sequences, or too large ones.", hint)
    return np.repeat(*np.array(parts).T).astype(np.int32)


def memory_wanted(case: Case) -> Iterator[int]:
    """Bytes that a case takes at least, before its file is there; a bound needs no more memory than the one before."""
    yield case.S * (32 + 8 * case.T * case.H * case.D)  # lengths, and queries
    if case.queries:
        yield 8 * int(case.counts().sum()) * case.H * case.D
    pages = ceil_div(lengths(case.lengths, case.S, case.seed).astype(np.int64), case.page)
    places = case.S * int(pages.max())
    total = int(pages.max() if case.pages == "shared" else pages.sum())
    yield 8 * places + (8 + case.page) * total + 8 * case.page * case.Hkv * case.D  # tables, `_used_slots`, a page


def make(case: Case) -> DecodeArrays:
    """The arrays of a case, in memory."""
    asked = outlined(case)
    caches = {name: np.empty(getattr(asked, name).shape, asked.key_cache.dtype) for name in CACHES}
    for name, first, some in _drawn_pages(case, asked):
        caches[name][first : first + len(some)] = some
    return replace(asked, key_cache=caches["key_cache"], value_cache=caches["value_cache"])


def outlined(case: Case) -> DecodeArrays:
    """A case with caches that take no memory, for they hold nothing and are not to be read."""
    seq_lens = lengths(case.lengths, case.S, case.seed)
    tables, pages = _tables(case, seq_lens)
    rng = np.random.default_rng([case.seed, 1])
    kind = dtype(case.cache_type or case.query_type)
    x = CHUNK_BYTES // kind.itemsize
    if case.layout == "vllm" and case.D % x and not case.D % 8:  # what is no multiple of 8 fits no layout
        raise UsageError(f"layout vllm has chunks of {x}, which do not divide {case.D}.", "choose nhd or hnd.")
    _check_size("sharpness", case.sharpness, case.query_type)
    if kind.name not in SCALED_TYPES:
        _check_size("value scale", case.value_scale, kind.name)
    counts = case.counts()
    shape = (int(counts.sum()), 1) if case.queries else (case.S, case.T)
    query = rng.standard_normal((*shape, case.H, case.D), np.float32) * np.float32(case.sharpness)
    shapes = cache_shapes(case.layout, pages, case.Hkv, case.page, case.D, kind.itemsize)
    deviations = STORED.get(kind.name)
    k_scale, v_scale = (1 / deviations[0], case.value_scale / deviations[1]) if deviations else (1.0, 1.0)
    slopes = 2.0 ** (-8.0 * np.arange(1, case.H + 1) / case.H)  # as ALiBi has them for a power of two heads
    keys, values = (_unread(shape, kind) for shape in shapes)
    asked = DecodeArrays(
        query.astype(dtype(case.query_type)), keys, values, tables, seq_lens,
        slopes.astype(np.float32) if case.alibi else None, k_scale, v_scale, case.layout, case.D**-0.5, case.window,
        case.sparse, case.softcap, case.causal, np.cumsum([0, *counts], dtype=np.int32) if case.queries else None,
        rng.standard_normal(case.H, np.float32) * np.float32(case.sharpness) if case.sinks else None,
    )  # fmt: skip
    if wrong := problem(asked):
        raise UsageError(f"such a file cannot be made: {wrong}.", "see docs/decode.md.")
    return asked


def _unread(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """A contiguous array that is never read: there is memory for its first number only."""
    strides = [kind.itemsize * stride for stride in contiguous(shape, kind.name).strides]
    bits = np.zeros(1, f"u{kind.itemsize}")  # NumPy refuses to lay out some of the types that it is taught
    return np.lib.stride_tricks.as_strided(bits, shape, strides, writeable=False).view(kind)


def _check_size(name: str, factor: float, kind: str) -> None:
    """Refuse a factor on normal numbers that makes some of them infinite."""
    if factor * LARGEST_DRAWN > (MAX_FLOAT16 if kind == "float16" else MAX_BFLOAT16):
        raise UsageError(f"{kind} has no room for numbers of a {name} of {factor:g}.", "choose a smaller one.")


def _tables(case: Case, seq_lens: np.ndarray) -> tuple[np.ndarray, int]:
    """The block tables, and how many pages there are: one more than are used, so that one is never to be read."""
    counts = ceil_div(seq_lens.astype(np.int64), case.page)
    width = max(1, int(counts.max()))
    places = np.arange(width) < counts[:, None]
    total = width if case.pages == "shared" else int(counts.sum())
    order = (
        np.arange(total)[::-1] if case.pages == "reversed" else np.random.default_rng([case.seed, 2]).permutation(total)
    )
    tables = np.full((case.S, width), -1, np.int32)
    tables[places] = np.broadcast_to(order, (case.S, width))[places] if case.pages == "shared" else order
    return tables, total + 1


def _used_slots(case: Case, seq_lens: np.ndarray, tables: np.ndarray, pages: int) -> np.ndarray:
    """Which slots [pages, page] hold a token that some query sees."""
    used = np.zeros((pages, case.page), bool)
    for row, length, count in zip(tables, seq_lens.tolist(), case.counts().tolist(), strict=True):
        if count == 0:
            continue
        first = max(0, length - (count if case.causal else 1) - case.window + 1) if case.window else 0
        (low, start), (high, end) = divmod(first, case.page), divmod(length, case.page)
        used[row[low + (start > 0) : high]] = True  # whole pages
        if start:
            used[row[low], start : end if low == high else case.page] = True
        if end and (low < high or not start):
            used[row[high], :end] = True
    return used


def _drawn_pages(case: Case, asked: DecodeArrays) -> Iterator[tuple[str, int, np.ndarray]]:
    """The caches, some pages at a time: the name of one, which page is the first, and the pages as the layout has them.

    What is stored as fp8 or int8, of small range, is about as large whatever its scale is.
    """
    kind = asked.key_cache.dtype
    deviations = STORED.get(kind.name, (1.0, case.value_scale))
    used = _used_slots(case, asked.seq_lens, asked.block_tables, asked.pages)
    step = max(1, STEP // (case.page * case.Hkv * case.D))
    for stream, (name, factor) in enumerate(zip(CACHES, deviations, strict=True)):
        rng = np.random.default_rng([case.seed, 2 + stream])
        for first in range(0, asked.pages, step):
            some = used[first : first + step]
            drawn = rng.standard_normal((*some.shape, case.Hkv, case.D), np.float32) * np.float32(factor)
            drawn[~some] = np.inf if kind == np.int8 else np.nan
            yield name, first, _in_layout(stored(drawn, kind, 1.0), case.layout, name)


def _in_layout(cache: np.ndarray, layout: str, name: str) -> np.ndarray:
    """[pages, page, Hkv, D] in one of `LAYOUTS`."""
    assert layout in LAYOUTS
    if layout == "nhd":
        return cache
    if layout == "hnd":
        return np.ascontiguousarray(cache.transpose(0, 2, 1, 3))
    if name == "value_cache":
        return np.ascontiguousarray(cache.transpose(0, 2, 3, 1))
    pages, page, Hkv, D = cache.shape
    keys, _ = cache_shapes("vllm", pages, Hkv, page, D, cache.dtype.itemsize)
    chunks = cache.reshape(pages, page, Hkv, *keys[2::2])
    return np.ascontiguousarray(chunks.transpose(0, 2, 3, 1, 4))


def generate(path: str, case: Case) -> DecodeArrays:
    """Write a case to a file, a part of its caches at a time; returns it with caches that hold nothing."""
    asked = outlined(case)
    whole = {"block_tables": asked.block_tables, "seq_lens": asked.seq_lens}
    whole |= {name: array for name in RARER if (array := getattr(asked, name)) is not None}
    if asked.is_scaled:
        whole |= {name: np.array([getattr(asked, name)], np.float32) for name in FACTORS}
    query = asked.query if case.T > 1 else asked.query[:, 0]
    arrays = {"query": query, **{name: getattr(asked, name) for name in CACHES}, **whole}
    kinds = {name: (array.dtype.name, array.shape) for name, array in arrays.items()}
    with TensorWriter(path, kinds, metadata(asked)) as file:
        file.write("query", query)
        for name, first, some in _drawn_pages(case, asked):
            file.write(name, some, first * some[0].size)
        for name, array in whole.items():
            file.write(name, array)
        file.commit()
    return asked
