"""From new keys and values on a GPU, and slots for them, to a launch that can be repeated, of any library.

Nothing here reads an array: slots are the GPU's to look at. What is for a slot that the cache has not is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import NamedTuple

from flashcli.asked.attention import Operand
from flashcli.asked.decode import check_layout
from flashcli.asked.write_kv import WriteKv, outer_problem
from flashcli.gpu.decode import (
    FREE,
    cache_strides,
    caches_of_type,
    check_rows,
    check_scales,
    check_strides,
    outline,
    stride,
)
from flashcli.gpu.launcher import Place, PreparedWrite
from flashcli.gpu.prepared import ALIGNMENT, SHAPES
from flashcli.kernels import decode, write_kv


class Options(NamedTuple):
    """The arguments of that name of `flashcli.write_kv`; scales that are arrays are 1 here."""

    layout: str = "vllm"
    cache_dtype: str | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0


class Arrays(NamedTuple):
    """The arguments of that name of `flashcli.write_kv`, as they lie."""

    key: Operand
    value: Operand
    key_cache: Operand
    value_cache: Operand
    slot_mapping: Operand
    k_scale: Operand | None = None
    v_scale: Operand | None = None


@functools.lru_cache(maxsize=SHAPES)
def prepare(place: Place, arrays: Arrays, addresses: int, options: Options) -> PreparedWrite:
    """The kernel compiled and loaded, its argument packed but for the addresses.

    ``addresses`` are the lowest bits of those of key, value and the cache, or'ed. ValueError says what cannot be
    written.
    """
    check_layout(options.layout)
    check_scales(arrays)
    arrays = arrays._replace(**caches_of_type(arrays, options.cache_dtype))
    outlines = {name: outline(getattr(arrays, name)) for name in Arrays._fields[:5]}
    asked = WriteKv(**outlines, k_scale=options.k_scale, v_scale=options.v_scale, layout=options.layout)  # type: ignore[arg-type]
    if wrong := outer_problem(asked):
        raise ValueError(f"cannot write: {wrong}")
    strides = _strides(arrays) | cache_strides(arrays, asked)
    _check_alignment(asked, strides, addresses)
    build = write_kv.build_of(asked)
    build.check(place.capability, f"GPU {place.device}", "give a cache of the key's type.")
    return PreparedWrite(place, build, write_kv.argument(asked, strides))


def _strides(arrays: Arrays) -> dict[str, int]:
    """Those of the new keys and values."""
    told: dict[str, int] = {}
    for name in ("key", "value"):
        array = getattr(arrays, name)
        check_strides(name, array, (FREE, FREE, 1))
        told |= {f"new_{name}_token": stride(array, 0), f"new_{name}_head": stride(array, 1)}
    check_strides("slot_mapping", arrays.slot_mapping, (1,))
    return told


def _check_alignment(asked: WriteKv, strides: Mapping[str, int], addresses: int) -> None:
    """Rows are read and written some bytes at a time, which start on multiples of as many."""
    given, size = asked.key.dtype.itemsize, asked.key_cache.dtype.itemsize
    of_cache = decode.vector_bytes(asked.D, size)
    if addresses % ALIGNMENT:
        raise ValueError(f"key, value, key_cache and value_cache must start on multiples of {ALIGNMENT} bytes")
    for name in ("key", "value"):
        new = [number for axis, number in strides.items() if axis.startswith(f"new_{name}_")]
        check_rows(name, new, given, ALIGNMENT)
        cache = [number for axis, number in strides.items() if axis.startswith(f"{name}_")]
        check_rows(f"{name}_cache", cache, size, of_cache)
