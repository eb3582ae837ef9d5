"""`torch.nn.functional.scaled_dot_product_attention`, by flashcli's kernels where they support the call."""

from __future__ import annotations

import torch
from torch.nn import functional

from flashcli.asked.shape import MAX_D
from flashcli.torch import in_place, operator
from flashcli.torch.gradients import widened
from flashcli.torch.sight import HALVES


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    halves: bool = False,
) -> torch.Tensor:
    """`torch.nn.functional.scaled_dot_product_attention`, with its parameters, its answer and its errors.

    flashcli's kernels compute if all of this holds. Query, key and value are float32 tensors on one GPU. With
    ``halves`` they may also be float16 or bfloat16, which takes longer than by cuDNN, and is more accurate. They have
    shapes [B, H, M, d] and [B, Hkv, N, d], or [B, M, d] and [B, N, d], with d from 1 to 256. Hkv = H, or ``enable_gqa``
    and Hkv divides H. The mask, if there is one, is boolean, or of query's type, and not given with ``is_causal``.
    There is no dropout, and autocast is off, or leaves halves alone. Every other call goes to PyTorch's own function. A
    query that sees no key gets zeros.
    """
    if not supported(query, key, value, attn_mask, dropout_p, is_causal, enable_gqa, halves):
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    attn_mask = added_in_float32(attn_mask)
    if torch.compiler.is_compiling() or not in_place.is_quiet(query, key, value, attn_mask):
        return operator.attention(query, key, value, attn_mask, None, is_causal, scale, 0, True)[0]
    given = query, key, value, attn_mask, None, in_place.Options(is_causal, scale, rows_first=True)
    wanted = in_place.wants_gradients(query, key, value, attn_mask)
    return (operator.in_place_with_gradients if wanted else in_place.compute)(*given)[0]


def added_in_float32(mask: torch.Tensor | None) -> torch.Tensor | None:
    """The mask; one of halves, which is to be added to scores, in float32."""
    return None if mask is None else widened(mask)


def supported(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    enable_gqa: bool = False,
    halves: bool = False,
) -> bool:
    """Whether flashcli's kernels compute a call: the rule that `scaled_dot_product_attention` states."""
    if not (isinstance(query, torch.Tensor) and isinstance(key, torch.Tensor) and isinstance(value, torch.Tensor)):
        return False
    kind = query.dtype
    if not (query.is_cuda and kind == key.dtype == value.dtype):
        return False
    if not (halves if kind in HALVES else kind == torch.float32 and not torch.is_autocast_enabled("cuda")):
        return False
    if dropout_p or query.is_nested:
        return False
    of_q, of_k = query.shape, key.shape
    if len(of_q) not in (3, 4) or len(of_k) != len(of_q) or of_k != value.shape:
        return False
    if of_k[0] != of_q[0] or of_k[-1] != of_q[-1] or not 1 <= of_q[-1] <= MAX_D:
        return False
    if not query.get_device() == key.get_device() == value.get_device():
        return False
    if len(of_q) == 4:
        H, Hkv = of_q[1], of_k[1]
        if not H or (Hkv != H and not (enable_gqa and Hkv and H % Hkv == 0)):
            return False
    if mask is None:
        return True
    if not isinstance(mask, torch.Tensor) or not _broadcasts(mask.shape, (*query.shape[:-1], key.shape[-2])):
        return False
    return not is_causal and mask.dtype in (torch.bool, torch.float32, kind) and mask.device == query.device


def _broadcasts(shape: tuple[int, ...], wanted: tuple[int, ...]) -> bool:
    missing = len(wanted) - len(shape)
    return missing >= 0 and all(n in (1, want) for n, want in zip(shape, wanted[missing:], strict=True))
