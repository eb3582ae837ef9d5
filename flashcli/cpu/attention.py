"""Attention in NumPy, a tile at a time: the readable statement of the algorithm.

FlashAttention-2 (arXiv 2307.08691, algorithm 1): a tile of Br query rows meets one tile of Bc keys after the other. It
carries its row maxima m, its row sums l and its unnormalised output O along, so that memory does not grow with M · N.
Axes before a matrix's rows and columns, of batches or heads, are units: independent of each other, several in one tile
where sequences are short.

A row has the same bytes whatever else is computed with it. Br depends on M and the mask alone, so that the row has the
same neighbours in its tile; and each product is the same call of BLAS (`packed`), which has one thread (`for_each`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from flashcli.asked.attention import Call
from flashcli.asked.shape import MAX_FLOAT32, TILE, ceil_div
from flashcli.cpu.workers import for_each, threads_for

# The S tile, Br x Bc floats = 0.75 MiB, should stay in a core's second-level cache between its five passes. Short
# sequences fill it with several units instead, so that one NumPy call does enough work to pay for it.
BR, BC = TILE, 512
LONG = 2048  # rows that give work to several cores in tiles of `BR`
AT_A_LOOK = 2**18  # numbers of K that a thread looks at in one task, about
BESIDE_BIAS = 2.0**103  # scores below it plus any float32 are at most the largest float32


class Tile(NamedTuple):
    """A task that depends on no other: some rows of Q in each of some units."""

    units: tuple[slice, ...]
    rows: slice


class Matrices(NamedTuple):
    """Arrays of a call: Q and O [..., M, d], K and V [..., N, d], perhaps bias and mask [..., M, N] and LSE [..., M].

    All have the same units, as ALiBi's slopes [...] have; what several units share is repeated by strides of 0. O and
    the LSE are written.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    bias: np.ndarray | None = None
    mask: np.ndarray | None = None
    lse: np.ndarray | None = None
    slopes: np.ndarray | None = None

    def of(self, tile: Tile) -> Matrices:
        """The parts of the arrays that a tile needs, with all keys of its units."""
        units, of_rows = tile.units, (*tile.units, tile.rows)
        q, k, v, out, bias, mask, lse, slopes = self
        return Matrices(
            q[of_rows], k[units], v[units], out[of_rows],
            None if bias is None else bias[of_rows], None if mask is None else mask[of_rows],
            None if lse is None else lse[of_rows], None if slopes is None else slopes[units],
        )  # fmt: skip


class Sight(NamedTuple):
    """The keys that a query sees: query i of a tile ``first`` + i to ``last`` + i, as far as there is a limit.

    ``position`` + i is the position from which ALiBi measures the distance of a key.
    """

    last: int | None = None
    first: int | None = None
    position: int = 0

    @classmethod
    def of(cls, asked: Call, row: int = 0) -> Sight:
        """The sight of a call's queries from ``row`` on."""
        last = asked.q_start + row if asked.causal else None
        return cls(last, asked.first + row if asked.windowed else None, asked.position + row)

    def beyond(self, keys: int) -> Sight:
        """The sight of the keys after the first ``keys``."""
        last = None if self.last is None else self.last - keys
        return Sight(last, None if self.first is None else self.first - keys, self.position - keys)

    def keys(self, rows: int, N: int) -> tuple[int, int]:
        """The first key that some of ``rows`` queries sees, and the one after the last, of N keys."""
        end = N if self.last is None else min(N, max(self.last + rows, 0))
        return (0 if self.first is None else min(max(self.first, 0), end)), end


def attend_arrays(asked: Call, given: Matrices) -> None:
    """Compute attention of arrays with any strides, as ``asked`` has it, into ``given.out`` and ``given.lse``."""
    if asked.empty:
        given.out[...] = 0
        if given.lse is not None:
            given.lse[...] = -np.inf
        return
    by_group, units = in_groups(asked, given), (asked.B, asked.Hkv, asked.H // asked.Hkv)
    limit = MAX_FLOAT32 if given.bias is None and given.slopes is None else BESIDE_BIAS
    threads = threads_for(asked)
    largest = np.empty((2, asked.B, asked.Hkv, 1), np.float32)  # magnitudes in each head of K, and of V
    k_largest, v_largest = np.broadcast_to(largest, (2, *units))

    def look(some: tuple[slice, ...]) -> None:
        for of_heads, matrix in zip(largest, (by_group.k, by_group.v), strict=True):
            of_heads[some] = magnitude(matrix[some], (-2, -1))

    def compute(tile: Tile) -> None:
        part, sight = by_group.of(tile), Sight.of(asked, tile.rows.start)
        q, k, v = magnitude(part.q, (-2, -1)), k_largest[tile.units], v_largest[tile.units]
        attend(part, asked.scale, sight, spoilt=not np.isfinite(k + v).all())
        for unit in np.argwhere(exceeds_float32(q, k, v, asked.N, asked.d, asked.scale, limit)):
            one = part.of(Tile(tuple(slice(index, index + 1) for index in unit), slice(None)))
            attend(one, asked.scale, sight, np.float64)

    at_once = max(1, AT_A_LOOK // (asked.N * asked.d))
    for_each(look, list(groups(largest.shape[1:], at_once)), threads)
    for_each(compute, list(tiles(units, asked.M, asked.N, row_tile(asked.M, asked.causal), threads)), threads)


def in_groups(asked: Call, given: Matrices) -> Matrices:
    """Views of the arrays with units [B, Hkv, H / Hkv]: heads of Q that share one of K and V lie side by side."""
    B, H, Hkv, group, M, N, d = asked.B, asked.H, asked.Hkv, asked.H // asked.Hkv, asked.M, asked.N, asked.d
    of_k = B, Hkv, group, N, d

    def of_scores(given: np.ndarray) -> np.ndarray:
        with_heads = given if asked.heads or given.ndim < 3 else given[:, None]
        return np.broadcast_to(with_heads, (B, H, M, N)).reshape(B, Hkv, group, M, N)

    return Matrices(
        given.q.reshape(B, Hkv, group, M, d), np.broadcast_to(given.k.reshape(B, Hkv, 1, N, d), of_k),
        np.broadcast_to(given.v.reshape(B, Hkv, 1, N, d), of_k), given.out.reshape(B, Hkv, group, M, d),
        None if given.bias is None else of_scores(given.bias), None if given.mask is None else of_scores(given.mask),
        None if given.lse is None else given.lse.reshape(B, Hkv, group, M),
        None if given.slopes is None else np.broadcast_to(given.slopes, (B, H)).reshape(B, Hkv, group),
    )  # fmt: skip


def row_tile(M: int, causal: bool) -> int:
    """The tile height Br, a divisor of `TILE`: halved for short M, and if causal: all rows get the last row's keys."""
    Br = BR if M >= LONG else BR // 2
    return Br // 2 if causal else Br


def tiles(units: tuple[int, ...], M: int, N: int, Br: int, threads: int) -> Iterator[Tile]:
    """Cut M rows of each unit into tiles of about one S tile, fewer units where threads would go without."""
    Br = min(M, Br)
    count = max(1, BR * BC // (Br * min(N, BC)))
    if threads > 1:
        count = min(count, ceil_div(math.prod(units) * M, 4 * threads * Br))
    for some in groups(units, count):
        for i in reversed(range(0, M, Br)):  # the longest first, when causal
            yield Tile(some, slice(i, min(i + Br, M)))


def groups(units: tuple[int, ...], count: int) -> Iterator[tuple[slice, ...]]:
    """Cut axes of units into blocks of up to ``count``, along the last axis first."""
    axes = []
    for length in reversed(units):
        step = max(1, min(length, count))
        starts = range(0, length, step)
        axes.append(map(slice, starts, (*starts[1:], length)))
        count //= step
    return itertools.product(*reversed(axes))


@np.errstate(all="ignore")  # exp(-inf) is wanted; NaN and Inf in the data give what IEEE arithmetic gives
def attend(
    given: Matrices,
    scale: float,
    sight: Sight = Sight(),  # noqa: B008  never changed
    dtype: type = np.float32,
    spoilt: bool = False,
) -> None:
    """O = softmax(scale Q Kᵀ + bias) V and its LSE, for the rows of one tile; float32, with ``dtype`` in between.

    Keys that no row sees are passed over, in whole tiles. A row that sees no key has O = 0 and LSE = -inf. ``spoilt``:
    K and V may hold NaN and Inf, which a mask or a window may hide.
    """
    Q: np.ndarray = given.q.astype(dtype, order="C")
    *units, Br, d = Q.shape
    first, N = sight.keys(Br, given.k.shape[-2])
    # Whether keys may be taken away from some queries and not from others, beside the causal mask.
    may_hide = given.bias is not None or given.mask is not None or sight.first is not None
    if abs(math.frexp(scale)[0]) == 0.5:  # a power of two scales Q exactly, and saves a pass over S
        Q *= dtype(scale)
        scale = 1
    m = np.full((*units, Br, 1), -np.inf, dtype)
    l = np.zeros((*units, Br, 1), dtype)
    O = np.zeros((*units, Br, d), dtype)
    tile = np.empty((*units, Br, min(BC, N)), dtype)  # one buffer for all S and P: fresh memory costs page faults
    PV = np.empty_like(O)

    for j in range(first // BC * BC, N, BC):
        columns = slice(j, min(j + BC, N))
        Kj, Vj = packed(given.k[..., columns, :], dtype, Br), packed(given.v[..., columns, :], dtype, Br)
        S = np.matmul(Q, Kj.swapaxes(-1, -2), out=tile[..., : Kj.shape[-2]])
        if scale != 1:
            S *= dtype(scale)
        change(S, given.bias, given.mask, given.slopes, sight, j)
        hidden = np.equal(S, -np.inf) if spoilt and may_hide else None
        m_new = np.maximum(m, S.max(axis=-1, keepdims=True))
        shift = np.where(m_new == -np.inf, dtype(0), m_new)  # -inf - -inf would be NaN: exp(-inf) = 0 is meant
        P = np.exp(np.subtract(S, shift, out=S), out=S)
        rescale = np.exp(m - shift)
        l = l * rescale + P.sum(axis=-1, keepdims=True)
        O *= rescale
        O += np.matmul(P, Vj, out=PV) if hidden is None else product(P, Vj, hidden)
        m = m_new

    last = 0 if sight.last is None else sight.last
    if may_hide or last < 0:
        sees_nothing = m == -np.inf if may_hide else (np.arange(Br) + last < 0)[:, None]
        np.copyto(O, 0, where=sees_nothing)
        np.copyto(l, 1, where=sees_nothing)
    np.divide(O, l, out=given.out, casting="same_kind")
    if given.lse is not None:
        np.add(m, np.log(l), out=given.lse[..., None], casting="same_kind")


def packed(matrix: np.ndarray, dtype: type = np.float32, rows: int = 1) -> np.ndarray:
    """The matrix, or a contiguous copy where strides could change the bits of a product with ``rows`` rows.

    If a side has length 1, NumPy and BLAS choose their way by the strides, and each way rounds otherwise. If none has,
    the distance of rows makes no difference, as long as they do not overlap.
    """
    (row, step), width = matrix.strides[-2:], matrix.shape[-1] * matrix.itemsize
    apart = row == width or (row > width and 1 not in (rows, *matrix.shape[-2:]))
    as_it_is = matrix.dtype == dtype and step == matrix.itemsize and apart and matrix.flags.aligned
    return matrix if as_it_is else matrix.astype(dtype, order="C")


def change(
    S: np.ndarray,
    bias: np.ndarray | None,
    mask: np.ndarray | None,
    slopes: np.ndarray | None,
    sight: Sight,
    first: int = 0,
) -> None:
    """Add biases to the scores S of keys from ``first`` on, in place; set to -inf what is not seen.

    That is where the mask is false, where the bias is -inf, and what is not in sight. ALiBi (arXiv 2108.12409) takes
    off a head's slope times a key's distance; here on both sides of a query.
    """
    *_, Br, keys = S.shape
    if bias is not None:
        bias = bias[..., first : first + keys]
        S += bias
        np.copyto(S, -np.inf, where=bias == -np.inf)  # though S be NaN
    if mask is not None:
        np.copyto(S, -np.inf, where=~mask[..., first : first + keys])
    if slopes is None and sight.last is None and sight.first is None:
        return
    sight, rows, columns = sight.beyond(first), np.arange(Br)[:, None], np.arange(keys)
    if slopes is not None:
        distances = np.abs(sight.position + rows - columns).astype(np.float32)
        S -= slopes[..., None, None] * distances
    if sight.last is not None and (seen_by_all := max(sight.last + 1, 0)) < keys:
        np.copyto(S[..., seen_by_all:], -np.inf, where=columns[seen_by_all:] > sight.last + rows)
    if sight.first is not None and (unseen_by_some := sight.first + Br - 1) > 0:
        np.copyto(S[..., :unseen_by_some], -np.inf, where=columns[:unseen_by_some] < sight.first + rows)


def product(left: np.ndarray, right: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """``left @ right``, to which hidden elements of the left side add nothing, whatever is in that row of the right."""
    bad = ~np.isfinite(right)
    rows = bad.any(axis=-1, keepdims=True)
    found: np.ndarray = np.where(hidden, 0, left) @ np.where(rows, 0, right)
    for j in np.flatnonzero(rows.any(axis=tuple(range(rows.ndim - 2)))):
        spoilt = np.where(rows[..., j, None, :], right[..., j, None, :], 0)
        found += np.where(hidden[..., j, None], 0, left[..., j, None] * spoilt)
    return found


def magnitude(values: np.ndarray, axes: tuple[int, ...] | None = None) -> np.ndarray:
    """The largest magnitude along some axes, or of all values; NaN where one of them is NaN."""
    with np.errstate(invalid="ignore"):
        return np.maximum(values.max(axis=axes, initial=0), -values.min(axis=axes, initial=0))


@np.errstate(invalid="ignore")
def exceeds_float32(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, N: int, d: int, scale: float, limit: float = MAX_FLOAT32
) -> np.ndarray:
    """Whether numbers of these magnitudes may make scores beyond ``limit``, or sums of V beyond float32; a bool each.

    It is false where a magnitude is infinite or NaN; else it is true for any scale outside 2^-100 to 2^100, but 0.
    """
    q, k, v = np.asarray(q, np.float64), np.asarray(k, np.float64), np.asarray(v, np.float64)
    moderate = scale == 0 or 2**-100 <= abs(scale) <= 2**100
    scores = (q * k * d * max(1.0, abs(scale)) < limit) & (q * abs(scale) < MAX_FLOAT32)  # Q may be scaled first
    fits = scores & (v * N < MAX_FLOAT32) & moderate
    return ~fits & np.isfinite(q + k + v)
