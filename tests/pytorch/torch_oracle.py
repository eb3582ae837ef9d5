"""Attention in float64 by PyTorch's operations, with gradients."""

from __future__ import annotations

import torch


def oracle(q, k, v, bias=None, causal=False, scale=None, q_start=0, dtype=torch.float64):
    """O and the LSE; the arguments are those of `flashcli.torch.attention`. In float32 it is naive attention."""
    q, k, v = (x.to(dtype) for x in (q, k, v))
    if q.ndim == 4:
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores.masked_fill(~bias, -torch.inf) if bias.dtype == torch.bool else scores + bias.to(dtype)
    if causal:
        i, j = (torch.arange(n, device=q.device) for n in scores.shape[-2:])
        scores = scores.masked_fill(j > i[:, None] + q_start, -torch.inf)
    if scores.shape[-1] == 0:
        return torch.zeros_like(q), q.new_full(q.shape[:-1], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.exp(scores - lse.masked_fill(lse == -torch.inf, torch.inf)[..., None]) @ v, lse


def gradients(do, q, k, v, bias=None, dlse=None, dtype=torch.float64, **options):
    """dQ, dK, dV, and dbias for a bias of numbers, by PyTorch's autograd."""
    wanted = [q, k, v] + ([bias] if bias is not None and bias.dtype != torch.bool else [])
    given = [x.detach().to(dtype).requires_grad_() for x in wanted]
    of_bias = given[3] if len(given) > 3 else bias
    o, lse = oracle(*given[:3], of_bias, dtype=dtype, **options)
    loss = (o * do.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (lse.masked_fill(lse == -torch.inf, 0) * dlse.to(dtype)).sum()
    return torch.autograd.grad(loss, given)
