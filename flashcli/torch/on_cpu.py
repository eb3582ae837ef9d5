"""PyTorch's tensors on the CPU: NumPy's arrays of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashcli.run.attention import attention


def compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool,
    scale: float | None,
    backend: str,
    bias: torch.Tensor | None,
    q_start: int,
    return_lse: bool,
    out: torch.Tensor | None,
    **options: Any,
) -> Any:
    """`flashcli.attention` of tensors without gradients, of whatever ``backend``."""
    found = attention(
        _numbers(q), _numbers(k), _numbers(v), causal, scale, backend, bias=None if bias is None else _numbers(bias),
        q_start=q_start, return_lse=return_lse, out=None if out is None else _numbers(out), **options,
    )  # fmt: skip
    answer, *lse = found if isinstance(found, tuple) else (found,)
    o = torch.from_numpy(answer) if out is None else out
    return (o, torch.from_numpy(lse[0])) if lse else o


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().numpy()
