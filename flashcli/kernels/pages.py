"""A cache in pages as kernels get it: macros for its types, and its strides."""

from __future__ import annotations

from collections.abc import Iterable

from flashcli.asked.attention import Operand
from flashcli.asked.decode import ITEM_SIZES, Decode
from flashcli.asked.write_kv import WriteKv
from flashcli.kernels.operation import Tiling
from flashcli.kernels.tuning.decode import Problem

TYPE_NUMBERS = {name: number for number, name in enumerate(ITEM_SIZES)}  # see decode.cuh
FREE = -1  # a stride that kernels are told


def macros(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """Macros that every kernel for a cache in pages is compiled with."""
    own = {
        "HEAD_DIM": problem.d, "PAGE": problem.page, "QUERY_TYPE": TYPE_NUMBERS[problem.query_type],
        "CACHE_TYPE": TYPE_NUMBERS[problem.cache_type], "TRANSPOSED": int(problem.transposed),
    }  # fmt: skip
    own |= {name.upper(): 1 for name in ("ragged", "softcap", "sinks") if getattr(problem, name)}
    own |= {"SHORT": problem.short} if problem.short else {}
    return own | {"ROWS": problem.rows, "THREADS": tiling.threads}


def odd_heads(problem: Problem) -> str:
    """The reason why no kernel reads heads of ``problem.d`` numbers; empty for a multiple of 8, see decode.cuh."""
    return "a cache has heads of a multiple of 8 numbers" if problem.d % 8 else ""


def cache_strides(asked: Decode | WriteKv) -> dict[str, int]:
    """Strides of both caches as kernels get them, by name, in elements; ValueError for strides that no kernel reads.

    Pages, heads and slots may be any number of aligned bytes apart; the rest is contiguous. See decode.cuh.
    """
    unit = asked.vector_bytes
    told = {"key_chunk": unit // asked.cache_itemsize}
    axes: tuple[str, ...]
    if asked.layout == "vllm":
        keys = (FREE, FREE, asked.page * asked.chunk, asked.chunk, 1)
        wanted, axes = {"key": keys, "value": (FREE, FREE, asked.page, 1)}, ("page", "head")
        told = {"key_slot": told["key_chunk"], "key_chunk": asked.page * told["key_chunk"], "value_slot": 1}
    else:
        wanted = dict.fromkeys(("key", "value"), (FREE, FREE, FREE, 1))
        axes = ("page", "slot", "head") if asked.layout == "nhd" else ("page", "head", "slot")
    for cache, strides in wanted.items():
        name, array = f"{cache}_cache", getattr(asked, f"{cache}_cache")
        check_strides(name, array, strides)
        apart = {f"{cache}_{axis}": stride(array, i) for i, axis in enumerate(axes)}
        check_rows(name, apart.values(), asked.cache_itemsize, unit)
        told |= apart
    return told


def stride(array: Operand, axis: int) -> int:
    """The stride along an axis, in elements; 0 for an axis of one element, whose stride means nothing."""
    return array.strides[axis] if array.shape[axis] > 1 else 0


def check_strides(name: str, array: Operand, wanted: tuple[int, ...]) -> None:
    """Raise ValueError for an array whose strides are not the ``wanted`` ones, in elements; `FREE` allows any."""
    for n, found, right in zip(array.shape, array.strides, wanted, strict=True):
        if n > 1 and right not in (FREE, found):
            rule = ["any" if one == FREE else one for one in wanted]
            raise ValueError(
                f"{name} has strides {list(array.strides)}, where {rule} are wanted: give a contiguous copy"
            )


def check_rows(name: str, strides: Iterable[int], itemsize: int, unit: int) -> None:
    """Raise ValueError if rows of an array do not start on multiples of ``unit`` bytes; ``strides`` in elements."""
    for apart in strides:
        if apart * itemsize % unit:
            raise ValueError(f"{name} has rows {apart * itemsize} bytes apart, no multiple of {unit}: give a copy")
