"""Calls of attention and of its gradients, for arrays of any library: shape, strides and type alone are looked at.

`call` and `backward` refuse what cannot be computed, in one sentence that names the argument. Else they give one
record for all backends. Names are the field's: B batches, H heads of Q, Hkv of K and V, M queries, N keys, d numbers a
head.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Collection, Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

from flashcli.asked.shape import MAX_D, MAX_INT32, MAX_SCALE

HALVES = ("float16", "bfloat16")  # types of 16 bits, whose numbers are computed with in float32
TYPES = ("float32", *HALVES)  # of Q, K and V
# What changes scores: nothing, numbers, a mask, or numbers and a mask; the same with ALiBi's biases, by arithmetic.
BIASES = ("", "float32", "bool", "both", "alibi", "alibi and float32", "alibi and bool", "alibi and both")
ANY_STRIDES = ("bias", "mask", "lse", "dlse", "alibi_slopes")  # whose last axis need not be contiguous
NO_WINDOW = (-1, -1)
MAX_ROWS = MAX_INT32 - 1024  # kernels count rows in an int, and tiles go beyond the last row

FAR = 2**62  # positions from a sequence's start that nothing reaches; a sum with a number of rows has 64 bits
MAX_POSITION = 2**29  # of a query, for ALiBi: beyond, all biases of a row are far from 0 by the same

ALIGNMENT = 16  # bytes on which rows start, for kernels to move four numbers at a time

Strides = tuple[int, int, int]  # of batches, heads and rows, in elements; 0 where there is only one


class Operand(NamedTuple):
    """The outline of an array: ``shape``, ``strides`` in elements, and its type's name, such as "float32" or "bool"."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: str


def outline(array: Any) -> Operand:
    """The outline of a NumPy array; a byte order that is not this machine's is part of its type's name."""
    return _outline(array.shape, array.strides, array.dtype)


@functools.lru_cache(maxsize=1024)  # NumPy takes longer to tell a type's name than all else here
def _outline(shape: tuple[int, ...], strides: tuple[int, ...], dtype: Any) -> Operand:
    size = dtype.itemsize or 1  # numbers of type V0 have no bytes
    name = dtype.name if dtype.isnative else str(dtype)
    return Operand(shape, tuple(stride // size for stride in strides), name)


class Operands(NamedTuple):
    """The outlines of a call's arrays, named as the arguments of `flashcli.attention`; None for what is not given."""

    q: Operand
    k: Operand
    v: Operand
    bias: Operand | None = None
    mask: Operand | None = None
    out: Operand | None = None
    alibi_slopes: Operand | None = None
    cu_seqlens_q: Operand | None = None
    cu_seqlens_k: Operand | None = None


class Options(NamedTuple):
    """Options of a call that decide what is computed, checked, named as the arguments of `flashcli.attention`."""

    causal: bool
    scale: float | None
    q_start: int
    window: tuple[int, int]


class Call(NamedTuple):
    """A call of attention: sizes, strides and options, without the arrays' addresses; hashable.

    Q and O are [B, H, M, d], K and V [B, Hkv, N, d]; element (b, h, i, x) is ``strides · (b, h, i) + x`` elements from
    the first. ``heads`` says whether Q was given with an axis of heads, which O and the LSE then have. With ``causal``,
    query i sees keys up to ``q_start`` + i, and with ``windowed`` from ``first`` + i on; both are cut to -M and to N,
    so that sums with them stay small, and 0 where they limit nothing. ``bias`` is one of `BIASES`; ``bias_strides`` and
    ``mask_strides`` are of batches, heads, rows and columns, 0 where the array is broadcast. ``slopes`` are strides of
    batches and heads, and ``position`` is that of query 0 for ALiBi. ``aligned`` and ``together`` are set by `at`.
    ``dtype`` is one of `TYPES`, that of Q, K and V; ``out_dtype`` is O's, the same one or float32.

    If there are ``sequences``, they are packed: Q and O [tokens, H, d] are taken for one batch of M queries, K and V
    for N keys. Of each sequence, `of_sequence` is the call: its last query is at the position of its last key.
    """

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    d: int
    heads: bool
    causal: bool
    scale: float
    q_start: int
    bias: str
    q: Strides
    k: Strides
    v: Strides
    o: Strides
    bias_strides: tuple[int, int, int, int]
    mask_strides: tuple[int, int, int, int] = (0, 0, 0, 0)
    aligned: bool = False
    together: int = 1
    windowed: bool = False
    first: int = 0
    slopes: tuple[int, int] = (0, 0)
    position: int = 0
    sequences: int = 0
    dtype: str = "float32"
    out_dtype: str = "float32"

    def of_sequence(self, M: int, N: int) -> Call:
        """The call of one of the packed sequences, of M queries and N keys; of its strides those of heads and rows."""
        ahead = N - M
        return self._replace(
            M=M, N=N, sequences=0, q_start=self.q_start + ahead if self.causal else 0,
            first=self.first + ahead if self.windowed else 0, position=self.position + ahead,
        )  # fmt: skip

    def at(self, addresses: int, of_bias: int = 0, of_mask: int = 0) -> Call:
        """The call with ``aligned`` and ``together`` set.

        Aligned means that all rows of arrays at these addresses, or'ed, start on `ALIGNMENT`. Of neighbouring keys 1, 2
        or 4 biases, and numbers of the mask, can be read together.
        """
        aligned = _rows_aligned(addresses, self.q, self.k, self.v, self.o)
        together = 1
        if self.bias_contiguous and self.bias_strides[2] < 2**29:  # kernels count bytes in 32 bits then
            steps = self.N, of_bias // 4, of_mask, *self.bias_strides[:3], *self.mask_strides[:3]
            together = next((n for n in (4, 2) if not any(step % n for step in steps)), 1)
        return self._replace(aligned=aligned, together=together)

    @property
    def group(self) -> int:
        """The number of heads of Q that share one head of K and V."""
        return self.H // self.Hkv

    @property
    def bias_contiguous(self) -> bool:
        """Whether numbers of the bias, and of the mask, for neighbouring keys are neighbours."""
        by_kind = {"float32": {self.bias_strides[3]}, "bool": {self.mask_strides[3]}, "alibi": {1}}
        return by_kind.get(self.bias.removeprefix("alibi and "), {self.bias_strides[3], self.mask_strides[3]}) == {1}

    @property
    def mask_of_keys(self) -> bool:
        """Whether there is a mask that takes keys away from all queries of a head."""
        return BIASES.index(self.bias) & 2 != 0 and self.mask_strides[2] == 0

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of O: Q's."""
        if self.sequences:
            return self.M, self.H, self.d
        return (self.B, self.H, self.M, self.d) if self.heads else (self.B, self.M, self.d)

    @property
    def lse_shape(self) -> tuple[int, ...]:
        """The shape of the LSE: a number for each row of Q; of packed sequences [H, tokens]."""
        return (self.H, self.M) if self.sequences else self.shape[:-1]

    @property
    def empty(self) -> bool:
        """Whether there is nothing to compute: no row; or no key, and then O = 0 and LSE = -inf."""
        return 0 in (self.B, self.M, self.N)


def call(
    q: Operand,
    k: Operand,
    v: Operand,
    bias: Operand | None = None,
    causal: bool = False,
    scale: float | None = None,
    q_start: int = 0,
    window: Sequence[int] = NO_WINDOW,
    out_dtype: object = None,
    **others: Operand | None,
) -> Call:
    """The `Call` of operands q, k, v, perhaps a bias, and ``others`` of `Operands`. A bias of bools is the mask.

    Without ``out``, O is laid out like a contiguous Q. ``out_dtype``, a name or a library's type, is O's type: that of
    Q, which None stands for, or float32. Raises TypeError for an argument of the wrong type, ValueError for one of the
    wrong shape, strides or size.
    """
    of = Operands(q, k, v, bias, **others)
    kind = "" if out_dtype is None else type_name(out_dtype)
    return _call(of, checked(causal, scale, q_start, window), kind)


def type_name(dtype: object) -> str:
    """The name of a type given as a name or as any library's object, such as ``torch.float32``."""
    return str(getattr(dtype, "__name__", dtype)).rpartition(".")[2]


def checked(causal: bool, scale: float | None, q_start: int, window: Sequence[int]) -> Options:
    """Return the options of a call, or raise TypeError or ValueError; whole numbers are cut to `FAR`."""
    if not isinstance(causal, Integral) and type(causal).__name__ not in ("bool", "bool_"):  # NumPy's is no bool
        raise TypeError(f"causal must be True or False, not {type(causal).__name__}")
    if scale is not None:
        if not isinstance(scale, Real):
            raise TypeError(f"scale must be a number, not {type(scale).__name__}")
        if not abs(int(scale) if isinstance(scale, Integral) else float(scale)) <= MAX_SCALE:
            raise ValueError(f"scale must be finite, from {-MAX_SCALE:.5g} to {MAX_SCALE:.5g}, not {scale}")
        scale = float(scale)
    if not isinstance(q_start, Integral):
        raise TypeError(f"q_start must be a whole number, not {type(q_start).__name__}")
    left, right = window if hasattr(window, "__len__") and len(window) == 2 else (None, None)
    if not isinstance(left, Integral) or not isinstance(right, Integral):
        raise TypeError(f"window must be two whole numbers, (left, right), not {window!r}")
    if left < -1 or right < -1:
        raise ValueError(f"window must have no number below -1, which is no limit, not {window!r}")
    limits = min(int(left), FAR), min(int(right), FAR)
    return Options(bool(causal), scale, max(-FAR, min(int(q_start), FAR)), limits)


@functools.lru_cache(maxsize=256)  # a model asks the same again and again
def _call(of: Operands, options: Options, out_dtype: str) -> Call:
    q, k, v, bias, mask, out, slopes, *starts = of
    causal, scale, q_start, (left, right) = options
    _check_types(q, k, v, bias, mask)
    if out is not None:
        check_type("out", out, (out_dtype,) if out_dtype else result_types(q))
    out_dtype = result_type(q, out_dtype if out is None else out.dtype)
    out = out or contiguous(q.shape, out_dtype)
    if starts != [None, None]:
        return _packed_call(of, out, options)
    if bias is not None and bias.dtype == "bool":
        bias, mask = None, bias
    B, H, Hkv, M, N, d = _sizes(q, k, v)
    heads = len(q.shape) == 4
    for name, operand in {"q": q, "k": k, "v": v}.items():
        _check_strides(name, operand)
    _check_out(out, q.shape)
    changed = BIASES[(bias is not None) + 2 * (mask is not None) + 4 * (slopes is not None)]
    of_bias, of_mask = (
        _score_strides(name, x, (B, H, M, N), heads) for name, x in {"bias": bias, "mask": mask}.items()
    )
    last = N
    if causal or right >= 0:
        causal, last = True, q_start + (0 if causal else right)
    first = q_start - left
    windowed = left >= 0 and first > 1 - M  # else each query sees the first key
    return Call(
        B, H, Hkv, M, N, d, heads, causal or windowed, 1 / math.sqrt(d) if scale is None else scale,
        max(-M, min(last, N)) if causal or windowed else 0, changed,
        _of_rows(q), _of_rows(k), _of_rows(v), _of_rows(out), of_bias, of_mask,
        windowed=windowed, first=max(-M, min(first, N)) if windowed else 0, slopes=_slope_strides(slopes, B, H),
        position=0 if slopes is None else max(-MAX_POSITION, min(q_start, MAX_POSITION)), dtype=q.dtype,
        out_dtype=out_dtype,
    )  # fmt: skip


def result_types(q: Operand) -> tuple[str, ...]:
    """The types that O, dO and the gradients may have: Q's, and float32."""
    return tuple(dict.fromkeys((q.dtype, "float32")))


def result_type(q: Operand, wanted: str) -> str:
    """The type of O, or of the gradients: ``wanted``, or Q's where that is empty; TypeError for one it cannot be."""
    if wanted and wanted not in result_types(q):
        raise TypeError(f"out_dtype must be {' or '.join(result_types(q))} for a q of {q.dtype}, not {wanted}")
    return wanted or q.dtype


def _packed_call(of: Operands, out: Operand, options: Options) -> Call:
    """The `Call` of sequences packed one after the other: as for one batch, but for what queries see."""
    q, k, v, bias, mask, _, slopes, q_starts, k_starts = of
    causal, scale, q_start, (left, right) = options
    if q_starts is None:
        raise ValueError("cu_seqlens_k must be given with cu_seqlens_q")
    k_starts = q_starts if k_starts is None else k_starts
    sequences = _count(q_starts, k_starts)
    for name, given in {"bias": bias, "mask": mask, "q_start": q_start or None}.items():
        if given is not None:
            raise ValueError(f"{name} must not be given with cu_seqlens_q")
    for name, x, axes in (("q", q, "[tokens, H, d]"), ("k", k, "[tokens, Hkv, d]"), ("v", v, "[tokens, Hkv, d]")):
        if len(x.shape) != 3:
            raise ValueError(f"{name} must have shape {axes} with cu_seqlens_q, not {list(x.shape)}")
    if out.shape != q.shape:
        raise ValueError(f"out must have the shape of q, {list(q.shape)}, not {list(out.shape)}")
    of_slopes = _slope_strides(slopes, sequences, q.shape[1])
    q, k, v, out = (Operand((1, *_rows_last(x.shape)), (0, *_rows_last(x.strides)), x.dtype) for x in (q, k, v, out))
    found = _call(Operands(q, k, v, out=out), Options(causal, scale, 0, NO_WINDOW), out.dtype)
    causal, windowed = causal or right >= 0, left >= 0
    # What a query sees is counted from its sequence's last key and query: more than there are limits nothing.
    last = 0 if found.causal else min(right, found.M) if causal else found.M
    return found._replace(
        causal=causal or windowed, q_start=last if causal or windowed else 0, windowed=windowed,
        first=-min(left, found.N) if windowed else 0, sequences=sequences, slopes=of_slopes,
        bias="" if slopes is None else "alibi",
    )  # fmt: skip


def _rows_last(axes: tuple[int, ...]) -> tuple[int, ...]:
    """Lengths or strides of [tokens, H, d] as those of [H, tokens, d]."""
    return axes[1], axes[0], axes[2]


def _count(q_starts: Operand, k_starts: Operand) -> int:
    """The number of packed sequences, one at least."""
    for name, x in {"cu_seqlens_q": q_starts, "cu_seqlens_k": k_starts}.items():
        if x.dtype != "int32":
            raise TypeError(f"{name} must be an int32 array, not {x.dtype}")
        if len(x.shape) != 1 or x.shape[0] < 2:
            raise ValueError(f"{name} must have shape [S + 1] for S sequences, not {list(x.shape)}")
        if x.strides[0] != 1:
            raise ValueError(f"{name} must be contiguous: give a copy")
    if q_starts.shape != k_starts.shape:
        raise ValueError(f"cu_seqlens_k must have the shape of cu_seqlens_q, {list(q_starts.shape)}")
    return q_starts.shape[0] - 1


def check_starts(name: str, starts: Sequence[int], tokens: int) -> None:
    """Raise ValueError if ``starts`` of packed sequences do not go from 0 to the number of tokens."""
    if starts[0] != 0 or starts[-1] != tokens or any(a > b for a, b in itertools.pairwise(starts)):
        raise ValueError(f"{name} must go from 0 to the number of tokens, {tokens}, and never down")


def _rows_aligned(addresses: int, *matrices: Strides) -> bool:
    return addresses % ALIGNMENT == 0 and not any(stride % 4 for strides in matrices for stride in strides)


class Backward(NamedTuple):
    """A call of the gradients: sizes, strides and options, without the arrays' addresses; hashable.

    ``of`` is the call of `flashcli.attention` that they are gradients of, with O as it lies. dO and dQ have Q's shape,
    dK and dV K's. ``lse`` and ``dlse`` are strides of batches, heads and rows, ``dlse`` None where it is not given.
    ``dbias_shape`` is None where dbias is not wanted; ``dbias`` are its strides, 0 along axes that are summed over.
    dO and O have ``of.out_dtype``, dQ, dK and dV ``out_dtype``; dbias is float32.
    """

    of: Call
    do: Strides
    lse: Strides
    dlse: Strides | None
    dq: Strides
    dk: Strides
    dv: Strides
    dbias_shape: tuple[int, ...] | None
    dbias: tuple[int, int, int, int]
    aligned: bool = False
    out_dtype: str = "float32"

    def at(self, addresses: int, of_bias: int = 0, of_mask: int = 0) -> Backward:
        """The call with ``aligned`` set, and with `Call.at` of the same addresses."""
        of = self.of.at(addresses, of_bias, of_mask)
        by = of.q, of.k, of.v, of.o, self.do, self.dq, self.dk, self.dv
        return self._replace(of=of, aligned=_rows_aligned(addresses, *by))


def backward(
    do: Operand,
    q: Operand,
    k: Operand,
    v: Operand,
    o: Operand | None = None,
    lse: Operand | None = None,
    dlse: Operand | None = None,
    return_dbias: bool = False,
    rows_first: bool = False,
    causal: bool = False,
    scale: float | None = None,
    q_start: int = 0,
    window: Sequence[int] = NO_WINDOW,
    out_dtype: object = None,
    **others: Operand | None,
) -> Backward:
    """The `Backward` of operands do, q, k, v, and ``others`` of `Operands`; without ``o``, O and LSE are contiguous.

    dQ, dK and dV [B, H, rows, d] are contiguous, or with ``rows_first`` laid out as [B, rows, H, d]; ``out_dtype`` is
    their type, as that of O in `call`. Errors are those of `call`.
    """
    of, options = Operands(q, k, v, **others), checked(causal, scale, q_start, window)
    kind = "" if out_dtype is None else type_name(out_dtype)
    return _backward(do, of, o, lse, dlse, options, bool(return_dbias), rows_first, kind)


@functools.lru_cache(maxsize=256)
def _backward(
    do: Operand,
    given: Operands,
    o: Operand | None,
    lse: Operand | None,
    dlse: Operand | None,
    options: Options,
    return_dbias: bool,
    rows_first: bool,
    out_dtype: str,
) -> Backward:
    q, k, v, bias, mask = given[:5]
    _check_types(q, k, v, bias, mask)
    check_type("do", do, result_types(q))
    of = _call(given, options, do.dtype)
    refuse_half(o, lse)
    for name, operand, shape in (
        ("do", do, of.shape), ("o", o, of.shape), ("lse", lse, of.lse_shape), ("dlse", dlse, of.lse_shape)
    ):  # fmt: skip
        if operand is not None:
            check_type(name, operand, ("float32" if "lse" in name else do.dtype,))
            _check_like(name, operand, shape)
    if return_dbias and (bias is None or bias.dtype == "bool"):
        raise ValueError("return_dbias must be False where there is no bias of float32 numbers")
    layout = contiguous_rows_first if rows_first and of.heads and not of.sequences else contiguous
    of_rows = _of_tokens if of.sequences else _of_rows
    dq, dk = of_rows(layout(q.shape, "float32")), of_rows(layout(k.shape, "float32"))
    return Backward(
        of if o is None else of._replace(o=of_rows(o)), of_rows(do),
        _of_row_numbers(contiguous(of.lse_shape, "float32") if lse is None else lse, of),
        None if dlse is None else _of_row_numbers(dlse, of), dq, dk, dk, *_dbias(bias if return_dbias else None, of),
        out_dtype=result_type(q, out_dtype),
    )  # fmt: skip


def check_backend_on_gpu(backend: str) -> None:
    """Raise ValueError for a backend that does not compute arrays on a GPU."""
    if backend not in ("auto", "cuda"):
        raise ValueError(f"backend must be 'auto' or 'cuda' for arrays on a GPU, not {backend!r}")


def refuse_half(o: object, lse: object) -> None:
    """Raise ValueError if only one of O and its LSE is given."""
    if (o is None) != (lse is None):
        given, missing = ("lse", "o") if o is None else ("o", "lse")
        raise ValueError(f"{given} must be given together with {missing}: attention(..., return_lse=True) has both")


def contiguous_rows_first(shape: tuple[int, ...], dtype: str) -> Operand:
    """The outline of [B, H, rows, d] that lies as a contiguous [B, rows, H, d]."""
    _, H, rows, d = shape
    return Operand(shape, (rows * H * d, d, H * d, 1), dtype)


def _check_like(name: str, operand: Operand, shape: tuple[int, ...]) -> None:
    if operand.shape != shape:
        like = "one number for each row of q" if "lse" in name else "the shape of q"
        raise ValueError(f"{name} must have {like}, {list(shape)}, not {list(operand.shape)}")
    _check_strides(name, operand)


def _of_row_numbers(operand: Operand, of: Call) -> Strides:
    """The strides of batches, heads and rows of an array with one number a row: [B, M], [B, H, M] or [H, tokens]."""
    return _with_heads([0] * bool(of.sequences) + _several(operand), 3)


def _dbias(bias: Operand | None, of: Call) -> tuple[tuple[int, ...] | None, tuple[int, int, int, int]]:
    """The shape of dbias, that of the bias, and the strides of a contiguous array of it; None and 0 for no bias."""
    if bias is None:
        return None, (0, 0, 0, 0)
    dense = contiguous(bias.shape, "float32")
    return bias.shape, _score_strides("bias", dense, (of.B, of.H, of.M, of.N), of.heads)


def contiguous(shape: tuple[int, ...], dtype: str) -> Operand:
    """The outline of a contiguous array in C order: no gaps, the last axis innermost."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= length
    return Operand(shape, tuple(reversed(strides)), dtype)


def check_type(name: str, operand: Operand, allowed: Collection[str]) -> None:
    """Raise TypeError for an array whose type is none of those allowed."""
    if operand.dtype not in allowed:
        *most, last = allowed
        kinds = f"{', '.join(most)} or {last}" if most else last
        raise TypeError(f"{name} must be a {kinds} array, not {operand.dtype}")


def _check_types(q: Operand, k: Operand, v: Operand, bias: Operand | None, mask: Operand | None) -> None:
    check_type("q", q, TYPES)
    for name, operand in {"k": k, "v": v}.items():
        check_type(name, operand, (q.dtype,))
    if bias is not None:
        check_type("bias", bias, ("float32", "bool"))
    if mask is not None:
        check_type("mask", mask, ("bool",))
    if bias is not None and mask is not None and bias.dtype == "bool":
        raise TypeError("bias must be a float32 array where there is a mask, too, not bool")


def _sizes(q: Operand, k: Operand, v: Operand) -> tuple[int, int, int, int, int, int]:
    """The sizes B, H, Hkv, M, N, d; ValueError for shapes that do not fit together."""
    if len(q.shape) not in (3, 4):
        raise ValueError(f"q must have shape [B, M, d] or [B, H, M, d], not {list(q.shape)}")
    B, *several, M, d = q.shape
    if not 1 <= d <= MAX_D:
        raise ValueError(f"q must have a last axis, d, of 1 to {MAX_D}, not {d}: its shape is {list(q.shape)}")
    axes = "[B, Hkv, N, d]" if several else "[B, N, d]"
    if len(k.shape) != len(q.shape) or (k.shape[0], k.shape[-1]) != (B, d):
        wanted = f"{axes} with B = {B} and d = {d}, as q has them"
        raise ValueError(f"k must have shape {wanted}, not {list(k.shape)}")
    if v.shape != k.shape:
        raise ValueError(f"v must have the shape of k, {list(k.shape)}, not {list(v.shape)}")
    [H], [Hkv], N = several or [1], k.shape[1:-2] or [1], k.shape[-2]
    if H == 0:
        raise ValueError(f"q must have at least one head, but its shape is {list(q.shape)}")
    if Hkv == 0 or H % Hkv:
        raise ValueError(f"k must have a number of heads that divides the {H} of q, not {Hkv}")
    for name, rows in {"B·H·M": B * H * M, "B·Hkv·N": B * Hkv * N, "M + N": M + N}.items():
        if rows > MAX_ROWS:
            raise ValueError(f"q, k and v must have {name} of at most {MAX_ROWS}, not {rows}")
    return B, H, Hkv, M, N, d


def _check_strides(name: str, operand: Operand) -> None:
    if 0 in operand.shape:
        return
    hint = "give another" if name == "out" else "give a copy"
    used = [stride for length, stride in zip(operand.shape, operand.strides, strict=True) if length > 1]
    if any(stride < 0 for stride in used):
        raise ValueError(f"{name} must have no negative strides, not {list(operand.strides)}: {hint}")
    if name not in ANY_STRIDES and operand.shape[-1] > 1 and operand.strides[-1] != 1:
        apart = operand.strides[-1]
        raise ValueError(f"{name} must be contiguous along its last axis, not {apart} elements apart: {hint}")


def _check_out(out: Operand, shape: tuple[int, ...]) -> None:
    if out.shape != shape:
        raise ValueError(f"out must have the shape of q, {list(shape)}, not {list(out.shape)}")
    _check_strides("out", out)
    reach = 0  # of the axes of smaller strides: the next one has to step over them
    for stride, length in sorted(zip(out.strides, out.shape, strict=True)):
        if length > 1 and stride <= reach and 0 not in shape:
            raise ValueError(f"out must not overlap itself: it has shape {list(shape)} and strides {list(out.strides)}")
        reach += stride * (length - 1)


def _score_strides(
    name: str, given: Operand | None, scores: tuple[int, int, int, int], heads: bool
) -> tuple[int, int, int, int]:
    """The strides of a bias or a mask along batches, heads, rows and columns of scores; 0 where it is broadcast."""
    if given is None:
        return 0, 0, 0, 0
    wanted = scores if heads else (scores[0], *scores[2:])
    missing = len(wanted) - len(given.shape)
    shape = (1,) * missing + given.shape
    if missing < 0 or any(length not in (1, want) for length, want in zip(shape, wanted, strict=True)):
        axes = "[B, H, M, N]" if heads else "[B, M, N]"
        raise ValueError(f"{name} must be broadcastable to {axes} = {list(wanted)}, not have shape {list(given.shape)}")
    _check_strides(name, given)
    return _with_heads([0] * missing + _several(given), 4)


def _of_rows(operand: Operand) -> Strides:
    """The strides of batches, heads and rows of a matrix [B, rows, d] or [B, H, rows, d]."""
    return _with_heads(_several(operand)[:-1], 3)


def _of_tokens(operand: Operand) -> Strides:
    """The strides of batches, of which there is one, heads and rows of a matrix [tokens, H, d]."""
    row, head, _ = _several(operand)
    return 0, head, row


def _slope_strides(slopes: Operand | None, B: int, H: int) -> tuple[int, int]:
    """The strides of batches, or sequences, and heads of ALiBi's slopes."""
    if slopes is None:
        return 0, 0
    check_type("alibi_slopes", slopes, ("float32",))
    if slopes.shape not in ((H,), (B, H)):
        raise ValueError(f"alibi_slopes must have shape {[H]} or {[B, H]}, not {list(slopes.shape)}")
    _check_strides("alibi_slopes", slopes)
    *batch, head = _several(slopes)
    return (batch or [0])[0], head


def _with_heads(strides: list[int], axes: int) -> Any:
    """Strides of so many axes: 0 is that of heads, the second, where there is none."""
    return (*strides[:1], *[0] * (axes - len(strides)), *strides[1:])


def _several(operand: Operand) -> list[int]:
    """Strides in elements, 0 for an axis of at most one element, for which libraries give any number."""
    return [stride if length > 1 else 0 for length, stride in zip(operand.shape, operand.strides, strict=True)]
