"""attention(q, k, v) on arrays of any library: who computes, and where."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np


def attention(
    q: Any,
    k: Any,
    v: Any,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: Any = None,
    q_start: int = 0,
    return_lse: bool = False,
    out: Any = None,
    kernel: str | None = None,
    precision: str = "fp32",
    batch_invariant: bool = True,
) -> Any:
    """softmax(scale · Q Kᵀ + bias) V for each batch and head, accurate to fp32.

    Arrays on a GPU are read and written where they lie, on the caller's current stream; the call returns at once, and
    can be captured in a CUDA graph. They may be PyTorch's, CuPy's, or of any library with ``__cuda_array_interface__``
    or DLPack. NumPy's arrays, and PyTorch's tensors on the CPU, are computed on the CPU, or on a GPU by way of it.

    Parameters
    ----------
    q : float32 array [B, M, d] or [B, H, M, d], 1 <= d <= 256
    k, v : float32 arrays [B, N, d] or [B, Hkv, N, d]; H / Hkv heads of q that follow one another share one of k and v
    causal : query i sees keys 0 to q_start + i only
    scale : factor on Q Kᵀ; 1/sqrt(d) if None
    backend : "cuda", "cpu", or "auto": the GPU on which the arrays are, or else a usable one, else the CPU
    bias : float32, added to scores, or bool, where False takes a key away; broadcast to [B, H, M, N], or [B, M, N]
    q_start : the position of the first query in the sequence of keys; may be negative
    return_lse : the natural logarithm of each row's sum of exp(score), too
    out : float32 array of q's shape for the answer, which overlaps nothing else
    kernel : which one computes, on a GPU; the fastest if None
    precision : "fp32", or "fp16": faster, with a relative error of some 7e-4, on a GPU
    batch_invariant : each row has the same bytes whatever else is in the batch; False may be faster, on a GPU

    All arrays are of one library, and in one place. Strides are free, but the last axis of an array on a GPU is
    contiguous.

    Returns
    -------
    ``out``, or else an array of q's library, float32, of q's shape, contiguous; with ``return_lse``, a tuple of it and
    a float32 array [B, H, M] or [B, M]. A query that sees no key has zeros and an LSE of -inf. Libraries with no
    allocator that is known get a `DeviceArray` with both protocols.

    Raises
    ------
    TypeError, ValueError
        for arguments of another type or shape, or in another place; then nothing has been queued
    flashcli.errors.FlashError
        where the backend is missing or fails, or does not compute what is asked for

    Source: FlashAttention-2, arXiv 2307.08691, algorithm 1.
    """
    compute = _known.get(type(q)) or _find(q)
    return compute(
        q, k, v, causal, scale, backend, bias=bias, q_start=q_start, return_lse=return_lse, out=out, kernel=kernel,
        precision=precision, batch_invariant=batch_invariant,
    )  # fmt: skip


_known: dict[type, Callable[..., Any]] = {}


def _find(q: Any) -> Callable[..., Any]:
    """The function for arrays of q's library, from now on."""
    _known[type(q)] = found = _of(q)
    return found


def _of(q: Any) -> Callable[..., Any]:
    if not isinstance(q, np.ndarray):
        if any(kind.__module__.partition(".")[0] == "torch" for kind in type(q).__mro__):
            from flashcli.torch.tensors import attention as of_tensors

            return of_tensors
        from flashcli.interop.protocols import speaks

        if speaks(q):
            from flashcli.interop.anyones import attention as of_anyones

            return of_anyones
    from flashcli.run.attention import attention as of_numpy

    return of_numpy
