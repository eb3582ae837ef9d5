"""Attention in NumPy: the default where there is no GPU, and the readable statement of the algorithm.

FlashAttention-2 (arXiv 2307.08691, algorithm 1): a tile of Br query rows meets one tile of Bc keys after the other and
carries its row maxima m, its row sums l and its unnormalised output O along, so that memory is bounded by tiles
whatever N is. Independent (batch, row tile) pairs run in threads.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, TypeVar

import numpy as np
from threadpoolctl import threadpool_info

from flashcli.backends.base import Backend, LongBatch, Overlap, Slot, ignore
from flashcli.backends.workers import Workers
from flashcli.files.cut import TILE, Cut
from flashcli.shape import Chunk, Shape, ceil_div
from flashcli.timeline import Timeline

# The S tile, Br x Bc floats = 0.75 MiB, should stay in a core's second-level cache between its five passes. Short
# sequences fill it with several batches instead, so that one NumPy call does enough work to pay for it.
BR, BC = TILE, 512
TILES = 16  # at least, where Br can be made smaller for that: work for every core
FLOAT32_MAX = float(np.finfo(np.float32).max)

T = TypeVar("T")


class Tile(NamedTuple):
    """Independent work: some rows of Q in each batch of a range."""

    batches: slice
    rows: slice


class Work(NamedTuple):
    """Q [batches, M, d], K and V [batches, N, d], and where the answer goes.

    ``given`` [batches, matrices, M, d] is what has come with Q, itself included; ``first_row`` is Q's position.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    out: np.ndarray
    given: np.ndarray
    first_row: int = 0


class Done(NamedTuple):
    """A tile, and the largest magnitude in its rows of each matrix that was given: [batches, matrices]."""

    tile: Tile
    largest: np.ndarray


class CpuSlot(Slot):
    work: Work
    running: Iterator[Any]  # Done; or, of K and V of a long batch, the largest magnitude of each


class CpuLongBatch(LongBatch):
    largest: np.ndarray  # magnitude in K, and in V, so far


class CpuBackend(Backend[CpuSlot]):
    # One thread reads, and one writes, faster than all others compute; a second writer would spin for the file's lock.
    # Of two chunks in computation, the second employs the threads for which the first has no work left.
    overlap = Overlap(reading=1, computing=1, writing=1)

    def __init__(self, causal: bool = False, scale: float | None = None, threads: int | None = None) -> None:
        self._causal = causal
        self._scale = scale
        self._Br = BR
        self._workers = Workers("attention", threads)

    def __enter__(self) -> CpuBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self._workers.close()

    @property
    def description(self) -> str:
        return f"{self._workers} (Br={self._Br}, Bc={BC})"

    def details(self) -> dict[str, object]:
        return {"backend": "cpu", "threads": self._workers.count, "Br": self._Br, "Bc": BC}

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[CpuSlot]]:
        self._Br = row_tile(shape.B, shape.N)
        smaller = by.smaller()  # what waits in few small slots may still be in a cache
        if smaller and smaller.batches * smaller.rows >= self._workers.count * self._Br:
            by = smaller
        # Two, so that one fills while the other is used. Of the batch before the last, all is done: at least two chunks
        # came since, and `overlap` lets one be computed beside another.
        self._long = [] if by.whole else CpuLongBatch.several(2, shape)
        return by, [CpuSlot(shape, by) for _ in range(count)]

    def submit(self, slot: CpuSlot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk, slot.submitted = chunk, time.perf_counter()
        given, answer, (_, N, d) = slot.input_of(chunk), slot.output_of(chunk), vars(slot.shape).values()
        if chunk.matrices == "QKV":
            qkv = given.reshape(-1, 3, N, d)
            q, k, v = qkv.transpose(1, 0, 2, 3)
            self._start(slot, Work(q, k, v, answer.reshape(q.shape), qkv))
            return
        batch = self._long_of(slot)
        if chunk.matrices == "KV":
            batch.keep(chunk, given)
            slot.running = self._workers.map(magnitude, np.split(given, [max(N - chunk.rows.start, 0) * d]))
        else:
            q = given.reshape(1, -1, d)
            out, first_row = answer.reshape(q.shape), chunk.rows.start
            self._start(slot, Work(q, batch.k[None], batch.v[None], out, q[:, None], first_row))

    def wait(self, slot: CpuSlot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        done = list(checking(slot.running, check))
        if slot.chunk.matrices == "KV":
            batch, largest = self._long_of(slot), np.array(done)
            slot.finite = bool(np.isfinite(largest).all())
            batch.largest = largest if slot.chunk.rows.start == 0 else np.maximum(batch.largest, largest)
        else:
            slot.finite = all(np.isfinite(largest).all() for _, largest in done)
            compute = functools.partial(self._compute, slot.work, dtype=np.float64)
            for _ in checking(self._workers.map(compute, self._huge(slot, done)), check):
                """Their input has been looked at before."""
        timeline.add("computation", slot.submitted, time.perf_counter(), f"compute {slot.chunk}")

    def _long_of(self, slot: Slot) -> CpuLongBatch:
        return self._long[slot.chunk.batches.start % len(self._long)]

    def _start(self, slot: CpuSlot, work: Work) -> None:
        (B, M, _), N = work.q.shape, work.k.shape[1]
        slot.work = work
        slot.running = self._workers.map(
            functools.partial(self._compute, work), tiles(B, M, N, self._Br, self._workers.count)
        )

    def _compute(self, work: Work, tile: Tile, dtype: type = np.float32) -> Done:
        """The answer of a tile; its input is looked at while it is in a cache."""
        batches, rows = tile
        attend(
            work.q[batches, rows].astype(dtype, copy=False), work.k[batches], work.v[batches], work.out[batches, rows],
            work.first_row + rows.start, 1 / np.sqrt(work.q.shape[2]) if self._scale is None else self._scale,
            self._causal,
        )  # fmt: skip
        return Done(tile, magnitude(work.given[batches, :, rows], (2, 3)))

    def _huge(self, slot: CpuSlot, done: list[Done]) -> Iterator[Tile]:
        """The tiles, of one batch each, for which float32 may have no room in between.

        That depends on the tile's Q and its batch's K and V alone, and so do the answer's bits, however chunks are cut.
        """
        if slot.chunk.matrices == "Q":
            keys = self._long_of(slot).largest[None]
        else:
            keys = np.zeros((len(slot.work.q), 2), np.float32)
            for (batches, _), largest in done:
                keys[batches] = np.maximum(keys[batches], largest[:, 1:])
        scale, (_, N, d) = 1.0 if self._scale is None else self._scale, slot.work.k.shape
        for (batches, rows), largest in done:
            for b, q in enumerate(largest[:, 0], batches.start):
                if exceeds_float32(float(q), float(keys[b, 0]), float(keys[b, 1]), N, d, scale):
                    yield Tile(slice(b, b + 1), rows)


def checking(running: Iterable[T], check: Callable[[], None]) -> Iterator[T]:
    """What comes, with a look at what else there is after each; raises here what a worker raised."""
    for result in running:
        yield result
        check()


def magnitude(values: np.ndarray, axes: tuple[int, ...] | None = None) -> np.ndarray:
    """The largest along some axes, or of all; NaN where one is NaN."""
    with np.errstate(invalid="ignore"):
        return np.maximum(values.max(axis=axes, initial=0), -values.min(axis=axes, initial=0))


def exceeds_float32(q: float, k: float, v: float, N: int, d: int, scale: float) -> bool:
    """Whether numbers up to these may make scores, or sums of V, that float32 has no room for; not if one is infinite.

    Nor has it room for scores so small that only such a scale brings them back.
    """
    if not math.isfinite(q + k + v):
        return False
    scores, moderate = q * k * d * max(1.0, abs(scale)), scale == 0 or 2**-100 <= abs(scale) <= 2**100
    return not (scores < FLOAT32_MAX and v * N < FLOAT32_MAX and moderate)


def blas_text() -> str:
    """The BLAS that NumPy uses and the kind of core it computes for, such as "openblas 0.3.31 (SkylakeX)"."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return (
        ", ".join(f"{p['internal_api']} {p['version']} ({p.get('architecture', 'unknown')})" for p in pools)
        or "unknown"
    )


def row_tile(B: int, N: int) -> int:
    """Br for an input, a divisor of `TILE`. It depends on nothing else: BLAS may round otherwise in another Br."""
    Br = TILE
    while Br > TILE // 4 and TILES * Br > B * N:
        Br //= 2
    return Br


def tiles(B: int, M: int, N: int, Br: int, threads: int) -> Iterator[Tile]:
    """Cut M rows of each of B batches into tiles of about one S tile, fewer batches where threads would go without."""
    Br = min(M, Br)
    batches = min(max(1, BR * BC // (Br * min(N, BC))), ceil_div(B * M, 4 * threads * Br))
    for b in range(0, B, batches):
        for i in reversed(range(0, M, Br)):  # the longest first, when causal
            yield Tile(slice(b, min(b + batches, B)), slice(i, min(i + Br, M)))


@np.errstate(all="ignore")  # exp(-inf) is wanted; NaN and Inf in the data give what IEEE arithmetic gives
def attend(
    Q: np.ndarray, K: np.ndarray, V: np.ndarray, out: np.ndarray, first_row: int, scale: float, causal: bool
) -> None:
    """O = softmax(scale Q Kᵀ) V for a tile of rows: Q, out [batches, Br, d]; K, V [batches, N, d]; float32.

    What is in between has the type of Q, which may be float64. ``first_row`` is the position of Q's first row in the
    sequence, for the causal mask.
    """
    (batches, Br, d), dtype = Q.shape, Q.dtype
    N = min(K.shape[1], first_row + Br) if causal else K.shape[1]
    if abs(math.frexp(scale)[0]) == 0.5:  # a power of two scales Q exactly, and saves a pass over S
        Q, scale = Q * dtype.type(scale), 1
    m = np.full((batches, Br, 1), -np.inf, dtype)
    l = np.zeros((batches, Br, 1), dtype)
    O = np.zeros((batches, Br, d), dtype)
    tile = np.empty((batches, Br, min(BC, N)), dtype)  # one buffer for all S and P: fresh memory costs page faults
    PV = np.empty_like(O)

    for j in range(0, N, BC):
        Kj, Vj = (matrix[:, j : min(j + BC, N)].astype(dtype, copy=False) for matrix in (K, V))
        S = np.matmul(Q, Kj.transpose(0, 2, 1), out=tile[:, :, : Kj.shape[1]])
        if scale != 1:
            S *= dtype.type(scale)
        if causal and j + Kj.shape[1] > first_row:
            S[:, np.arange(Kj.shape[1]) + j > np.arange(Br)[:, None] + first_row] = -np.inf
        m_new = np.maximum(m, S.max(axis=2, keepdims=True))
        shift = np.where(m_new == -np.inf, dtype.type(0), m_new)  # -inf - -inf would be NaN: exp(-inf) = 0 is meant
        P = np.exp(np.subtract(S, shift, out=S), out=S)
        rescale = np.exp(m - shift)
        l = l * rescale + P.sum(axis=2, keepdims=True)
        O *= rescale
        O += np.matmul(P, Vj, out=PV)
        m = m_new
    np.divide(O, l, out=out, casting="same_kind")
