"""The emulation of `wgmma`'s arithmetic: what it rounds, and what it makes of attention."""

from __future__ import annotations

import numpy as np
import pytest

from bench import roundings, views
from bench.rows import Emulated
from flashcli.files.verify import Comparison, reference

EXACT = roundings.Arithmetic(*[False] * 5)


def error(how: roundings.Arithmetic, d: int = 32, positive: bool = False) -> float:
    rng, comparison = np.random.default_rng(0), Comparison()
    qkv = rng.uniform(-3, 3, (3, 192, d)).astype(np.float32)
    if positive:
        qkv[2] = np.abs(qkv[2])
    got = roundings.attention(qkv[0, :20], qkv[1], qkv[2], 64, how, rng)
    comparison.add(got, reference(qkv, rows=np.arange(20)), 0, range(20))
    return comparison.relative_l2


def test_without_roundings_the_answer_is_that_in_float64():
    assert error(EXACT) < 2e-8  # the factor of S is an fp32 number in any arithmetic


def test_with_all_of_them_it_is_as_accurate_as_fp32():
    assert 1e-7 < error(roundings.Arithmetic()) < 6e-7


@pytest.mark.parametrize("kind", ["splits", "scores", "outputs", "exponentials", "sums"])
def test_each_rounding_has_an_error_of_its_own(kind):
    assert 1e-9 < error(roundings.Arithmetic(**vars(EXACT) | {kind: True})) < 6e-7


def test_what_truncation_takes_on_average_can_be_given_back():
    for positive in (False, True):
        plain, given_back = roundings.Arithmetic(gives_back=False), roundings.Arithmetic()
        assert error(given_back, 128, positive) < 0.95 * error(plain, 128, positive)


def test_the_tensor_core_truncates_toward_zero():
    a, b = np.ones((1, 16)), np.full((1, 16), 2.0**-26)
    a[0, 0] = b[0, 0] = 1
    for sign in (1, -1):
        assert roundings.multiplied_and_added(np.zeros((1, 1)), a, sign * b) == sign
        assert roundings.multiplied_and_added(np.full((1, 1), sign * 2.0**-30), a, sign * b) == sign


def test_errors_stand_beside_each_other():
    about = {"B": 1, "N": 8, "rows": 4}
    rows = [Emulated(**about, case=f"(1, 8, {d})", d=d, contender=name, relative_l2=d * 1e-8)
            for name in ("all", "none") for d in (32, 64)]  # fmt: skip
    assert views.rounding_lines(rows) == [
        ["", "(1, 8, 32)", "(1, 8, 64)"], ["all", "3.2e-07", "6.4e-07"], ["none", "3.2e-07", "6.4e-07"]
    ]  # fmt: skip
