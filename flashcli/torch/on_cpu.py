"""PyTorch's tensors on the CPU: NumPy's arrays of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashcli.arrays.numpys import attention


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
    given: dict[str, Any] = {
        name: None if tensor is None else numbers(name, tensor)
        for name, tensor in {"q": q, "k": k, "v": v, "bias": bias, "out": out}.items()
    }
    found = attention(
        **given, causal=causal, scale=scale, backend=backend, q_start=q_start, return_lse=return_lse, **options
    )
    answer, *lse = found if isinstance(found, tuple) else (found,)
    o = torch.from_numpy(answer) if out is None else out
    return (o, torch.from_numpy(lse[0])) if lse else o


def numbers(name: str, tensor: torch.Tensor) -> np.ndarray:
    """The same memory as an array of NumPy's."""
    try:
        return tensor.detach().numpy()
    except TypeError as error:  # NumPy has no such numbers
        of, kind = " or bool" if name == "bias" else "", str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name} must be a float32{of} tensor, not {kind}") from error
