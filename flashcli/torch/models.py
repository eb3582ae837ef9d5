"""flashcli's attention for the models of Hugging Face's transformers."""

from __future__ import annotations

import functools
from typing import Any

import torch

from flashcli.torch.sdpa import scaled_dot_product_attention

REFUSED = {  # arguments of other attentions of transformers that would change the answer
    "softcap": "scores cannot be capped here",
    "s_aux": "there are no attention sinks here",
    "sinks": "there are no attention sinks here",
}


def register_transformers(name: str = "fp32", halves: bool = False) -> None:
    """Let models be loaded with ``attn_implementation="fp32"``, or whatever other ``name``.

    With ``halves``, models in float16 and bfloat16 are computed right to fp32, too; without, PyTorch's own attention
    computes them. Grouped heads are not repeated in memory. Masks are made as for "sdpa". Raises
    ValueError for a name with "flash" in it: transformers takes such a name for a library that it knows itself and that
    wants other masks.
    """
    if not isinstance(name, str):
        raise TypeError(f"name must be a text, not {type(name).__name__}")
    if "flash" in name:
        raise ValueError(f"name must not have 'flash' in it, which transformers keeps for other libraries: {name!r}")
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(name, functools.partial(attention_forward, halves=halves))
    AttentionMaskInterface.register(name, sdpa_mask)


def attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    *,
    halves: bool = False,
    **rest: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as transformers calls it: query [B, H, M, d], key and value [B, Hkv, N, d]; O is [B, M, H, d]."""
    for refused, reason in REFUSED.items():
        if rest.get(refused) is not None:
            raise ValueError(f"{refused} must be None: {reason}")
    M, N = query.shape[2], key.shape[2]
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    is_causal = is_causal and M > 1 and attention_mask is None
    if attention_mask is not None:
        attention_mask = attention_mask[..., :N]
    if position_bias is not None:
        attention_mask, is_causal = _with_mask(position_bias, attention_mask, is_causal, M, N), False
    out = scaled_dot_product_attention(
        query, key, value, attention_mask, dropout, is_causal, scaling, enable_gqa=key.shape[1] != query.shape[1],
        halves=halves,
    )  # fmt: skip
    return out.transpose(1, 2).contiguous(), None


def _with_mask(bias: torch.Tensor, mask: torch.Tensor | None, is_causal: bool, M: int, N: int) -> torch.Tensor:
    """A bias with a mask in it, to be added to scores: -inf where the mask, or the causal mask, takes a key away."""
    if is_causal:
        mask = torch.ones(M, N, dtype=torch.bool, device=bias.device).tril()
    if mask is None:
        return bias
    return bias.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else bias + mask
