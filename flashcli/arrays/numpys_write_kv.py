"""`flashcli.write_kv` of NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashcli.asked.decode import check_cache_dtype, check_layout
from flashcli.cpu.pages import WriteKvArrays, check_array, one_number
from flashcli.cpu.pages import write_problem as problem
from flashcli.cpu.write_kv import write
from flashcli.files.decode.tensors import dtype


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
    """`flashcli.write_kv` of NumPy's arrays."""
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    for name, array in {"key": key, "value": value, **caches, "slot_mapping": slot_mapping}.items():
        check_array(name, array)
        if name in caches and not array.flags.writeable:
            raise ValueError(f"{name} must be writeable")
    check_layout(layout)
    check_cache_dtype(key_cache.dtype.name, value_cache.dtype.name, cache_dtype)
    if cache_dtype is not None:
        key_cache, value_cache = (cache.view(dtype(cache_dtype)) for cache in (key_cache, value_cache))
    asked = WriteKvArrays(
        key, value, key_cache, value_cache, slot_mapping, one_number("k_scale", k_scale),
        one_number("v_scale", v_scale), layout,
    )  # fmt: skip
    if wrong := problem(asked):
        raise ValueError(f"cannot write: {wrong}")
    write(asked)
