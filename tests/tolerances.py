"""How accurate is accurate enough: the one place that the tests take a tolerance from.

An answer must be at most FACTOR times as far from the float64 reference as naive fp32 attention is on the same input,
both in its largest error and in relative L2. So the yardstick follows the input: where scores of 1e9 leave fp32 few
digits, naive attention loses them too. Half precision or TF32 is off by a factor of hundreds.

The largest of a few thousand rounding errors depends on the order in which a sum happens to be done: by a factor of two
for naive attention itself. So naive attention is measured in ORDERS orders, and its worst counts. One more is that of
a textbook's loops, one term after the other, on TEXTBOOK_ROWS rows: a matrix product by BLAS keeps several sums at a
time, the more the longer the processor's registers, and is the more accurate for it.

A kernel that splits numbers in two halves keeps 22 of 24 bits. Where a score is a sum of few products, d < SHORT_HEAD,
its largest error may be SPLIT_FACTOR times naive's; it is not chosen there unless asked for.

FLOOR is for inputs on which naive attention is nearly exact by luck, such as N = 1: four roundings of the weighted mean
of |V|, which is what is summed up.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable

import numpy as np
import pytest

from flashcli.cpu.workers import blas_text
from flashcli.files import verify
from flashcli.files.verify import reference

FACTOR = 1.5
SPLIT_FACTOR = 2.5
ORDERS = 8
TEXTBOOK_ROWS = 64
FLOOR = 2.0**-22


def naive_fp32(qkv: np.ndarray, causal: bool = False, scale: float | None = None) -> np.ndarray:
    """softmax(scale Q Kᵀ) V of float32 [B, 3, N, d], written down as it stands, in float32 throughout."""
    Q, K, V = qkv[:, 0], qkv[:, 1], qkv[:, 2]
    S = (Q @ K.transpose(0, 2, 1)) * np.float32(Q.shape[2] ** -0.5 if scale is None else scale)
    if causal:
        S[:, np.triu(np.ones(S.shape[1:], bool), 1)] = -np.inf
    P = np.exp(S - S.max(axis=2, keepdims=True))
    return P / P.sum(axis=2, keepdims=True) @ V


def textbook_fp32(qkv: np.ndarray, rows: np.ndarray, causal: bool = False, scale: float | None = None) -> np.ndarray:
    """The same for some rows, every sum one term after the other: [B, rows, d]."""
    Q, K, V = qkv[:, 0, rows], qkv[:, 1], qkv[:, 2]
    S = np.zeros((*Q.shape[:2], K.shape[1]), np.float32)
    for column in range(Q.shape[2]):
        S += Q[:, :, None, column] * K[:, None, :, column]
    S *= np.float32(Q.shape[2] ** -0.5 if scale is None else scale)
    if causal:
        S[:, np.arange(K.shape[1]) > rows[:, None]] = -np.inf
    P = np.exp(S - S.max(axis=2, keepdims=True))
    O, total = np.zeros(Q.shape, np.float32), np.zeros((*Q.shape[:2], 1), np.float32)
    for key in range(K.shape[1]):
        O += P[:, :, key, None] * V[:, None, key]
        total += P[:, :, key, None]
    return O / total


def float64(qkv: np.ndarray, causal: bool = False, scale: float | None = None) -> np.ndarray:
    return np.stack([reference(batch, causal, scale) for batch in qkv])


def sizes(values: np.ndarray) -> np.ndarray:
    """How large an array of errors is: its largest, and its L2 norm."""
    return np.array([np.abs(values).max(), np.linalg.norm(values)])


def allowed_errors(qkv: np.ndarray, causal: bool = False, scale: float | None = None) -> np.ndarray:
    """The sizes of error that are accurate enough on this input."""
    want, rng = float64(qkv, causal, scale), np.random.default_rng(0)
    rows = rng.choice(qkv.shape[2], min(qkv.shape[2], TEXTBOOK_ROWS), replace=False)
    of_all = np.array([1, np.sqrt(qkv.shape[2] / len(rows))])  # the L2 norm grows with the number of rows
    naive = of_all * sizes(textbook_fp32(qkv, rows, causal, scale) - want[:, rows])
    absolute = qkv.copy()
    absolute[:, 2] = np.abs(qkv[:, 2])
    for _ in range(ORDERS):
        naive = np.maximum(naive, sizes(naive_fp32(qkv, causal, scale) - want))
        qkv = qkv.copy()
        qkv[:, :2] = qkv[:, :2, :, rng.permutation(qkv.shape[3])]  # the same scores, summed in another order
    return FACTOR * naive + FLOOR * sizes(float64(absolute, causal, scale))


cache: pytest.Cache | None = None  # what is kept between sessions; conftest.py sets it


@functools.cache
def _code(measure: Callable) -> str:
    """All that a measure depends on, but for its arguments."""
    sources = [inspect.getsource(inspect.getmodule(part)) for part in (measure, measured, verify)]
    return "\0".join([*sources, measure.__name__, np.__version__, blas_text()])


def measured(measure: Callable[..., np.ndarray], qkv: np.ndarray, *options: object) -> np.ndarray:
    """``measure(qkv, *options)``, a few numbers that are much work, kept for other processes and sessions.

    Every kernel is asked about the same inputs.
    """
    what = repr((qkv.shape, options, _code(measure))).encode()
    name = f"yardstick/{hashlib.sha256(what + np.ascontiguousarray(qkv).tobytes()).hexdigest()}"
    found = cache and cache.get(name, None)
    if found is None:
        found = measure(qkv, *options).tolist()
        if cache:
            cache.set(name, found)
    return np.array(found)


_expected: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}


def expected(qkv: np.ndarray, causal: bool, scale: float | None) -> tuple[np.ndarray, np.ndarray]:
    """The float64 answer and the sizes of error allowed; kept, since every kernel is asked about the same inputs."""
    key = hashlib.sha256(np.ascontiguousarray(qkv)).digest(), qkv.shape, causal, scale
    if key not in _expected:
        _expected[key] = float64(qkv, causal, scale), measured(allowed_errors, qkv, causal, scale)
    return _expected[key]


def assert_accurate(out: np.ndarray, qkv: np.ndarray, causal: bool = False, scale: float | None = None) -> None:
    assert_all_accurate([(out, qkv)], causal, scale)


def assert_all_accurate(
    answers: list[tuple[np.ndarray, np.ndarray]],
    causal: bool = False,
    scale: float | None = None,
    factor: float = FACTOR,
) -> None:
    """Answers to inputs [B, 3, N, d] of one kind: relative L2 of each, and the largest error of all, must be right."""
    largest = np.zeros(2)
    for out, qkv in answers:
        assert np.isfinite(out).all(), f"{np.count_nonzero(~np.isfinite(out))} of {out.size} elements are not finite"
        want, allowed = expected(qkv, causal, scale)
        found = sizes(out - want)
        assert found[1] <= allowed[1], f"(B, 3, N, d) = {qkv.shape}: L2 error {found[1]:.3g}, allowed {allowed[1]:.3g}"
        largest = np.maximum(largest, [found[0], allowed[0]])
    largest[1] *= factor / FACTOR
    assert largest[0] <= largest[1], f"max error {largest[0]:.3g}, allowed {largest[1]:.3g}"
