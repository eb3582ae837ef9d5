"""The gradients of attention in NumPy, a pair of tiles at a time: the readable statement of the algorithm.

FlashAttention-2 (arXiv 2307.08691, algorithm 2), in two passes instead of one with additions in any order. P =
exp(S - m) / l is computed again. D is the row sums of dO ∘ O, less the gradient of the LSE. dV = Pᵀ dO, and dS =
P ∘ (dO Vᵀ - D). The first pass computes dQ = scale · dS K by tiles of rows, the second dK = scale · dSᵀ Q and dV by
tiles of keys. So each number is the sum of the same terms in the same order, whatever there is beside it. Memory beyond
the gradients is a few numbers a row.

Rounding errors of O, and of S where it is rounded otherwise than in the forward pass, are common to a whole row: they
do not average out. So the first pass also finds each row's maximum m of S and its sum l of P. The LSE would tell them
less exactly: where there are many keys, S - LSE is a larger number than S - m, and rounded more coarsely. The sums of
dS, 0 but for roundings, are an error of D: dQ is mended by that times P K.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from flashcli.asked.attention import Backward
from flashcli.asked.shape import MAX_FLOAT32, round_up
from flashcli.cpu.attention import (
    BESIDE_BIAS,
    Matrices,
    Sight,
    Tile,
    change,
    exceeds_float32,
    in_groups,
    magnitude,
    packed,
    product,
    tiles,
)  # fmt: skip
from flashcli.cpu.workers import for_each, threads_for

Part = tuple[slice, slice, slice, slice]
# Rows, and keys, of a pair of tiles, whose S, P and dS should stay in a core's second-level cache. Both passes cut at
# the same places, for BLAS rounds otherwise in other shapes: l is to be the sum of the very P that it divides.
TILE = 256


@dataclass(frozen=True)
class Terms:
    """Arrays that gradients are made of: units [B, Hkv, group] of Q, dO, O [M, d], K, V [N, d], bias and mask [M, N].

    The first pass fills three arrays [M] of float64: ``m``, the maximum of each row of S, ``l``, the sum of exp(S - m),
    and ``D``, less ``dlse``. For a row that sees nothing ``m`` is 0 and ``l`` 1, so that P = exp(-inf - 0) = 0.
    Arrays that several units share are repeated by strides of 0.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    do: np.ndarray
    o: np.ndarray
    bias: np.ndarray | None
    mask: np.ndarray | None
    m: np.ndarray
    l: np.ndarray
    D: np.ndarray
    dlse: np.ndarray | None
    slopes: np.ndarray | None  # of units
    scale: float
    sight: Sight
    spoilt: bool  # whether there may be NaN and Inf, which the mask or the bias may hide

    def of(self, units: tuple[slice, ...], rows: slice, columns: slice, dtype: type) -> Terms:
        """The terms of a pair of tiles, some rows and some columns of some units, in this float type."""

        of_rows = (*units, rows)

        def numbers(whole: np.ndarray) -> np.ndarray:
            return whole[of_rows].astype(dtype)[..., None]

        # Q and dO are copies: the product of a matrix with its own transpose is another way of BLAS.
        return replace(
            self, q=self.q[of_rows].astype(dtype, order="C"), do=self.do[of_rows].astype(dtype, order="C"),
            k=packed(self.k[(*units, columns)], dtype), v=packed(self.v[(*units, columns)], dtype),
            bias=None if self.bias is None else self.bias[(*of_rows, columns)],
            mask=None if self.mask is None else self.mask[(*of_rows, columns)],
            m=numbers(self.m), l=numbers(self.l), D=numbers(self.D),
            slopes=None if self.slopes is None else self.slopes[units],
            sight=self.sight.beyond(columns.start - rows.start),
        )  # fmt: skip

    @property
    def may_hide(self) -> bool:
        """Whether keys may be taken away from some queries and not from others."""
        return any(x is not None for x in (self.bias, self.mask, *self.sight[:2]))

    def S(self) -> np.ndarray:
        """The scores S = scale · Q Kᵀ + bias, [.., rows, columns], -inf where a mask hides them."""
        S = self.q @ self.k.swapaxes(-1, -2)
        S *= S.dtype.type(self.scale)
        change(S, self.bias, self.mask, self.slopes, self.sight)
        return S

    def P_and_dS(self, S: np.ndarray, m: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """P and dS, [.., rows, columns] each, times ``l``, and which of them are hidden; P takes the memory of S."""
        masked = np.equal(S, -np.inf) if self.may_hide else None
        P = np.exp(np.subtract(S, m, out=S), out=S)
        dS = self.do @ self.v.swapaxes(-1, -2)
        dS -= self.D
        dS *= P
        if masked is not None:  # though V, or dO, be not finite
            np.copyto(dS, 0, where=masked)
            if self.spoilt:
                np.copyto(P, 0, where=masked)
        return P, dS, masked

    def times(self, left: np.ndarray, right: np.ndarray, hidden: np.ndarray | None) -> np.ndarray:
        """``left @ right``; what is hidden of the left side meets nothing that is not finite."""
        return product(left, right, hidden) if self.spoilt and hidden is not None else left @ right


class Gradients(NamedTuple):
    """Arrays that the gradients are written into; dbias is None where it is not wanted."""

    dq: np.ndarray
    dk: np.ndarray
    dv: np.ndarray
    dbias: np.ndarray | None = None


def backward_arrays(asked: Backward, do: np.ndarray, dlse: np.ndarray | None, given: Matrices, into: Gradients) -> None:
    """Compute the gradients of a call that is not empty, from its arrays ``given`` with O, into the arrays ``into``."""
    call, by_group = asked.of, in_groups(asked.of, given)
    units = call.B, call.Hkv, call.group
    m, l, D = np.empty((3, *units, call.M))
    terms = Terms(
        by_group.q, by_group.k, by_group.v, do.reshape(by_group.q.shape), by_group.out, by_group.bias, by_group.mask,
        m, l, D, None if dlse is None else dlse.reshape(D.shape), by_group.slopes, call.scale, Sight.of(call),
        (given.bias is not None or given.mask is not None or call.windowed)
        and not all(np.isfinite(magnitude(x, None)) for x in (given.q, given.k, given.v, do)),
    )  # fmt: skip
    dq = into.dq.reshape(by_group.q.shape)
    dk, dv = (x.reshape(call.B, call.Hkv, call.N, call.d) for x in (into.dk, into.dv))
    huge = _exceeds(terms)

    def rows(tile: Tile) -> None:
        _dq(terms, tile, dq, np.float32)
        for unit in _each(huge, tile):
            _dq(terms, Tile(unit, tile.rows), dq, np.float64)

    def keys(tile: Tile) -> None:
        _dk_dv(terms, tile, dk, dv, np.float32)
        for unit in _each(huge[..., 0], tile):
            _dk_dv(terms, Tile(unit, tile.rows), dk, dv, np.float64)

    threads = threads_for(call)
    for_each(rows, list(tiles(units, call.M, call.N, TILE, threads)), threads)
    for_each(keys, list(tiles(units[:2], call.N, call.M, TILE, threads)), threads)
    if into.dbias is not None:
        of_bias = DBias(terms, asked, into.dbias, np.float64 if huge.any() else np.float32)
        for_each(of_bias.compute, list(of_bias.parts()), threads)


@np.errstate(all="ignore")
def _exceeds(terms: Terms) -> np.ndarray:
    """Whether float32 may be too small for a number on the way to a unit's gradients: bools [B, Hkv, group].

    If one unit of a group needs float64, all of it do: they share dK and dV.
    """
    q, k, v, do = (magnitude(x, (-2, -1)).astype(np.float64) for x in (terms.q, terms.k, terms.v, terms.do))
    (*_, M, d), N, scale = terms.q.shape, terms.k.shape[-2], max(1.0, abs(terms.scale))
    limit = MAX_FLOAT32 if terms.bias is None and terms.slopes is None else BESIDE_BIAS
    in_scores = exceeds_float32(q, k, v, N, d, terms.scale, limit)
    dS = 2 * do * v * d
    most = np.maximum(do * M, dS * scale * np.maximum(1, np.maximum(q * M, k * N)))
    found = in_scores | (~(most < MAX_FLOAT32) & np.isfinite(q + k + v + do))
    return np.broadcast_to(found.any(axis=2, keepdims=True), found.shape)


def _each(huge: np.ndarray, tile: Tile) -> list[tuple[slice, ...]]:
    """The units of a tile for which ``huge`` is true, one by one."""
    first = [part.start for part in tile.units]
    found = np.argwhere(huge[tile.units])
    return [tuple(slice(a + b, a + b + 1) for a, b in zip(first, at, strict=True)) for at in found]


def _slices(length: int, step: int, start: int = 0) -> list[slice]:
    return [slice(first, min(first + step, length)) for first in range(start, length, step)]


@np.errstate(all="ignore")
def _dq(terms: Terms, tile: Tile, dq: np.ndarray, dtype: type) -> None:
    """Compute dQ of a tile of rows into ``dq``, and the rows' ``m``, ``l`` and ``D`` into ``terms``."""
    where, N, rows = (*tile.units, tile.rows), terms.k.shape[-2], tile.rows
    start, end = terms.sight.beyond(-rows.start).keys(rows.stop - rows.start, N)
    start, N = start // TILE * TILE, min(N, round_up(end, TILE))
    D = (terms.do[where].astype(np.float64, order="C") * terms.o[where]).sum(axis=-1)
    if terms.dlse is not None:
        D -= terms.dlse[where]
    terms.D[where] = D.astype(dtype)  # the number that dS is made with: ``error`` mends its rounding, too
    m = np.full((*dq[where].shape[:-1], 1), -np.inf, dtype)
    l, error = np.zeros((2, *m.shape))
    dS_K, P_K = np.zeros((2, *dq[where].shape), dtype)
    for columns in _slices(N, TILE, start):
        part = terms.of(tile.units, tile.rows, columns, dtype)
        S = part.S()
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        shift = np.where(m_new == -np.inf, dtype(0), m_new)
        P, dS, hidden = part.P_and_dS(S, shift)
        rescale = np.exp(m - shift, dtype=np.float64)
        l = l * rescale + P.sum(axis=-1, keepdims=True)
        error = error * rescale + dS.sum(axis=-1, keepdims=True)
        for sums, left in ((dS_K, dS), (P_K, P)):
            sums *= rescale.astype(dtype)
            sums += part.times(left, part.k, hidden)
        m = m_new
    empty = m == -np.inf
    np.copyto(m, 0, where=empty)
    np.copyto(l, 1, where=empty)
    error /= l
    if terms.dlse is not None:
        error -= terms.dlse[where][..., None]
    found = (dS_K - error.astype(dtype) * P_K) / l.astype(dtype) * dtype(terms.scale)
    np.copyto(error, 0, where=empty)
    np.copyto(found, 0, where=empty)
    dq[where], terms.m[where], terms.l[where] = found, m[..., 0], l[..., 0]
    terms.D[where] += error[..., 0]


@np.errstate(all="ignore")
def _dk_dv(terms: Terms, tile: Tile, dk: np.ndarray, dv: np.ndarray, dtype: type) -> None:
    """Compute dK and dV of a tile of keys, summed over all rows of Q and all heads that share them."""
    (*_, group, M, _), where = terms.q.shape, (*tile.units, tile.rows)
    start, last, first = 0, *terms.sight[:2]
    if last is not None:  # before it, no row sees any of these keys
        start = min(max(tile.rows.start - last, 0), M) // TILE * TILE
    if first is not None:  # nor after it
        M = min(round_up(max(tile.rows.stop - first, start), TILE), M)
    of_k, of_v = np.zeros((2, *dk[where].shape), dtype)
    for head, rows in itertools.product(range(group), _slices(M, TILE, start)):
        units = (*tile.units, slice(head, head + 1))
        part = terms.of(units, rows, tile.rows, dtype)
        P, dS, hidden = part.P_and_dS(part.S(), part.m)
        hidden = None if hidden is None else hidden.swapaxes(-1, -2)
        of_v += part.times(P.swapaxes(-1, -2), part.do / part.l, hidden)[:, :, 0]
        of_k += part.times(dS.swapaxes(-1, -2), part.q / part.l, hidden)[:, :, 0]
    dk[where], dv[where] = of_k * dtype(terms.scale), of_v


class DBias:
    """The gradient of a bias, summed over the axes along which it is broadcast."""

    def __init__(self, terms: Terms, asked: Backward, dbias: np.ndarray, dtype: type) -> None:
        shape = dbias.shape if asked.of.heads or dbias.ndim < 3 else (dbias.shape[0], 1, *dbias.shape[1:])
        self._terms, self._asked, self._dtype = terms, asked, dtype
        self._dbias = dbias.reshape((1,) * (4 - len(shape)) + shape)

    def parts(self) -> Iterator[Part]:
        """Parts of batches, heads, rows and columns that share no sum: an axis that is summed over is taken whole."""
        call = self._asked.of
        lengths, steps = (call.B, call.H, call.M, call.N), (1, 1, TILE, TILE)
        yield from itertools.product(
            *(
                _slices(length, step if n > 1 else length)
                for length, step, n in zip(lengths, steps, self._dbias.shape, strict=True)
            )
        )

    @np.errstate(all="ignore")
    def compute(self, part: Part) -> None:
        at = tuple(x if n > 1 else slice(None) for x, n in zip(part, self._dbias.shape, strict=True))
        batches, heads, rows, columns = part
        sums: np.ndarray = np.zeros(self._dbias[at].shape)
        for b, h in itertools.product(*(range(x.start, x.stop) for x in (batches, heads))):
            unit = tuple(slice(i, i + 1) for i in (b, *divmod(h, self._asked.of.group)))
            for i, j in itertools.product(
                _slices(rows.stop, TILE, rows.start), _slices(columns.stop, TILE, columns.start)
            ):
                tile = self._terms.of(unit, i, j, self._dtype)
                _, dS, hidden = tile.P_and_dS(tile.S(), tile.m)
                dS /= tile.l
                if hidden is not None:  # though l be NaN
                    np.copyto(dS, 0, where=hidden)
                inside: tuple[slice, ...] = (
                    slice(i.start - rows.start, i.stop - rows.start) if sums.shape[2] > 1 else slice(None),
                    slice(j.start - columns.start, j.stop - columns.start) if sums.shape[3] > 1 else slice(None),
                )
                summed = tuple(axis for axis in (2, 3) if sums.shape[axis] == 1)
                sums[(slice(None), slice(None), *inside)] += dS[:, 0].sum(axis=summed, keepdims=True, dtype=np.float64)
        self._dbias[at] = sums
