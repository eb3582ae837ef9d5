"""The shapes at which paged decode is timed."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np

from flashcli.asked.decode import cache_shapes
from flashcli.asked.shape import ceil_div
from flashcli.cpu.pages import DecodeArrays
from flashcli.files.decode import cases as decode_cases
from flashcli.files.decode.tensors import dtype

MOST_SHORT = "1,6,22,54,103,170,255,361,487,634,804,996,1211,1450,1713,2000"  # 1 + 1999 (i/15)^2.25


class TimedShape(NamedTuple):
    """A shape to time: the lengths, and those of ragged queries, as `decode_cases.lengths` takes them."""

    name: str
    S: int
    H: int
    Hkv: int
    D: int
    lengths: str
    query_type: str = "float16"
    cache_type: str = "float16"
    page: int = 16  # tokens
    queries: str = ""
    T: int = 1
    shared: int = 0  # tokens at the beginning of all sequences


SHAPES = (
    TimedShape("8x4096 64/8", 8, 64, 8, 128, "4096"),
    TimedShape("1x4096 32/8", 1, 32, 8, 128, "4096"),
    TimedShape("1x32768 32/8", 1, 32, 8, 128, "32768"),
    TimedShape("32x4096 32/8", 32, 32, 8, 128, "4096"),
    TimedShape("64x1024 32/32", 64, 32, 32, 128, "1024"),
    TimedShape("128x2048 32/4", 128, 32, 4, 128, "2048"),
    TimedShape("256x512 32/8", 256, 32, 8, 128, "512"),
    TimedShape("16x8192 32/8 D=64", 16, 32, 8, 64, "8192"),
    TimedShape("131072 + 255x64", 256, 32, 8, 128, "131072,64x255"),
    TimedShape("fp8 8x4096 64/8", 8, 64, 8, 128, "4096", cache_type="float8_e4m3fn"),
    TimedShape("fp8 32x4096 32/8", 32, 32, 8, 128, "4096", cache_type="float8_e4m3fn"),
    TimedShape("int8 8x4096 64/8", 8, 64, 8, 128, "4096", cache_type="int8"),
    TimedShape("int8 32x4096 32/8", 32, 32, 8, 128, "4096", cache_type="int8"),
    TimedShape("16x(1..2000) 32/8", 16, 32, 8, 128, "uniform:2000"),
    TimedShape("16x(1..2000), most short", 16, 32, 8, 128, MOST_SHORT),
    TimedShape("64x(1..4096) 32/8", 64, 32, 8, 128, "uniform:4096"),
    TimedShape("fp8 64x(1..4096) 32/8", 64, 32, 8, 128, "uniform:4096", cache_type="float8_e4m3fn"),
    TimedShape("fp32 8x4096 64/8", 8, 64, 8, 128, "4096", "float32", "float32"),
    TimedShape("fp32 1x32768 32/8", 1, 32, 8, 128, "32768", "float32", "float32"),
)

# Batches on both sides of vLLM's rule for V1 or V2: 512 blocks, 8192 tokens, a partition.
OF_THE_RULE = tuple(
    TimedShape(f"{S}x{tokens} 32/8", S, 32, 8, 128, str(tokens))
    for S in (1, 8, 16, 32, 128)
    for tokens in (512, 1024, 4096, 8192, 16384)
)


def outlined(shape: TimedShape, layout: str, seed: int = 0) -> DecodeArrays:
    """The problem of a shape: its lengths, but no other numbers; each page is used once."""
    lengths = decode_cases.lengths(shape.lengths, shape.S, seed)
    counts = ceil_div(lengths.astype("int64"), shape.page)
    kind, pages = dtype(shape.cache_type), max(1, int(counts.sum()))
    keys, values = cache_shapes(layout, pages, shape.Hkv, shape.page, shape.D, kind.itemsize)
    starts = None
    if shape.queries:
        starts = np.cumsum([0, *decode_cases.lengths(shape.queries, shape.S, seed, "queries")], dtype=np.int32)
    first, T = (shape.S, shape.T) if starts is None else (int(starts[-1]), 1)
    arrays: dict[str, Any] = {
        "query": _unread((first, T, shape.H, shape.D), dtype(shape.query_type)),
        "key_cache": _unread(keys, kind), "value_cache": _unread(values, kind),
        "block_tables": _unread((shape.S, max(1, int(counts.max()))), np.dtype(np.int32)),
    }  # fmt: skip
    return DecodeArrays(**arrays, seq_lens=lengths, layout=layout, scale=shape.D**-0.5, query_starts=starts)


def _unread(shape: tuple[int, ...], kind: np.dtype) -> np.ndarray:
    """A contiguous array that is never read: there is memory for its first number only."""
    strides = tuple(kind.itemsize * math.prod(shape[axis + 1 :]) for axis in range(len(shape)))
    return np.lib.stride_tricks.as_strided(np.zeros(1, kind), shape, strides, writeable=False)
