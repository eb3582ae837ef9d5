"""Triangle attention of structure biology: many rows of a pair representation, one bias and one mask beside each other.

AlphaFold 2 (Jumper et al. 2021, supplement 1.6.6, algorithms 13 and 14). Shapes are cuEquivariance's.
"""

from __future__ import annotations

import torch

from flashcli.torch.paged_tensors import refuse_no_tensor
from flashcli.torch.tensors import attention


def triangle_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    """softmax(scale · Q Kᵀ + bias) V of each row and head of a pair representation, with gradients, accurate to fp32.

    Parameters
    ----------
    q : float32, float16 or bfloat16 tensor [B, N, H, Q, d]: batches, rows, heads, queries, numbers a head
    k, v : tensors [B, N, H, K, d] of q's type
    bias : tensor [B, 1, H, Q, K], which all N rows share; taken as float32
    mask : tensor [B, N, 1, 1, K], 0 or False where a key is taken away; taken as bool
    scale : factor on Q Kᵀ; 1/sqrt(d) if None

    The axis of batches may be left out of all of them. Bias and mask may have any shape that is broadcast to
    [B, N, H, Q, K]. Strides are free, but the last axis of q, k and v on a GPU is contiguous: transposed views of
    [B, N, Q, H, d] cost no copy.

    Returns
    -------
    a tensor of q's shape and type; halves are computed right to fp32, and rounded at the end. A query of which all keys
    are taken away has zeros, where cuEquivariance, which adds -1e9 to them, has the mean of V. The gradient of the bias
    is summed over rows in a fixed order.

    Raises
    ------
    TypeError, ValueError
        for arguments of another type or shape; errors of `flashcli.attention`, whose batches are the rows here

    Source: cuEquivariance's ``triangle_attention``, and DeepSpeed4Science's ``DS4Sci_EvoformerAttention``.
    """
    for name, x in {"q": q, "k": k, "v": v, "bias": bias, **({} if mask is None else {"mask": mask})}.items():
        refuse_no_tensor(name, x)
    if q.ndim not in (4, 5):
        raise ValueError(f"q must have shape [B, N, H, Q, d] or [N, H, Q, d], not {list(q.shape)}")
    first = q.shape[0]
    for name, x in {"k": k, "v": v}.items():
        if x.ndim != q.ndim or x.shape[0] != first:
            raise ValueError(f"{name} must have {q.ndim} axes, the first of {first}, as q has, not {list(x.shape)}")
    bias, mask = bias.float(), None if mask is None else mask.bool()
    if q.ndim == 4:
        return _rows(q, k, v, bias, mask, scale)
    changes = _of_batches("bias", bias, first), [None] * first if mask is None else _of_batches("mask", mask, first)
    found = [_rows(*given, scale) for given in zip(q.unbind(), k.unbind(), v.unbind(), *changes, strict=True)]
    return found[0][None] if first == 1 else torch.stack(found) if found else torch.empty_like(q)


def _rows(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
) -> torch.Tensor:
    """The answer [N, H, Q, d] for one batch."""
    o = attention(q, k, v, scale=scale, bias=bias, mask=mask)
    assert isinstance(o, torch.Tensor)
    return o


def _of_batches(name: str, x: torch.Tensor, B: int) -> list[torch.Tensor]:
    """The part of a bias or mask for each batch."""
    if x.ndim < 5:
        return [x] * B
    if x.shape[0] not in (1, B):
        raise ValueError(f"{name} must have a first axis of 1 or {B}, not shape {list(x.shape)}")
    return list(x.expand(B, *x.shape[1:]).unbind())
