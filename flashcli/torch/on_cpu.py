"""Attention of PyTorch's tensors on the CPU, by way of NumPy's arrays of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashcli.arrays.numpys import attention
from flashcli.asked.attention import call
from flashcli.torch import in_place
from flashcli.torch.sight import HALVES, Sight


def compute(q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, sight: Sight, **options: Any) -> Any:
    """Attention of tensors without gradients; ``options`` are those of `flashcli.attention`."""
    if q.dtype in HALVES:
        return _of_halves(q, k, v, bias, mask, out, sight, options)
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "out": out, **sight.by_name()}
    given: dict[str, Any] = {name: None if x is None else numbers(name, x) for name, x in tensors.items()}
    found = attention(**given, window=sight.window, **options)
    answer, *lse = found if isinstance(found, tuple) else (found,)
    o = torch.from_numpy(answer) if out is None else out
    return (o, torch.from_numpy(lse[0])) if lse else o


def _of_halves(q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, sight: Sight, options: dict[str, Any]) -> Any:
    """Attention of halves: widened, which is exact, and rounded at the end."""
    q, k, v = map(in_place.rows_contiguous, (q, k, v))
    of, given = sight.operands(q=q, k=k, v=v, bias=bias, mask=mask, out=out), ("causal", "scale", "q_start")
    asked = call(**of, **{name: options[name] for name in given}, out_dtype=options.pop("out_dtype"))
    if out is not None:
        in_place.refuse_sharing(out, q=q, k=k, v=v, bias=bias, mask=mask, **sight.by_name())
    found = compute(q.float(), k.float(), v.float(), bias, mask, None, sight, **options)
    answer, *lse = found if isinstance(found, tuple) else (found,)
    o = answer.to(getattr(torch, asked.out_dtype)) if out is None else out.copy_(answer)
    return (o, *lse) if lse else o


def numbers(name: str, tensor: torch.Tensor) -> np.ndarray:
    """A tensor as a NumPy array of the same memory; TypeError for a type that NumPy does not have."""
    try:
        return tensor.detach().numpy()
    except TypeError as error:  # NumPy has no such numbers
        of, kind = " or bool" if name == "bias" else "", str(tensor.dtype).removeprefix("torch.")
        raise TypeError(f"{name} must be a float32{of} tensor, not {kind}") from error
