"""`flashcli.write_kv` of NumPy's arrays, which is also the readable statement of what is written where."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashcli.files.decode_file import dtype
from flashcli.paged import check_array, check_cache_dtype, check_layout, one_number
from flashcli.paged_write import WriteKv, problem


def write_kv(
    key: np.ndarray,
    value: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
    *,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    layout: str = "vllm",
    cache_dtype: str | None = None,
) -> None:
    """Parameters and errors are those of `flashcli.write_kv`."""
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, array in {"key": key, "value": value, **caches, "slot_mapping": slot_mapping}.items():
        check_array(name, array)
        if name in caches and not array.flags.writeable:
            raise ValueError(f"{name} must be writeable")
    check_layout(layout)
    check_cache_dtype(key_cache.dtype.name, value_cache.dtype.name, cache_dtype)
    if cache_dtype is not None:
        key_cache, value_cache = (cache.view(dtype(cache_dtype)) for cache in (key_cache, value_cache))
    asked = WriteKv(
        key, value, key_cache, value_cache, slot_mapping, one_number("k_scale", k_scale),
        one_number("v_scale", v_scale), layout,
    )  # fmt: skip
    if wrong := problem(asked):
        raise ValueError(f"cannot write: {wrong}")
    write(asked)


def write(asked: WriteKv) -> None:
    """Put the tokens into their slots; of two with one slot, the later one stays."""
    kept = np.flatnonzero(asked.slot_mapping >= 0)
    pages, slots = np.divmod(asked.slot_mapping[kept], asked.page)
    keys = _stored(asked.key[kept], asked.key_cache.dtype, asked.k_scale)
    values = _stored(asked.value[kept], asked.value_cache.dtype, asked.v_scale)
    if asked.layout == "vllm":  # keys [pages, Hkv, D / x, page, x], values [pages, Hkv, D, page]
        asked.key_cache[pages, :, :, slots] = keys.reshape(*keys.shape[:2], asked.D // asked.chunk, asked.chunk)
        asked.value_cache[pages, :, :, slots] = values
        return
    for cache, rows in ((asked.key_cache, keys), (asked.value_cache, values)):
        if asked.layout == "nhd":  # [pages, page, Hkv, D]
            cache[pages, slots] = rows
        else:  # [pages, Hkv, page, D]
            cache[pages, :, slots] = rows


def _stored(numbers: np.ndarray, kind: np.dtype, scale: float) -> np.ndarray:
    """Numbers as a cache of this type has them: in fp8 divided by its scale, and none beyond the largest finite one."""
    if numbers.dtype == kind:
        return numbers
    import ml_dtypes

    largest = np.float32(ml_dtypes.finfo(kind).max)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinity is among what is cut
        scaled = numbers.astype(np.float32) / np.float32(scale)
    return np.clip(scaled, -largest, largest).astype(kind)
