"""`flashcli.decode` of NumPy's arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashcli.asked.decode import BlockSparse, check_cache_dtype, check_layout, check_option_types, default_scale
from flashcli.cpu.pages import DecodeArrays, check_array, one_number
from flashcli.cpu.pages import decode_problem as problem
from flashcli.files.decode.tensors import dtype
from flashcli.run.decode import open_backend
from flashcli.run.request import check_backend


def decode(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    *,
    alibi_slopes: np.ndarray | None = None,
    k_scale: Any = 1.0,
    v_scale: Any = 1.0,
    layout: str = "vllm",
    scale: float | None = None,
    sliding_window: int = 0,
    block_sparse: BlockSparse | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    cache_dtype: str | None = None,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flashcli.decode` of NumPy's arrays."""
    check_backend(backend)
    arrays = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens, **({} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}),
    }  # fmt: skip
    for name, array in arrays.items():
        check_array(name, array)
    check_option_types({"scale": scale, "sliding_window": sliding_window, "block_sparse": block_sparse})
    check_layout(layout)
    check_cache_dtype(key_cache.dtype.name, value_cache.dtype.name, cache_dtype)
    if cache_dtype is not None:
        key_cache, value_cache = (cache.view(dtype(cache_dtype)) for cache in (key_cache, value_cache))
    asked = DecodeArrays(
        query[:, None] if query.ndim == 3 else query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes,
        one_number("k_scale", k_scale), one_number("v_scale", v_scale), layout,
        default_scale(query.shape) if scale is None else scale, sliding_window, block_sparse,
    )  # fmt: skip
    if wrong := problem(asked):
        raise ValueError(f"cannot decode: {wrong}")
    with open_backend(backend) as engine:
        out, lse = engine.decode(asked, range(asked.S))
    out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out
