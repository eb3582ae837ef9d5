"""Gradients of inputs on which halves have gone wrong, by kernels emulated on the CPU."""

from __future__ import annotations

import numpy as np
import pytest
from gradients_oracle import assert_accurate, draw
from oracle import Asked, plain
from sanitize_backward import Case, Given, computed

M, N = 100, 130


def drawn(distribution, d, seed=0):
    return draw(distribution, 1, 1, 1, M, N, d, seed)


def compute(place, kernel, do, q, k, v, bias=None):
    """dQ, dK and dV by the kernel, given O and the LSE. A bias is one number, which changes nothing."""
    o, lse = (x.astype(np.float32) for x in plain(Asked(q, k, v)))
    given = {"dO": do, "Q": q, "K": k, "V": v, "O": o, "lse": lse}
    if bias is not None:
        given |= {"bias": bias, "lse": lse + bias}
    case = Case(d=q.shape[-1], B=1, H=1, M=M, N=N, bias=None if bias is None else bias.shape, dbias=False)
    return list(computed(place, kernel, case, Given(given, given)).values())


def check(place, kernel, do, q, k, v, **options):
    assert_accurate(Asked(q, k, v), do, compute(place, kernel, do, q, k, v, **options))


@pytest.mark.parametrize(("kernel", "d"), [("wgmma_short", 64), ("wgmma", 128)])
def test_where_one_key_has_all_weight_dS_is_no_rounding_of_dP(emulated_place, kernel, d):
    check(emulated_place, kernel, *drawn("one key", d))


def test_bytes_are_those_of_whole_heads_where_one_key_has_all_weight_of_some_queries(emulated_place):
    do, q, k, v = drawn("one key", 64)
    q[:, :, :70] /= 30  # of the first 64, one of these records
    one, other = (compute(emulated_place, kernel, do, q, k, v) for kernel in ("wgmma", "wgmma_short"))
    assert all(x.tobytes() == y.tobytes() for x, y in zip(one, other, strict=True))


def test_both_passes_round_scores_alike(emulated_place):
    do, q, k, v = drawn("one key", 64, seed=3)
    check(emulated_place, "wgmma", do, q * np.float32(100), k, v)


def test_both_passes_add_biases_alike_where_one_score_is_huge(emulated_place):
    do, q, k, v = drawn("normal", 64)
    q *= np.float32(1000)
    q[0, 0, 5] *= 100
    check(emulated_place, "wgmma", do, q, k, v, bias=np.ones(1, np.float32))


@pytest.mark.parametrize("kernel", ["mma", "wgmma"])
def test_P_is_finite_though_an_LSE_of_millions_is_rounded(emulated_place, kernel):
    do, q, k, v = drawn("normal", 64)
    assert all(np.isfinite(x).all() for x in compute(emulated_place, kernel, do, q * np.float32(2**23), k, v))
