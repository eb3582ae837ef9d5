"""The gradients of attention spelled out, in any float type; and inputs on which gradients have gone wrong.

In float64 they are the reference; in float32 naive gradients, the yardstick for errors: each of dQ, dK, dV must be at
most FACTOR (tolerances.py) times as far from the reference, in relative L2.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from oracle import Asked, finish_scores, times, with_heads
from tolerances import FACTOR, FLOOR, ORDERS

NAMES = "dQ", "dK", "dV", "dbias"


def gradients(
    asked: Asked, do: np.ndarray, dlse: np.ndarray | None = None, dtype: type = np.float64
) -> list[np.ndarray]:
    """dQ, dK, dV, and dbias for a bias of numbers, by the formulas as they stand."""
    q, k, v = with_heads(asked, dtype)
    d_o = do.reshape(q.shape).astype(dtype)
    scale = dtype(asked.q.shape[-1] ** -0.5 if asked.scale is None else asked.scale)
    with np.errstate(all="ignore"):
        S, sees_nothing = finish_scores(asked, q @ k.swapaxes(2, 3))
        m = S.max(axis=3, keepdims=True, initial=-np.inf)
        P = np.where(sees_nothing, dtype(0), np.exp(S - np.where(sees_nothing, dtype(0), m)))
        P = P / np.where(sees_nothing, dtype(1), P.sum(axis=3, keepdims=True))
        hidden = -np.inf == S
        P, dP = np.where(hidden, 0, P), np.where(hidden, 0, d_o @ v.swapaxes(2, 3))
        D = (P * dP).sum(axis=3, keepdims=True)
        if dlse is not None:
            D = D - dlse.reshape(D.shape).astype(dtype)
        dS = np.where(hidden, 0, P * (dP - D))
        by_key = hidden.swapaxes(2, 3)
        dq, dk = scale * times(dS, k, hidden), scale * times(dS.swapaxes(2, 3), q, by_key)
        dv = times(P.swapaxes(2, 3), d_o, by_key)
    Hkv = asked.k.shape[1] if asked.k.ndim == 4 else 1
    dk, dv = (x.reshape(x.shape[0], Hkv, x.shape[1] // Hkv, *x.shape[2:]).sum(2) for x in (dk, dv))
    found = [dq.reshape(asked.q.shape), dk.reshape(asked.k.shape), dv.reshape(asked.v.shape)]
    if asked.bias is not None and asked.bias.dtype != bool:
        found.append(sum_to_shape(dS if asked.q.ndim == 4 else dS[:, 0], asked.bias.shape))
    return found


def tangents(
    asked: Asked, along: Sequence[np.ndarray], do: np.ndarray, dlse: np.ndarray | None = None, dtype: type = np.float64
) -> list[np.ndarray]:
    """The tangents of O, the LSE, dQ, dK and dV along tQ, tK and tV, by the formulas as they stand."""
    (q, k, v), (tq, tk, tv) = with_heads(asked, dtype), with_heads(Asked(*along), dtype)
    d_o, scale = (
        do.reshape(q.shape).astype(dtype),
        dtype(asked.q.shape[-1] ** -0.5 if asked.scale is None else asked.scale),
    )
    with np.errstate(all="ignore"):
        S, sees_nothing = finish_scores(asked, q @ k.swapaxes(2, 3))
        P = np.exp(S - np.where(sees_nothing, dtype(0), S.max(axis=3, keepdims=True, initial=-np.inf)))
        P = P / np.where(sees_nothing, dtype(1), P.sum(axis=3, keepdims=True))
        hidden = -np.inf == S

        def seen(x: np.ndarray) -> np.ndarray:
            return np.where(hidden, dtype(0), x)

        def row_sums(x: np.ndarray) -> np.ndarray:
            return x.sum(axis=3, keepdims=True)

        P, tS = seen(P), seen(scale * (tq @ k.swapaxes(2, 3) + q @ tk.swapaxes(2, 3)))
        dP, tdP = seen(d_o @ v.swapaxes(2, 3)), seen(d_o @ tv.swapaxes(2, 3))
        R = row_sums(P * tS)
        tP = seen(P * (tS - R))
        D = row_sums(P * dP) - (0 if dlse is None else dlse.reshape(R.shape).astype(dtype))
        dS = seen(P * (dP - D))
        tD = row_sums(tP * dP + P * tdP)
        tdS = seen(tP * (dP - D) + P * (tdP - tD))
        by_key = hidden.swapaxes(2, 3)
        to = times(tP, v, hidden) + times(P, tv, hidden)
        tdq = scale * (times(tdS, k, hidden) + times(dS, tk, hidden))
        tdk = scale * (times(tdS.swapaxes(2, 3), q, by_key) + times(dS.swapaxes(2, 3), tq, by_key))
        tdv = times(tP.swapaxes(2, 3), d_o, by_key)
    Hkv = asked.k.shape[1] if asked.k.ndim == 4 else 1
    tdk, tdv = (x.reshape(x.shape[0], Hkv, x.shape[1] // Hkv, *x.shape[2:]).sum(2) for x in (tdk, tdv))
    found = [to, R, tdq, tdk, tdv]
    shapes = asked.q.shape, asked.q.shape[:-1], asked.q.shape, asked.k.shape, asked.v.shape
    return [x.reshape(shape) for x, shape in zip(found, shapes, strict=True)]


def sum_to_shape(values: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Summed over the axes along which an array of that shape is broadcast."""
    values = values.sum(axis=tuple(range(values.ndim - len(shape))))
    return values.sum(axis=tuple(i for i, n in enumerate(shape) if n == 1), keepdims=True)


def relative_errors(asked: Asked, do: np.ndarray, got: list[np.ndarray]) -> list[tuple[str, float, float]]:
    """Of each gradient: its name, its relative L2 error, and that of naive gradients at their worst."""
    want, rng = gradients(asked, do), np.random.default_rng(0)
    naive = np.zeros(len(want))
    for _ in range(ORDERS // 2):
        columns = rng.permutation(asked.q.shape[-1])
        other = asked._replace(q=asked.q[..., columns], k=asked.k[..., columns])
        found = gradients(other, do, None, np.float32)
        for x in found[:2]:
            x[..., columns] = x.copy()
        naive = np.maximum(naive, [error(x, y) for x, y in zip(found, want, strict=True)])
    errors = [error(x, y) for x, y in zip(got, want, strict=True)]
    return list(zip(NAMES, errors, naive.tolist(), strict=False))


def error(got: np.ndarray, want: np.ndarray) -> float:
    """Relative L2; infinite where one is not finite."""
    if not np.isfinite(got).all():
        return np.inf
    size = np.linalg.norm(want)
    return float(np.linalg.norm(got - want) / size) if size else float(np.abs(got).max(initial=0))


def assert_accurate(asked: Asked, do: np.ndarray, got: list[np.ndarray], factor: float = FACTOR) -> None:
    for name, found, naive in relative_errors(asked, do, got):
        allowed = factor * naive + FLOOR
        assert found <= allowed, f"{name} of q {asked.q.shape}: error {found:.3g}, allowed {allowed:.3g}"


class Inputs(NamedTuple):
    do: np.ndarray
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray


DISTRIBUTIONS = (
    "uniform", "normal", "sharp", "V with a mean", "outliers", "small dO", "large dO", "rows of all sizes",
    "low scores", "one key",
)  # fmt: skip


def draw(distribution: str, B: int, H: int, Hkv: int, M: int, N: int, d: int, seed: int = 0) -> Inputs:
    """Arrays with heads on which one thing or the other is hard."""
    rng = np.random.default_rng(seed)
    shapes = (B, H, M, d), (B, H, M, d), (B, Hkv, N, d), (B, Hkv, N, d)
    do, q, k, v = (rng.normal(size=shape) for shape in shapes)
    if distribution == "uniform":
        do, q, k, v = (rng.uniform(-3, 3, shape) for shape in shapes)
    elif distribution == "sharp":
        q *= 6
    elif distribution == "V with a mean":
        v += 10
    elif distribution == "outliers":
        for x in (do, q, v):
            x[rng.random(x.shape) < 0.001] *= 1e4 if x is not q else 10
    elif distribution == "small dO":
        do *= 1e-8
    elif distribution == "large dO":
        do *= 1e8
    elif distribution == "rows of all sizes":
        do *= 2.0 ** rng.integers(-20, 20, (B, H, M, 1))
    elif distribution == "low scores":
        k[..., 0], q[..., 0] = -120, d**0.5
    elif distribution == "one key":  # has all of a query's weight, but for e^-20 or so: of dS next to nothing is left
        k /= np.linalg.norm(k, axis=-1, keepdims=True)
        q = 30 * d**0.5 * k.repeat(H // Hkv, 1)[:, :, np.arange(M) % N]
    return Inputs(*(x.astype(np.float32) for x in (do, q, k, v)))
