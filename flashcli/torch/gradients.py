"""Attention and its gradients in PyTorch's own operations, which have gradients and tangents themselves.

FlashAttention-2 (arXiv 2307.08691, section 2.2): S = scale · Q Kᵀ + bias, P = exp(S - lse), and D is the row sums of
dO ∘ O. Then dV = Pᵀ dO; dS = P ∘ (dO Vᵀ - D + dlse); dQ = scale · dS K; dK = scale · dSᵀ Q; dbias = dS. The heads of
Q that share one of K and V are one long head here. P is in memory, whole: this is for gradients of gradients, and for
tangents.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from flashcli.torch.sight import HALVES, Sight


class Scores(NamedTuple):
    """The making of scores of Q and K: arguments of `flashcli.attention` of these names."""

    bias: torch.Tensor | None
    mask: torch.Tensor | None
    causal: bool
    scale: float | None
    q_start: int
    sight: Sight

    def of(self, q: torch.Tensor, k: torch.Tensor, group: int) -> torch.Tensor:
        """The scores S, [B, Hkv, group, M, N] if heads share K (group > 1), else [.., M, N]; -inf where masked."""
        bias, mask = (x if x is None else x.expand(*q.shape[:-1], k.shape[-2]) for x in (self.bias, self.mask))
        scores = _split(self.factor(q) * _stacked(q, group) @ k.mT, group)
        if bias is not None:
            there = _split_heads(bias, group)
            scores = scores.masked_fill(~there, -torch.inf) if bias.dtype == torch.bool else scores + there
        if mask is not None:
            scores = scores.masked_fill(~_split_heads(mask, group), -torch.inf)
        return self.sight.change(scores, self.causal, self.q_start, group)

    def factor(self, q: torch.Tensor) -> float:
        return q.shape[-1] ** -0.5 if self.scale is None else self.scale


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, by: Scores) -> tuple[torch.Tensor, torch.Tensor]:
    """O, of Q's shape, and the LSE, of halves in float32; 0 and -inf, with gradient 0, for a row that sees nothing."""
    q, k, v = map(widened, (q, k, v))
    if by.sight.packed and q.ndim == 3:
        out, lse = attention(_as_batch(q), _as_batch(k), _as_batch(v), by)
        return out[0].transpose(0, 1).contiguous(), lse[0]
    group = q.shape[-3] // k.shape[-3] if q.ndim == 4 else 1
    scores = by.of(q, k, group)
    if scores.shape[-1] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    top = scores.detach().amax(-1, keepdim=True)
    nothing = top == -torch.inf
    P = torch.exp(scores - top.masked_fill(nothing, 0))
    total = P.sum(-1, keepdim=True).masked_fill(nothing, 1)
    out = _joined(P / total, group) @ v
    lse = (torch.log(total) + top).masked_fill(nothing, -torch.inf)
    return out.reshape(q.shape), lse.reshape(q.shape[:-1])


def gradients(
    d_out: torch.Tensor, d_lse: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor,
    out: torch.Tensor, lse: torch.Tensor, by: Scores,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """The gradients dQ, dK, dV, and dbias for a bias of numbers; ``out`` and ``lse`` are O and LSE of that call."""
    if by.sight.packed and q.ndim == 3:
        d_out, q, k, v, out = map(_as_batch, (d_out, q, k, v, out))
        d_lse = None if d_lse is None else d_lse[None]
        *found, d_bias = gradients(d_out, d_lse, q, k, v, out, lse[None], by)
        dq, dk, dv = (x[0].transpose(0, 1) for x in found)
        return dq, dk, dv, d_bias
    kinds = q.dtype, k.dtype, v.dtype
    d_out, q, k, v, out = map(widened, (d_out, q, k, v, out))
    scale = by.factor(q)
    group = q.shape[-3] // k.shape[-3] if q.ndim == 4 else 1
    q_, out_ = _stacked(q, group), _stacked(out, group)
    scores = by.of(q, k, group)
    above = lse.masked_fill(lse == -torch.inf, torch.inf)  # a row that sees nothing: P = 0
    P = torch.exp(scores - _split_heads(above[..., None], group))
    d_out_ = _stacked(d_out, group)
    dv = _joined(P, group).mT @ d_out_
    D = (d_out_ * out_).sum(-1, keepdim=True)
    dP = _split(d_out_ @ v.mT - D, group)
    if d_lse is not None:
        dP = dP + _split_heads(d_lse[..., None], group)
    dS = P * dP
    dS_ = _joined(dS, group)
    dq, dk = (scale * dS_ @ k).reshape(q.shape), scale * dS_.mT @ q_
    d_bias = None
    if by.bias is not None and by.bias.dtype != torch.bool:
        d_bias = dS.reshape(*q.shape[:-1], k.shape[-2]).sum_to_size(by.bias.shape)
    dq, dk, dv = (x.to(kind) for x, kind in zip((dq, dk, dv), kinds, strict=True))
    return dq, dk, dv, d_bias


def widened(x: torch.Tensor) -> torch.Tensor:
    """Halves as float32; other types as they are."""
    return x.float() if x.dtype in HALVES else x


def _as_batch(x: torch.Tensor) -> torch.Tensor:
    """Packed sequences [tokens, H, d] as one batch [1, H, tokens, d]."""
    return x.transpose(0, 1)[None]


def _stacked(rows: torch.Tensor, group: int) -> torch.Tensor:
    """Rows [B, H, M, d] as [B, Hkv, group · M, d]."""
    return rows if group == 1 else rows.unflatten(1, (-1, group)).flatten(2, 3)


def _split(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Scores [B, Hkv, group · M, N] as [B, Hkv, group, M, N]."""
    return scores if group == 1 else scores.unflatten(-2, (group, -1))


def _joined(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Scores [B, Hkv, group, M, N] as [B, Hkv, group · M, N]: the inverse of `_split`."""
    return scores if group == 1 else scores.flatten(-3, -2)


def _split_heads(scores: torch.Tensor, group: int) -> torch.Tensor:
    """Scores [B, H, M, N] as [B, Hkv, group, M, N]."""
    return scores if group == 1 else scores.unflatten(1, (-1, group))
