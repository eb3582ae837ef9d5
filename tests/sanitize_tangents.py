"""Tangents of arrays where they lie, for compute-sanitizer: many small cases in one process that imports no PyTorch.

Usage: python tests/sanitize_tangents.py [KERNEL]

Cases are those of `sanitize_backward`, as far as kernels of tangents take them, with directions beside. The tangents
are compared with float64. Without a KERNEL it takes all that run on this GPU.
"""

from __future__ import annotations

import math

import numpy as np
from gradients_oracle import tangents
from sanitize_arrays import LAYOUTS, nan, operand
from sanitize_backward import CASES as OF_GRADIENTS
from sanitize_backward import TOLERANCE, Case, Given, _question
from sanitize_backward import make as make_gradients
from sanitizing import Program, compute, end, offset

from flashcli.asked import tangents as asking
from flashcli.asked.how import How
from flashcli.gpu.place import Place
from flashcli.gpu.prepared import prepare
from flashcli.kernels.operation import Plan
from flashcli.kernels.tangents import KERNELS, POINTERS, TANGENTS

CASES = {name: case for name, case in OF_GRADIENTS.items() if case.dtype == "float32"}
ALONG = {"tQ": "Q", "tK": "K", "tV": "V"}
NAMES = "tO", "tlse", "dQ", "dK", "dV"


def make(case: Case) -> Given:
    """The arrays of the gradients, and directions; what is spoilt of a matrix is so of its direction, too."""
    whole, view = make_gradients(case)
    rng = np.random.default_rng(4)
    for name, like in ALONG.items():
        whole[name], view[name] = LAYOUTS[case.lies](*view[like].shape, "float32")
        view[name][...] = np.where(np.isfinite(view[like]), rng.normal(size=view[like].shape), np.nan)
    return Given(whole, view)


def asked(case: Case, gradients: bool = True) -> asking.Tangents:
    """What is asked for. Memory is allocated on far more than 16 bytes."""
    whole, view = make(case)
    of = {name: operand(x) for name, x in view.items()}
    found = asking.tangents(
        of["tQ"], of["tK"], of["tV"], of["Q"], of["K"], of["V"], of["lse"], of["dO"] if gradients else None,
        dlse=of.get("dlse"), bias=of.get("bias"), mask=of.get("mask"), causal=case.causal, q_start=case.q_start,
    )  # fmt: skip
    return found.at(math.gcd(*(offset(whole[name], view[name]) for name in ("dO", "Q", "K", "V", *ALONG))))


def plans(place: Place, kernel: str, case: Case) -> list[Plan]:
    """With gradients, and without."""
    return [TANGENTS.plan(asked(case, gradients), place.gpu, How(kernel)) for gradients in (True, False)]


def check(place: Place, kernel: str, case: Case) -> None:
    """Compute them, with those of gradients and without, and compare; AssertionError says what is wrong."""
    for gradients in (True, False):
        _check(place, kernel, case, gradients)


def _check(place: Place, kernel: str, case: Case, gradients: bool) -> None:
    whole, view = make(case)
    shapes = (view["Q"], view["lse"], view["Q"], view["K"], view["V"])
    answer = {name: nan(*like.shape) for name, like in zip(NAMES, shapes, strict=True)}
    if not gradients:
        answer = {name: answer[name] for name in NAMES[:2]}
    given = {name: x for name, x in view.items() if gradients or name not in ("dO", "dlse")}
    prepared = prepare(place, TANGENTS, asked(case, gradients), How(kernel))
    compute(place, prepared, POINTERS, {name: whole[name] for name in given}, given, answer)
    if case.spoilt and not case.hidden:
        assert np.isfinite(answer["tO"][0]).all() and np.isnan(answer["tO"][-1]).any(), "NaN in another batch, or lost"
        return
    along = [view[name] for name in ALONG]
    right = tangents(_question(case, view), along, view["dO"], view.get("dlse"))
    for (name, got), want in zip(answer.items(), right, strict=False):
        near = TOLERANCE * max(1, np.abs(want).max()) if want.any() else 0
        np.testing.assert_allclose(got, want, rtol=0, atol=near, err_msg=name)


PROGRAM = Program(KERNELS, CASES, plans, check)

if __name__ == "__main__":
    end(PROGRAM.main)
