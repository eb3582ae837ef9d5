"""flash-attn's functions on a cache in pages, by `flashcli.decode` and `flashcli.write_kv`.

Names, arguments, their order and defaults are those of the package flash-attn, so that a call can be replaced as it
stands. What is not computed here is refused with a sentence. Types are those of `flashcli.decode`, fp32 among them.
"""

from __future__ import annotations

from typing import Any

import torch

from flashcli.torch.paged import check, decode
from flashcli.torch.paged_tensors import refuse_no_tensor
from flashcli.torch.paged_write import write_kv

NO_WINDOW = (-1, -1)


def flash_attn_varlen_func(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: torch.Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: torch.Tensor | None = None,
) -> Any:
    """Attention of ``q`` [tokens, H, D] to the pages ``k`` and ``v`` [pages, page, Hkv, D] that ``block_table`` names.

    Sequence s has ``cu_seqlens_k[s + 1] - cu_seqlens_k[s]`` tokens there. ``max_seqlen_q`` is ``max_query_len`` of
    `flashcli.decode`; ``max_seqlen_k`` and ``deterministic`` are not needed. With ``return_attn_probs`` the answer is a
    tuple of O, the LSE [H, tokens], and None.

    Source: ``flash_attn/flash_attn_interface.py`` of the package flash-attn, 2.7.
    """
    refuse({"dropout_p": dropout_p})
    refuse_no_tensor("cu_seqlens_k", cu_seqlens_k)
    out, lse = varlen(
        q, k, v, block_table, cu_seqlens_k.diff(), cu_seqlens_q, causal, window_size, scale=softmax_scale,
        softcap=softcap, alibi_slopes=alibi_slopes, max_query_len=max_seqlen_q,
    )  # fmt: skip
    return (out, lse.transpose(0, 1), None) if return_attn_probs else out


def flash_attn_with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    k: torch.Tensor | None = None,
    v: torch.Tensor | None = None,
    rotary_cos: torch.Tensor | None = None,
    rotary_sin: torch.Tensor | None = None,
    cache_seqlens: int | torch.Tensor | None = None,
    cache_batch_idx: torch.Tensor | None = None,
    cache_leftpad: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = NO_WINDOW,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: torch.Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Any:
    """Attention of ``q`` [S, T, H, D] to pages [pages, page, Hkv, D], once new ``k`` and ``v`` have been written there.

    ``cache_seqlens`` are the tokens in the cache before the new ones [S, T', Hkv, D], an int or int32 [S].
    ``num_splits`` is not needed. With ``return_softmax_lse``, the answer is a tuple of O and the LSE [S, H, T].

    Source: ``flash_attn/flash_attn_interface.py`` of the package flash-attn, 2.7.
    """
    others = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    refuse(others | {"cache_batch_idx": cache_batch_idx, "cache_leftpad": cache_leftpad})
    table = _paged(block_table)
    for name, x in {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": table}.items():
        refuse_no_tensor(name, x)
    if q.ndim != 4 or 0 in q.shape:
        raise ValueError(f"q has shape {list(q.shape)}, where [S, T, H, D] is wanted, none of them 0")
    S, T, H, D = q.shape
    if cache_seqlens is None or (k is None) != (v is None):
        raise ValueError("cache_seqlens must be given, and k and v both or neither")
    lengths = cache_seqlens
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.full((S,), lengths, dtype=torch.int32, device=q.device)
    starts = None if T == 1 else torch.arange(0, S * T + 1, T, dtype=torch.int32, device=q.device)
    tensors = q.reshape(S * T, H, D), k_cache, v_cache, table
    options = _options(
        starts, causal, window_size, scale=softmax_scale, softcap=softcap, alibi_slopes=alibi_slopes, max_query_len=T
    )
    if k is not None and v is not None:
        for name, x, axes, wanted in (
            ("block_table", table, 2, "[S, most pages]"), ("cache_seqlens", lengths, 1, "[S]"),
            ("k", k, 4, "[S, T', Hkv, D]"), ("v", v, 4, "[S, T', Hkv, D]"),
        ):  # fmt: skip
            refuse_no_tensor(name, x)
            if x.ndim != axes or len(x) != S:
                raise ValueError(f"{name} has shape {list(x.shape)}, where {wanted} is wanted with S = {S}")
        check(*tensors, lengths, **options)  # before anything is written
        slots = _slots(table, lengths[:, None] + torch.arange(k.shape[1], device=q.device), k_cache.shape[1])
        write_kv(k.flatten(0, 1), v.flatten(0, 1), k_cache, v_cache, slots.flatten(), layout="nhd")
        lengths = lengths + k.shape[1]
    out, lse = decode(*tensors, lengths, return_lse=True, **options)
    out, lse = out.reshape(q.shape), lse.reshape(S, T, H).transpose(1, 2)
    return (out, lse) if return_softmax_lse else out


def _slots(table: torch.Tensor, places: torch.Tensor, page: int) -> torch.Tensor:
    """The slots of tokens at ``places`` [S, T'] of sequences; a negative one, nowhere, for a place beyond the table.

    Nothing beyond is looked up: on a GPU that would end the process's use of it.
    """
    width = table.shape[1]
    column = torch.where(places < 0, width, places // page).clamp(max=width)
    with_nowhere = torch.nn.functional.pad(table, (0, 1), value=-1)
    return with_nowhere.gather(1, column.long()).long() * page + places % page


def varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    block_table: torch.Tensor | None,
    lengths: torch.Tensor,
    starts: torch.Tensor | None,
    causal: bool,
    window_size: Any,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """O [tokens, H, D] and LSE [tokens, H] of queries to pages, by flash-attn's mask and window.

    ``window_size`` has the keys to the left of a query and to its right, -1 for all. Without ``starts`` each sequence
    has one query.
    """
    options = _options(starts, causal, window_size, **options)
    out, lse = decode(q, k, v, _paged(block_table), lengths, return_lse=True, **options)
    return out, lse


def _options(starts: torch.Tensor | None, causal: bool, window_size: Any, **options: Any) -> dict[str, Any]:
    """The options of `flashcli.decode` for flash-attn's mask and window, and others."""
    try:
        left, right = NO_WINDOW if window_size is None else window_size
    except (TypeError, ValueError):
        raise TypeError(f"window_size must be two whole numbers, (left, right), not {window_size!r}") from None
    causal = causal or right == 0
    if not causal and ((left, right) != NO_WINDOW or options.get("alibi_slopes") is not None):
        raise ValueError("without causal=True there are neither windows nor ALiBi's slopes here")
    window = left + 1 if left >= 0 else 0
    return options | {"query_starts": starts, "layout": "nhd", "causal": causal, "sliding_window": window}


def refuse(others: dict[str, Any]) -> None:
    """Raise ValueError for an argument, by its name, that is given though nothing here computes it."""
    for name, value in others.items():
        if not (value is None or (isinstance(value, (bool, int, float)) and value == 0)):
            raise ValueError(f"{name} has no meaning for flashcli, which does not compute it")


def _paged(block_table: torch.Tensor | None) -> torch.Tensor:
    if block_table is None:
        raise ValueError("block_table must be given: sequences without pages are for flashcli.attention")
    return block_table
