"""From what is asked of a cache in pages on a GPU to launches that can be repeated, whatever library the arrays are of.

Nothing here reads an array: lengths and pages are the GPU's to look at. A length outside of its row of the table is cut
to it there, and a page outside of the cache is replaced by one of it, so that no memory but the arrays' is read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from flashcli.asked.attention import Operand
from flashcli.asked.decode import (
    FACTORS,
    BlockSparse,
    Decode,
    InPages,
    check_cache_dtype,
    check_layout,
    default_scale,
    outer_problem,
)
from flashcli.gpu.launcher import Place, PreparedDecode
from flashcli.gpu.prepared import SHAPES
from flashcli.kernels import decode

FREE = -1  # a stride that kernels are told
QUERY_UNIT = 4  # bytes of a query that are read at a time


class Element(NamedTuple):
    """A type of numbers, with what of NumPy's `dtype` is asked for where there are no numbers."""

    name: str
    itemsize: int


class Outline(NamedTuple):
    """An array without its numbers: all that has to be known of it to tell what is to be launched."""

    shape: tuple[int, ...]
    dtype: Element


def outline(array: Operand) -> Outline:
    return Outline(array.shape, Element(array.dtype, decode.ITEM_SIZES.get(array.dtype, 1)))


class Options(NamedTuple):
    """The arguments of that name of `flashcli.decode`; scales that are arrays are 1 here."""

    layout: str = "vllm"
    scale: float | None = None
    sliding_window: int = 0
    block_sparse: BlockSparse | None = None
    backend: str = "auto"
    cache_dtype: str | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


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
    arrays = _with_tokens(arrays._replace(**caches_of_type(arrays, options.cache_dtype)))
    asked = _outlined(arrays, options)
    if wrong := outer_problem(asked):
        raise ValueError(f"cannot decode: {wrong}")
    strides = _strides(arrays, asked)
    _check_alignment(asked, strides, addresses)
    build = decode.build_of(None, asked)
    build.check(place.capability, f"GPU {place.device}", "give a cache of the query's type.")
    given = decode.argument(asked, {}, strides)
    scales = {name: getattr(asked, name) for name in FACTORS if getattr(asked, name) != 1}
    return PreparedDecode(place, build, decode.sizes_of(asked), given, scales, unread=() if asked.is_fp8 else FACTORS)


def caches_of_type(arrays: Any, cache_dtype: str | None) -> dict[str, Operand]:
    """Both caches, those of bytes as what the caller says they are."""
    caches = {"key_cache": arrays.key_cache, "value_cache": arrays.value_cache}
    check_cache_dtype(arrays.key_cache.dtype, arrays.value_cache.dtype, cache_dtype)
    return caches if cache_dtype is None else {name: x._replace(dtype=cache_dtype) for name, x in caches.items()}


def _with_tokens(arrays: Arrays) -> Arrays:
    """A query of one token a sequence may have no axis of tokens."""
    shape, strides, dtype = arrays.query
    if len(shape) != 3:
        return arrays
    return arrays._replace(query=Operand((shape[0], 1, *shape[1:]), (strides[0], 0, *strides[1:]), dtype))


def _outlined(arrays: Arrays, options: Options) -> Decode:
    check_layout(options.layout)
    check_scales(arrays)
    outlines: dict[str, Any] = {
        name: outline(array) for name, array in arrays._asdict().items() if array is not None and name not in FACTORS
    }
    scale = options.scale
    if scale is None:
        scale = default_scale(arrays.query.shape)
    return Decode(
        **outlines, k_scale=options.k_scale, v_scale=options.v_scale, layout=options.layout, scale=scale,
        window=options.sliding_window, sparse=options.block_sparse,
    )  # fmt: skip


def check_scales(arrays: Any) -> None:
    """Refuse scales that are arrays of anything but one float32."""
    for name in FACTORS:
        scale = getattr(arrays, name)
        if scale is not None and (scale.dtype, scale.shape) not in (("float32", ()), ("float32", (1,))):
            raise ValueError(f"{name} must be a number or one float32, not {scale.dtype} {list(scale.shape)}")


def _strides(arrays: Arrays, asked: Decode) -> dict[str, int]:
    """Those that kernels are told, in numbers; ValueError for an array that lies as no kernel reads it."""
    fixed: dict[str, tuple[int, ...]] = {
        "query": (FREE, FREE, asked.D, 1), "block_tables": (FREE, 1), "seq_lens": (1,), "alibi_slopes": (1,),
    }  # fmt: skip
    for name, wanted in fixed.items():
        if (array := getattr(arrays, name)) is not None:
            check_strides(name, array, wanted)
    told = {"query_sequence": stride(arrays.query, 0), "query_token": stride(arrays.query, 1)}
    return told | {"table_row": stride(arrays.block_tables, 0)} | cache_strides(arrays, asked)


def cache_strides(arrays: Any, asked: InPages) -> dict[str, int]:
    """The same of both caches."""
    keys, values = {
        "vllm": ((FREE, FREE, asked.page * asked.chunk, asked.chunk, 1), (FREE, FREE, asked.page, 1)),
        "nhd": ((FREE, FREE, FREE, 1),) * 2,
        "hnd": ((FREE, FREE, FREE, 1),) * 2,
    }[asked.layout]
    axes = {"vllm": ("page", "head"), "nhd": ("page", "slot", "head"), "hnd": ("page", "head", "slot")}[asked.layout]
    told: dict[str, int] = {}
    for cache, wanted in (("key", keys), ("value", values)):
        array = getattr(arrays, f"{cache}_cache")
        check_strides(f"{cache}_cache", array, wanted)
        told |= {f"{cache}_{axis}": stride(array, i) for i, axis in enumerate(axes)}
    return told


def stride(array: Operand, axis: int) -> int:
    """0 where there is only one: what the array says then means nothing."""
    return array.strides[axis] if array.shape[axis] > 1 else 0


def check_strides(name: str, array: Operand, wanted: tuple[int, ...]) -> None:
    """Refuse an array that has other strides than these, of which some are `FREE`."""
    for n, found, right in zip(array.shape, array.strides, wanted, strict=True):
        if n > 1 and right not in (FREE, found):
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
    check_rows("query", [strides["query_sequence"], strides["query_token"]], asked.query.dtype.itemsize, QUERY_UNIT)
    for cache in ("key", "value"):
        apart = [number for name, number in strides.items() if name.startswith(f"{cache}_")]
        check_rows(f"{cache}_cache", apart, size, of_cache)


def check_rows(name: str, strides: Iterable[int], itemsize: int, unit: int) -> None:
    """Refuse rows of an array that do not start on multiples of so many bytes."""
    for apart in strides:
        if apart * itemsize % unit:
            raise ValueError(f"{name} has rows {apart * itemsize} bytes apart, no multiple of {unit}: give a copy")
