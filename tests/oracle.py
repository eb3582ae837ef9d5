"""Attention spelled out once more, for arrays with heads, a bias, q_start, LSE: the plain formula in any float type.

In float64 it is the reference; in float32 it is naive attention, the yardstick for errors (see tolerances.py).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from tolerances import FACTOR, FLOOR, ORDERS, TEXTBOOK_ROWS, sizes


class Asked(NamedTuple):
    """q [B, M, d] or [B, H, M, d], k and v [B, N, d] or [B, Hkv, N, d], and the keywords of flashcli.attention."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    causal: bool = False
    scale: float | None = None
    bias: np.ndarray | None = None
    q_start: int = 0
    mask: np.ndarray | None = None

    @property
    def keywords(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in ("causal", "scale", "bias", "q_start", "mask")}


def plain(asked: Asked, dtype: type = np.float64) -> tuple[np.ndarray, np.ndarray]:
    """O and LSE by softmax(scale Q Kᵀ + bias) V as it stands; 0 and -inf where a query sees nothing."""
    q, k, v = with_heads(asked, dtype)
    with np.errstate(all="ignore"):
        S, sees_nothing = finish_scores(asked, q @ k.swapaxes(2, 3))
        m = S.max(axis=3, keepdims=True, initial=-np.inf)
        P = np.exp(S - np.where(sees_nothing, dtype(0), m))
        l = P.sum(axis=3, keepdims=True)
        O = np.where(sees_nothing, dtype(0), times(P / l, v, -np.inf == S))
        lse = np.where(sees_nothing, dtype(-np.inf), m + np.log(l))
    return O.reshape(asked.q.shape), lse.reshape(asked.q.shape[:-1])


def times(left: np.ndarray, right: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """left @ right, to which what is hidden on the left adds nothing, not even 0 * NaN."""
    odd = ~np.isfinite(right).all(axis=tuple(range(right.ndim - 1)))  # columns of which some are not finite
    if not odd.any():
        return left @ right
    product = np.where(hidden, 0, left) @ np.where(odd, 0, right)
    product[..., odd] = np.where(hidden[..., None], 0, left[..., None] * right[..., None, :, odd]).sum(axis=-2)
    return product


def textbook(asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    """The same in float32, every sum one term after the other."""
    q, k, v = with_heads(asked, np.float32)
    S = np.zeros((*q.shape[:3], k.shape[2]), np.float32)
    O, l = np.zeros(q.shape, np.float32), np.zeros((*q.shape[:3], 1), np.float32)
    with np.errstate(all="ignore"):
        for column in range(q.shape[3]):
            S += q[..., None, column] * k[:, :, None, :, column]
        S, sees_nothing = finish_scores(asked, S)
        m = S.max(axis=3, keepdims=True, initial=-np.inf)
        P = np.exp(S - np.where(sees_nothing, np.float32(0), m))
        for key in range(k.shape[2]):
            O += P[..., key, None] * v[:, :, None, key]
            l += P[..., key, None]
        O, lse = np.where(sees_nothing, 0, O / l), np.where(sees_nothing, -np.inf, m + np.log(l))
    return O.reshape(asked.q.shape), lse.reshape(asked.q.shape[:-1])


def with_heads(asked: Asked, dtype: type) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Q, K and V as [B, H, rows, d], heads of K and V repeated."""
    q, k, v = (x.astype(dtype) if x.ndim == 4 else x[:, None].astype(dtype) for x in asked[:3])
    group = q.shape[1] // k.shape[1]
    return q, np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)


def finish_scores(asked: Asked, S: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """scale · S + bias, masked; and which rows see nothing. ``S`` is Q Kᵀ [B, H, M, N]."""
    scale = asked.q.shape[-1] ** -0.5 if asked.scale is None else asked.scale
    S, (M, N) = S * S.dtype.type(scale), S.shape[2:]
    for changes in (asked.bias, asked.mask):
        if changes is not None:
            if asked.q.ndim == 3 and changes.ndim == 3:
                changes = changes[:, None]
            hidden = ~changes if changes.dtype == bool else changes == -np.inf
            S = np.where(hidden, S.dtype.type(-np.inf), S if changes.dtype == bool else S + changes.astype(S.dtype))
    last = np.arange(M)[:, None] + asked.q_start  # the last key that a query sees
    if asked.causal:
        S = np.where(np.arange(N) > last, S.dtype.type(-np.inf), S)
    if asked.bias is not None or asked.mask is not None or N == 0:
        return S, (-np.inf == S).all(axis=3, keepdims=True)
    return S, np.broadcast_to(last < 0 if asked.causal else np.zeros((M, 1), bool), (*S.shape[:2], M, 1))


def some_rows(asked: Asked, rows: np.ndarray) -> Asked:
    """Rows of Q, with a bias that masks for them what the causal mask did."""
    M, N = asked.q.shape[-2], asked.k.shape[-2]
    given = np.zeros((1, N), np.float32) if asked.bias is None else asked.bias
    bias = np.where(given, 0, -np.inf) if given.dtype == bool else given
    if asked.causal:
        bias = np.where(np.arange(N) > np.arange(M)[:, None] + asked.q_start, -np.inf, bias)
    bias = np.broadcast_to(bias, (*bias.shape[:-2], M, N))[..., rows, :]
    return asked._replace(q=asked.q[..., rows, :], bias=bias.astype(np.float32), causal=False)


def assert_accurate(cases: list[tuple[Asked, np.ndarray, np.ndarray | None]], factor: float = FACTOR) -> None:
    """O and LSE of questions of one kind: relative L2 of each, and the largest error of all, must be accurate enough.

    That is: at most ``factor`` times the error of naive float32 attention, as tolerances.py has it.
    """
    largest = np.zeros((2, 2))
    for asked, out, lse in cases:
        want, rng = plain(asked), np.random.default_rng(0)
        rows = rng.choice(asked.q.shape[-2], min(asked.q.shape[-2], TEXTBOOK_ROWS), replace=False)
        textbook_want = [want[0][..., rows, :], want[1][..., rows]]
        of_all = np.array([1, np.sqrt(asked.q.shape[-2] / len(rows))])
        naive = [of_all * errors(*pair) for pair in zip(textbook(some_rows(asked, rows)), textbook_want, strict=True)]
        for _ in range(ORDERS):
            columns = rng.permutation(asked.q.shape[-1])
            other = asked._replace(q=asked.q[..., columns], k=asked.k[..., columns])
            naive = np.maximum(naive, [errors(*pair) for pair in zip(plain(other, np.float32), want, strict=True)])
        weights = plain(asked._replace(v=np.abs(asked.v)))[0], np.where(np.isfinite(want[1]), np.abs(want[1]) + 1, 0)
        for which, got in enumerate([out, lse]):
            if got is None:
                continue
            allowed = factor * naive[which] + FLOOR * sizes(weights[which])
            found = errors(got, want[which])
            name = f"{['O', 'LSE'][which]} of q {asked.q.shape}, k {asked.k.shape}"
            assert found[1] <= allowed[1], f"{name}: L2 error {found[1]:.3g}, allowed {allowed[1]:.3g}"
            largest[which] = np.maximum(largest[which], [found[0], allowed[0]])
    assert (largest[:, 0] <= largest[:, 1]).all(), f"max errors {largest[:, 0]}, allowed {largest[:, 1]}"


def errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """The sizes of the error; infinite where what is not finite, such as the LSE of nothing, is not the same."""
    finite = np.isfinite(want)
    if not np.array_equal(got[~finite], want[~finite]) or not np.isfinite(got[finite]).all():
        return np.array([np.inf, np.inf])
    return sizes(got[finite] - want[finite]) if finite.any() else np.zeros(2)
