"""write_kv in NumPy, new keys and values into slots of a cache in pages: the readable statement of the algorithm."""

from __future__ import annotations

import numpy as np

from flashcli.asked.decode import SCALED_TYPES
from flashcli.cpu.pages import WriteKvArrays


def write(asked: WriteKvArrays) -> None:
    """Put new keys and values into their slots of the cache; of two tokens with one slot, the later one stays."""
    kept = np.flatnonzero(asked.slot_mapping >= 0)
    pages, slots = np.divmod(asked.slot_mapping[kept], asked.page)
    keys = stored(asked.key[kept], asked.key_cache.dtype, asked.k_scale)
    values = stored(asked.value[kept], asked.value_cache.dtype, asked.v_scale)
    if asked.layout == "vllm":  # keys [pages, Hkv, D / x, page, x], values [pages, Hkv, D, page]
        asked.key_cache[pages, :, :, slots] = keys.reshape(*keys.shape[:2], asked.D // asked.chunk, asked.chunk)
        asked.value_cache[pages, :, :, slots] = values
        return
    for cache, rows in ((asked.key_cache, keys), (asked.value_cache, values)):
        if asked.layout == "nhd":  # [pages, page, Hkv, D]
            cache[pages, slots] = rows
        else:  # [pages, Hkv, page, D]
            cache[pages, :, slots] = rows


def stored(numbers: np.ndarray, kind: np.dtype, scale: float) -> np.ndarray:
    """Numbers as a cache of type ``kind`` has them: for fp8 and int8 divided by the scale, cut to the type's range.

    Both round to even. The range of int8 is from -128 to 127, and NaN becomes 0 there.
    """
    if kind.name not in SCALED_TYPES:
        return numbers.astype(kind, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):  # an infinity is among what is cut
        scaled = numbers.astype(np.float32) / np.float32(scale)
    if kind == np.int8:
        return np.nan_to_num(np.rint(scaled).clip(-128, 127), nan=0).astype(kind)
    import ml_dtypes

    largest = np.float32(ml_dtypes.finfo(kind).max)
    return np.clip(scaled, -largest, largest).astype(kind)
