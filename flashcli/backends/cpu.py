"""Attention in NumPy: the default where there is no GPU, and the readable statement of the algorithm.

FlashAttention-2 (arXiv 2307.08691, algorithm 1): a tile of Br query rows meets one tile of Bc keys after the other and
carries its row maxima m, its row sums l and its unnormalised output O along, so that memory is bounded by tiles
whatever N is. Independent (batch, row tile) pairs run in threads; NumPy lets go of the interpreter lock inside its
loops, and BLAS is held to one thread per worker.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
from threadpoolctl import threadpool_info, threadpool_limits

from flashcli.backends.base import Backend, LongBatch, Overlap, Slot, ignore
from flashcli.backends.cores import usable_cores
from flashcli.files.cut import TILE, Cut
from flashcli.files.summary import is_finite
from flashcli.shape import Chunk, Shape, ceil_div
from flashcli.timeline import Timeline

# The S tile, Br x Bc floats = 0.75 MiB, should stay in a core's second-level cache between its five passes. Short
# sequences fill it with several batches instead, so that one NumPy call does enough work to pay for it.
BR, BC = TILE, 512
TILES = 16  # at least, where Br can be made smaller for that: work for every core


class Tile(NamedTuple):
    """Independent work: some rows of Q in each batch of a range."""

    batches: slice
    rows: slice


class CpuSlot(Slot):
    running: Iterator[bool] = iter(())  # what is being computed: of each tile, whether its input is finite


class CpuBackend(Backend):
    # One thread reads, and one writes, faster than all others compute; a second writer would spin for the file's lock.
    # Of two chunks in computation, the second employs the threads for which the first has no work left.
    overlap = Overlap(reading=1, computing=1, writing=1)

    def __init__(self, causal: bool = False, scale: float | None = None, threads: int | None = None) -> None:
        self._causal = causal
        self._scale = scale
        self._Br = BR
        self._threads = threads or len(usable_cores())
        self._pool = ThreadPoolExecutor(self._threads, thread_name_prefix="attention")
        self._blas = threadpool_limits(limits=1, user_api="blas")

    def __enter__(self) -> CpuBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)
        self._blas.restore_original_limits()

    @property
    def description(self) -> str:
        threads = f"{self._threads} thread{'s' if self._threads > 1 else ''}"
        return f"cpu, NumPy {np.__version__}, {threads} (Br={self._Br}, Bc={BC})"

    def details(self) -> dict[str, object]:
        return {"backend": "cpu", "threads": self._threads, "Br": self._Br, "Bc": BC}

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[CpuSlot]]:
        self._Br = row_tile(shape.B, shape.N)
        smaller = by.smaller()  # what waits in few small slots may still be in a cache
        if smaller and smaller.batches * smaller.rows >= self._threads * self._Br:
            by = smaller
        # Two, so that one fills while the other is used. Of the batch before the last, all is done: at least two chunks
        # came since, and `overlap` lets one be computed beside another.
        self._long = [] if by.whole else [LongBatch(shape) for _ in range(min(2, shape.B))]
        return by, [CpuSlot(shape, by) for _ in range(count)]

    def submit(self, slot: Slot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk, slot.submitted = chunk, time.perf_counter()
        given, answer, d = slot.input_of(chunk), slot.output_of(chunk), slot.shape.d
        if chunk.matrices == "QKV":
            qkv = given.reshape(-1, 3, slot.shape.N, d)
            q, k, v = qkv.transpose(1, 0, 2, 3)
            slot.running = self._start(q, k, v, answer.reshape(q.shape), qkv)
            return
        batch = self._long[chunk.batches.start % len(self._long)]
        if chunk.matrices == "KV":
            batch.keep(chunk, given)
            slot.running = self._pool.map(is_finite, [given])
        else:
            q = given.reshape(1, -1, d)
            k, v, out = batch.k[None], batch.v[None], answer.reshape(q.shape)
            slot.running = self._start(q, k, v, out, q[:, None], chunk.rows.start)

    def wait(self, slot: Slot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        slot.finite = True
        for finite in slot.running:  # raises here what a worker raised
            slot.finite &= finite
            check()
        timeline.add("computation", slot.submitted, time.perf_counter(), f"compute {slot.chunk}")

    def _start(
        self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, given: np.ndarray, first_row: int = 0
    ) -> Iterator[bool]:
        """Begin the tiles of Q [batches, M, d]; with each, see whether the same rows of ``given`` [batches, ..] are
        finite, while they are in a cache."""
        scale = 1 / np.sqrt(q.shape[2]) if self._scale is None else self._scale

        def work(tile: Tile) -> bool:
            batches, rows = tile
            attend(q[batches, rows], k[batches], v[batches], out[batches, rows], first_row + rows.start, scale,
                   self._causal)  # fmt: skip
            return is_finite(given[batches, :, rows])

        return self._pool.map(work, tiles(*q.shape[:2], k.shape[1], self._Br, self._threads))


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
    """O = softmax(scale Q Kᵀ) V for a tile of rows: Q, out [batches, Br, d]; K, V [batches, N, d]; all float32.

    ``first_row`` is the position of Q's first row in the sequence, for the causal mask.
    """
    batches, Br, d = Q.shape
    N = min(K.shape[1], first_row + Br) if causal else K.shape[1]
    if abs(math.frexp(scale)[0]) == 0.5:  # a power of two scales Q exactly, and saves a pass over S
        Q, scale = Q * np.float32(scale), 1
    m = np.full((batches, Br, 1), -np.inf, np.float32)
    l = np.zeros((batches, Br, 1), np.float32)
    O = np.zeros((batches, Br, d), np.float32)
    tile = np.empty((batches, Br, min(BC, N)), np.float32)  # one buffer for all S and P: fresh memory costs page faults
    PV = np.empty_like(O)

    for j in range(0, N, BC):
        Kj, Vj = K[:, j : min(j + BC, N)], V[:, j : min(j + BC, N)]
        S = np.matmul(Q, Kj.transpose(0, 2, 1), out=tile[:, :, : Kj.shape[1]])
        if scale != 1:
            S *= np.float32(scale)
        if causal and j + Kj.shape[1] > first_row:
            S[:, np.arange(Kj.shape[1]) + j > np.arange(Br)[:, None] + first_row] = -np.inf
        m_new = np.maximum(m, S.max(axis=2, keepdims=True))
        shift = np.where(
            m_new == -np.inf, np.float32(0), m_new
        )  # -inf - -inf would be NaN where exp(-inf) = 0 is meant
        P = np.exp(np.subtract(S, shift, out=S), out=S)
        rescale = np.exp(m - shift)
        l = l * rescale + P.sum(axis=2, keepdims=True)
        O *= rescale
        O += np.matmul(P, Vj, out=PV)
        m = m_new
    np.divide(O, l, out=out)
