"""Attention in float64 by PyTorch's operations, with gradients."""

from __future__ import annotations

import torch


def oracle(q, k, v, bias=None, causal=False, scale=None, q_start=0):
    """O and the LSE; the arguments are those of `flashcli.torch.attention`."""
    q, k, v = (x.double() for x in (q, k, v))
    if q.ndim == 4:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.double()
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(j > i[:, None] + q_start, -torch.inf)
    if scores.shape[-1] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]) @ v, lse
