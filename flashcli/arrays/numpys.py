"""The public functions on NumPy's arrays: computed on the CPU, or on a GPU by way of it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashcli.asked import decode as pages
from flashcli.asked import merge as merging
from flashcli.asked import write_kv as writing
from flashcli.asked.attention import (
    ANY_STRIDES,
    Backward,
    Call,
    Operand,
    Options,
    backward,
    call,
    check_starts,
    outline,
)
from flashcli.asked.how import How, check_choice
from flashcli.asked.shape import Shape
from flashcli.cpu.attention import Matrices, attend_arrays
from flashcli.cpu.backward import Gradients, backward_arrays
from flashcli.cpu.merge import merge as merge_arrays
from flashcli.cpu.pages import DecodeArrays, WriteKvArrays, one_number, page_problem, slot_problem
from flashcli.cpu.write_kv import write
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.cut import cut
from flashcli.files.decode.tensors import dtype
from flashcli.gpu import driver
from flashcli.run import decode as decoding
from flashcli.run.request import BACKENDS, Request, open_backend, refuse_conflicts

NEEDED = ("do", "q", "k", "v")


def attention(
    backend: str = "auto", out: np.ndarray | None = None, out_dtype: Any = None, **given: Any
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flashcli.attention` of NumPy's arrays, by the names of its parameters.

    Arrays may have any strides. Where the last axis is not contiguous, or a stride is negative, a copy is computed on.
    The CPU's answers do not depend on ``batch_invariant``.
    """
    how = How(*map(given.pop, How._fields))
    options = Options(*map(given.pop, Options._fields))._asdict()
    arrays, of = _as_they_lie(**given)
    to = None if out is None else _operand_to_write(out, arrays)
    asked = call(**of, **options, out=to, out_dtype=out_dtype)
    into = out if out is not None and asked.out_dtype == "float32" else np.empty(arrays["q"].shape, np.float32)
    matrices = _matrices(arrays, into, np.empty(asked.lse_shape, np.float32) if how.return_lse else None)
    if not _by_gpu(asked, matrices, backend, how):
        for one, part, *_ in _sequences(asked, matrices, arrays) if asked.sequences else [(asked, matrices)]:
            attend_arrays(one, part)
    answer = matrices.out if out is None else out
    if answer is not matrices.out:
        answer[...] = matrices.out
    elif asked.out_dtype != "float32":
        answer = matrices.out.astype(arrays["q"].dtype)
    return answer if matrices.lse is None else (answer, matrices.lse)


def _as_they_lie(**arrays: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arguments that are given, and their outlines; those in `NEEDED` have to be.

    An array with strides that no backend takes is copied. TypeError names what is no plain NumPy array.
    """
    found, outlines = {}, {}
    for name, x in arrays.items():
        if x is not None or name in NEEDED:
            if type(x) is not np.ndarray:
                _refuse_others(name, x, ", and what is not masked as mask")
            last = x.ndim == 0 or x.shape[-1] == 1 or x.strides[-1] == x.itemsize or name in ANY_STRIDES
            whole = x.flags.c_contiguous or all(stride >= 0 and stride % (x.itemsize or 1) == 0 for stride in x.strides)
            found[name] = x = np.asarray(x if last and whole and x.flags.aligned else np.array(x, order="C"))
            outlines[name] = outline(x)
    return found, outlines


def _matrices(arrays: dict[str, np.ndarray], o: np.ndarray, lse: np.ndarray | None = None) -> Matrices:
    """The arrays of a call: Q, K and V in float32, which has all numbers of the halves; a bias of bools is a mask."""
    bias, mask = arrays.get("bias"), arrays.get("mask")
    if bias is not None and bias.dtype == np.bool_:
        bias, mask = None, bias
    return Matrices(
        np.asarray(arrays["q"], np.float32), np.asarray(arrays["k"], np.float32), np.asarray(arrays["v"], np.float32),
        o, bias, mask, lse, arrays.get("alibi_slopes"),
    )  # fmt: skip


def _sequences(
    asked: Call, given: Matrices, arrays: dict[str, np.ndarray]
) -> Iterator[tuple[Call, Matrices, slice, slice]]:
    """Each packed sequence: its call, views of the arrays, its rows of Q and of K. ValueError for bad starts."""
    of_q = arrays["cu_seqlens_q"].tolist()
    of_k = arrays["cu_seqlens_k"].tolist() if "cu_seqlens_k" in arrays else of_q
    check_starts("cu_seqlens_q", of_q, asked.M)
    check_starts("cu_seqlens_k", of_k, asked.N)
    for s, pairs in enumerate(zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True)):
        rows, keys = (slice(*pair) for pair in pairs)
        q, out = (as_batch(x[rows]) for x in (given.q, given.out))
        lse = None if given.lse is None else given.lse[None, :, rows]
        slopes = given.slopes if given.slopes is None or given.slopes.ndim == 1 else given.slopes[s]
        part = Matrices(q, as_batch(given.k[keys]), as_batch(given.v[keys]), out, lse=lse, slopes=slopes)
        yield asked.of_sequence(q.shape[-2], part.k.shape[-2]), part, rows, keys


def as_batch(x: np.ndarray) -> np.ndarray:
    """A view of a matrix [rows, H, d] as one batch [1, H, rows, d]."""
    return x.swapaxes(0, 1)[None]


def _by_gpu(asked: Call, given: Matrices, backend: str, how: How) -> bool:
    """Compute on a GPU if one is asked for, or is there and a file could hold the call; return whether it did.

    A file has M = N, and nothing but Q, K and V. Where no GPU is needed, the driver is asked for one, in no time; else
    it is opened, which says what is missing.
    """
    leaves_open = how.kernel is None and how.precision == "fp32"
    if leaves_open and (backend == "cpu" or (backend == "auto" and driver.problem())):
        return False
    request = Request(backend, asked.causal, asked.scale, how.kernel, how.precision)
    refuse_conflicts(request)
    if asked.empty:
        return False
    plain = (asked.Hkv, asked.N, asked.q_start, asked.bias) == (asked.H, asked.M, 0, "") and given.lse is None
    plain = plain and not asked.windowed and not asked.sequences
    if request.needs_gpu and not plain:
        raise UsageError(
            "arrays on the CPU with a bias, mask, LSE, grouped heads, q_start, M != N, a window or packed "
            "sequences have the cpu backend only.",
            'leave out backend="cuda", kernel and precision, or give arrays that are on a GPU.',
        )
    if backend == "cpu" or not plain:
        return False
    try:
        _by_chunks(request if request.on_host else replace(request, backend="cuda"), given)
    except BackendUnavailable:
        if request.needs_gpu:
            raise
        return False
    return True


def _by_chunks(request: Request, given: Matrices) -> None:
    """Compute chunk by chunk with a backend for files, heads as batches."""
    from flashcli.run.arrays import attend  # a quarter of the time of all imports here

    q, k, v = (matrix.reshape(-1, *matrix.shape[-2:]) for matrix in (given.q, given.k, given.v))
    shape, out = Shape(*q.shape), given.out if given.out.ndim == 3 else np.empty(q.shape, np.float32)
    by = cut(shape)
    with open_backend(request, replace(shape, B=by.batches), by.rows) as engine:
        attend(engine, q, k, v, out)
    if out is not given.out:
        given.out[...] = out.reshape(given.out.shape)


def attention_backward(
    backend: str = "auto", return_dbias: bool = False, kernel: str | None = None, out_dtype: Any = None, **given: Any
) -> tuple[np.ndarray, ...]:
    """`flashcli.attention_backward` of NumPy's arrays, by the names of its parameters; computed on the CPU."""
    check_choice("backend", backend, BACKENDS)
    if backend == "cuda" or kernel is not None:
        raise UsageError(
            "gradients of arrays on the CPU are computed by the cpu backend.",
            'leave out backend="cuda" and kernel, or give arrays that are on a GPU.',
        )
    options = Options(*map(given.pop, Options._fields))._asdict()
    arrays, of = _as_they_lie(**given)
    asked = backward(**of, **options, return_dbias=return_dbias, out_dtype=out_dtype)
    do = np.asarray(arrays["do"], np.float32)
    o = np.asarray(arrays["o"], np.float32) if "o" in arrays else np.empty(do.shape, np.float32)
    dq, dk, dv = (np.zeros(arrays[name].shape, np.float32) for name in "qkv")
    dbias = None if asked.dbias_shape is None else np.zeros(asked.dbias_shape, np.float32)
    matrices = _matrices(arrays, o)
    if not asked.of.sequences:
        _differentiate(asked, do, arrays.get("dlse"), matrices, Gradients(dq, dk, dv, dbias), "o" not in arrays)
    for one, part, rows, keys in _sequences(asked.of, matrices, arrays) if asked.of.sequences else ():
        into = Gradients(as_batch(dq[rows]), as_batch(dk[keys]), as_batch(dv[keys]))
        d_lse = arrays["dlse"][None, :, rows] if "dlse" in arrays else None
        _differentiate(asked._replace(of=one), as_batch(do[rows]), d_lse, part, into, "o" not in arrays)
    kind = arrays["q"].dtype if asked.out_dtype != "float32" else np.dtype(np.float32)
    rounded = [x.astype(kind, copy=False) for x in (dq, dk, dv)]
    return tuple(rounded if dbias is None else [*rounded, dbias])


def _differentiate(
    asked: Backward, do: np.ndarray, dlse: np.ndarray | None, given: Matrices, into: Gradients, forward: bool
) -> None:
    """Compute the gradients of a call; with ``forward`` its O before."""
    if asked.of.empty:
        return
    if forward:
        attend_arrays(asked.of, given)
    backward_arrays(asked, do, dlse, given, into)


def decode(
    *required: np.ndarray, return_lse: bool = False, backend: str = "auto", kernel: str | None = None, **others: Any
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """`flashcli.decode` of NumPy's arrays."""
    check_choice("backend", backend, BACKENDS)
    pages.check_option_types({"kernel": kernel})
    decoding.check_kernel(backend, kernel)
    arrays, options = _by_name(pages.ARRAYS, required, others)
    asked = pages.ask(**_outlines(arrays), **_checked_options(options))
    query = arrays["query"]
    arrays["query"] = query.reshape(asked.query.shape)
    given = DecodeArrays(**{**vars(asked), **arrays, **_of_type(asked.cache_type, arrays)})
    if wrong := page_problem(given):
        raise ValueError(f"cannot decode: {wrong}")
    backend = "cpu" if backend == "auto" and kernel is None and driver.problem() else backend
    with decoding.open_backend(backend, kernel=kernel) as engine:
        out, lse = engine.decode(given, range(given.S))
    out, lse = out.reshape(query.shape), lse.reshape(query.shape[:-1])
    return (out, lse) if return_lse else out


def write_kv(*required: np.ndarray, **others: Any) -> None:
    """`flashcli.write_kv` of NumPy's arrays."""
    arrays, options = _by_name(writing.ARRAYS, required, others)
    outlines = _outlines(arrays)
    for name in ("key_cache", "value_cache"):
        if not arrays[name].flags.writeable:
            raise ValueError(f"{name} must be writeable")
    asked = writing.ask(**outlines, **_checked_options(options))
    given = WriteKvArrays(**{**vars(asked), **arrays, **_of_type(asked.cache_type, arrays)})
    if wrong := slot_problem(given):
        raise ValueError(f"cannot write: {wrong}")
    write(given)


def _by_name(
    names: Sequence[str], required: Sequence[np.ndarray], others: dict[str, Any]
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays of a call by pages that are given, the first of ``names`` by their places, and its options."""
    arrays = dict(zip(names, required, strict=False)) | {name: x for name, x in others.items() if name in names}
    options = {name: x for name, x in others.items() if name not in names}
    return {name: x for name, x in arrays.items() if x is not None or name not in pages.OPTIONAL}, options


def merge(outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """`flashcli.merge` of NumPy's arrays."""
    parts = {"outs": outs, "lses": lses}.items()
    found = (_outlines({f"{name}[{i}]": x for i, x in enumerate(arrays)}) for name, arrays in parts)
    merging.ask(*(tuple(outlines.values()) for outlines in found))
    return merge_arrays(outs, lses)


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


def _of_type(kind: str, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Both caches as arrays of a type, which their bytes already are."""
    return {name: arrays[name].view(dtype(kind)) for name in ("key_cache", "value_cache")}


def _refuse_others(name: str, array: object, instead: str = "") -> None:
    """Raise TypeError for what is no NumPy array, or is masked: what is masked would count."""
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} must be a NumPy array, not {type(array).__name__}")
    if isinstance(array, np.ma.MaskedArray):
        raise TypeError(f"{name} must not be a masked array: give its data{instead}")


def _operand_to_write(out: np.ndarray, inputs: dict[str, np.ndarray]) -> Operand:
    _refuse_others("out", out)
    if not out.flags.writeable or not out.flags.aligned:
        raise ValueError(f"out must be {'aligned' if out.flags.writeable else 'writeable'}")
    for name, array in inputs.items():
        if np.may_share_memory(out, array) and np.shares_memory(out, array):  # bounds, then each
            raise ValueError(f"out must not overlap {name}")
    return outline(out)
