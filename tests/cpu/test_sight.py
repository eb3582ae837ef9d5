"""Windows, ALiBi's slopes and packed sequences on NumPy's arrays, by the CPU backend."""

from __future__ import annotations

import functools
import itertools

import gradients_oracle
import numpy as np
import pytest
from oracle import Asked, assert_accurate
from support import sampled

from flashcli import attention as attention_of_any
from flashcli import attention_backward
from flashcli.asked.attention import Operand, call
from flashcli.errors import UsageError

attention = functools.partial(attention_of_any, backend="cpu")
LENGTHS = (5, 0, 300, 1, 64, 700)
WINDOWS = [(-1, -1), (40, 0), (7, 300), (-1, 5), (0, 0), (30, -1)]


def random(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).uniform(-3, 3, shape).astype(np.float32)


NO_SLOPES = np.zeros((), np.float32)


def spelled_out(M, N, window=(-1, -1), slopes=NO_SLOPES, q_start=0, causal=False):
    """The bias that says what a window and slopes say."""
    far = np.arange(M)[:, None] + q_start - np.arange(N)
    left, right = window[0], 0 if causal else window[1]
    seen = ((left < 0) | (far <= left)) & ((right < 0) | (far >= -right))
    return np.where(seen, -slopes[..., None, None] * np.abs(far).astype(np.float32), -np.inf).astype(np.float32)


def starts(lengths) -> np.ndarray:
    return np.cumsum([0, *lengths]).astype(np.int32)


def assert_gradients_accurate(asked, do, found) -> None:
    """Those of Q, K and V: nobody asks for that of the bias."""
    gradients_oracle.assert_accurate(asked, do, [*found, *gradients_oracle.gradients(asked, do)[3:]])


@pytest.mark.parametrize("window", sampled(WINDOWS), ids=str)
@pytest.mark.parametrize(("M", "N", "q_start"), [(150, 150, 0), (97, 700, 603), (300, 90, -20)])
def test_a_window_is_as_accurate_as_naive_attention(M, N, q_start, window):
    q, k, v, do = random(2, 4, M, 24), *random(2, 2, 2, N, 24, seed=1), random(2, 4, M, 24, seed=2)
    asked = Asked(q, k, v, bias=spelled_out(M, N, window, q_start=q_start))
    options = {"window": window, "q_start": q_start}
    assert_accurate([(asked, *attention(q, k, v, **options, return_lse=True))])
    assert_gradients_accurate(asked, do, attention_backward(do, q, k, v, **options))


@pytest.mark.parametrize("of_batches", [False, True], ids=["of heads", "of batches"])
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
def test_slopes_are_a_bias_that_grows_with_the_distance(causal, of_batches):
    M, N, q_start = 130, 600, 470
    q, k, v, do = random(2, 4, M, 24), *random(2, 2, 2, N, 24, seed=1), random(2, 4, M, 24, seed=2)
    slopes = np.abs(random(2, 4, seed=3))[(slice(None) if of_batches else 0)]
    asked = Asked(q, k, v, bias=spelled_out(M, N, (100, -1), slopes, q_start, causal))
    options = {"alibi_slopes": slopes, "q_start": q_start, "causal": causal, "window": (100, -1)}
    assert_accurate([(asked, *attention(q, k, v, **options, return_lse=True))])
    assert_gradients_accurate(asked, do, attention_backward(do, q, k, v, **options))


def test_slopes_add_to_a_bias_and_a_mask():
    q, k, v, bias = random(2, 4, 60, 16), *random(2, 2, 4, 70, 16, seed=1), random(4, 60, 70, seed=2)
    slopes, mask = np.abs(random(4, seed=3)), random(2, 1, 1, 70, seed=4) > -1
    asked = Asked(q, k, v, bias=np.where(mask, bias + spelled_out(60, 70, slopes=slopes), -np.inf))
    assert_accurate([(asked, *attention(q, k, v, bias=bias, mask=mask, alibi_slopes=slopes, return_lse=True))])


OPTIONS = [
    {}, {"causal": True}, {"window": (20, 3)}, {"window": (9, -1), "scale": 0.3},
    {"causal": True, "alibi_slopes": np.float32([0.5, 0.25, 2, 1])},
    {"alibi_slopes": np.linspace(0, 1, 24, dtype=np.float32).reshape(6, 4)},
]  # fmt: skip


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_packed_sequences_have_the_bytes_that_each_has_alone(options):
    of_q, of_k = starts(LENGTHS), starts(reversed(LENGTHS))
    q, do, (k, v) = random(of_q[-1], 4, 24), random(of_q[-1], 4, 24, seed=3), random(2, of_k[-1], 2, 24, seed=1)
    packed = options | {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k}
    o, lse = attention(q, k, v, **packed, return_lse=True)
    gradients = attention_backward(do, q, k, v, **packed, dlse=np.ones_like(lse))
    for s, (rows, keys) in enumerate(zip(itertools.pairwise(of_q), itertools.pairwise(of_k), strict=True)):
        rows, keys = slice(*rows), slice(*keys)
        alone = options.copy()
        if options.get("alibi_slopes", np.zeros(0)).ndim == 2:
            alone["alibi_slopes"] = options["alibi_slopes"][s]
        one = [x.swapaxes(0, 1)[None] for x in (q[rows], k[keys], v[keys])]
        alone["q_start"] = one[1].shape[2] - one[0].shape[2]  # the last query is at the position of the last key
        want = attention(*one, **alone, return_lse=True)
        np.testing.assert_array_equal(o[rows], want[0][0].swapaxes(0, 1))
        np.testing.assert_array_equal(lse[:, rows], want[1][0])
        found = attention_backward(do[rows].swapaxes(0, 1)[None], *one, **alone, dlse=np.ones_like(want[1]))
        for got, x in zip((gradients[0][rows], gradients[1][keys], gradients[2][keys]), found, strict=True):
            np.testing.assert_array_equal(got, x[0].swapaxes(0, 1))


def test_packed_sequences_are_written_where_they_are_wanted():
    cu, x = starts(LENGTHS), random(sum(LENGTHS), 3, 2, 16)
    q, k, v = (x[:, i] for i in range(3))
    out = np.full((sum(LENGTHS), 4, 16), np.nan, np.float32)[:, ::2]
    assert attention(q, k, v, cu_seqlens_q=cu, out=out) is out
    np.testing.assert_array_equal(out, attention(*(y.copy() for y in (q, k, v)), cu_seqlens_q=cu, cu_seqlens_k=cu))


def test_keys_before_a_window_are_passed_over():
    q, k, v = random(1, 2, 256, 16), *random(2, 1, 2, 8192, 16, seed=1)
    k[:, :, :4096] = np.nan
    v[:, :, :4096] = np.inf
    options = {"window": (1000, 0), "q_start": 8192 - 256}
    o, lse = attention(q, k, v, **options, return_lse=True)
    assert np.isfinite(o).all() and np.isfinite(lse).all()
    for x in attention_backward(q, q, k, v, **options):
        assert np.isfinite(x[:, :, 4096:] if x.shape == k.shape else x).all()


def test_what_a_window_hides_never_reaches_an_answer():
    q, k, v = random(1, 2, 40, 16), *random(2, 1, 2, 40, 16, seed=1)
    v[:, :, 10] = np.nan
    seen = attention(q, k, v, window=(3, 4))
    assert np.isnan(seen[:, :, 6:14]).all() and np.isfinite(seen[:, :, [*range(6), *range(14, 40)]]).all()


def test_a_window_that_limits_nothing_is_none():
    q, k = Operand((2, 40, 16), (640, 16, 1), "float32"), Operand((2, 50, 16), (800, 16, 1), "float32")
    assert call(q, k, k, window=(39, -1)) == call(q, k, k)
    assert call(q, k, k, window=(-1, 0)) == call(q, k, k, causal=True) == call(q, k, k, causal=True, window=(-1, 7))


GOOD = {"q": random(20, 4, 8), "k": random(30, 2, 8), "v": random(30, 2, 8)}
STARTS = {"cu_seqlens_q": np.int32([0, 5, 20]), "cu_seqlens_k": np.int32([0, 30, 30])}


@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"cu_seqlens_q": np.int64([0, 5, 20])}, TypeError, "cu_seqlens_q must be an int32 array, not int64"),
        ({"cu_seqlens_q": np.int32([0])}, ValueError, r"cu_seqlens_q must have shape \[S \+ 1\]"),
        ({"cu_seqlens_q": None}, ValueError, "cu_seqlens_k must be given with cu_seqlens_q"),
        ({"cu_seqlens_k": np.int32([0, 30])}, ValueError, "cu_seqlens_k must have the shape of cu_seqlens_q"),
        ({"cu_seqlens_k": None}, ValueError, "cu_seqlens_k must go from 0 to the number of tokens, 30"),
        ({"cu_seqlens_q": np.int32([0, 21, 20])}, ValueError, "cu_seqlens_q must go from 0 .* never down"),
        ({"q": random(1, 20, 4, 8)}, ValueError, r"q must have shape \[tokens, H, d\] with cu_seqlens_q"),
        ({"mask": np.full((20, 30), True)}, ValueError, "mask must not be given with cu_seqlens_q"),
        ({"q_start": 1}, ValueError, "q_start must not be given with cu_seqlens_q"),
        ({"window": 3}, TypeError, r"window must be two whole numbers, \(left, right\), not 3"),
        ({"window": (1, 0.5)}, TypeError, "window must be two whole numbers"),
        ({"window": (-2, 0)}, ValueError, "window must have no number below -1"),
        ({"alibi_slopes": np.ones(4)}, TypeError, "alibi_slopes must be a float32 array, not float64"),
        ({"alibi_slopes": np.ones(2, np.float32)}, ValueError, r"alibi_slopes must have shape \[4\] or \[2, 4\]"),
        ({"backend": "cuda"}, UsageError, "packed sequences have the cpu backend only"),
        ({"out": np.zeros((1, 20, 8), np.float32)}, ValueError, "out must have the shape of q"),
    ],
    ids=str,
)
def test_bad_arguments_are_told_by_name(changed, error, words):
    with pytest.raises(error, match=words):
        attention(**GOOD | STARTS | changed)
