"""NumPy's arrays: those in the memory of the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from flashcli import api

_attention: Callable[..., Any] = api.attention
OTHERWISE = {
    "bias": None, "q_start": 0, "return_lse": False, "out": None, "kernel": None, "precision": "fp32",
    "batch_invariant": True,
}  # fmt: skip


def attention(q: Any, k: Any, v: Any, causal: bool, scale: float | None, backend: str, **options: Any) -> Any:
    """`flashcli.attention` of these arrays."""
    asked = {name: value for name, value in options.items() if value is not OTHERWISE[name]}
    return _attention(q, k, v, causal, scale, backend, **asked)
