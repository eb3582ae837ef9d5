"""How accurate the fp32 kernels are: the gate before any speed, on samples of rows, since N is large here."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from support import IN_USE, forward, open_engine, pass_over_if_refused, random_qkv
from tolerances import FACTOR, FLOOR, measured, naive_fp32, textbook_fp32

from flashcli.files.verify import reference

ROWS = 512
UNIFORM_LIMIT = 1.0e-6  # relative L2 on inputs in [-3, 3]


def some_rows(N: int) -> np.ndarray:
    return np.random.default_rng(3).choice(N, ROWS, replace=False)


def mixed_scales(qkv: np.ndarray) -> np.ndarray:
    return qkv * np.array([1e-3, 1e3, 1e-4], np.float32)[:, None, None]


def outliers(qkv: np.ndarray) -> np.ndarray:
    chosen = np.random.default_rng(1).random(qkv.shape) < 1e-4
    return np.where(chosen, qkv * 1000, qkv)


KINDS = {
    "normal": lambda qkv: qkv,
    "normal * 30": lambda qkv: qkv * 30,
    "1e-6": lambda qkv: qkv * 1e-6,
    "1e5": lambda qkv: qkv * 1e5,
    "outliers": outliers,
    "peaked": lambda qkv: qkv * np.array([20, 1, 1])[:, None, None],
    "constant rows": lambda qkv: np.broadcast_to(qkv[:, :1], qkv.shape),
    "zeros": np.zeros_like,
    "mixed scales": mixed_scales,
}


def naive_error(qkv: np.ndarray) -> np.ndarray:
    """Relative L2 and largest error of naive attention in some rows, the worst of a few orders of summation.

    A single row with two nearly equal largest scores can decide either.
    """
    rows, rng, found = some_rows(1024), np.random.default_rng(5), []
    want = reference(qkv, rows=rows)
    for out in (textbook_fp32(qkv[None], rows)[0], naive_fp32(qkv[None])[0][rows]):
        found.append((relative_l2(out, want), np.abs(out - want).max()))
    for _ in range(3):
        qkv = qkv.copy()
        qkv[:2] = qkv[:2, :, rng.permutation(qkv.shape[2])]
        out = textbook_fp32(qkv[None], rows)[0]
        found.append((relative_l2(out, want), np.abs(out - want).max()))
    return np.max(found, axis=0)


def relative_l2(out: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(out - want) / max(np.linalg.norm(want), 1e-300))


@pytest.mark.parametrize(
    "engine", [pytest.param(name, marks=pytest.mark.gpu) for name in IN_USE], indirect=True, scope="module"
)
@pytest.mark.parametrize("d", [32, 64])
@pytest.mark.parametrize("N", [2048, 32768])
def test_uniform_inputs(engine, N, d):
    """A gate for the kernels in use; what else there is is held to naive attention below."""
    qkv = random_qkv(1, N, d)
    rows = some_rows(N)
    assert relative_l2(engine(qkv)[0][rows], reference(qkv[0], rows=rows)) <= UNIFORM_LIMIT


@functools.cache
def naive_case(kind: str, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """An input, some rows, their float64 answer, and naive attention's errors: the same for all engines."""
    normal = np.random.default_rng(2).standard_normal((3, 1024, d))
    qkv = np.ascontiguousarray(KINDS[kind](normal), np.float32)
    rows = some_rows(1024)
    return qkv, rows, reference(qkv, rows=rows), measured(naive_error, qkv)


@pytest.mark.parametrize("kind", KINDS)
def test_no_worse_than_naive(engine, kind):
    for d in (32, 64):
        qkv, rows, want, (l2, largest) = naive_case(kind, d)
        out = engine(qkv[None])[0][rows]
        assert np.isfinite(out).all()
        assert relative_l2(out, want) <= FACTOR * l2 + FLOOR
        assert np.abs(out - want).max() <= FACTOR * largest + FLOOR * np.abs(qkv[2]).max()


def test_huge_inputs_give_finite_outputs(engine):
    qkv = np.random.default_rng(4).uniform(-1, 1, (1, 3, 300, 64)).astype(np.float32) * np.float32(1e18)
    assert np.isfinite(reference(qkv[0])).all()
    assert np.isfinite(engine(qkv)).all()


@pytest.mark.parametrize("shape", [(3, 129, 64), (200, 128, 32), (1, 1000, 33)])
def test_the_same_input_gives_the_same_bits(engine, shape):
    qkv = random_qkv(*shape)
    assert engine(qkv).tobytes() == engine(qkv).tobytes()


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["mma", "wgmma", "wgmma_short"])
@pytest.mark.parametrize("d", [28, 32, 64, 128])
def test_one_product_is_as_accurate_as_fp16(gpu, name, d):
    pass_over_if_refused(name, d)
    qkv = random_qkv(1, 1000, d)
    with open_engine(name, (1, 1000, d), precision="fp16") as backend:
        error = relative_l2(forward(backend, qkv)[0], reference(qkv[0]))
    assert 1e-5 < error < 2e-3
