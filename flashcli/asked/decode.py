"""Paged decode: what is asked for, where its numbers lie, and whether it can be answered.

A cache of keys and values is an array of pages, each with room for ``page`` tokens of every head. Row s of
``block_tables`` says which pages sequence s has, in order: its token j is in slot ``j % page`` of page
``block_tables[s, j // page]``. The T query tokens of a sequence are the last T of its ``seq_lens[s]`` tokens. Names are
those of vLLM where it has one; S sequences, T query tokens, H heads, Hkv heads of the cache, D numbers a head.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import numpy as np

from flashcli.asked.shape import MAX_INT32, MAX_SCALE, ceil_div

LAYOUTS = ("vllm", "nhd", "hnd")
QUERY_TYPES = ("float32", "float16", "bfloat16")
FP8_TYPES = ("float8_e4m3fn", "float8_e5m2")
FACTORS = ("k_scale", "v_scale")
MAX_HEAD = 256
MAX_QUERY_TOKENS = 8
CHUNK_BYTES = 16  # vLLM's layout splits keys into chunks of these


def _to_python(frozen: object, *names: str) -> None:
    """NumPy's short numbers become Python's: they would overflow in products, and in sums with places of tokens."""
    for name in names:
        if isinstance(value := getattr(frozen, name), np.generic):
            object.__setattr__(frozen, name, value.item())


@dataclass(frozen=True)
class BlockSparse:
    """Which blocks of ``block_size`` tokens a head sees: the last ``local_blocks``, and every ``vert_stride``-th.

    Which every ``vert_stride``-th differs from head to head by ``head_sliding_step``: of all heads, counted over
    ``tp_rank`` ranks that have H each; or, if it is negative, of the cache's heads by its magnitude.
    """

    vert_stride: int
    block_size: int
    local_blocks: int = 0
    head_sliding_step: int = 0
    tp_rank: int = 0

    def __post_init__(self) -> None:
        _to_python(self, *vars(self))

    def offset(self, head: int, heads: int, kv_head: int, kv_heads: int) -> int:
        if self.head_sliding_step >= 0:
            return (self.tp_rank * heads + head) * self.head_sliding_step + 1
        return (self.tp_rank * kv_heads + kv_head) * -self.head_sliding_step + 1


class InPages:
    """What the shape of a cache says, for whoever has ``key_cache`` and its ``layout``."""

    key_cache: Any
    layout: str

    def __post_init__(self) -> None:
        """Factors are an fp8 cache's: those given for another one are ignored, as by vLLM."""
        for name in () if self.is_fp8 else FACTORS:
            object.__setattr__(self, name, 1.0)

    @property
    def is_fp8(self) -> bool:
        return self.key_cache.dtype.name in FP8_TYPES

    @property
    def Hkv(self) -> int:
        return self.key_cache.shape[2 if self.layout == "nhd" else 1]

    @property
    def page(self) -> int:
        """How many tokens a page has room for."""
        return self.key_cache.shape[{"vllm": 3, "nhd": 1, "hnd": 2}[self.layout]]

    @property
    def pages(self) -> int:
        return self.key_cache.shape[0]

    @property
    def chunk(self) -> int:
        """How many numbers of the cache are in a chunk of `CHUNK_BYTES`."""
        return CHUNK_BYTES // self.key_cache.dtype.itemsize


@dataclass(frozen=True, eq=False)
class Decode(InPages):
    """Queries [S, T, H, D] against a cache in pages, by arrays that may be mapped from a file.

    ``scale`` is the factor on q·k, and ``k_scale`` and ``v_scale`` are those on the numbers of an fp8 cache, 1 for
    every other one. With a ``window`` above 0 a query token sees that many tokens, itself the last of them.
    """

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    alibi_slopes: np.ndarray | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"
    scale: float = 1.0
    window: int = 0
    sparse: BlockSparse | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _to_python(self, "scale", *FACTORS, "window")

    @property
    def S(self) -> int:
        return self.query.shape[0]

    @property
    def T(self) -> int:
        return self.query.shape[1]

    @property
    def H(self) -> int:
        return self.query.shape[2]

    @property
    def D(self) -> int:
        return self.query.shape[3]

    @property
    def group(self) -> int:
        """How many heads share a head of the cache."""
        return self.H // self.Hkv

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max())

    def first_used(self, length: np.ndarray) -> np.ndarray:
        """The first token of a sequence that any of its query tokens may see."""
        return np.maximum(0, length - self.T - self.window + 1) if self.window else length * 0

    def used_bytes(self) -> int:
        """Bytes of keys and values that have to be read, each once: those of the tokens that may be seen."""
        tokens = int((self.seq_lens.astype(np.int64) - self.first_used(self.seq_lens.astype(np.int64))).sum())
        return 2 * tokens * self.Hkv * self.D * self.key_cache.dtype.itemsize

    def tokens_seen(self, s: int, t: int, head: int) -> np.ndarray | slice:
        """The tokens of sequence s that a head of query token t sees: a slice, or their numbers where it is sparse."""
        position = int(self.seq_lens[s]) - self.T + t
        first = max(0, position - self.window + 1) if self.window else 0
        if not self.sparse:
            return slice(first, max(first, position + 1))
        size, stride = self.sparse.block_size, self.sparse.vert_stride
        blocks = np.arange(first // size, position // size + 1)
        offset = self.sparse.offset(head, self.H, head // self.group, self.Hkv) % stride
        kept = ((blocks + offset) % stride == 0) | (blocks > position // size - self.sparse.local_blocks)
        tokens = (blocks[kept, None] * size + np.arange(min(size, position + 1))).reshape(-1)
        return tokens[(tokens >= first) & (tokens <= position)]


def cache_shapes(layout: str, pages: int, kv_heads: int, page: int, D: int, itemsize: int) -> tuple[tuple, tuple]:
    """The shapes of the cache of keys and of that of values."""
    if layout == "vllm":
        x = CHUNK_BYTES // itemsize
        return (pages, kv_heads, D // x, page, x), (pages, kv_heads, D, page)
    one = (pages, page, kv_heads, D) if layout == "nhd" else (pages, kv_heads, page, D)
    return one, one


def default_scale(query_shape: tuple[int, ...]) -> float:
    """1/sqrt(D), of a shape that need not be a query's yet."""
    return max(1, *query_shape[-1:], 1) ** -0.5


def check_layout(layout: str) -> None:
    """Refuse a layout that there is not."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")


def check_cache_dtype(key_type: str, value_type: str, cache_dtype: str | None) -> None:
    """Refuse a ``cache_dtype`` that there is not, or for a cache whose type speaks for itself."""
    if cache_dtype is None:
        return
    if cache_dtype not in FP8_TYPES:
        raise ValueError(f"cache_dtype must be one of {', '.join(FP8_TYPES)}, not {cache_dtype!r}")
    if (key_type, value_type) != ("uint8", "uint8"):
        raise ValueError(f"cache_dtype is for caches of uint8, not for {key_type} and {value_type}")


ONE_NUMBER = "a number or one float32"
OPTION_KINDS: dict[str, tuple[Any, str]] = {  # the types that an option may have, and what they are called
    "scale": ((Real, type(None)), "a number"),
    "k_scale": (Real, ONE_NUMBER),
    "v_scale": (Real, ONE_NUMBER),
    "sliding_window": (Integral, "a whole number"),
    "block_sparse": ((BlockSparse, type(None)), "a BlockSparse of flashcli.asked.decode"),
}


def check_option_types(given: Mapping[str, Any]) -> None:
    """Refuse options, by their names, of types that they cannot have."""
    for name, value in given.items():
        kind, wanted = OPTION_KINDS.get(name, (object, ""))
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def check_array(name: str, array: object) -> None:
    """Refuse what is no array of NumPy's, or masked, or in the byte order of another machine."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: give its data")
    if not array.dtype.isnative:
        raise TypeError(f"{name} must have this machine's byte order, not that of {array.dtype}")


def one_number(name: str, scale: Any) -> float:
    """A scale, which may be an array of one number."""
    array = np.asarray(scale)
    if array.size != 1 or array.dtype.kind not in "fiu":
        raise ValueError(f"{name} must be {ONE_NUMBER}, not {array.dtype} {list(array.shape)}")
    return float(array.item())


def problem(asked: Decode) -> str:
    """What is wrong with it, as the rest of a sentence that begins with "its"; empty if nothing is."""
    return outer_problem(asked) or _slope_problem(asked) or _table_problem(asked)


def outer_problem(asked: Decode) -> str:
    """The same by types, shapes and numbers alone, without a look into any array."""
    return _type_problem(asked) or _shape_problem(asked) or _number_problem(asked)


def _type_problem(asked: Decode) -> str:
    if wrong := cache_type_problem(asked, "query", asked.query.dtype.name):
        return wrong
    for name in ("block_tables", "seq_lens"):
        if getattr(asked, name).dtype.name != "int32":
            return f"{name} is {getattr(asked, name).dtype.name}, not int32"
    if asked.alibi_slopes is not None and asked.alibi_slopes.dtype.name != "float32":
        return f"alibi_slopes is {asked.alibi_slopes.dtype.name}, not float32"
    return ""


def cache_type_problem(asked: Any, name: str, kind: str) -> str:
    """What is wrong with the types of a cache for an array of that ``name`` and ``kind``."""
    cache, values = asked.key_cache.dtype.name, asked.value_cache.dtype.name
    if kind not in QUERY_TYPES:
        return f"{name} is {kind}, not {', '.join(QUERY_TYPES)}"
    if values != cache:
        return f"key_cache is {cache} and its value_cache {values}: one type for both is wanted"
    if cache not in (kind, *FP8_TYPES):
        return f"key_cache is {cache}: with a {name} of {kind} it can be {', '.join((kind, *FP8_TYPES))}"
    return ""


def _shape_problem(asked: Decode) -> str:
    ranks: dict[str, int] = {"query": 4, **cache_ranks(asked.layout), "block_tables": 2, "seq_lens": 1}
    if wrong := rank_problem(asked, ranks, may_be_empty=("block_tables",)):
        return wrong
    if not 1 <= asked.T <= MAX_QUERY_TOKENS:
        return f"query has {asked.T} tokens a sequence, not from 1 to {MAX_QUERY_TOKENS}"
    if asked.H % asked.Hkv:
        return f"query has {asked.H} heads, no multiple of the cache's {asked.Hkv} (layout {asked.layout})"
    if wrong := head_problem(asked, asked.D):
        return wrong
    wanted = {**wanted_caches(asked, asked.D), "seq_lens": (asked.S,),
              "block_tables": (asked.S, asked.block_tables.shape[1])}  # fmt: skip
    if asked.alibi_slopes is not None:
        wanted["alibi_slopes"] = (asked.H,)
    return exact_shape_problem(asked, wanted)


def cache_ranks(layout: str) -> dict[str, int]:
    """How many dimensions the caches have."""
    return {"key_cache": 5 if layout == "vllm" else 4, "value_cache": 4}


def rank_problem(asked: Any, ranks: Mapping[str, int], may_be_empty: tuple[str, ...]) -> str:
    for name, rank in ranks.items():
        shape = getattr(asked, name).shape
        if len(shape) != rank:
            axes = {1: "one dimension is"}.get(rank, f"{rank} dimensions are")
            axes = "3 or 4 dimensions are" if name == "query" else axes
            return f"{name} has shape {list(shape)}, where {axes} wanted (layout {asked.layout})"
        if 0 in shape and name not in may_be_empty:
            return f"{name} has shape {list(shape)}: there is nothing in it"
    return ""


def head_problem(asked: Any, D: int) -> str:
    """What is wrong with heads of D numbers in the cache's pages."""
    if D % 8 or D > MAX_HEAD:
        return f"heads have {D} numbers, not a multiple of 8 up to {MAX_HEAD}"
    if asked.layout == "vllm" and D % asked.chunk:
        return f"heads have {D} numbers, which chunks of {asked.chunk} do not divide (layout vllm)"
    if asked.page & (asked.page - 1):
        return f"pages have {asked.page} slots, no power of two"
    return ""


def wanted_caches(asked: Any, D: int) -> dict[str, tuple[int, ...]]:
    """The shapes that the caches are to have."""
    size = asked.key_cache.dtype.itemsize
    keys, values = cache_shapes(asked.layout, asked.pages, asked.Hkv, asked.page, D, size)
    return {"key_cache": keys, "value_cache": values}


def exact_shape_problem(asked: Any, wanted: Mapping[str, tuple[int, ...]]) -> str:
    for name, shape in wanted.items():
        if (found := getattr(asked, name).shape) != shape:
            return f"{name} has shape {list(found)}, where {list(shape)} is wanted (layout {asked.layout})"
    return ""


def _number_problem(asked: Decode) -> str:
    for name in ("scale", *FACTORS):
        if not abs(getattr(asked, name)) <= MAX_SCALE:
            return f"{name} is {getattr(asked, name)}, not a finite number of up to {MAX_SCALE:.5g}"
    if not 0 <= asked.window <= MAX_INT32:
        return f"sliding_window is {asked.window}, not from 0 to {MAX_INT32}"
    return _sparse_problem(asked.sparse, asked.page) if asked.sparse else ""


def _slope_problem(asked: Decode) -> str:
    if asked.alibi_slopes is not None and not np.isfinite(asked.alibi_slopes).all():
        return "alibi_slopes hold a number that is not finite"
    return ""


def _sparse_problem(sparse: BlockSparse, page: int) -> str:
    for name, value in vars(sparse).items():
        if not isinstance(value, Integral):
            return f"{name} is {value!r}, not a whole number"
    if sparse.block_size < 1 or sparse.block_size % page:
        return f"block-sparse block_size is {sparse.block_size}, no multiple of the page's {page}"
    lowest = {"vert_stride": 2, "local_blocks": 0, "tp_rank": 0, "block_size": 1, "head_sliding_step": -MAX_INT32}
    for name, least in lowest.items():
        if not least <= (value := getattr(sparse, name)) <= MAX_INT32:
            return f"{name} is {value}, not from {least} to {MAX_INT32}"
    return ""


def _table_problem(asked: Decode) -> str:
    """Of lengths and pages. What is past a sequence's last page, or before its window, is not looked at."""
    lengths, room = asked.seq_lens.astype(np.int64), asked.block_tables.shape[1] * asked.page
    if (bad := (lengths < 0) | (lengths > room)).any():
        s = int(bad.argmax())
        return (
            f"seq_lens[{s}] is {lengths[s]}, not from 0 to the {room} tokens that its row of block_tables has room for"
        )
    first, last = asked.first_used(lengths) // asked.page, ceil_div(lengths, asked.page)
    for s in range(asked.S):
        used = asked.block_tables[s, first[s] : last[s]]
        if (bad := (used < 0) | (used >= asked.pages)).any():
            j = int(bad.argmax())
            return f"block_tables[{s}, {first[s] + j}] is {used[j]}, not from 0 to {asked.pages - 1}, the cache's pages"
    return ""
