"""attention(q, k, v): the Python API, and the choice of a backend that the command line shares."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager

import numpy as np

from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.cut import cut
from flashcli.kernels.attention import KERNELS
from flashcli.run.arrays import attend
from flashcli.shape import MAX_D, Shape

BACKENDS = ("auto", "cuda", "cpu")
MAX_SCALE = float(np.finfo(np.float32).max) / math.log2(math.e)  # beyond it scale · log2(e), in kernels, is infinite


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
    shape = _check(q, k, v, scale)
    out = np.empty(shape, np.float32)
    by = cut(Shape(*shape))
    with open_backend(backend, (by.batches, *shape[1:]), causal, scale, rows=by.rows) as engine:
        attend(engine, q, k, v, out)
    return out


def _check(q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float | None) -> tuple[int, int, int]:
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
    return q.shape


def open_backend(
    name: str,
    shape: tuple[int, int, int],
    causal: bool = False,
    scale: float | None = None,
    kernel: str | None = None,
    precision: str = "fp32",
    device: int | None = None,
    turn: int = 0,
    threads: int | None = None,
    cores: int | None = None,
    max_device_bytes: int | None = None,
    rows: int | None = None,
    notice: Callable[[str], None] = lambda text: None,
) -> AbstractContextManager:
    """An open backend for inputs of shape (B, N, d), of whose Q ``rows`` come at a time; a ``with`` block closes it.

    It is right for any B, N and number of rows; they only decide which tiles are fastest. Without a ``device``, those
    that have different ``turn``s get different GPUs, as far as there are. The CPU backend has as many ``threads`` as
    asked for, else as there are ``cores`` for this process, else as cores can be used.

    "auto" is the GPU if there is a usable one, else the CPU with one ``notice``; it is the GPU without fallback once a
    kernel, a device or a precision is asked for that only a GPU has. Kernel "sequential" is the CPU without notice.
    """
    if name not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}, not {name!r}")
    if kernel is not None and kernel not in KERNELS:
        raise UsageError(f"there is no kernel {kernel!r}.", f"choose one of {', '.join(KERNELS)}.")
    if kernel is not None and precision not in KERNELS[kernel].precisions:
        raise UsageError(f"kernel {kernel} has no {precision}.", f"it has {', '.join(KERNELS[kernel].precisions)}.")
    no_fallback = name == "cuda" or kernel is not None or device is not None or precision != "fp32"
    if threads is not None and no_fallback:
        raise UsageError("--threads is for the cpu backend, not for GPUs or kernels.", "leave it out.")
    if kernel is not None and KERNELS[kernel].on_host:
        asked = {
            "--backend cuda": name == "cuda",
            "--device": device is not None,
            "--max-device-memory": max_device_bytes is not None,
        }
        if any(asked.values()):
            options = " and ".join(option for option, given in asked.items() if given)
            raise UsageError(f"{options}: for GPUs, but kernel {kernel} runs on the CPU.", "leave out one of the two.")
        from flashcli.backends.sequential import SequentialBackend

        return SequentialBackend(shape[2], causal, scale)
    if name == "cpu" and (kernel is not None or device is not None):
        raise UsageError("--kernel and --device are for GPUs, not for the cpu backend.", "leave out --backend cpu.")
    if name == "cpu" and max_device_bytes is not None:
        raise UsageError("--max-device-memory is for GPUs, not for the cpu backend.", "leave it out.")
    if name == "cpu" and precision != "fp32":
        raise UsageError(f"the cpu backend has no {precision}.", "leave out --precision.")
    if name != "cpu":
        from flashcli.backends.cuda import CudaBackend

        try:
            B, N, d = shape
            sizes = B, rows or N, N
            return CudaBackend(d, causal, scale, kernel, precision, device, turn, sizes, max_device_bytes)
        except BackendUnavailable as error:
            if no_fallback:
                raise
            notice(f"no usable GPU, computing on the CPU: {error}")
    from flashcli.backends.cpu import CpuBackend

    return CpuBackend(causal, scale, threads or cores)
