"""vLLM's operators on a cache in pages, by `flashcli.decode` and `flashcli.write_kv`.

Names and the order of arguments are vLLM's, so that a call such as ``torch.ops._C.paged_attention_v1`` can be replaced
as it stands.

Everything is queued on the current stream. The operators of V1 and V2 read layout vllm, with one query token a
sequence, and return nothing. Both run the fastest kernel; those that they name are ``kernel="paged_v1"`` and "paged_v2"
of `flashcli.decode`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashcli.asked.decode import SCALED_TYPES, BlockSparse
from flashcli.torch.flash_attn import refuse, varlen
from flashcli.torch.merging import merge
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


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    max_seqlen_q: int,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_k: int,
    cu_seqlens_k: torch.Tensor | None = None,
    seqused_k: torch.Tensor | None = None,
    q_v: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: Sequence[int] | None = None,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
    return_softmax_lse: bool = False,
    out: torch.Tensor | None = None,
    scheduler_metadata: torch.Tensor | None = None,
    q_descale: torch.Tensor | None = None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
    num_splits: int = 0,
    fa_version: int = 2,
    s_aux: torch.Tensor | None = None,
    cp_world_size: int = 1,
    cp_rank: int = 0,
    cp_tot_seqused_k: torch.Tensor | None = None,
) -> Any:
    """Attention of ``q`` [tokens, H, D] to the pages ``k`` and ``v`` [pages, page, Hkv, D] that ``block_table`` names.

    Sequence s has ``seqused_k[s]`` tokens there, and ``s_aux`` are the heads' sinks. A descale is one number for all
    heads, which may be expanded; ``q_descale``, for queries of fp8, and those of a cache of ``q``'s type are ignored.
    ``max_seqlen_q`` is ``max_query_len`` of `flashcli.decode`; ``max_seqlen_k``, ``scheduler_metadata``,
    ``num_splits``, ``fa_version`` and ``deterministic`` are not needed. With ``return_softmax_lse``, the answer is a
    tuple of O and the LSE [H, tokens].

    Source: ``vllm_flash_attn/flash_attn_interface.py`` of vLLM's flash-attention.
    """
    others = {"q_v": q_v, "dropout_p": dropout_p, "return_attn_probs": return_attn_probs}
    refuse(others | {"cu_seqlens_k": cu_seqlens_k, "cp_world_size": cp_world_size - 1})
    if seqused_k is None:
        raise ValueError("seqused_k must be given: sequences without pages are for flashcli.attention")
    if s_aux is not None:
        refuse_no_tensor("s_aux", s_aux)
    factors = {"k_scale": _one_for_all("k_descale", k_descale), "v_scale": _one_for_all("v_descale", v_descale)}
    found, lse = varlen(
        q, k, v, block_table, seqused_k, cu_seqlens_q, causal, window_size, scale=softmax_scale, softcap=softcap,
        alibi_slopes=alibi_slopes, sinks=None if s_aux is None else s_aux.float(), out=out, max_query_len=max_seqlen_q,
        **factors,
    )  # fmt: skip
    return (found, lse.transpose(0, 1)) if return_softmax_lse else found


def _one_for_all(name: str, descale: torch.Tensor | None) -> float | torch.Tensor:
    """The one number that an expanded tensor has, as a tensor of it; 1 for None."""
    if descale is None:
        return 1.0
    refuse_no_tensor(name, descale)
    if descale.numel() == 0 or any(n > 1 and stride for n, stride in zip(descale.shape, descale.stride(), strict=True)):
        raise ValueError(f"{name} must be one number for all sequences and heads, expanded, not {list(descale.shape)}")
    return descale.as_strided((1,), (1,))


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
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _write("vllm", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, **scales)


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
) -> None:
    """Write keys and values as `reshape_and_cache` does, into pages [pages, page, Hkv, D] of `flash_attn_varlen_func`.

    Source: ``reshape_and_cache_flash`` in vLLM's ``vllm/_custom_ops.py``.
    """
    scales = {"k_scale": k_scale, "v_scale": v_scale}
    _write("nhd", key, value, key_cache, value_cache, slot_mapping, kv_cache_dtype, **scales)


def _write(
    layout: str, key: Any, value: Any, key_cache: Any, value_cache: Any, slots: Any, kv_cache_dtype: str, **scales: Any
) -> None:
    for name, tensor in {"key": key, "value": value, "slot_mapping": slots}.items():
        refuse_no_tensor(name, tensor)
    cache_dtype = _cache_dtype(key_cache, kv_cache_dtype)
    if len(key) != (tokens := len(slots)):
        key, value = key[:tokens], value[:tokens]
    write_kv(key, value, key_cache, value_cache, slots, layout=layout, cache_dtype=cache_dtype, **scales)


def merge_attn_states(
    output: torch.Tensor,
    prefix_output: torch.Tensor,
    prefix_lse: torch.Tensor,
    suffix_output: torch.Tensor,
    suffix_lse: torch.Tensor,
    output_lse: torch.Tensor | None = None,
) -> None:
    """Merge the answers [tokens, H, D] to a prefix and to what follows it into ``output``; each LSE is [H, tokens].

    Raises what `flashcli.merge` does.

    Source: ``merge_attn_states`` in vLLM's ``vllm/v1/attention/ops/merge_attn_states.py``.
    """
    refuse_no_tensor("prefix_output", prefix_output)
    of_rows = prefix_output.shape[1::-1]
    _refuse_shape("output", output, prefix_output.shape)
    for name, x in {"prefix_lse": prefix_lse, "suffix_lse": suffix_lse, "output_lse": output_lse}.items():
        if x is not None or name != "output_lse":
            _refuse_shape(name, x, of_rows)
    lses = [lse.transpose(0, 1).contiguous() for lse in (prefix_lse, suffix_lse)]
    out, lse = merge((prefix_output, suffix_output), lses)
    output.copy_(out)
    if output_lse is not None:
        output_lse.copy_(lse.transpose(0, 1))


def _refuse_shape(name: str, x: Any, shape: Sequence[int]) -> None:
    refuse_no_tensor(name, x)
    if list(x.shape) != list(shape):
        raise ValueError(f"{name} must have shape {list(shape)}, not {list(x.shape)}")


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
