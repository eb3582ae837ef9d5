"""Windows, ALiBi's slopes and packed sequences where arrays lie, for compute-sanitizer: attention and its gradients.

Usage: python tests/sanitize_sight.py [KERNEL]

As in `sanitize_arrays`, each array has memory of its own, exactly as long as it is. What is found is compared with the
CPU's answers, which other tests compare with float64. Without a KERNEL it takes all that run on this GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from sanitizing import Program, compute, end

from flashcli import attention, attention_backward
from flashcli.asked.attention import Backward, Call, backward, call, outline
from flashcli.asked.how import How
from flashcli.errors import BackendUnavailable
from flashcli.gpu.place import Place
from flashcli.gpu.prepared import prepare
from flashcli.kernels import attention as forward_kernels
from flashcli.kernels import backward as backward_kernels
from flashcli.kernels.backward import BACKWARD
from flashcli.kernels.operation import Operation, Plan
from flashcli.kernels.plan import ATTENTION

KERNELS = [name for name, kernel in forward_kernels.KERNELS.items() if kernel.strided]
KERNELS += [name for name in backward_kernels.KERNELS if name not in KERNELS]
TOLERANCE = 5e-5
LENGTHS, KEYS = (5, 0, 150, 1, 64, 130, 7), (9, 3, 150, 0, 70, 300, 7)


class Case(NamedTuple):
    """Packed sequences of these lengths, each with so many keys; or without any of them a dense batch of two."""

    lengths: tuple[int, ...] = LENGTHS
    keys: tuple[int, ...] = KEYS
    d: int = 64
    Hkv: int = 2  # of 4 heads
    causal: bool = False
    window: tuple[int, int] = (-1, -1)
    slopes: str = ""  # "of heads", or "of batches": or of sequences
    q_start: int = 0
    bias: bool = False  # and a mask
    spoilt: bool = False  # NaN in one sequence


CASES = {
    "packed": Case(),
    "packed, causal": Case(d=32, causal=True),
    "packed, window": Case(window=(40, 10)),
    "packed, slopes of heads": Case(d=32, causal=True, slopes="of heads"),
    "packed, slopes of sequences, window": Case(window=(70, -1), slopes="of batches"),
    "packed, heads of 100": Case(d=100, causal=True, window=(33, 0)),
    "packed, heads of 128": Case(d=128),
    "packed, heads of 200": Case((5, 40), (70, 33), d=200),
    "packed, odd": Case(d=30, window=(9, 9)),
    "packed, one": Case((70,), (70,), d=32, causal=True),
    "packed, many": Case((3,) * 40, (2,) * 40, d=32),  # of which a warp looks at 32 at a time
    "packed, NaN": Case(spoilt=True),
    "window": Case((), (), window=(40, 10), q_start=100),
    "window to the left": Case((), (), d=32, window=(3, -1), q_start=150),
    "window before all keys": Case((), (), window=(100, 0), q_start=-20),
    "slopes": Case((), (), d=32, slopes="of heads"),
    "slopes, causal, bias and mask": Case((), (), causal=True, slopes="of batches", q_start=100, bias=True),
    "window, slopes, bias and mask": Case((), (), d=32, window=(60, -1), slopes="of heads", q_start=100, bias=True),
    "whole heads, slopes, bias and mask": Case(
        (), (), d=32, Hkv=4, causal=True, slopes="of heads", q_start=100, bias=True
    ),
    "window, heads of 200": Case((), (), d=200, window=(60, 5), q_start=20),
}


def make(case: Case) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """The arrays, and the other options of a call."""
    rng, H, Hkv = np.random.default_rng(5), 4, case.Hkv
    M, N = (sum(case.lengths), sum(case.keys)) if case.lengths else (200, 300)
    shapes = {"do": (H, M), "q": (H, M), "k": (Hkv, N), "v": (Hkv, N)}
    found = {
        name: rng.normal(size=(rows, heads, case.d) if case.lengths else (2, heads, rows, case.d)).astype(np.float32)
        for name, (heads, rows) in shapes.items()
    }
    if case.slopes:
        shape = (H,) if case.slopes == "of heads" else (len(case.lengths) or 2, H)
        found["alibi_slopes"] = rng.uniform(0, 0.2, shape).astype(np.float32)
    if case.bias:
        found["bias"] = rng.normal(size=(1, H, M, N)).astype(np.float32)
        found["mask"] = rng.random((2, 1, 1, N)) < 0.8
    if case.lengths:
        found["cu_seqlens_q"], found["cu_seqlens_k"] = (
            np.cumsum([0, *lengths]).astype(np.int32) for lengths in (case.lengths, case.keys)
        )
    if case.spoilt:
        found["v"][sum(case.keys[:5]) + 7] = np.nan
    return found, {"causal": case.causal, "window": case.window, "q_start": case.q_start}


def asked(case: Case) -> tuple[Call, Backward]:
    arrays, options = make(case)
    of: dict[str, Any] = {name: outline(x) for name, x in arrays.items()}
    do = of.pop("do")
    return call(**of, **options).at(0), backward(do=do, **of, **options, return_dbias=case.bias).at(0)


def launches(place: Place, kernel: str, case: Case) -> Iterator[tuple[Operation, Any, How, Plan]]:
    """What a kernel's name stands for, forward and backward, as far as it takes a case on this GPU."""
    forward, gradients = asked(case)
    for operation, what, how in (
        (ATTENTION, forward, How(kernel, return_lse=True)),
        (BACKWARD, gradients, How(kernel)),
    ):
        if kernel not in operation.kernels:
            continue
        try:
            yield operation, what, how, operation.plan(what, place.gpu, how)
        except BackendUnavailable:
            continue


def plans(place: Place, kernel: str, case: Case) -> Iterator[Plan]:
    return (plan for *_, plan in launches(place, kernel, case))


def check(place: Place, kernel: str, case: Case) -> None:
    """Compute them and compare them with the CPU's; AssertionError says what is wrong."""
    arrays, options = make(case)
    inputs = {name: x for name, x in arrays.items() if name != "do"}
    o, lse = attention(**inputs, **options, backend="cpu", return_lse=True)
    for operation, what, how, _ in launches(place, kernel, case):
        if operation is ATTENTION:
            want = {"O": o, "lse": lse}
        else:
            names = ["dQ", "dK", "dV", "dbias"][: 3 + case.bias]
            right = attention_backward(**arrays, **options, o=o, lse=lse, return_dbias=case.bias)
            want = dict(zip(names, right, strict=True))
        _compare(case, _found(place, operation, what, how, arrays, o, lse, want), want)


def _found(
    place: Place,
    operation: Operation,
    what: Any,
    how: How,
    arrays: dict[str, np.ndarray],
    o: np.ndarray,
    lse: np.ndarray,
    want: dict[str, np.ndarray],
) -> dict[str, np.ndarray]:
    prepared = prepare(place, operation, what, how)
    called = {
        "do": "dO", "q": "Q", "k": "K", "v": "V", "alibi_slopes": "slopes", "cu_seqlens_q": "q_starts",
        "cu_seqlens_k": "k_starts",
    }  # fmt: skip
    given = {called.get(name, name): x for name, x in arrays.items()}
    if operation is BACKWARD:
        given |= {"O": o, "lse": lse}
    found = {name: np.full_like(x, np.nan) for name, x in want.items()}
    compute(place, prepared, operation.pointers, given, given, found)
    return found


def _compare(case: Case, found: dict[str, np.ndarray], want: dict[str, np.ndarray]) -> None:
    for name, right in want.items():
        finite = np.isfinite(right)
        assert not np.isnan(found[name][finite]).any(), f"NaN in another sequence's {name}, or nothing was written"
        if case.spoilt and name != "lse":
            assert np.isnan(found[name]).any() == np.isnan(right).any(), f"NaN is lost in {name}"
            continue
        np.testing.assert_array_equal(found[name][~finite], right[~finite], f"{name} of rows that see nothing")
        near = TOLERANCE * max(1, np.abs(right[finite]).max(initial=0))
        np.testing.assert_allclose(found[name][finite], right[finite], rtol=0, atol=near, err_msg=name)


PROGRAM = Program(KERNELS, CASES, plans, check)

if __name__ == "__main__":
    end(PROGRAM.main)
