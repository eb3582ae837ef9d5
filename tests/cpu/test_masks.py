"""A mask beside a bias, on the CPU; and that what either takes away reaches nothing."""

from __future__ import annotations

import numpy as np
import pytest
from gradients_oracle import gradients
from oracle import Asked, plain

from flashcli import attention, attention_backward

B, H, M, N, d = 3, 2, 5, 7, 8


def drawn():
    rng = np.random.default_rng(0)
    do, q = rng.standard_normal((2, B, H, M, d), dtype=np.float32)
    k, v = rng.standard_normal((2, B, H, N, d), dtype=np.float32)
    return do, q, k, v, rng.standard_normal((1, H, M, N), dtype=np.float32), rng.random((B, 1, 1, N)) < 0.7


@pytest.mark.parametrize("causal", [False, True])
def test_a_mask_beside_a_bias(causal):
    do, q, k, v, bias, mask = drawn()
    asked = Asked(q, k, v, causal, None, bias, 1, mask)
    o, lse = attention(q, k, v, **asked.keywords, return_lse=True)
    for got, want in zip((o, lse), plain(asked), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    found = attention_backward(do, q, k, v, **asked.keywords, o=o, lse=lse, return_dbias=True)
    for got, want in zip(found, gradients(asked, do), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)


def test_a_bias_of_bools_is_a_mask():
    _, q, k, v, _, mask = drawn()
    np.testing.assert_array_equal(attention(q, k, v, bias=mask), attention(q, k, v, mask=mask))


@pytest.mark.parametrize("spoilt", ["k", "v", "bias", "q", "do"])
@pytest.mark.parametrize("number", [np.nan, np.inf])
@pytest.mark.parametrize("by", ["mask", "bias"])
def test_what_is_taken_away_reaches_no_answer_and_no_gradient(spoilt, number, by):
    do, q, k, v, bias, _ = drawn()
    arrays, hidden = {"do": do, "q": q, "k": k, "v": v}, np.zeros((M, N), bool)
    hidden[2 if spoilt in ("q", "do") else slice(None), slice(None) if spoilt in ("q", "do") else 3] = True
    if by == "bias":
        if spoilt == "bias":
            pytest.skip("it is the bias itself that hides")
        bias[..., hidden] = -np.inf
    mask = ~hidden if by == "mask" else None

    def computed():
        options = {"bias": bias, "mask": mask}
        return attention(q, k, v, **options), *attention_backward(do, q, k, v, **options, return_dbias=True)

    right = computed()
    if spoilt == "bias":
        bias[..., hidden] = number
    else:
        arrays[spoilt][..., 2 if spoilt in ("q", "do") else 3, :] = number
    for got, want in zip(computed(), right, strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
