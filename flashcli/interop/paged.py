"""From what is asked of a cache in pages on a GPU to launches that can be repeated, whatever library the arrays are of.

Nothing here reads an array: lengths and pages are the GPU's to look at. A length outside of its row of the table is cut
to it there, and a page outside of the cache is replaced by one of it, so that no memory but the arrays' is read.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

from flashcli.gpu.launcher import Place, PreparedDecode
from flashcli.interop.prepared import SHAPES
from flashcli.kernels import decode
from flashcli.operands import Operand
from flashcli.paged import FP8_TYPES, BlockSparse, Decode, check_cache_dtype, check_layout, outer_problem

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "int32": 4, **dict.fromkeys(FP8_TYPES, 1)}
FREE = -1  # a stride that kernels are told
QUERY_UNIT = 4  # bytes of a query that are read at a time


class Element(NamedTuple):
    """A type of numbers, with what of NumPy's `dtype` is asked for where there are no numbers."""

    name: str
    itemsize: int


class Outline(NamedTuple):
    """An array without its numbers: all that `Decode` has to know to tell what is to be launched."""

    shape: tuple[int, ...]
    dtype: Element


class Options(NamedTuple):
    """The arguments of that name of `flashcli.decode`; scales that are arrays are 1 here."""

    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"
    scale: float | None = None
    sliding_window: int = 0
    block_sparse: BlockSparse | None = None
    backend: str = "auto"
    cache_dtype: str | None = None


class Arrays(NamedTuple):
    """The arguments of that name of `flashcli.decode`, as they lie."""

    query: Operand
    key_cache: Operand
    value_cache: Operand
    block_tables: Operand
    seq_lens: Operand
    alibi_slopes: Operand | None = None
    k_scale: Operand | None = None
    v_scale: Operand | None = None


@functools.lru_cache(maxsize=SHAPES)
def prepare(place: Place, arrays: Arrays, addresses: int, options: Options) -> PreparedDecode:
    """Its kernel compiled and loaded, its argument packed but for the addresses.

    ``addresses`` are the lowest bits of those of the query and the cache, or'ed. ValueError says what cannot be
    computed.
    """
    if options.backend not in ("auto", "cuda"):
        raise ValueError(f"backend must be 'auto' or 'cuda' for arrays on a GPU, not {options.backend!r}")
    arrays = _with_tokens(_of_type(arrays, options.cache_dtype))
    asked = _outlined(arrays, options)
    if wrong := outer_problem(asked):
        raise ValueError(f"cannot decode: {wrong}")
    strides = _strides(arrays, asked)
    _check_alignment(asked, strides, addresses)
    build = decode.build_of(None, asked)
    build.check(place.capability, f"GPU {place.device}", "give a cache of the query's type.")
    given = decode.argument(asked, {}, strides)
    scales = {name: getattr(options, name) for name in ("k_scale", "v_scale") if getattr(options, name) != 1}
    return PreparedDecode(place, build, decode.sizes_of(asked), given, scales)


def _of_type(arrays: Arrays, cache_dtype: str | None) -> Arrays:
    keys, values = arrays.key_cache, arrays.value_cache
    check_cache_dtype(keys.dtype, values.dtype, cache_dtype)
    if cache_dtype is None:
        return arrays
    return arrays._replace(key_cache=keys._replace(dtype=cache_dtype), value_cache=values._replace(dtype=cache_dtype))


def _with_tokens(arrays: Arrays) -> Arrays:
    """A query of one token a sequence may have no axis of tokens."""
    shape, strides, dtype = arrays.query
    if len(shape) != 3:
        return arrays
    return arrays._replace(query=Operand((shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:]), dtype))


def _outlined(arrays: Arrays, options: Options) -> Decode:
    check_layout(options.layout)
    for name in ("k_scale", "v_scale"):
        scale = getattr(arrays, name)
        if scale is not None and (scale.dtype, scale.shape) not in (("float32", ()), ("float32", (1,))):
            raise ValueError(f"{name} must be a number or one float32, not {scale.dtype} {list(scale.shape)}")
    outlines: dict[str, Any] = {
        name: Outline(array.shape, Element(array.dtype, ITEM_SIZES.get(array.dtype, 1)))
        for name, array in arrays._asdict().items()
        if array is not None and name not in ("k_scale", "v_scale")
    }
    scale = options.scale
    if scale is None:
        scale = max(1, *arrays.query.shape[-1:]) ** -0.5
    return Decode(
        **outlines, k_scale=options.k_scale, v_scale=options.v_scale, layout=options.layout, scale=scale,
        window=options.sliding_window, sparse=options.block_sparse,
    )  # fmt: skip


def _strides(arrays: Arrays, asked: Decode) -> dict[str, int]:
    """Those that kernels are told, in numbers; ValueError for an array that lies as no kernel reads it."""
    D, page, x = asked.D, asked.page, asked.chunk
    keys, values = {
        "vllm": ((FREE, FREE, page * x, x, 1), (FREE, FREE, page, 1)),
        "nhd": ((FREE, FREE, FREE, 1),) * 2,
        "hnd": ((FREE, FREE, FREE, 1),) * 2,
    }[asked.layout]
    fixed: dict[str, tuple[int, ...]] = {
        "query": (FREE, FREE, D, 1), "key_cache": keys, "value_cache": values,
        "block_tables": (asked.block_tables.shape[1], 1), "seq_lens": (1,), "alibi_slopes": (1,),
    }  # fmt: skip
    for name, wanted in fixed.items():
        if (array := getattr(arrays, name)) is not None:
            _check_strides(name, array, wanted)
    axes = {"vllm": ("page", "head"), "nhd": ("page", "slot", "head"), "hnd": ("page", "head", "slot")}[asked.layout]
    told = {"query_sequence": _stride(arrays.query, 0), "query_token": _stride(arrays.query, 1)}
    for cache, array in (("key", arrays.key_cache), ("value", arrays.value_cache)):
        told |= {f"{cache}_{axis}": _stride(array, i) for i, axis in enumerate(axes)}
    return told


def _stride(array: Operand, axis: int) -> int:
    """0 where there is only one: what the array says then means nothing."""
    return array.strides[axis] if array.shape[axis] > 1 else 0


def _check_strides(name: str, array: Operand, wanted: tuple[int, ...]) -> None:
    for n, stride, right in zip(array.shape, array.strides, wanted, strict=True):
        if n > 1 and right not in (FREE, stride):
            rule = ["any" if one == FREE else one for one in wanted]
            raise ValueError(
                f"{name} has strides {list(array.strides)}, where {rule} are wanted: give a contiguous copy"
            )


def _check_alignment(asked: Decode, strides: Mapping[str, int], addresses: int) -> None:
    """Rows of a cache are read some bytes at a time, which start on multiples of as many."""
    size = asked.key_cache.dtype.itemsize
    of_cache = decode.vector_bytes(asked.D, size)
    if addresses % of_cache:
        raise ValueError(f"query, key_cache and value_cache must start on multiples of {of_cache} bytes")
    for name, stride in strides.items():
        item, unit = (asked.query.dtype.itemsize, QUERY_UNIT) if name.startswith("query") else (size, of_cache)
        if stride * item % unit:
            array = {"query": "query", "key": "key_cache", "value": "value_cache"}[name.partition("_")[0]]
            raise ValueError(f"{array} has rows {stride * item} bytes apart, no multiple of {unit}: give a copy")
