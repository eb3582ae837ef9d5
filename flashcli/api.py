"""attention(q, k, v): the Python API."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashcli.backends.request import Request, open_backend
from flashcli.files.cut import cut
from flashcli.run.arrays import attend
from flashcli.shape import MAX_D, MAX_SCALE, Shape


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
) -> np.ndarray:
    """softmax(scale · Q Kᵀ) V for each batch, accurate to fp32.

    Parameters
    ----------
    q, k, v : float32 arrays [B, N, d], 1 <= d <= 256
    causal : query i sees keys 0 to i only
    scale : factor on Q Kᵀ; 1/sqrt(d) if None
    backend : "cuda", "cpu", or "auto": a usable GPU, else the CPU

    Returns
    -------
    float32 array [B, N, d]

    Raises
    ------
    TypeError, ValueError
        for arrays of another type or shape
    flashcli.errors.FlashError
        where the backend is missing or fails

    Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
    """
    _check(q, k, v, scale)
    shape, out = Shape(*q.shape), np.empty(q.shape, np.float32)
    by, request = cut(shape), Request(backend, causal, scale)
    with open_backend(request, replace(shape, B=by.batches), by.rows) as engine:
        attend(engine, q, k, v, out)
    return out


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None) -> None:
    for name, array in {"q": q, "k": k, "v": v}.items():
        if not isinstance(array, np.ndarray) or array.dtype != np.float32:
            kind = array.dtype if isinstance(array, np.ndarray) else type(array).__name__
            raise TypeError(f"{name} must be a float32 NumPy array, not {kind}")
        if array.ndim != 3:
            raise ValueError(f"{name} must have shape [B, N, d], not {list(array.shape)}")
    if not q.shape == k.shape == v.shape:
        raise ValueError(f"q, k, v must have one shape, not {q.shape}, {k.shape}, {v.shape}")
    if min(q.shape) < 1 or q.shape[2] > MAX_D:
        raise ValueError(f"B, N, d must be at least 1 and d at most {MAX_D}, not {q.shape}")
    if scale is not None and not isinstance(scale, int | float | np.number):
        raise TypeError(f"scale must be a number, not {type(scale).__name__}")
    if scale is not None and not abs(scale) <= MAX_SCALE:
        raise ValueError(f"scale must be finite, from {-MAX_SCALE:.5g} to {MAX_SCALE:.5g}, not {scale}")
