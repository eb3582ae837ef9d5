"""vLLM's operators on a cache in pages, by `flashcli.decode` and `flashcli.write_kv`.

Names and the order of arguments are vLLM's, so that a call such as ``torch.ops._C.paged_attention_v1`` can be replaced
as it stands.

Layout vllm, one query token a sequence. Everything is queued on the current stream, and nothing is returned.
Both versions of attention run the fastest kernel; those that V1 and V2 name are ``kernel="paged_v1"`` and "paged_v2" of
`flashcli.decode`.
"""

from __future__ import annotations

import torch

from flashcli.asked.decode import SCALED_TYPES, BlockSparse
from flashcli.torch.paged import decode
from flashcli.torch.paged_tensors import refuse_no_tensor
from flashcli.torch.paged_write import write_kv

SCALED = dict(zip(("fp8_e4m3", "fp8_e5m2", "int8"), SCALED_TYPES, strict=True))
SCALED["fp8"] = SCALED["fp8_e4m3"]  # by vLLM's names


def paged_attention_v1(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """Attention of ``query`` [S, H, D] to the cache, into ``out``, contiguous and of the query's shape and type.

    ``max_seq_len`` is not needed: lengths are the GPU's to look at. ``kv_cache_dtype`` is "auto", "fp8", "fp8_e4m3",
    "fp8_e5m2" or "int8". A cache of the query's type is read as it is, whatever the scales are. Raises what
    `flashcli.decode` does.

    Source: ``paged_attention_v1`` in vLLM's ``vllm/_custom_ops.py``.
    """
    shape: tuple[int, ...] = getattr(value_cache, "shape", ())
    if len(shape) == 4 and (shape[1], shape[3]) != (num_kv_heads, block_size):
        raise ValueError(
            f"value_cache has {shape[1]} heads and pages of {shape[3]}, but num_kv_heads is {num_kv_heads} and "
            f"block_size {block_size}"
        )
    sparse = None
    if blocksparse_vert_stride > 1:
        sparse = BlockSparse(
            blocksparse_vert_stride, blocksparse_block_size, blocksparse_local_blocks, blocksparse_head_sliding_step,
            tp_rank,
        )  # fmt: skip
    if getattr(key_cache, "dtype", None) == getattr(query, "dtype", None):
        k_scale = v_scale = 1.0
    decode(
        query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes=alibi_slopes, k_scale=k_scale,
        v_scale=v_scale, scale=scale, block_sparse=sparse, cache_dtype=_cache_dtype(key_cache, kv_cache_dtype), out=out,
    )  # fmt: skip


def paged_attention_v2(
    out: torch.Tensor,
    exp_sums: torch.Tensor,
    max_logits: torch.Tensor,
    tmp_out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    num_kv_heads: int,
    scale: float,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    max_seq_len: int,
    alibi_slopes: torch.Tensor | None,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    tp_rank: int = 0,
    blocksparse_local_blocks: int = 0,
    blocksparse_vert_stride: int = 0,
    blocksparse_block_size: int = 64,
    blocksparse_head_sliding_step: int = 0,
) -> None:
    """`paged_attention_v1` with vLLM's arguments of V2: ``exp_sums``, ``max_logits``, ``tmp_out`` are ignored.

    Source: ``paged_attention_v2`` in vLLM's ``vllm/_custom_ops.py``.
    """
    paged_attention_v1(
        out, query, key_cache, value_cache, num_kv_heads, scale, block_tables, seq_lens, block_size, max_seq_len,
        alibi_slopes, kv_cache_dtype, k_scale, v_scale, tp_rank, blocksparse_local_blocks, blocksparse_vert_stride,
        blocksparse_block_size, blocksparse_head_sliding_step,
    )  # fmt: skip


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Write keys and values [tokens, Hkv, D] into slots of the cache; tokens past the end of slot_mapping are padding.

    Raises what `flashcli.write_kv` does.

    Source: ``reshape_and_cache`` in vLLM's ``vllm/_custom_ops.py``.
    """
    for name, tensor in {"key": key, "value": value, "slot_mapping": slot_mapping}.items():
        refuse_no_tensor(name, tensor)
    cache_dtype = _cache_dtype(key_cache, kv_cache_dtype)
    if len(key) != (tokens := len(slot_mapping)):
        key, value = key[:tokens], value[:tokens]
    write_kv(
        key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, cache_dtype=cache_dtype
    )


def _cache_dtype(key_cache: torch.Tensor, kv_cache_dtype: str) -> str | None:
    """The type of the bytes of a cache of uint8, by vLLM's ``kv_cache_dtype``; None for a cache of any other type.

    ValueError where that is not the one of int8 and fp8 that a cache's own type says: its bytes mean something else.
    """
    if kv_cache_dtype not in ("auto", *SCALED):
        raise ValueError(f"kv_cache_dtype must be one of auto, {', '.join(SCALED)}, not {kv_cache_dtype!r}")
    found, named = str(getattr(key_cache, "dtype", "")).removeprefix("torch."), SCALED.get(kv_cache_dtype)
    if found in SCALED_TYPES and named not in (None, found):
        raise ValueError(f"kv_cache_dtype is {kv_cache_dtype!r}, but key_cache is {found}: view it as uint8")
    return named if found == "uint8" else None
