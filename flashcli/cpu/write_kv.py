"""write_kv in NumPy, new keys and values into slots of a cache in pages: the readable statement of the algorithm."""

from __future__ import annotations

import numpy as np

from flashcli.cpu.pages import WriteKvArrays


def write(asked: WriteKvArrays) -> None:
    """Put new keys and values into their slots of the cache; of two tokens with one slot, the later one stays."""
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
    """Numbers converted to a cache's type: for fp8 divided by its scale and cut to the largest finite number."""
    if numbers.dtype == kind:
        return numbers
    import ml_dtypes

    largest = np.float32(ml_dtypes.finfo(kind).max)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinity is among what is cut
        scaled = numbers.astype(np.float32) / np.float32(scale)
    return np.clip(scaled, -largest, largest).astype(kind)
