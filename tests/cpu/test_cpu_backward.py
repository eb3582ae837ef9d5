"""attention_backward on NumPy arrays, by the CPU backend."""

from __future__ import annotations

import functools
import itertools
import tracemalloc

import numpy as np
import pytest
from gradients_oracle import DISTRIBUTIONS, assert_accurate, draw, gradients
from hypothesis import given
from hypothesis import strategies as st
from layouts import laid, some_bias
from oracle import Asked, plain

from flashcli import attention, attention_backward
from flashcli.cpu import workers
from flashcli.errors import UsageError

FLOAT32 = np.finfo(np.float32)


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def compute(asked: Asked, do: np.ndarray, **more: object) -> tuple[np.ndarray, ...]:
    wanted = asked.bias is not None and asked.bias.dtype != bool
    return attention_backward(do, *asked[:3], **asked.keywords, return_dbias=wanted, **more)


def assert_close(got: tuple[np.ndarray, ...], want: list[np.ndarray], tolerance: float = 2e-5) -> None:
    assert len(got) == len(want)
    for mine, right in zip(got, want, strict=True):
        assert mine.shape == right.shape and mine.dtype == np.float32 and mine.flags.c_contiguous
        np.testing.assert_allclose(mine, right, rtol=0, atol=tolerance * max(1, np.abs(right).max(initial=0)))


# Accuracy


@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_as_accurate_as_naive_gradients(distribution, causal):
    do, q, k, v = draw(distribution, 1, 4, 2, 150, 700, 40)
    asked = Asked(q, k, v, causal, q_start=550)
    assert_accurate(asked, do, compute(asked, do))


@pytest.mark.parametrize("M", [1, 4, 32])
def test_few_queries_and_many_keys_are_as_accurate(M):
    """S - LSE would be a larger number than S - m, and rounded more coarsely."""
    do, q, k, v = draw("normal", 1, 1, 1, M, 100_000, 16)
    asked = Asked(q, k, v)
    assert_accurate(asked, do, compute(asked, do), factor=1.2)


@pytest.mark.parametrize("row", [0, 120, 255, 270])
def test_a_row_that_sees_one_key_gives_it_all_of_its_do(row):
    """Whatever is rounded in a score of hundreds: P is divided by the sum of the same P."""
    do, q, k, v = draw("normal", 1, 1, 1, 300, 300, 64)
    do[:, :, np.arange(300) != row] = 0
    _, _, dv = attention_backward(do, 100 * q, k, v, causal=True, q_start=-row)
    np.testing.assert_allclose(dv[0, 0, 0], do[0, 0, row], rtol=1e-6)


def test_rows_that_all_but_see_one_key_are_as_accurate():
    """dP - D is less than D's last bit there: D is mended from the number that dS was made with."""
    do, q, k, v = draw("normal", 1, 1, 1, 1000, 2, 64)
    asked = Asked(q, k / 1000, v, bias=np.float32([0, -20]))
    assert_accurate(asked, do, compute(asked, do))


@pytest.mark.parametrize("bias", ["float32", "bool"])
def test_as_accurate_with_a_bias(bias):
    do, q, k, v = draw("normal", 2, 4, 2, 97, 600, 33)
    added = random(2, 1, 97, 600, seed=3) if bias == "float32" else random(4, 97, 600, seed=4) > -1
    asked = Asked(q, k, v, True, None, added, 500)
    assert_accurate(asked, do, compute(asked, do))


def test_gradients_are_what_finite_differences_say():
    do, q, k, v = draw("normal", 1, 2, 1, 5, 7, 4)
    asked, step = Asked(q, k, v, True, 0.7, random(5, 7, seed=8), 2), 1e-6
    found = compute(asked, do)
    for index, field in enumerate(("q", "k", "v", "bias")):
        x = getattr(asked, field).astype(np.float64)
        slopes = np.zeros(x.shape)
        for at in np.ndindex(*x.shape):
            sides = []
            for sign in (1, -1):
                moved = x.copy()
                moved[at] += sign * step
                sides.append((plain(asked._replace(**{field: moved}))[0] * do).sum())
            slopes[at] = (sides[0] - sides[1]) / (2 * step)
        np.testing.assert_allclose(found[index], slopes, rtol=1e-4, atol=1e-5)


# Layouts, biases, masks


@st.composite
def questions(draw_):
    B, Hkv, group = (draw_(st.integers(1, 3)) for _ in range(3))
    M, N = draw_(st.integers(1, 60) | st.integers(90, 200)), draw_(st.integers(1, 60) | st.integers(500, 600))
    d, seed = draw_(st.sampled_from([1, 3, 16])), draw_(st.integers(0, 1000))
    do, q, k, v = laid(draw_, draw("normal", B, Hkv * group, Hkv, M, N, d, seed))
    bias = some_bias(draw_, (B, Hkv * group, M, N), functools.partial(random, seed=seed + 3))
    if draw_(st.booleans()):
        do, q, k, v = do[:, 0], q[:, 0], k[:, 0], v[:, 0]
        bias = bias if bias is None or bias.ndim < 3 else bias[..., 0, :, :]
    scale, q_start = draw_(st.sampled_from([None, 1.0, -0.3])), draw_(st.integers(-5, N + 5))
    return Asked(q, k, v, draw_(st.booleans()), scale, bias, q_start), do


@given(question=questions(), dlse=st.booleans())
def test_any_shape_strides_and_bias(question, dlse):
    asked, do = question
    of_lse = random(*asked.q.shape[:-1], seed=9) if dlse else None
    assert_close(compute(asked, do, dlse=of_lse), gradients(asked, do, of_lse), 1e-4)


def test_every_small_causal_mask():
    for M, N, q_start in itertools.product(range(1, 5), range(1, 6), range(-4, 6)):
        do, q, k, v = draw("normal", 2, 1, 1, M, N, 4)
        asked = Asked(q, k, v, causal=True, q_start=q_start)
        assert_close(compute(asked, do), gradients(asked, do))


@pytest.mark.parametrize("mask", ["causal", "bool", "float32"])
def test_rows_that_see_nothing_have_zeros_and_add_nothing(mask):
    do, q, k, v = draw("normal", 2, 4, 2, 30, 40, 16)
    seen = np.ones((30, 40), bool)
    seen[:3] = False
    bias = {"causal": None, "bool": seen, "float32": np.where(seen, 0, -np.inf).astype(np.float32)}[mask]
    asked = Asked(q, k, v, mask == "causal", None, bias, -3)
    found = compute(asked, do)
    assert not found[0][:, :, :3].any() and all(np.isfinite(x).all() for x in found)
    assert_close(found, gradients(asked, do))
    spoilt = compute(asked._replace(v=np.where(np.arange(40)[:, None] == 39, np.float32(np.nan), v)), do)
    assert not spoilt[0][:, :, :3].any()


def test_a_broadcast_gradient_and_one_that_is_not_contiguous():
    do, q, k, v = draw("normal", 2, 2, 2, 30, 40, 16)
    asked, one = Asked(q, k, v), np.float32(1)
    assert_close(compute(asked, np.broadcast_to(one, q.shape)), gradients(asked, np.ones(q.shape)))
    assert_close(compute(asked, np.ascontiguousarray(do.T).T), gradients(asked, do))


def test_what_the_forward_pass_gave_need_not_be_computed_again():
    do, q, k, v = draw("normal", 2, 4, 2, 30, 40, 16)
    o, lse = attention(q, k, v, causal=True, backend="cpu", return_lse=True)
    again = attention_backward(do, q, k, v, causal=True)
    for first, second in zip(attention_backward(do, q, k, v, causal=True, o=o, lse=lse), again, strict=True):
        np.testing.assert_array_equal(first, second)


@pytest.mark.parametrize("lengths", [(0, 5, 6), (2, 0, 6), (2, 5, 0)])
def test_nothing_to_compute_gives_zeros(lengths):
    B, M, N = lengths
    do, q, k, v = draw("normal", B, 2, 2, M, N, 4)
    for got, like in zip(attention_backward(do, q, k, v), (q, k, v), strict=True):
        assert got.shape == like.shape and not got.any()


# Numbers


@pytest.mark.parametrize("large", [(1e30, 1e-8, 1, 1e30), (1, 1e18, 1e18, 1), (1e20, 1, 1e-20, 1e-30)])
def test_numbers_beyond_float32_in_between_have_gradients(large):
    do, q, k, v = (x * np.float32(y) for x, y in zip(draw("normal", 1, 2, 1, 50, 60, 8), large, strict=True))
    asked = Asked(q, k, v)
    for got, want in zip(compute(asked, do), gradients(asked, do), strict=True):
        with np.errstate(over="ignore"):
            np.testing.assert_allclose(got, want.astype(np.float32), rtol=1e-3, atol=1e-4 * np.abs(want).max())


def test_nan_is_where_the_formulas_put_it():
    do, q, k, v = draw("normal", 2, 2, 2, 20, 30, 8)
    q[0, 1, 4, 3] = np.nan
    dq, dk, dv = attention_backward(do, q, k, v)
    assert np.isnan(dq[0, 1, 4]).all() and np.isnan(dq).sum() == 8
    assert np.isnan(dk[0, 1]).all() and np.isnan(dv[0, 1]).all() and np.isnan(dk).sum() == dk[0, 1].size


# One result, little memory


def test_bytes_do_not_depend_on_company_or_threads(monkeypatch):
    do, q, k, v = draw("normal", 5, 4, 2, 140, 530, 16)
    together = attention_backward(do, q, k, v, causal=True, q_start=300)
    monkeypatch.setattr(workers, "usable_cores", lambda: range(7))
    for b in range(5):
        alone = attention_backward(*(x[b : b + 1] for x in (do, q, k, v)), causal=True, q_start=300)
        for one, all_ in zip(alone, together, strict=True):
            np.testing.assert_array_equal(one[0], all_[b])


def test_memory_is_that_of_tiles():
    do, q, k, v = draw("normal", 1, 1, 1, 6000, 6000, 8)
    bias = random(1, 6000)
    attention_backward(*(x[:, :, :10] for x in (do, q, k, v)))
    tracemalloc.start()
    attention_backward(do, q, k, v, bias=bias, return_dbias=True)
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most < 24 * 2**20  # the scores alone are 137 MiB


# Bad input

BAD = {
    "a type": ("do", lambda x: x.astype(np.float64), TypeError, "do must be a float32 array, not float64"),
    "a shape": ("do", lambda x: x[:, :1], ValueError, r"do must have the shape of q, \[2, 2, 5, 4\], not"),
    "no array": ("do", lambda x: x.tolist(), TypeError, "do must be a NumPy array, not list"),
    "o alone": ("o", lambda x: x, ValueError, "o must be given together with lse"),
    "lse alone": ("lse", lambda x: x[..., 0], ValueError, "lse must be given together with o"),
    "dlse's shape": ("dlse", lambda x: x, ValueError, r"dlse must have one number for each row of q, \[2, 2, 5\], not"),
    "k's type": ("k", lambda x: x.astype(np.float16), TypeError, "k must be a float32 array, not float16"),
}


@pytest.mark.parametrize(("name", "spoil", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_arrays_are_told_by_name(name, spoil, kind, message):
    given_ = draw("normal", 2, 2, 2, 5, 5, 4)._asdict()
    given_[name] = spoil(given_.get(name, given_["do"]))
    with pytest.raises(kind, match=message):
        attention_backward(**given_)


def test_a_gradient_of_no_bias_or_of_a_mask_is_refused():
    given_ = draw("normal", 2, 2, 2, 5, 5, 4)
    for bias in (None, np.ones((5, 5), bool)):
        with pytest.raises(ValueError, match="return_dbias must be False where there is no bias of float32 numbers"):
            attention_backward(*given_, bias=bias, return_dbias=True)


@pytest.mark.parametrize("options", [{"backend": "cuda"}, {"kernel": "plain"}])
def test_a_gpu_for_arrays_on_the_cpu_is_refused(options):
    with pytest.raises(UsageError, match="gradients of arrays on the CPU are computed by the cpu backend"):
        attention_backward(*draw("normal", 1, 1, 1, 5, 5, 4), **options)
