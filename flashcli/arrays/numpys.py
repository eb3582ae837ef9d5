"""attention(q, k, v) of NumPy's arrays."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from flashcli.asked.attention import ANY_STRIDES, Call, Operand, call, checked
from flashcli.asked.how import check_precision
from flashcli.asked.shape import Shape
from flashcli.cpu.attention import Matrices, attend_arrays
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.cut import cut
from flashcli.run.arrays import attend
from flashcli.run.request import Request, open_backend, refuse_conflicts


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: np.ndarray | None = None,
    q_start: int = 0,
    return_lse: bool = False,
    out: np.ndarray | None = None,
    kernel: str | None = None,
    precision: str = "fp32",
    batch_invariant: bool = True,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flashcli.attention` of NumPy's arrays.

    Arrays may have any strides. Where the last axis is not contiguous, or a stride is negative, a copy is computed on.
    The CPU's answers do not depend on ``batch_invariant``.
    """
    check_precision(precision)
    causal, scale, q_start = checked(causal, scale, q_start)
    request = Request(backend, causal, scale, kernel, precision)
    refuse_conflicts(request)
    q, k, v = (as_it_lies(name, array) for name, array in {"q": q, "k": k, "v": v}.items())
    bias = None if bias is None else as_it_lies("bias", bias)
    asked = call(
        operand(q), operand(k), operand(v), None if bias is None else operand(bias),
        None if out is None else _operand_to_write(out, {"q": q, "k": k, "v": v, "bias": bias}), causal, scale, q_start,
    )  # fmt: skip
    given = Matrices(
        q, k, v, np.empty(q.shape, np.float32) if out is None else out, bias,
        np.empty(asked.lse_shape, np.float32) if return_lse else None,
    )  # fmt: skip
    if asked.empty:
        given.out[...] = 0
        if given.lse is not None:
            given.lse[...] = -np.inf
    else:
        _compute(request, asked, given)
    return given.out if given.lse is None else (given.out, given.lse)


def _compute(request: Request, asked: Call, given: Matrices) -> None:
    """Compute on a GPU if there is one and a file could hold the call (M = N, no bias or LSE), else on the CPU."""
    as_files = (asked.Hkv, asked.N, asked.q_start, asked.bias) == (asked.H, asked.M, 0, "") and given.lse is None
    if request.needs_gpu and not as_files:
        raise UsageError(
            "arrays on the CPU with a bias, an LSE, grouped heads, q_start or M != N are computed by the cpu backend.",
            'leave out backend="cuda", kernel and precision, or give arrays that are on a GPU.',
        )
    if as_files and request.backend != "cpu":
        try:
            return _by_chunks(request if request.on_host else replace(request, backend="cuda"), given)
        except BackendUnavailable:
            if request.needs_gpu:
                raise
    attend_arrays(asked, given)


def _by_chunks(request: Request, given: Matrices) -> None:
    """Compute chunk by chunk with a backend for files, heads as batches."""
    q, k, v = (matrix.reshape(-1, *matrix.shape[-2:]) for matrix in (given.q, given.k, given.v))
    shape, out = Shape(*q.shape), given.out if given.out.ndim == 3 else np.empty(q.shape, np.float32)
    by = cut(shape)
    with open_backend(request, replace(shape, B=by.batches), by.rows) as engine:
        attend(engine, q, k, v, out)
    if out is not given.out:
        given.out[...] = out.reshape(given.out.shape)


def as_it_lies(name: str, array: np.ndarray) -> np.ndarray:
    """The array, or a contiguous copy where no backend takes its strides; TypeError if it is no plain NumPy array."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):  # what is masked would count: NumPy's own functions take it away
        raise TypeError(f"{name} must not be a masked array: give its data, and its mask as bias")
    last = array.ndim == 0 or array.shape[-1] == 1 or array.strides[-1] == array.itemsize or name in ANY_STRIDES
    whole = all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    return np.asarray(array if last and whole and array.flags.aligned else np.array(array, order="C"))


def operand(array: np.ndarray) -> Operand:
    """The outline of a NumPy array: shape, strides in elements, and type, with its byte order if that is foreign."""
    dtype = array.dtype.name if array.dtype.isnative else str(array.dtype)
    return Operand(array.shape, tuple(stride // array.itemsize for stride in array.strides), dtype)


def _operand_to_write(out: np.ndarray, inputs: dict[str, np.ndarray | None]) -> Operand:
    if not isinstance(out, np.ndarray):
        raise TypeError(f"out must be a NumPy array, not {type(out).__name__}")
    if isinstance(out, np.ma.MaskedArray):
        raise TypeError("out must not be a masked array: give its data")
    if not out.flags.writeable or not out.flags.aligned:
        raise ValueError(f"out must be {'aligned' if out.flags.writeable else 'writeable'}")
    for name, array in inputs.items():
        if array is not None and np.may_share_memory(out, array) and np.shares_memory(out, array):  # bounds, then each
            raise ValueError(f"out must not overlap {name}")
    return operand(out)
