"""The four functions on NumPy's arrays: computed on the CPU, or on a GPU by way of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from flashcli.asked import decode as pages
from flashcli.asked import write_kv as writing
from flashcli.asked.attention import ANY_STRIDES, Call, Operand, backward, call, checked, outline
from flashcli.asked.how import check_precision
from flashcli.asked.shape import Shape
from flashcli.cpu.attention import Matrices, attend_arrays
from flashcli.cpu.backward import Gradients, backward_arrays
from flashcli.cpu.pages import DecodeArrays, WriteKvArrays, one_number, page_problem, slot_problem
from flashcli.cpu.write_kv import write
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.cut import cut
from flashcli.files.decode.tensors import dtype
from flashcli.run import decode as decoding
from flashcli.run.arrays import attend
from flashcli.run.request import Request, check_backend, open_backend, refuse_conflicts


def attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
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
    bias, mask = (None if x is None else as_it_lies(name, x) for name, x in {"bias": bias, "mask": mask}.items())
    inputs = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask}
    asked = call(
        outline(q), outline(k), outline(v), None if bias is None else outline(bias),
        None if out is None else _operand_to_write(out, inputs), causal, scale, q_start,
        None if mask is None else outline(mask),
    )  # fmt: skip
    given = Matrices(
        q, k, v, np.empty(q.shape, np.float32) if out is None else out, *mask_apart(bias, mask),
        np.empty(asked.lse_shape, np.float32) if return_lse else None,
    )  # fmt: skip
    if asked.empty:
        given.out[...] = 0
        if given.lse is not None:
            given.lse[...] = -np.inf
    else:
        _compute(request, asked, given)
    return given.out if given.lse is None else (given.out, given.lse)


def mask_apart(bias: np.ndarray | None, mask: np.ndarray | None) -> tuple[np.ndarray | None, np.ndarray | None]:
    """The bias of numbers and the mask: a bias of bools is a mask."""
    return (None, bias) if bias is not None and bias.dtype == np.bool_ else (bias, mask)


def _compute(request: Request, asked: Call, given: Matrices) -> None:
    """Compute on a GPU if there is one and a file could hold the call (M = N, no bias or LSE), else on the CPU."""
    as_files = (asked.Hkv, asked.N, asked.q_start, asked.bias) == (asked.H, asked.M, 0, "") and given.lse is None
    if request.needs_gpu and not as_files:
        raise UsageError(
            "arrays on the CPU with a bias, mask, LSE, grouped heads, q_start or M != N have the cpu backend only.",
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


def attention_backward(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: np.ndarray | None = None,
    mask: np.ndarray | None = None,
    q_start: int = 0,
    o: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    return_dbias: bool = False,
    kernel: str | None = None,
) -> tuple[np.ndarray, ...]:
    """`flashcli.attention_backward` of NumPy's arrays: on the CPU, whatever their strides."""
    check_backend(backend)
    if backend == "cuda" or kernel is not None:
        raise UsageError(
            "gradients of arrays on the CPU are computed by the cpu backend.",
            'leave out backend="cuda" and kernel, or give arrays that are on a GPU.',
        )
    do, q, k, v = (as_it_lies(name, x) for name, x in {"do": do, "q": q, "k": k, "v": v}.items())
    others = {
        name: as_it_lies(name, x)
        for name, x in {"o": o, "lse": lse, "dlse": dlse, "bias": bias, "mask": mask}.items()
        if x is not None
    }
    of = {name: outline(x) for name, x in others.items()}
    asked = backward(
        outline(do), outline(q), outline(k), outline(v), of.get("o"), of.get("lse"), of.get("dlse"), of.get("bias"),
        causal, scale, q_start, return_dbias, mask=of.get("mask"),
    )  # fmt: skip
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    dbias = None if asked.dbias_shape is None else np.zeros(asked.dbias_shape, np.float32)
    if not asked.of.empty:
        o = others.get("o")
        changes = mask_apart(others.get("bias"), others.get("mask"))
        given = Matrices(q, k, v, np.empty(q.shape, np.float32) if o is None else o, *changes)
        if o is None:
            attend_arrays(asked.of, given)
        backward_arrays(asked, do, others.get("dlse"), given, Gradients(dq, dk, dv, dbias))
    return (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias)


def decode(
    query: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    block_tables: np.ndarray,
    seq_lens: np.ndarray,
    *,
    alibi_slopes: np.ndarray | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    **options: Any,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flashcli.decode` of NumPy's arrays."""
    check_backend(backend)
    arrays = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens, **({} if alibi_slopes is None else {"alibi_slopes": alibi_slopes}),
    }  # fmt: skip
    asked = pages.ask(**_outlines(arrays), **_checked_options(options))
    arrays["query"] = query.reshape(asked.query.shape)
    given = DecodeArrays(**{**vars(asked), **arrays, **_of_type(asked.cache_type, key_cache, value_cache)})
    if wrong := page_problem(given):
        raise ValueError(f"cannot decode: {wrong}")
    with decoding.open_backend(backend) as engine:
        out, lse = engine.decode(given, range(given.S))
    out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out


def write_kv(
    key: np.ndarray,
    value: np.ndarray,
    key_cache: np.ndarray,
    value_cache: np.ndarray,
    slot_mapping: np.ndarray,
    **options: Any,
) -> None:
    """`flashcli.write_kv` of NumPy's arrays."""
    arrays = {
        "key": key, "value": value, "key_cache": key_cache, "value_cache": value_cache, "slot_mapping": slot_mapping,
    }  # fmt: skip
    outlines = _outlines(arrays)
    for name in ("key_cache", "value_cache"):
        if not arrays[name].flags.writeable:
            raise ValueError(f"{name} must be writeable")
    asked = writing.ask(**outlines, **_checked_options(options))
    given = WriteKvArrays(**{**vars(asked), **arrays, **_of_type(asked.cache_type, key_cache, value_cache)})
    if wrong := slot_problem(given):
        raise ValueError(f"cannot write: {wrong}")
    write(given)


def _outlines(arrays: dict[str, np.ndarray]) -> dict[str, Operand]:
    """The outlines of arrays of a call by pages; TypeError for one that is no plain array of this machine's."""
    for name, array in arrays.items():
        _refuse_others(name, array)
        if not array.dtype.isnative:
            raise TypeError(f"{name} must have this machine's byte order, not that of {array.dtype}")
    return {name: outline(array) for name, array in arrays.items()}


def _checked_options(options: dict[str, Any]) -> dict[str, Any]:
    """The options of a call by pages, with the number of each scale."""
    options = options | {name: one_number(name, options[name]) for name in pages.FACTORS if name in options}
    pages.check_option_types(options)
    return options


def _of_type(name: str, *caches: np.ndarray) -> dict[str, np.ndarray]:
    """Both caches as arrays of a type, which their bytes already are."""
    return dict(zip(("key_cache", "value_cache"), (cache.view(dtype(name)) for cache in caches), strict=True))


def as_it_lies(name: str, array: np.ndarray) -> np.ndarray:
    """The array, or a contiguous copy where no backend takes its strides; TypeError if it is no plain NumPy array."""
    _refuse_others(name, array, ", and what is not masked as mask")
    last = array.ndim == 0 or array.shape[-1] == 1 or array.strides[-1] == array.itemsize or name in ANY_STRIDES
    whole = all(stride >= 0 and stride % (array.itemsize or 1) == 0 for stride in array.strides)
    return np.asarray(array if last and whole and array.flags.aligned else np.array(array, order="C"))


def _refuse_others(name: str, array: object, instead: str = "") -> None:
    """Raise TypeError for what is no NumPy array, or is masked: what is masked would count."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: give its data{instead}")


def _operand_to_write(out: np.ndarray, inputs: dict[str, np.ndarray | None]) -> Operand:
    _refuse_others("out", out)
    if not out.flags.writeable or not out.flags.aligned:
        raise ValueError(f"out must be {'aligned' if out.flags.writeable else 'writeable'}")
    for name, array in inputs.items():
        if array is not None and np.may_share_memory(out, array) and np.shares_memory(out, array):  # bounds, then each
            raise ValueError(f"out must not overlap {name}")
    return outline(out)
