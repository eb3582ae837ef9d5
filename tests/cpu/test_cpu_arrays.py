"""Attention on NumPy arrays with heads, grouped heads, strides, a bias, an LSE and q_start, by the CPU backend."""

from __future__ import annotations

import functools
import itertools
import tracemalloc
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import LAYOUTS, laid, some_bias
from oracle import Asked, assert_accurate, plain

from flashcli import attention
from flashcli.asked.shape import Shape
from flashcli.cpu import attention as cpu
from flashcli.cpu.attention import groups
from flashcli.cpu.workers import usable_cores
from flashcli.files.distributions import DISTRIBUTIONS, draw

FLOAT32 = np.finfo(np.float32)
attention = functools.partial(attention, backend="cpu")


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-3, 3, shape).astype(np.float32)


def qkv(B: int, heads: tuple[int, int], rows: tuple[int, int], d: int, seed: int = 0) -> list[np.ndarray]:
    """Q with the first numbers of heads and rows, K and V with the second."""
    return [random(B, heads[i > 0], rows[i > 0], d, seed=3 * seed + i) for i in range(3)]


def answer(asked: Asked) -> tuple[np.ndarray, np.ndarray]:
    return attention(asked.q, asked.k, asked.v, **asked.keywords, return_lse=True)


def assert_right(asked: Asked) -> None:
    assert_accurate([(asked, *answer(asked))])


# Accuracy


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("bias", ["", "float32", "bool"])
@pytest.mark.parametrize(("M", "N"), [(1, 700), (300, 300), (97, 1100), (500, 90)])
def test_as_accurate_as_naive_attention(M, N, bias, causal):
    q, k, v = qkv(2, (4, 2), (M, N), 40)
    added = {"": None, "float32": random(2, 1, M, N, seed=3), "bool": random(4, M, N, seed=4) > -1}[bias]
    assert_right(Asked(q, k, v, causal, None, added, N - M))


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution(distribution, causal):
    qkv = draw(Shape(8, 150, 64), range(8), seed=5, distribution=distribution).reshape(2, 4, 3, 150, 64)
    assert_right(Asked(qkv[:, :, 0], qkv[:, ::2, 1], qkv[:, ::2, 2], causal))


# Layouts


@st.composite
def questions(draw_):
    B, Hkv, group = (draw_(st.integers(1, 3)) for _ in range(3))
    M, N = draw_(st.integers(1, 60) | st.integers(90, 200)), draw_(st.integers(1, 60) | st.integers(500, 600))
    d, seed = draw_(st.sampled_from([1, 3, 16, 33])), draw_(st.integers(0, 1000))
    q, k, v = laid(draw_, [x / 3 for x in qkv(B, (Hkv * group, Hkv), (M, N), d, seed=seed)])
    bias = some_bias(draw_, (B, Hkv * group, M, N), functools.partial(random, seed=seed + 3))
    if draw_(st.booleans()):
        q, k, v = q[:, 0], k[:, 0], v[:, 0]
        bias = bias if bias is None or bias.ndim < 3 else bias[..., 0, :, :]
    scale, q_start = draw_(st.sampled_from([None, 1.0, -0.3])), draw_(st.integers(-5, N + 5))
    return Asked(q, k, v, draw_(st.booleans()), scale, bias, q_start)


@given(asked=questions())
def test_any_shape_strides_and_bias(asked):
    (out, lse), (want, want_lse) = answer(asked), plain(asked)
    assert out.shape == asked.q.shape and lse.shape == asked.q.shape[:-1] and lse.dtype == np.float32
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-5)


def test_every_small_causal_mask():
    for M, N, q_start in itertools.product(range(1, 5), range(1, 6), range(-4, 6)):
        asked = Asked(*qkv(2, (1, 1), (M, N), 4), causal=True, q_start=q_start)
        for got, want in zip(answer(asked), plain(asked), strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("first_row", [510, 511, 512, 513])
def test_causal_rows_beside_the_end_of_a_tile_of_keys(first_row):
    assert_right(Asked(*qkv(1, (1, 1), (2, 600), 4), causal=True, q_start=first_row))


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_broadcast_views(axis):
    shape = [2, 4, 60, 16]
    one = [random(*[1 if a == axis else length for a, length in enumerate(shape)], seed=seed) for seed in range(3)]
    views = [np.broadcast_to(x, shape) for x in one]
    np.testing.assert_array_equal(attention(*views, causal=True), attention(*map(np.array, views), causal=True))
    assert_right(Asked(*views, causal=True))


def test_nothing_is_copied_as_a_whole():
    x = random(1, 3000, 3, 8, 16).transpose(2, 0, 3, 1, 4)  # a fused projection [B, M, 3, H, d]
    out = np.empty((1, 3000, 8, 16), np.float32).transpose(0, 2, 1, 3)
    bias = np.broadcast_to(random(8, 1, 1), (8, 3000, 3000))
    attention(*x[:, :, :, :10], bias=bias[:, :10, :10])  # what is imported and kept on a first call
    tracemalloc.start()
    attention(x[0], x[1, :, :2], x[2, :, :2], bias=bias, out=out)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < len(usable_cores()) * 2.5e6


# One result


def test_a_sequence_has_the_same_bytes_alone_and_among_others():
    x = qkv(7, (6, 3), (150, 200), 40)
    for options in ({}, {"causal": True, "q_start": 50}, {"bias": random(150, 200, seed=3)}):
        out, lse = attention(*x, **options, return_lse=True)
        for b, h in [(0, 0), (3, 1), (6, 5)]:
            one = [matrix[b : b + 1, i : i + 1] for matrix, i in zip(x, (h, h // 2, h // 2), strict=True)]
            alone, its_lse = attention(*one, **options, return_lse=True)
            assert alone.tobytes() == out[b, h].tobytes() and its_lse.tobytes() == lse[b, h].tobytes()
            without = attention(*(matrix[:, 0] for matrix in one), **options, return_lse=True)[0]
            assert without.tobytes() == alone.tobytes()


lengths = st.integers(1, 200)


@given(B=st.integers(1, 5), H=st.integers(1, 5), M=lengths, N=lengths, d=st.sampled_from([7, 16, 64]))
def test_heads_in_another_order_have_the_same_bytes(B, H, M, N, d):
    x = qkv(B, (H, H), (M, N), d)
    order = np.random.default_rng(0).permutation(H)
    np.testing.assert_array_equal(attention(*(m[:, order] for m in x)), attention(*x)[:, order])
    np.testing.assert_array_equal(attention(*(m[:1, :1] for m in x)), attention(*x)[:1, :1])


def test_where_the_numbers_lie_changes_no_bit():
    x = qkv(2, (3, 3), (130, 130), 24)
    want = attention(*x, causal=True)
    for layout in LAYOUTS.values():
        np.testing.assert_array_equal(attention(*map(layout, x), causal=True), want)
    same = x[0]  # BLAS knows a faster way to the product of a matrix and its own transpose
    np.testing.assert_array_equal(attention(same, same, same), attention(same, same.copy(), same.copy()))


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_threads_change_no_bit(threads, monkeypatch):
    x = qkv(5, (3, 3), (110, 110), 24)
    want = attention(*x)
    monkeypatch.setattr(cpu, "threads_for", lambda asked: threads)
    np.testing.assert_array_equal(attention(*x), want)


def test_calls_at_the_same_time_change_no_bit():
    x = qkv(2, (3, 3), (300, 300), 24)
    want = attention(*x)
    with ThreadPoolExecutor(4) as pool:
        for out in pool.map(lambda _: attention(*x), range(12)):
            np.testing.assert_array_equal(out, want)


@given(units=st.tuples(*[st.integers(1, 5)] * 3), count=st.integers(1, 200))
def test_groups_hold_every_unit_once(units, count):
    seen = np.zeros(units, int)
    for some in groups(units, count):
        assert np.size(seen[some]) <= count
        seen[some] += 1
    assert (seen == 1).all()


# Masks, and what is not finite


def test_a_query_that_sees_nothing_has_zeros_whatever_v_holds():
    q, k, v = random(1, 2, 6, 8), random(1, 2, 4, 8), np.full((1, 2, 4, 8), np.nan, np.float32)
    rows = np.array([True, False, True, False, False, True])[:, None]
    of_floats = np.where(rows, np.float32(0), np.float32(-np.inf))
    for options in ({"bias": rows}, {"bias": of_floats}, {"causal": True, "q_start": -9}):
        out, lse = attention(q, k, v, **options, return_lse=True)
        blind = ~rows[:, 0] if "bias" in options else slice(None)
        assert (out[:, :, blind] == 0).all() and (lse[:, :, blind] == -np.inf).all()
        assert "bias" not in options or np.isnan(out[:, :, rows[:, 0]]).all()


@pytest.mark.parametrize("M", [5, 150])
def test_the_lowest_bias_on_a_whole_row_gives_the_mean_of_v(M):
    q, k, v = qkv(2, (2, 2), (M, 700), 32)
    bias = np.zeros((M, 1), np.float32)
    bias[::2] = FLOAT32.min
    asked = Asked(q, k, v, bias=bias)
    out, lse = answer(asked)
    np.testing.assert_allclose(
        out[:, :, ::2], np.broadcast_to(v.mean(2, keepdims=True), out[:, :, ::2].shape), atol=1e-5
    )
    np.testing.assert_allclose(out, plain(asked, np.float32)[0], atol=1e-5)
    assert (lse[:, :, ::2] == FLOAT32.min).all()


def test_minus_infinity_in_the_data_is_no_mask():
    q, k, v = np.ones((1, 1, 3, 4), np.float32), np.full((1, 1, 5, 4), -np.inf, np.float32), random(1, 1, 5, 4)
    assert np.isnan(attention(q, k, v, return_lse=True)[0]).all()
    assert (attention(q, k, v, bias=np.ones(5, bool)) == 0).all()  # as PyTorch has it


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("which", range(4))
def test_nan_and_inf_show_where_ieee_arithmetic_puts_them(which, value):
    x = [*qkv(2, (4, 2), (120, 600), 16), random(2, 4, 120, 600)]
    x[which][1, 1, 77, 3] = value
    out, lse = answer(asked := Asked(*x[:3], bias=x[3]))
    want, want_lse = plain(asked)
    np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
    np.testing.assert_array_equal(np.isfinite(lse), np.isfinite(want_lse))


@pytest.mark.parametrize("bias", [None, np.float32(3.4e38), FLOAT32.min / 2], ids=str)
@pytest.mark.parametrize("factors", [(1e20, 1e20, 1), (1, 1, 1.1e38), (1e19, 1e17, 1), (1e-20, 1, 1e38)], ids=str)
def test_what_float32_has_no_room_for_in_between(factors, bias):
    x = qkv(2, (4, 2), (130, 600), 16)
    for matrix, factor in zip(x, factors, strict=True):
        matrix[1] *= np.float32(factor)
    bias = None if bias is None else np.where(random(130, 600) > 0, bias, 0).astype(np.float32)
    want = plain(asked := Asked(*x, bias=bias))[0]
    assert (np.abs(answer(asked)[0] - want) <= 1e-5 * np.repeat(np.abs(x[2]).max((2, 3), keepdims=True), 2, 1)).all()
