"""Gradients of arrays where they lie, for compute-sanitizer: many small cases in one process that imports no PyTorch.

Usage: python tests/sanitize_backward.py [KERNEL]

As in `sanitize_arrays`, each array has memory of its own, exactly as long as it is, and gaps between rows hold NaN. The
gradients are compared with float64. Without a KERNEL it takes all that run on this GPU.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from gradients_oracle import gradients
from oracle import Asked, plain
from sanitize_arrays import LAYOUTS, ROUNDING, nan, operand
from sanitizing import Program, compute, end, offset

from flashcli.asked.attention import Backward, backward
from flashcli.asked.how import How
from flashcli.files.decode.tensors import dtype
from flashcli.gpu.place import Place
from flashcli.gpu.prepared import prepare
from flashcli.kernels.backward import BACKWARD, KERNELS, POINTERS
from flashcli.kernels.operation import Plan

TOLERANCE = 5e-5


class Case(NamedTuple):
    """What is computed: ``lies`` is a key of `sanitize_arrays.LAYOUTS`, ``spoilt`` a matrix that is not all finite."""

    lies: str = "dense"
    d: int = 64
    B: int = 2
    H: int = 2
    Hkv: int = 1
    M: int = 70
    N: int = 101
    causal: bool = False
    q_start: int = 0
    bias: tuple[int, ...] | None = None
    mask: tuple[int, ...] | None = None
    dlse: bool = False
    dbias: bool = True  # wanted, where there is a bias
    spoilt: str = ""
    hidden: bool = False  # what is not finite is taken away
    dtype: str = "float32"
    of_answer: str = "float32"  # O's type, and dO's
    out_dtype: str = "float32"


CASES = {
    "dense": Case(),
    "causal": Case(causal=True, q_start=31, dlse=True),
    "rows that see nothing": Case(causal=True, q_start=-3),
    "fused": Case("fused", d=32),
    "odd, causal": Case("odd", d=30, causal=True),
    "heads of 96": Case(d=96),
    "heads of 128, rows first": Case("rows first", d=128),
    "heads of 200": Case(d=200, B=1),
    "one query, one key": Case(M=1, N=1),
    "one key": Case(d=32, Hkv=2, M=120, N=1, bias=(120, 1)),
    "one key that some see": Case("odd", M=300, N=1, causal=True, q_start=-5, dlse=True),
    "bias": Case(d=32, bias=(2, 2, 70, 101)),
    "bias of keys": Case(d=32, bias=(2, 1, 1, 101)),
    "bias of queries": Case(d=32, bias=(70, 1), causal=True),
    "bias of all batches": Case(d=32, B=17, H=1, M=70, N=140, bias=(70, 140), mask=(17, 1, 1, 140)),
    "bias of all heads": Case(d=32, B=1, H=17, Hkv=17, M=140, N=70, bias=(1, 140, 70), causal=True, q_start=-20),
    "bias and mask": Case(d=32, bias=(1, 2, 70, 101), mask=(2, 1, 1, 101)),
    "bias and mask, heads of 64, causal": Case(bias=(2, 70, 101), mask=(2, 1, 70, 101), causal=True, q_start=31),
    "bias and mask, heads of 128": Case(d=128, bias=(70, 101), mask=(2, 2, 70, 101)),
    "mask": Case(mask=(2, 1, 70, 101)),
    "a mask that hides NaN": Case(d=32, bias=(1, 2, 70, 101), mask=(2, 1, 1, 101), spoilt="v", hidden=True),
    "a mask that hides NaN, whole heads": Case(d=32, Hkv=2, N=102, mask=(2, 1, 1, 102), spoilt="k", hidden=True),
    "a mask that hides a query with NaN": Case(mask=(2, 1, 70, 1), spoilt="dO", hidden=True),
    "bias, heads of 128": Case(d=128, bias=(70, 101), causal=True, q_start=31),
    "more tiles than room for them": Case(d=32, M=330, N=460, causal=True, q_start=60),
    "blocks of 128 rows": Case(B=1, H=1, M=130, N=1100),
    "NaN": Case(spoilt="v"),
    "whole heads in shared memory": Case(d=32, Hkv=2, M=120),
    "whole heads, longer": Case(Hkv=2, M=190, N=130, causal=True, q_start=-60, dlse=True),
    "whole heads, odd": Case("odd", d=30, Hkv=2, causal=True, q_start=31),
    "whole heads, bias": Case(d=32, Hkv=2, M=120, bias=(2, 1, 120, 101)),
    "whole heads, NaN": Case(Hkv=2, spoilt="v"),
    "whole heads, one key": Case(d=32, Hkv=2, M=20, N=1, dlse=True),
    "whole heads, bias without its gradient": Case(d=32, Hkv=2, N=96, bias=(2, 70, 96), dbias=False, dlse=True),
    "halves": Case(dtype="float16", of_answer="float16", out_dtype="float16", dlse=True),
    "halves in": Case("fused", d=32, causal=True, q_start=31, dtype="float16", of_answer="float16"),
    "bfloat16 in": Case(d=128, dtype="bfloat16", of_answer="bfloat16"),
    "halves in, with dO in float32": Case(causal=True, dtype="float16"),
    "bfloat16, odd": Case("odd", d=30, dtype="bfloat16", of_answer="bfloat16", out_dtype="bfloat16"),
    "halves in, bias and mask": Case(bias=(2, 70, 101), mask=(2, 1, 70, 101), dtype="float16", of_answer="float16"),
    "halves in, mask": Case(mask=(2, 1, 70, 101), dtype="float16", of_answer="float16"),
    "halves in, heads of 200": Case(d=200, B=1, dtype="float16", of_answer="float16"),
    "halves in, one key": Case(d=32, Hkv=2, M=120, N=1, dtype="float16", of_answer="float16"),
    "halves in, whole heads": Case(Hkv=2, M=190, N=130, causal=True, q_start=-60, dtype="float16", of_answer="float16"),
    "bfloat16 in, whole heads, odd": Case("odd", d=30, Hkv=2, dtype="bfloat16", of_answer="bfloat16"),
    "halves, NaN": Case(spoilt="v", dtype="float16", of_answer="float16", out_dtype="float16"),
}


class Given(NamedTuple):
    """Of each array, what is allocated and the view of it that is given."""

    whole: dict[str, np.ndarray]
    view: dict[str, np.ndarray]


def make(case: Case) -> Given:
    rng, found = np.random.default_rng(3), {}
    for name, heads, rows in (
        ("dO", case.H, case.M), ("Q", case.H, case.M), ("K", case.Hkv, case.N), ("V", case.Hkv, case.N)
    ):  # fmt: skip
        kind = case.of_answer if name == "dO" else case.dtype
        _, view = found[name] = LAYOUTS[case.lies](case.B, heads, rows, case.d, kind)
        view[...] = rng.normal(size=view.shape)
    if case.bias:
        bias = rng.normal(size=case.bias).astype(np.float32)
        found["bias"] = bias, bias
    if case.mask:
        mask = rng.random(case.mask) < 0.8
        if case.hidden:
            of_query = case.spoilt == "dO"
            mask[(..., case.M // 2, slice(None)) if of_query else (..., case.N // 2)] = False
        found["mask"] = mask, mask
    asked = _question(case, {name: view for name, (_, view) in found.items()})
    o, lse = (x.astype(kind) for x, kind in zip(plain(asked), (dtype(case.of_answer), np.float32), strict=True))
    found |= {"O": (o, o), "lse": (lse, lse)}
    if case.dlse:
        dlse = rng.normal(size=lse.shape).astype(np.float32)
        found["dlse"] = dlse, dlse
    if case.spoilt:
        view = found[case.spoilt if case.spoilt == "dO" else case.spoilt.upper()][1]
        view[-1, -1, view.shape[-2] // 2, 5] = np.nan
    return Given(*({name: pair[i] for name, pair in found.items()} for i in (0, 1)))


def _question(case: Case, view: dict[str, np.ndarray]) -> Asked:
    return Asked(view["Q"], view["K"], view["V"], case.causal, None, view.get("bias"), case.q_start, view.get("mask"))


def asked(case: Case) -> Backward:
    """What is asked for. Memory is allocated on far more than 16 bytes."""
    whole, view = make(case)
    of = {name: operand(x) for name, x in view.items()}
    found = backward(
        of["dO"], of["Q"], of["K"], of["V"], of["O"], of["lse"], of.get("dlse"), case.bias is not None and case.dbias,
        bias=of.get("bias"), mask=of.get("mask"), causal=case.causal, q_start=case.q_start, out_dtype=case.out_dtype,
    )  # fmt: skip
    return found.at(math.gcd(*(offset(whole[name], view[name]) for name in ("dO", "Q", "K", "V"))))


def plans(place: Place, kernel: str, case: Case) -> list[Plan]:
    return [BACKWARD.plan(asked(case), place.gpu, How(kernel))]


def computed(place: Place, kernel: str, case: Case, given: Given) -> dict[str, np.ndarray]:
    """Gradients of the case's arrays, by name."""
    whole, view = given
    kind = case.out_dtype
    answer = {name: nan(*view[like].shape, kind=kind) for name, like in (("dQ", "Q"), ("dK", "K"), ("dV", "V"))}
    if case.bias and case.dbias:
        answer["dbias"] = nan(*case.bias)
    compute(place, prepare(place, BACKWARD, asked(case), How(kernel)), POINTERS, whole, view, answer)
    return answer


def right(case: Case, view: dict[str, np.ndarray]) -> list[np.ndarray]:
    """The gradients of the case's arrays in float64."""
    return gradients(_question(case, view), view["dO"], view.get("dlse"))


def check(place: Place, kernel: str, case: Case) -> None:
    """Compute them and compare them with float64; AssertionError says what is wrong."""
    given = make(case)
    answer, view = computed(place, kernel, case, given), given.view
    if case.spoilt and not case.hidden:
        assert np.isfinite(answer["dQ"][0]).all() and np.isnan(answer["dQ"][-1]).any(), "NaN in another batch, or lost"
        return
    for name, want in zip(answer, right(case, view), strict=False):
        near = TOLERANCE * max(1, np.abs(want).max()) if want.any() else 0
        rounding = 0 if name == "dbias" else ROUNDING[case.out_dtype]
        np.testing.assert_allclose(answer[name].astype(np.float32), want, rtol=rounding, atol=near, err_msg=name)


PROGRAM = Program(KERNELS, CASES, plans, check)

if __name__ == "__main__":
    end(PROGRAM.main)
