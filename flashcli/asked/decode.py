"""Calls of paged decode: the outlines of a query and of a cache in pages, options, and their checks.

A cache of keys and values is an array of pages, each with room for ``page`` tokens of every head. Row s of
``block_tables`` says which pages sequence s has, in order: its token j is in slot ``j % page`` of page
``block_tables[s, j // page]``. The query tokens of a sequence are the last of its ``seq_lens[s]`` tokens: T of each, or
with ``query_starts`` as many as these say. Names are those of vLLM where it has one; S sequences, T query tokens, H
heads, Hkv heads of the cache, D numbers a head.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Generic, TypeVar

from flashcli.asked.attention import Operand
from flashcli.asked.shape import MAX_INT32, MAX_SCALE

Array = TypeVar("Array", bound=Any)  # an outline, or an array of NumPy's

LAYOUTS = ("vllm", "nhd", "hnd")
# Types of queries and caches, in the order of their numbers in decode.cuh, and their bytes.
ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1}
QUERY_TYPES = ("float32", "float16", "bfloat16")
SCALED_TYPES = ("float8_e4m3fn", "float8_e5m2", "int8")  # of caches whose numbers are times a scale
FACTORS = ("k_scale", "v_scale")
MAX_HEAD = 256
MAX_QUERY_TOKENS = 8
CHUNK_BYTES = 16  # vLLM's layout splits keys into chunks of these


def _to_python(frozen: object, *names: str) -> None:
    """Turn NumPy's short numbers into Python's: they would overflow in products, and in sums with token numbers."""
    for name in names:
        if hasattr(value := getattr(frozen, name), "item"):
            object.__setattr__(frozen, name, value.item())


@dataclass(frozen=True)
class BlockSparse:
    """The blocks of ``block_size`` tokens that a head sees: the last ``local_blocks``, and every ``vert_stride``-th.

    The first of every ``vert_stride``-th block moves by ``head_sliding_step`` from head to head. Heads are counted over
    ``tp_rank`` earlier ranks of H heads each. A negative step moves by its magnitude from head to head of the cache.
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


def vector_bytes(row: int) -> int:
    """Bytes that kernels move at a time of rows of so many bytes."""
    return 16 if row % 16 == 0 else 8


class InPages:
    """Sizes and type of a cache in pages, for classes that have ``key_cache`` and its ``layout``."""

    key_cache: Any
    layout: str
    D: int

    def __post_init__(self) -> None:
        """Set k_scale and v_scale to 1 for a cache of the query's type, where they are ignored, as by vLLM."""
        for name in () if self.is_scaled else FACTORS:
            object.__setattr__(self, name, 1.0)

    @property
    def is_scaled(self) -> bool:
        return self.cache_type in SCALED_TYPES

    @property
    def Hkv(self) -> int:
        return self.key_cache.shape[2 if self.layout == "nhd" else 1]

    @property
    def page(self) -> int:
        """The number of tokens that a page has room for."""
        return self.key_cache.shape[{"vllm": 3, "nhd": 1, "hnd": 2}[self.layout]]

    @property
    def pages(self) -> int:
        return self.key_cache.shape[0]

    @property
    def cache_type(self) -> str:
        kind = self.key_cache.dtype
        return kind if isinstance(kind, str) else kind.name  # of an outline, or of an array of NumPy's

    @property
    def cache_itemsize(self) -> int:
        """Bytes of a number of the cache."""
        return ITEM_SIZES.get(self.cache_type, 1)

    @property
    def chunk(self) -> int:
        """The number of the cache's elements in a chunk of `CHUNK_BYTES`."""
        return CHUNK_BYTES // self.cache_itemsize

    @property
    def vector_bytes(self) -> int:
        """Bytes of the cache that kernels move at a time, on multiples of which its rows start."""
        return vector_bytes(self.D * self.cache_itemsize)


@dataclass(frozen=True, eq=False)
class Queries(InPages, Generic[Array]):
    """A call of decode: a ``query`` [S, T, H, D] against a cache in pages, and options.

    Ragged queries, which ``query_starts`` [S + 1] shares out among sequences, are [tokens, 1, H, D].

    ``scale`` is the factor on q·k. ``k_scale`` and ``v_scale`` are those on the numbers of a cache of fp8 or int8, 1
    for every other one and where they are arrays. With a ``window`` above 0 a query token sees that many tokens,
    itself the last of them. If not ``causal``, ragged query tokens stand where the last of their sequence does, and
    see all of it. A ``softcap`` c above 0 makes a score x c · tanh(x / c). ``sinks`` have one more logit of
    each head, which counts in the sum and has no value. ``max_query_len``, where it is given, is the most query tokens
    that a sequence has.
    """

    query: Array
    key_cache: Array
    value_cache: Array
    block_tables: Array
    seq_lens: Array
    alibi_slopes: Array | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"
    scale: float = 1.0
    window: int = 0
    sparse: BlockSparse | None = None
    softcap: float = 0.0
    causal: bool = True
    query_starts: Array | None = None
    sinks: Array | None = None
    one_result: bool = False
    max_query_len: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        _to_python(self, "scale", *FACTORS, "window", "softcap", "max_query_len")

    @property
    def is_ragged(self) -> bool:
        return self.query_starts is not None

    @property
    def S(self) -> int:
        return self.query.shape[0] if self.query_starts is None else self.query_starts.shape[0] - 1

    @property
    def T(self) -> int:
        """Query tokens that are neighbours along an axis of their own: those of a sequence; 1 if they are ragged."""
        return self.query.shape[1]

    @property
    def total(self) -> int:
        """Query tokens of all sequences."""
        return self.query.shape[0] * self.T

    @property
    def H(self) -> int:
        return self.query.shape[2]

    @property
    def D(self) -> int:  # type: ignore[override]
        return self.query.shape[3]

    @property
    def group(self) -> int:
        """The number of query heads that share a head of the cache."""
        return self.H // self.Hkv


@dataclass(frozen=True)
class Decode(Queries[Operand]):
    """A call of decode with outlines of arrays; hashable."""

    def at(self, addresses: int) -> Decode:
        """The call itself; ValueError if a query or cache at these addresses, or'ed, is not on `vector_bytes` bytes."""
        if addresses % self.vector_bytes:
            unit = self.vector_bytes
            raise ValueError(f"query, key_cache and value_cache must start on multiples of {unit} bytes")
        return self


@functools.lru_cache(maxsize=256)  # a model asks the same again and again
def ask(
    query: Operand,
    key_cache: Operand,
    value_cache: Operand,
    block_tables: Operand,
    seq_lens: Operand,
    alibi_slopes: Operand | None = None,
    k_scale: Operand | float = 1.0,
    v_scale: Operand | float = 1.0,
    layout: str = "vllm",
    scale: float | None = None,
    sliding_window: int = 0,
    block_sparse: BlockSparse | None = None,
    cache_dtype: str | None = None,
    query_starts: Operand | None = None,
    **others: Any,
) -> Decode:
    """The `Decode` of a call of `flashcli.decode` with arrays of these outlines; ValueError says why it cannot be.

    What `Queries` has by the public name is among the ``others``.
    """
    check_layout(layout)
    caches = caches_of_type(key_cache, value_cache, cache_dtype)
    factors = (one_factor("k_scale", k_scale), one_factor("v_scale", v_scale))
    scale = default_scale(query.shape) if scale is None else scale
    if wrong := ragged_problem(query.shape, None if query_starts is None else query_starts.shape):
        raise ValueError(f"cannot decode: {wrong}")
    if len(query.shape) == 3:  # a query of one token a sequence, or a ragged one, has no axis of tokens
        (S, *of_rows), (apart, *strides) = query.shape, query.strides
        query = Operand((S, 1, *of_rows), (apart, 0, *strides), query.dtype)
    asked = Decode(
        query, *caches, block_tables, seq_lens, alibi_slopes, *factors, layout, scale, sliding_window, block_sparse,
        query_starts=query_starts, **others,
    )  # fmt: skip
    if wrong := outer_problem(asked):
        raise ValueError(f"cannot decode: {wrong}")
    return asked


def caches_of_type(keys: Operand, values: Operand, cache_dtype: str | None) -> tuple[Operand, Operand]:
    """The outlines of both caches, with type ``cache_dtype`` instead of uint8 where the caller gives one."""
    check_cache_dtype(keys.dtype, values.dtype, cache_dtype)
    if cache_dtype is None:
        return keys, values
    return keys._replace(dtype=cache_dtype), values._replace(dtype=cache_dtype)


def one_factor(name: str, scale: Operand | float) -> float:
    """The scale if it is a number; 1 for an outline of one float32, which the GPU reads; else ValueError."""
    if not isinstance(scale, Operand):
        return scale
    if (scale.dtype, scale.shape) not in (("float32", ()), ("float32", (1,))):
        raise ValueError(f"{name} must be {ONE_NUMBER}, not {scale.dtype} {list(scale.shape)}")
    return 1.0


OPTIONAL = ("alibi_slopes", "query_starts", "sinks")
ARRAYS = ("query", "key_cache", "value_cache", "block_tables", "seq_lens", *OPTIONAL)
OPTIONS = (  # of `ask`, in order
    "layout", "scale", "sliding_window", "block_sparse", "cache_dtype", "softcap", "causal", "one_result",
    "max_query_len",
)  # fmt: skip


def cache_shapes(layout: str, pages: int, kv_heads: int, page: int, D: int, itemsize: int) -> tuple[tuple, tuple]:
    """The shapes of the caches of keys and values in a layout, for elements of ``itemsize`` bytes."""
    if layout == "vllm":
        x = CHUNK_BYTES // itemsize
        return (pages, kv_heads, D // x, page, x), (pages, kv_heads, D, page)
    one = (pages, page, kv_heads, D) if layout == "nhd" else (pages, kv_heads, page, D)
    return one, one


def default_scale(query_shape: tuple[int, ...]) -> float:
    """The factor 1/sqrt(D), D the last number of a shape that need not be checked yet."""
    return max(1, *query_shape[-1:], 1) ** -0.5


def check_layout(layout: str) -> None:
    """Raise ValueError for a layout that is none of `LAYOUTS`."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, not {layout!r}")


def check_cache_dtype(key_type: str, value_type: str, cache_dtype: str | None) -> None:
    """Raise ValueError for a ``cache_dtype`` that is unknown or not for caches of uint8, and for these without one."""
    if cache_dtype is None:
        if key_type == "uint8":
            raise ValueError(f"key_cache is uint8: say by cache_dtype which of {', '.join(SCALED_TYPES)} its bytes are")
        return
    if cache_dtype not in SCALED_TYPES:
        raise ValueError(f"cache_dtype must be one of {', '.join(SCALED_TYPES)}, not {cache_dtype!r}")
    if (key_type, value_type) != ("uint8", "uint8"):
        raise ValueError(f"cache_dtype is for caches of uint8, not for {key_type} and {value_type}")


ONE_NUMBER = "a number or one float32"
OPTION_KINDS: dict[str, tuple[Any, str]] = {  # the types that an option may have, and what they are called
    "scale": ((Real, type(None)), "a number"),
    "k_scale": (Real, ONE_NUMBER),
    "v_scale": (Real, ONE_NUMBER),
    "sliding_window": (Integral, "a whole number"),
    "block_sparse": ((BlockSparse, type(None)), "a BlockSparse of flashcli.asked.decode"),
    "softcap": (Real, "a number"),
    "one_result": (bool, "True or False"),
    "max_query_len": ((Integral, type(None)), "a whole number"),
    "kernel": ((str, type(None)), "the name of a kernel"),
    "causal": (bool, "True or False"),
}


def check_option_types(given: Mapping[str, Any]) -> None:
    """Raise TypeError for an option, by its name, of a type that it cannot have; see `OPTION_KINDS`."""
    for name, value in given.items():
        kind, wanted = OPTION_KINDS.get(name, (object, ""))
        if not isinstance(value, kind):
            raise TypeError(f"{name} must be {wanted}, not {type(value).__name__}")


def ragged_problem(query: tuple[int, ...], starts: tuple[int, ...] | None) -> str:
    """The fault in the shapes of query_starts and its query, which then is [tokens, H, D]; empty if there is none."""
    if starts is not None and (len(starts) != 1 or starts[0] < 2):
        return f"query_starts has shape {list(starts)}, where [S + 1] is wanted"
    if starts is not None and len(query) != 3:
        return f"query has shape {list(query)}, where [tokens, H, D] is wanted with query_starts"
    return ""


def outer_problem(asked: Decode) -> str:
    """The fault in a call by types, shapes and options, without a look at the arrays; empty if there is none."""
    return _type_problem(asked) or _shape_problem(asked) or _number_problem(asked)


def _type_problem(asked: Decode) -> str:
    if wrong := cache_type_problem(asked, "query", asked.query.dtype):
        return wrong
    wanted = dict.fromkeys(("block_tables", "seq_lens", "query_starts"), "int32")
    wanted |= dict.fromkeys(("alibi_slopes", "sinks"), "float32")
    for name, kind in wanted.items():
        if (array := getattr(asked, name)) is not None and array.dtype != kind:
            return f"{name} is {array.dtype}, not {kind}"
    return ""


def cache_type_problem(asked: Any, name: str, kind: str) -> str:
    """The fault in the types of both caches beside an array ``name`` of type ``kind``; empty if there is none."""
    cache, values = asked.key_cache.dtype, asked.value_cache.dtype
    if kind not in QUERY_TYPES:
        return f"{name} is {kind}, not {', '.join(QUERY_TYPES)}"
    if values != cache:
        return f"key_cache is {cache} and its value_cache {values}: one type for both is wanted"
    if cache not in (kind, *SCALED_TYPES):
        return f"key_cache is {cache}: with a {name} of {kind} it can be {', '.join((kind, *SCALED_TYPES))}"
    return ""


def _shape_problem(asked: Decode) -> str:
    ranks: dict[str, int] = {"query": 4, **cache_ranks(asked.layout), "block_tables": 2, "seq_lens": 1}
    if wrong := rank_problem(asked, ranks, may_be_empty=("block_tables",)):
        return wrong
    if not 1 <= asked.T <= MAX_QUERY_TOKENS:
        return f"query has {asked.T} tokens a sequence, not from 1 to {MAX_QUERY_TOKENS}"
    if (asked.max_query_len or asked.T) < asked.T:
        return f"query has {asked.T} tokens a sequence, more than max_query_len = {asked.max_query_len}"
    if asked.T > 1 and not asked.causal:
        return "causal is False, which goes with query_starts"
    if asked.seq_lens.shape != (asked.S,):
        of = "query_starts are of" if asked.is_ragged else "query is of"
        hint = "" if asked.is_ragged or asked.T > 1 else "; more than one query token of a sequence needs query_starts"
        return f"seq_lens has shape {list(asked.seq_lens.shape)}, but {of} {asked.S} sequences{hint}"
    if asked.H % asked.Hkv:
        return f"query has {asked.H} heads, no multiple of the cache's {asked.Hkv} (layout {asked.layout})"
    if wrong := head_problem(asked, asked.D):
        return wrong
    wanted = wanted_caches(asked, asked.D) | {"block_tables": (asked.S, asked.block_tables.shape[1])}
    wanted |= {name: (asked.H,) for name in ("alibi_slopes", "sinks") if getattr(asked, name) is not None}
    return exact_shape_problem(asked, wanted)


def cache_ranks(layout: str) -> dict[str, int]:
    """The number of dimensions of each cache in a layout, by its argument's name."""
    return {"key_cache": 5 if layout == "vllm" else 4, "value_cache": 4}


def rank_problem(asked: Any, ranks: Mapping[str, int], may_be_empty: tuple[str, ...]) -> str:
    for name, rank in ranks.items():
        shape = getattr(asked, name).shape
        if len(shape) != rank:
            axes = {1: "one dimension is"}.get(rank, f"{rank} dimensions are")
            axes = "3 or 4 dimensions are" if name == "query" else axes
            return f"{name} has shape {list(shape)}, where {axes} wanted (layout {asked.layout})"
        if 0 in shape and name not in may_be_empty:
            return f"{name} holds nothing: one of its axes has length 0"
    return ""


def head_problem(asked: Any, D: int) -> str:
    """The fault in the size of heads, D numbers, or of the cache's pages; empty if there is none."""
    if D % 8 or D > MAX_HEAD:
        return f"heads have {D} numbers, not a multiple of 8 up to {MAX_HEAD}"
    if asked.layout == "vllm" and D % asked.chunk:
        return f"heads have {D} numbers, which chunks of {asked.chunk} do not divide (layout vllm)"
    if asked.page & (asked.page - 1):
        return f"pages have {asked.page} slots, no power of two"
    return ""


def wanted_caches(asked: Any, D: int) -> dict[str, tuple[int, ...]]:
    """The shapes that both caches must have for heads of D numbers, by their arguments' names."""
    keys, values = cache_shapes(asked.layout, asked.pages, asked.Hkv, asked.page, D, asked.cache_itemsize)
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
    if asked.max_query_len is not None and not 1 <= asked.max_query_len <= MAX_INT32:
        return f"max_query_len is {asked.max_query_len}, not from 1 to {MAX_INT32}"
    if not 0 <= asked.softcap <= MAX_SCALE:
        return f"softcap is {asked.softcap}, not a finite number from 0 to {MAX_SCALE:.5g}"
    return _sparse_problem(asked.sparse, asked.page) if asked.sparse else ""


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
