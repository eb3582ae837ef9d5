"""What attention refuses, and the one form in which backends are told what to compute, without any array library."""

from __future__ import annotations

import math

import numpy as np
import pytest
from support import python

from flashcli.asked.attention import MAX_ROWS, Call, Operand, call, contiguous
from flashcli.asked.shape import MAX_INT32


def floats(*shape: int) -> Operand:
    return contiguous(shape, "float32")


Q, K = floats(2, 4, 5, 8), floats(2, 2, 7, 8)


def test_sizes_and_strides_of_a_plain_call():
    assert call(Q, K, K, causal=True, scale=0.5, q_start=2) == Call(
        B=2, H=4, Hkv=2, M=5, N=7, d=8, heads=True, causal=True, scale=0.5, q_start=2, bias="",
        q=(160, 40, 8), k=(112, 56, 8), v=(112, 56, 8), o=(160, 40, 8), bias_strides=(0, 0, 0, 0),
    )  # fmt: skip


def test_without_heads_there_is_one():
    asked = call(floats(2, 5, 9), floats(2, 7, 9), floats(2, 7, 9))
    assert (asked.H, asked.Hkv, asked.heads, asked.shape, asked.lse_shape) == (1, 1, False, (2, 5, 9), (2, 5))
    assert asked.q == (45, 0, 9) and asked.scale == 1 / math.sqrt(9)


def test_views_keep_their_strides_and_axes_of_one_have_none():
    q = Operand((1, 4, 5, 8), (999, 8, 96, 1), "float32")  # of a fused projection [B, M, 3, H, d]
    k = Operand((1, 4, 7, 8), (999, 0, 96, 1), "float32")  # one head, shown as four
    asked = call(q, k, k, out=Operand((1, 4, 5, 8), (160, 8, 32, 1), "float32"))
    assert (asked.q, asked.k, asked.o) == ((0, 8, 96), (0, 0, 96), (0, 8, 32))


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((2, 4, 5, 7), (140, 35, 7, 1)),
        ((2, 1, 5, 7), (35, 0, 7, 1)),
        ((5, 1), (0, 0, 1, 0)),
        ((7,), (0, 0, 0, 1)),
        ((), (0, 0, 0, 0)),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "bool"])
def test_a_bias_is_broadcast_by_strides(shape, strides, dtype):
    asked = call(Q, K, K, contiguous(shape, dtype))
    assert (asked.bias, asked.bias_strides if dtype == "float32" else asked.mask_strides) == (dtype, strides)


def test_a_mask_may_be_beside_a_bias():
    asked = call(Q, K, K, contiguous((5, 7), "float32"), mask=contiguous((2, 1, 1, 7), "bool"))
    assert (asked.bias, asked.bias_strides, asked.mask_strides) == ("both", (0, 0, 7, 1), (7, 0, 0, 1))
    assert asked.bias_contiguous and not call(Q, K, K, mask=contiguous((5, 1), "bool")).bias_contiguous
    with pytest.raises(TypeError, match=r"^mask must be a bool array, not float32$"):
        call(Q, K, K, mask=contiguous((5, 7), "float32"))
    with pytest.raises(TypeError, match=r"^bias must be a float32 array where there is a mask, too, not bool$"):
        call(Q, K, K, contiguous((5, 7), "bool"), mask=contiguous((5, 7), "bool"))
    with pytest.raises(ValueError, match=r"^mask must be broadcastable to "):
        call(Q, K, K, mask=contiguous((5, 8), "bool"))


def test_a_bias_without_heads_is_of_batches_first():
    q, k = floats(2, 5, 8), floats(2, 7, 8)
    assert call(q, k, k, floats(2, 1, 7)).bias_strides == (7, 0, 0, 1)


@pytest.mark.parametrize(("q_start", "meant"), [(-5, -5), (-6, -5), (-(10**30), -5), (7, 7), (10**30, 7)])
def test_q_start_stays_where_sums_with_it_are_small(q_start, meant):
    assert call(Q, K, K, causal=True, q_start=q_start).q_start == meant


def test_a_window_far_behind_far_queries_has_no_key_that_there_is():
    assert call(Q, K, K, q_start=2**40, window=(2**33, -1)).first == 7
    assert call(Q, K, K, q_start=2**40 + 3, window=(2**40, -1)).first == 3
    assert not call(Q, K, K, q_start=2**40, window=(10**30, -1)).windowed


def test_what_makes_no_difference_is_not_told():
    assert call(Q, K, K, q_start=3) == call(Q, K, K, causal=np.False_)
    assert hash(call(Q, K, K)) == hash(call(Q, K, K, scale=1 / math.sqrt(8)))


@pytest.mark.parametrize(("B", "M", "N"), [(0, 5, 7), (2, 0, 7), (2, 5, 0), (0, 0, 0)])
def test_nothing_to_compute_is_no_error(B, M, N):
    k = Operand((B, 2, N, 8), (0, -1, 3, 2), "float32")  # whatever the strides are of what holds nothing
    asked = call(floats(B, 4, M, 8), k if 0 in k.shape else floats(*k.shape), floats(B, 2, N, 8), floats(M, N))
    assert asked.empty and asked.shape == (B, 4, M, 8)


def strided(shape: tuple[int, ...], *strides: int) -> Operand:
    return Operand(shape, strides, "float32")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"q": floats(5, 8)}, r"q must have shape \[B, M, d\] or \[B, H, M, d\], not \[5, 8\]"),
        ({"q": floats(2, 4, 5, 257)}, "q must have a last axis, d, of 1 to 256, not 257"),
        ({"q": floats(2, 4, 5, 0)}, "q must have a last axis, d, of 1 to 256, not 0"),
        ({"q": floats(2, 0, 5, 8)}, "q must have at least one head"),
        ({"q": floats(2, 5, 8)}, r"k must have shape \[B, N, d\] with B = 2 and d = 8, as q has them, not \[2, 2, 7"),
        ({"k": floats(2, 2, 7, 9)}, r"k must have shape \[B, Hkv, N, d\] with B = 2 and d = 8"),
        ({"k": floats(3, 2, 7, 8)}, r"k must have shape \[B, Hkv, N, d\] with B = 2 and d = 8"),
        ({"v": floats(2, 2, 6, 8)}, r"v must have the shape of k, \[2, 2, 7, 8\], not \[2, 2, 6, 8\]"),
        ({"k": floats(2, 3, 7, 8), "v": floats(2, 3, 7, 8)}, "k must have a number of heads that divides the 4 of q"),
        ({"k": floats(2, 0, 7, 8), "v": floats(2, 0, 7, 8)}, "k must have a number of heads that divides the 4 of q"),
        ({"q": strided(Q.shape, 160, 40, 8, 2)}, "q must be contiguous along its last axis, not 2 elements apart"),
        ({"v": strided(K.shape, 112, 56, -8, 1)}, "v must have no negative strides"),
        (
            {"bias": floats(3, 7)},
            r"bias must be broadcastable to \[B, H, M, N\] = \[2, 4, 5, 7\], not have shape \[3, 7",
        ),
        ({"bias": floats(1, 1, 1, 5, 7)}, "bias must be broadcastable to"),
        ({"bias": strided((7,), -1)}, "bias must have no negative strides"),
        ({"out": floats(2, 4, 5, 7)}, r"out must have the shape of q, \[2, 4, 5, 8\]"),
        ({"out": strided(Q.shape, 160, 0, 8, 1)}, "out must not overlap itself"),
        ({"out": strided(Q.shape, 160, 40, 7, 1)}, "out must not overlap itself"),
        (
            {"out": strided(Q.shape, 160, 40, 8, 2)},
            "out must be contiguous along its last axis, .*: give another",
        ),
        ({"scale": math.nan}, "scale must be finite"),
        ({"scale": -2.36e38}, "scale must be finite"),
        ({"scale": 10**400}, "scale must be finite"),
        ({"q": strided((2, 4, MAX_ROWS // 8 + 1, 8), 0, 0, 0, 1)}, "q, k and v must have B·H·M of at most 2147482623"),
        ({name: strided((2, 2, MAX_INT32 // 4, 8), 0, 0, 0, 1) for name in "kv"}, "must have B·Hkv·N of at most"),
    ],
)
def test_what_has_the_wrong_shape_is_named(arguments, message):
    with pytest.raises(ValueError, match=message):
        call(**{"q": Q, "k": K, "v": K} | arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": K._replace(dtype="float16")}, "k must be a float32 array, not float16"),
        ({"v": K._replace(dtype="bfloat16")}, "v must be a float32 array, not bfloat16"),
        ({"out": Q._replace(dtype="float64")}, "out must be a float32 array, not float64"),
        ({"bias": contiguous((5, 7), "int64")}, "bias must be a float32 or bool array, not int64"),
        ({"scale": "1"}, "scale must be a number, not str"),
        ({"scale": np.ones(1)}, "scale must be a number, not ndarray"),
        ({"q_start": 1.0}, "q_start must be a whole number, not float"),
        ({"causal": np.ones((5, 7), bool)}, "causal must be True or False, not ndarray"),
        ({"causal": "no"}, "causal must be True or False, not str"),
    ],
)
def test_what_has_the_wrong_type_is_named(arguments, message):
    with pytest.raises(TypeError, match=message):
        call(**{"q": Q, "k": K, "v": K} | arguments)


def test_no_array_library_is_needed():
    program = "import sys, flashcli.asked.attention; assert not {'numpy', 'torch', 'cupy'} & set(sys.modules)"
    assert python("-c", program, cold=True).code == 0
