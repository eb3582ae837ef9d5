"""The NumPy backend: how it cuts its work, and what it leaves behind. Its answers: see test_attention.py."""

from __future__ import annotations

import os
import tracemalloc

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import random_qkv
from threadpoolctl import threadpool_info, threadpool_limits
from tolerances import assert_accurate

from flashcli.asked.shape import Shape
from flashcli.cpu.attention import attend, row_tile, tiles
from flashcli.cpu.workers import usable_cores
from flashcli.files.cut import TILE, Cut
from flashcli.files.verify import reference
from flashcli.run import arrays, slots_cpu
from flashcli.run.arrays import Arrays
from flashcli.run.slots_cpu import CpuBackend
from flashcli.run.stream import stream


@given(B=st.integers(1, 60), N=st.integers(1, 1500), Br=st.sampled_from([96, 384]), threads=st.integers(1, 64))
def test_tiles_cover_every_row_of_every_batch_once(B, N, Br, threads):
    seen = np.zeros((B, N), int)
    for tile in tiles((B,), N, N, Br, threads):
        assert tile.units[0].stop <= B and tile.rows.stop <= N
        seen[*tile.units, tile.rows] += 1
    assert (seen == 1).all()


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("N", [1, 2047, 2048, 10**6])
def test_rows_are_cut_where_tiles_end(N, causal):
    assert TILE % row_tile(N, causal) == 0


@pytest.mark.parametrize("threads", [1, 2, 7])
@pytest.mark.parametrize("causal", [False, True])
def test_any_number_of_threads(threads, causal):
    qkv, out = random_qkv(2, 1100, 16), np.full((2, 1100, 16), np.nan, np.float32)
    with CpuBackend(causal, threads=threads) as backend:
        assert backend.details()["threads"] == threads
        arrays.forward(backend, qkv, out)
    assert_accurate(out, qkv, causal)


def test_blas_has_one_thread_during_the_products(monkeypatch):
    seen: set[int] = set()

    def looked(*given) -> None:
        seen.update(pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas")
        attend(*given)

    monkeypatch.setattr(slots_cpu, "attend", looked)
    with threadpool_limits(2), CpuBackend() as backend:
        arrays.forward(backend, qkv := random_qkv(2, 50, 16), np.empty_like(qkv[:, 0]))
    assert seen <= {1}


def test_threads_and_chunks_change_no_bit():
    qkv = random_qkv(2, 1100, 16)
    answers = []
    for threads in (1, 3):
        for by in (Cut(True, 1, 1100), Cut(False, 1, 1100), Cut(False, 1, TILE)):
            out = np.full((2, 1100, 16), np.nan, np.float32)
            arrays = Arrays(*qkv.transpose(1, 0, 2, 3), out)
            with CpuBackend(threads=threads) as backend:
                stream(arrays, backend, arrays, by)
            answers.append(out)
    for out in answers[1:]:
        np.testing.assert_array_equal(out, answers[0])


def by_chunks(qkv: np.ndarray, by: Cut, causal: bool = False, scale: float | None = None) -> np.ndarray:
    out = np.full(qkv[:, 0].shape, np.nan, np.float32)
    arrays = Arrays(*qkv.transpose(1, 0, 2, 3), out)
    with CpuBackend(causal, scale, threads=2) as backend:
        stream(arrays, backend, arrays, by)
    return out


HUGE = {
    "Q and K": ((1e20, 1e20, 1), None),
    "Q": ((3e37, 1, 1), None),
    "V": ((1, 1, 1.1e38), None),
    "the scale": ((1, 1, 1), 2e38),
    "the negative scale": ((1, 1, 1), -2e38),
    "a power of two": ((1, 1, 1), 2.0**127),
    "all": ((1.1e38, 1.1e38, 1.1e38), 2e38),
    "Q that is scaled before K makes it small": ((1e30, 1e-30, 1), 2.0**50),
    "what the scale makes small": ((1e20, 1e20, 1), 1e-40),
    "what the scale makes large": ((1e-20, 1e-20, 1), 1e38),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("which", HUGE)
def test_what_float32_has_no_room_for_in_between(which, causal):
    factors, scale = HUGE[which]
    qkv = random_qkv(3, 700, 16)
    qkv[1] *= np.array(factors, np.float32)[:, None, None]
    want = np.stack([reference(batch, causal, scale) for batch in qkv])
    whole, rows = (by_chunks(qkv, by, causal, scale) for by in (Cut(True, 3, 700), Cut(False, 1, TILE)))
    assert (np.abs(whole - want) <= 1e-5 * np.abs(qkv[:, 2]).max(axis=(1, 2), keepdims=True)).all()
    np.testing.assert_array_equal(whole, rows)


def test_scores_that_are_lost_on_the_way_to_their_sum():
    """The products of a score add up to 0, but for -inf in between, which would be a weight of 0."""
    qkv = np.zeros((1, 3, 64, 4), np.float32)
    qkv[0, 0] = 1e19
    qkv[0, 1, ::2] = np.array([-3e19, -3e19, 3e19, 3e19], np.float32)
    qkv[0, 2, ::2] = 1
    np.testing.assert_array_equal(by_chunks(qkv, Cut(True, 1, 64)), 0.5)


def test_memory_is_bounded_by_tiles():
    N = 6000  # S would take 144 MB
    qkv, out = random_qkv(1, N, 8), np.empty((1, N, 8), np.float32)
    tracemalloc.start()
    with CpuBackend(threads=2) as backend:
        arrays.forward(backend, qkv, out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 16e6


def test_an_error_in_a_worker_is_raised():
    with CpuBackend() as backend, pytest.raises(ValueError, match="shape"):
        arrays.forward(backend, random_qkv(1, 10, 4), np.empty((1, 10, 5), np.float32))


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system has no CPU affinity")
def test_cores_taken_away_are_not_used():
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert len(usable_cores()) == 1
    finally:
        os.sched_setaffinity(0, allowed)


@pytest.mark.parametrize(("threads", "batches"), [(1, 2), (8, 2), (16, 4)])
def test_chunks_are_smaller_as_long_as_there_is_a_tile_for_each_thread(threads, batches):
    with CpuBackend(threads=threads) as backend:
        by, slots = backend.slots(Shape(40, 2048, 64), Cut(whole=True, batches=4, rows=2048), 3)
    assert (by.batches, len(slots)) == (batches, 3)
    assert slots[0].input.size == batches * 3 * 2048 * 64
