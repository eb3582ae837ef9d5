"""Attention on arrays where they lie, for compute-sanitizer: many small cases in one process that imports no PyTorch.

Usage: python tests/sanitize_arrays.py [KERNEL [TEXT]]

Each array has memory of its own, exactly as long as it is, so that memcheck sees what reads beyond; gaps between rows
hold NaN. The answers are compared with float64. Without a KERNEL it takes all that run on this GPU, with a TEXT the
cases that have it in their names; in any case it compiles all it needs first, on all cores, so that a run without the
tool leaves a cache for those under it.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from oracle import Asked, plain
from sanitizing import Program, compute, end, offset

from flashcli.asked.attention import Call, Operand, call
from flashcli.asked.how import How
from flashcli.files.decode.tensors import dtype
from flashcli.gpu.place import Place
from flashcli.gpu.prepared import prepare
from flashcli.kernels.arguments import POINTERS
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Plan
from flashcli.kernels.plan import ATTENTION

B, H, Hkv, M, N = 2, 4, 2, 150, 201  # several tiles of rows and of keys, the last ones partly filled
STRIDED = [name for name, kernel in KERNELS.items() if kernel.strided]
CALLED = {"Q": "q", "K": "k", "V": "v", "O": "out"}  # by kernels, and in a case
TOLERANCE = {"fp32": 2e-5, "fp16": 1e-2}
ROUNDING = {"float32": 0, "float16": 2**-11, "bfloat16": 2**-8}  # of an answer to its type, at most


class Case(NamedTuple):
    """What is computed: ``lies`` is a key of `LAYOUTS`, ``spoilt`` a matrix with a number that is not finite.

    ``bias`` and ``mask`` are their shapes; with ``by_keys`` those of one key are neighbours, not those of one query.
    ``hidden``: every query has the number that is not finite taken away.
    """

    lies: str = "dense"
    d: int = 64
    B: int = B
    H: int = H
    Hkv: int = Hkv
    M: int = M
    N: int = N
    causal: bool = False
    q_start: int = 0
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    hidden: bool = False
    by_keys: bool = False
    lse: bool = False
    spoilt: str = ""
    precision: str = "fp32"
    batch_invariant: bool = True
    dtype: str = "float32"
    out_dtype: str = "float32"


CASES = {
    "dense": Case(),
    "dense, LSE": Case(lse=True),
    "causal": Case(causal=True, q_start=N - M, lse=True),
    "rows that see nothing": Case(causal=True, q_start=-3, lse=True),
    "rows first": Case("rows first"),
    "fused, LSE": Case("fused", lse=True),
    "fused, causal": Case("fused", causal=True),
    "broadcast": Case("broadcast"),
    "odd": Case("odd", lse=True),
    "odd, causal": Case("odd", causal=True),
    "heads of 16": Case(d=16, N=333, lse=True),
    "heads of 12, fused, causal": Case("fused", d=12, causal=True),
    "heads of 30": Case(d=30),
    "heads of 32, fused": Case("fused", d=32),
    "heads of 32, causal": Case(d=32, causal=True, lse=True),
    "heads of 40, causal": Case(d=40, causal=True, lse=True),
    "heads of 96, fused": Case("fused", d=96),
    "heads of 200, causal": Case(d=200, causal=True, lse=True),
    "heads of 256, fused": Case("fused", d=256),
    "heads of 160, more of them than multiprocessors": Case(B=35, M=70, N=130, d=160),
    "a tile of keys for each block of a cluster, heads of 256": Case(B=1, H=2, Hkv=1, M=100, N=500, d=256, lse=True),
    "a tile of keys for each block of a cluster, heads of 150": Case("odd", B=1, H=2, Hkv=1, M=70, N=450, d=150),
    "many long heads, few keys": Case("fused", B=35, Hkv=4, M=64, N=64, d=256, lse=True),
    "many long heads, few keys, causal": Case("odd", B=35, Hkv=4, M=33, N=50, d=150, causal=True, q_start=17),
    "many long heads, two tiles of keys": Case("fused", B=35, Hkv=4, M=100, N=128, d=256, lse=True),
    "many long heads, two tiles of keys, causal": Case("odd", B=35, Hkv=4, M=70, N=90, d=150, causal=True, q_start=-3),
    "many keys": Case(M=33, N=700, lse=True),
    "many keys, causal": Case("fused", M=333, N=700, q_start=300, causal=True),
    "chunks of keys": Case(B=1, H=3, Hkv=1, M=200, N=1100, lse=True),
    "chunks of keys, causal": Case("fused", B=1, M=200, N=1100, q_start=500, causal=True, lse=True),
    "chunks of keys, more of them than blocks": Case(B=1, H=40, Hkv=1, M=600, N=1100, d=32),
    "chunks of keys, heads of 128": Case(B=1, H=1, Hkv=1, M=600, N=1100, d=128),
    "chunks of keys, heads of 256": Case(B=1, H=2, Hkv=1, M=100, N=1100, d=256, lse=True),
    "chunks of keys, clusters": Case("fused", B=1, H=1, Hkv=1, M=600, N=1100, lse=True),
    "chunks of keys, clusters with pairs": Case("fused", B=1, H=1, Hkv=1, M=600, N=1024, lse=True),
    "chunks of keys, clusters with pairs, heads of 72": Case(B=1, H=1, Hkv=1, M=600, N=1100, d=72),
    "chunks of keys, heads of 160": Case(B=1, H=20, Hkv=1, M=128, N=1100, d=160, lse=True),
    "chunks of keys, heads of 160, more of them than blocks": Case(B=1, H=140, Hkv=1, M=70, N=1100, d=160),
    "chunks of keys, NaN": Case(B=1, M=200, N=1100, spoilt="v"),
    "more heads than multiprocessors": Case(B=33, H=8, M=70, N=130, d=32),
    "heads of 12, more of them than multiprocessors": Case("fused", B=35, M=70, N=330, d=12, lse=True),
    "few keys": Case(M=49, N=49, d=32, lse=True),
    "few keys, many rows, causal": Case("fused", N=128, causal=True, q_start=-40, lse=True),
    "few keys, odd, causal": Case("odd", M=100, N=77, d=30, causal=True, lse=True),
    "few keys, bias and mask": Case(M=90, N=96, d=32, bias=(H, 90, 96), mask=(B, 1, 1, 96), lse=True),
    "few keys, bias by keys": Case(M=40, N=51, d=32, bias=(H, 40, 51), by_keys=True, lse=True),
    "few keys, a mask that hides NaN": Case(M=20, N=33, mask=(B, 1, 1, 33), spoilt="v", hidden=True, lse=True),
    "few keys, Inf": Case("fused", M=64, N=64, d=16, spoilt="k", lse=True),
    "heads of 128, causal, more of them than multiprocessors": Case(B=35, M=70, N=130, d=128, causal=True, lse=True),
    "heads of 128, mask of keys": Case("fused", d=128, N=190, mask=(B, 1, 1, 190), lse=True),
    "heads of 80, NaN": Case(d=80, M=70, N=130, spoilt="v", lse=True),
    "few keys, halves": Case(M=70, N=120, dtype="float16", out_dtype="float16"),
    "few keys, fp16": Case(M=70, N=64, precision="fp16"),
    "one query, one key": Case(M=1, N=1, lse=True),
    "one query": Case("fused", M=1, lse=True),
    "bias": Case(bias=(B, H, M, N), lse=True),
    "bias of keys": Case(bias=(B, 1, 1, N)),
    "bias of queries": Case(bias=(M, 1)),
    "bias by keys": Case(d=32, bias=(H, M, N), by_keys=True),
    "bias, fused": Case("fused", d=32, bias=(B, 1, M, N)),
    "bias, odd, causal": Case("odd", bias=(M, N), causal=True, lse=True),
    "bias, heads of 32": Case(d=32, bias=(B, H, M, N)),
    "bias, heads of 128": Case(d=128, bias=(B, H, M, N)),
    "bias, heads of 256": Case(d=256, bias=(B, H, M, N)),
    "mask": Case(d=32, mask=(B, H, M, N), lse=True),
    "mask of keys": Case(mask=(B, 1, 1, N)),
    "mask of queries": Case(mask=(H, M, 1), lse=True),
    "mask, fused": Case("fused", d=32, mask=(M, N), causal=True),
    "bias and mask": Case(d=32, bias=(1, H, M, N), mask=(B, 1, 1, N), lse=True),
    "bias and mask, heads of 64, causal": Case("fused", bias=(H, M, N), mask=(B, 1, M, N), causal=True),
    "bias and mask in pairs": Case(d=32, N=202, bias=(1, H, M, 202), mask=(B, 1, 1, 202), lse=True),
    "bias and mask in fours": Case(d=32, N=204, bias=(1, H, M, 204), mask=(B, 1, 1, 204), lse=True),
    "bias in fours, causal": Case(N=204, bias=(M, 204), causal=True, lse=True),
    "bias in pairs, heads of 128": Case(d=128, N=202, bias=(M, 202)),
    "mask in pairs": Case(N=202, mask=(B, 1, M, 202), lse=True),
    "bias and mask, odd, heads of 200": Case("odd", d=200, bias=(M, N), mask=(B, H, 1, N), lse=True),
    "a mask that hides NaN of K": Case(d=32, bias=(H, M, N), mask=(B, 1, 1, N), spoilt="k", hidden=True, lse=True),
    "a mask that hides Inf of V": Case(mask=(B, 1, 1, N), spoilt="v", hidden=True, lse=True),
    "a bias that hides NaN of K, heads of 256": Case(d=256, bias=(B, 1, 1, N), spoilt="k", hidden=True, lse=True),
    "a bias that hides Inf of V": Case(d=32, bias=(B, 1, 1, N), spoilt="v", hidden=True, lse=True),
    "NaN": Case(spoilt="q", lse=True),
    "Inf, fused": Case("fused", spoilt="v"),
    "NaN with a mask": Case(d=32, spoilt="k", mask=(B, 1, 1, N), lse=True),
    "NaN, one query": Case(M=1, N=33, spoilt="v", lse=True),
    "NaN, odd, causal": Case("odd", d=30, causal=True, spoilt="k", lse=True),
    "NaN, heads of 12, causal": Case(d=12, B=34, M=70, causal=True, spoilt="q", lse=True),
    "NaN, heads of 200": Case("fused", d=200, spoilt="k"),
    "NaN with a bias": Case(bias=(B, H, M, N), spoilt="v", lse=True),
    "NaN, chunks of keys, heads of 256": Case(B=1, H=2, Hkv=1, M=100, N=1100, d=256, spoilt="v", lse=True),
    "fp16": Case("fused", precision="fp16"),
    "NaN, a tile of keys for each block of a cluster": Case(B=1, H=2, Hkv=1, M=70, N=300, d=192, spoilt="v", lse=True),
    "NaN, many long heads, few keys": Case(B=35, Hkv=4, M=20, N=64, d=192, spoilt="k", lse=True),
    "fp16, heads of 192": Case(d=192, precision="fp16"),
    "bytes that depend on the batch": Case(batch_invariant=False),
    "halves": Case(dtype="float16", out_dtype="float16", lse=True),
    "bfloat16 in, fused, causal": Case("fused", causal=True, lse=True, dtype="bfloat16"),
    "halves, odd": Case("odd", d=30, dtype="float16", out_dtype="float16"),
    "bfloat16, odd, causal": Case("odd", causal=True, dtype="bfloat16", out_dtype="bfloat16"),
    "halves in, heads of 16": Case(d=16, N=333, lse=True, dtype="float16"),
    "halves in, heads of 128, rows first": Case("rows first", d=128, dtype="float16"),
    "bfloat16, heads of 200, causal": Case(d=200, causal=True, lse=True, dtype="bfloat16", out_dtype="bfloat16"),
    "halves in, heads of 256, fused": Case("fused", d=256, dtype="float16"),
    "halves, bias and mask": Case(d=32, bias=(1, H, M, N), mask=(B, 1, 1, N), lse=True, dtype="float16"),
    "halves, bias and mask, heads of 128": Case(d=128, bias=(M, N), mask=(B, 1, M, N), lse=True, dtype="float16"),
    "halves in, chunks of keys": Case("fused", B=1, M=200, N=1100, q_start=500, causal=True, dtype="float16"),
    "halves in, clusters with pairs": Case("fused", B=1, H=1, Hkv=1, M=600, N=1024, lse=True, dtype="bfloat16"),
    "halves in, chunks of keys, heads of 160": Case(B=1, H=2, Hkv=1, M=64, N=1100, d=160, dtype="bfloat16"),
    "halves, NaN": Case(spoilt="q", lse=True, dtype="float16", out_dtype="float16"),
    "bfloat16, Inf, fused": Case("fused", spoilt="v", dtype="bfloat16", out_dtype="bfloat16"),
    "halves, fp16": Case("fused", precision="fp16", dtype="float16", out_dtype="float16"),
}


# ---- arrays, and where they lie

LAYOUTS = {  # what is allocated, and the [B, H, rows, d] in it
    "dense": lambda B, H, rows, d, kind: _both(nan(B, H, rows, d, kind=kind)),
    "rows first": lambda B, H, rows, d, kind: _part(nan(B, rows, H, d, kind=kind), lambda x: x.swapaxes(1, 2)),
    "fused": lambda B, H, rows, d, kind: _part(nan(B, rows, 3, H, d, kind=kind), lambda x: x[:, :, 2].swapaxes(1, 2)),
    "broadcast": lambda B, H, rows, d, kind: _part(
        nan(H, rows, d, kind=kind), lambda x: np.broadcast_to(x, (B, H, rows, d))
    ),
    "odd": lambda B, H, rows, d, kind: _part(nan(B, H, rows, d + 1, kind=kind), lambda x: x[..., 1:]),
}


def nan(*shape: int, kind: str = "float32") -> np.ndarray:
    return np.full(shape, np.nan, dtype(kind))


def _both(whole: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    return whole, whole


def _part(whole: np.ndarray, view: Any) -> tuple[np.ndarray, np.ndarray]:
    return whole, view(whole)


class Arrays(NamedTuple):
    """Of each argument, what is allocated and the view of it that is given."""

    whole: dict[str, np.ndarray]
    view: dict[str, np.ndarray]


def arrays(case: Case) -> Arrays:
    """Normal numbers as the case has them."""
    rng, found = np.random.default_rng(3), {}
    shapes = {"q": (case.H, case.M), "k": (case.Hkv, case.N), "v": (case.Hkv, case.N), "out": (case.H, case.M)}
    for name, (heads, rows) in shapes.items():
        lies = "dense" if name in ("q", "out") and case.lies == "broadcast" else case.lies
        kind = case.out_dtype if name == "out" else case.dtype
        whole, view = found[name] = LAYOUTS[lies](case.B, heads, rows, case.d, kind)
        if name != "out":
            numbers = whole if lies == "broadcast" else view
            numbers[...] = rng.normal(size=numbers.shape)
            if name == case.spoilt:
                numbers[-1, -1, numbers.shape[-2] // 2, 5] = np.inf if name == "v" else np.nan
    for name, shape in {"bias": case.bias, "mask": case.mask}.items():
        if shape is not None:
            found[name] = _bias(case, shape, rng, name == "mask")
    return Arrays(*({name: pair[i] for name, pair in found.items()} for i in (0, 1)))


def _bias(case: Case, shape: tuple[int, ...], rng: np.random.Generator, is_mask: bool) -> tuple[np.ndarray, np.ndarray]:
    """Some take keys away, and those of a query in the middle all."""
    shape = (*shape[:-2], *shape[:-3:-1]) if case.by_keys else shape
    bias, nothing = rng.normal(size=shape).astype(np.float32), False if is_mask else -np.inf
    bias[bias < -1] = -np.inf
    whole = np.isfinite(bias) if is_mask else bias
    view = whole.swapaxes(-1, -2) if case.by_keys else whole
    if view.shape[-2] > 1:
        view[..., view.shape[-2] // 2, :] = nothing
    if case.hidden:
        view[..., case.N // 2] = nothing
    return whole, view


def operand(view: np.ndarray) -> Operand:
    return Operand(view.shape, tuple(stride // view.itemsize for stride in view.strides), view.dtype.name)


# ---- what is launched


def asked(case: Case, kernel: str) -> tuple[Call, How]:
    """The call, and how it is to be computed."""
    return _called(case), How(kernel, case.precision, case.batch_invariant, case.lse)


@functools.cache
def _called(case: Case) -> Call:
    """Memory is allocated on far more than 16 bytes."""
    whole, view = arrays(case)
    of = {name: operand(x) for name, x in view.items()}
    changes = {"bias": of.get("bias"), "mask": of.get("mask"), "out": of["out"]}
    what = call(of["q"], of["k"], of["v"], **changes, causal=case.causal, q_start=case.q_start)
    offsets = [offset(whole[name], x) for name, x in view.items() if name not in ("bias", "mask")]
    return what.at(math.gcd(*offsets))


def plans(place: Place, kernel: str, case: Case) -> list[Plan]:
    if case.precision not in KERNELS[kernel].precisions:
        return []
    call, how = asked(case, kernel)
    return [ATTENTION.plan(call, place.gpu, how)]


def check(place: Place, kernel: str, case: Case) -> None:
    """Compute it and compare it with float64; AssertionError says what is wrong."""
    whole, view = arrays(case)
    lse = nan(case.B, case.H, case.M)
    answers = {"out": whole["out"]} | ({"lse": lse} if case.lse else {})
    called = [CALLED.get(name, name) for name in POINTERS]
    compute(place, prepare(place, ATTENTION, *asked(case, kernel)), called, whole, view, answers)
    _compare(case, view, whole["out"], lse)


def _compare(case: Case, view: dict[str, np.ndarray], out: np.ndarray, lse: np.ndarray) -> None:
    right, right_lse = _right(case)
    near = {"rtol": TOLERANCE[case.precision], "atol": TOLERANCE[case.precision]}
    of_type = near | {"rtol": near["rtol"] + ROUNDING[case.out_dtype]}
    np.testing.assert_allclose(view["out"].astype(np.float32), right, **of_type, err_msg="O")
    gaps = out.size - view["out"].size
    assert np.isnan(out).sum() == gaps + np.isnan(right).sum(), "a gap between rows of O was written to"
    if case.lse:
        finite = np.isfinite(right_lse)
        np.testing.assert_allclose(lse[finite], right_lse[finite], **near, err_msg="LSE")
        np.testing.assert_array_equal(lse == -np.inf, right_lse == -np.inf, "rows that see nothing")


@functools.cache
def _right(case: Case) -> tuple[np.ndarray, np.ndarray]:
    """O and LSE in float64, whichever kernel they are to be compared with."""
    view = arrays(case).view
    return plain(Asked(*(view[x] for x in "qkv"), case.causal, None, view.get("bias"), case.q_start, view.get("mask")))


PROGRAM = Program(STRIDED, CASES, plans, check)

if __name__ == "__main__":
    end(PROGRAM.main)
