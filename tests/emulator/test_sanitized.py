"""The sanitizers' cases, emulated: attention and gradients of arrays as they lie, paged decode, and writing a cache.

Each array ends where nothing may be read, gaps between rows and what nobody uses hold NaN, and answers are compared
with float64. These are some of the cases; `make emulate` takes all.
"""

from __future__ import annotations

import itertools
import os
import re

import numpy as np
import pytest
import sanitize_arrays
import sanitize_backward
import sanitize_decode
import sanitize_sight
import sanitize_tangents
from sanitizing import compute
from support import THOROUGH

from flashcli.gpu.prepared import prepare
from flashcli.kernels.arguments import POINTERS
from flashcli.kernels.plan import ATTENTION

ALL = "EMULATE_ALL" in os.environ
TAKES_LONG = re.compile("more of them than|more tiles than|heads of 160")


@pytest.fixture
def place(emulated_place):
    return emulated_place


def cases(kernels, names):
    """Of each kernel some, and not the same ones."""
    pairs = list(itertools.product(kernels, names))
    return pairs if ALL else [pair for pair in pairs[:: 29 if THOROUGH else 70] if not TAKES_LONG.search(pair[1])]


def check(sanitizer, place, kernel, name):
    """A case of arrays as they lie, if the kernel takes it."""
    case = sanitizer.CASES[name]
    if not sanitizer.PROGRAM.takes(place, kernel, name):
        pytest.skip("the kernel does not take it")
    sanitizer.check(place, kernel, case)


@pytest.mark.parametrize(("kernel", "name"), cases(sanitize_arrays.STRIDED, sanitize_arrays.CASES))
def test_attention_of_arrays_as_they_lie(place, kernel, name):
    check(sanitize_arrays, place, kernel, name)


@pytest.mark.parametrize("kernel", ["wgmma", "wgmma_short"])
def test_products_of_as_many_columns_as_a_head_has_numbers(place, kernel):
    check(sanitize_arrays, place, kernel, "heads of 40, causal")


@pytest.mark.parametrize(("kernel", "name"), cases(sanitize_backward.KERNELS, sanitize_backward.CASES))
def test_gradients_of_arrays_as_they_lie(place, kernel, name):
    check(sanitize_backward, place, kernel, name)


@pytest.mark.parametrize("kernel", ["plain", "register_tiled"])
def test_gradients_have_the_same_bytes_wherever_rows_lie(place, kernel):
    asked = [sanitize_backward.Case(lies, d=32, B=1) for lies in ("dense", "odd")]
    dense, odd = (sanitize_backward.computed(place, kernel, case, sanitize_backward.make(case)) for case in asked)
    assert {name: x.tobytes() for name, x in dense.items()} == {name: x.tobytes() for name, x in odd.items()}


@pytest.mark.parametrize(("kernel", "name"), cases(sanitize_tangents.KERNELS, sanitize_tangents.CASES))
def test_tangents_of_arrays_as_they_lie(place, kernel, name):
    check(sanitize_tangents, place, kernel, name)


def test_a_sum_over_keys_takes_nothing_in_from_beyond_the_last_key(place):
    check(sanitize_backward, place, "wgmma", "one key")  # the tile after its one is no key's


@pytest.mark.parametrize(
    ("sanitizer", "name"),
    [
        (sanitize_arrays, "few keys, many rows, causal"), (sanitize_arrays, "few keys, bias and mask"),
        (sanitize_arrays, "few keys, Inf"), (sanitize_backward, "whole heads, odd"),
        (sanitize_backward, "whole heads, bias without its gradient"), (sanitize_backward, "whole heads, NaN"),
        (sanitize_backward, "whole heads, one key"),
    ],
)  # fmt: skip
def test_the_shortest_heads(place, sanitizer, name):
    sanitizer.check(place, "mma_short", sanitizer.CASES[name])


@pytest.mark.parametrize(
    "name", ["whole heads, odd", "whole heads, bias without its gradient", "whole heads, NaN", "whole heads, one key"]
)
def test_whole_heads_by_wgmma(place, name):
    sanitize_backward.check(place, "wgmma_whole", sanitize_backward.CASES[name])


@pytest.mark.parametrize("kernel", ["mma_short", "wgmma_whole", "wgmma_short"])
@pytest.mark.parametrize(
    ("spoilt", "value"), [("Q", np.nan), ("K", np.nan), ("V", -np.inf), ("dO", np.inf)], ids=["Q", "K", "V", "dO"]
)
def test_a_whole_head_that_is_not_finite_is_computed_by_its_block(place, kernel, spoilt, value):
    case = sanitize_backward.Case(
        d=36, Hkv=2, M=37, N=45, causal=True, q_start=5, bias=(2, 37, 45), dbias=False, dlse=True
    )
    given = sanitize_backward.make(case)
    given.view[spoilt][-1, -1, 17, 3] = value
    answer, right = sanitize_backward.computed(place, kernel, case, given), sanitize_backward.right(case, given.view)
    for name, want in zip(answer, right, strict=False):
        finite = np.isfinite(want)
        np.testing.assert_array_equal(np.isfinite(answer[name]), finite, err_msg=name)
        np.testing.assert_allclose(answer[name][finite], want[finite], atol=1e-5, err_msg=name)
    assert not all(np.isfinite(x).all() for x in right)


def test_a_bias_beside_slopes_has_a_gradient_of_whole_heads_too(place):
    sanitize_sight.check(place, "wgmma_short", sanitize_sight.CASES["whole heads, slopes, bias and mask"])


@pytest.mark.parametrize(("kernel", "name"), cases(sanitize_sight.KERNELS, sanitize_sight.CASES))
def test_windows_slopes_and_packed_sequences(place, kernel, name):
    check(sanitize_sight, place, kernel, name)


@pytest.mark.parametrize(("kernel", "name"), cases(sanitize_decode.LADDER, sanitize_decode.CASES))
def test_paged_decode(place, kernel, name):
    if not sanitize_decode.takes(kernel, sanitize_decode.CASES[name]):
        pytest.skip("the kernel does not take it")
    sanitize_decode.check(place, kernel, name)


@pytest.mark.parametrize("name", ["ragged, heads of 8", "ragged, heads of 16, e4m3"])
def test_queries_have_room_where_heads_are_short(place, name):
    sanitize_decode.check(place, "tensor", name)


@pytest.mark.parametrize("kernel", sanitize_decode.LADDER)
def test_lengths_and_pages_that_there_are_not_lead_nowhere(place, kernel):
    rubbish = [name for name, case in sanitize_decode.RUBBISH.items() if sanitize_decode.takes(kernel, case)]
    assert rubbish
    for name in rubbish:
        sanitize_decode.check(place, kernel, name)


@pytest.mark.parametrize("name", sanitize_decode.WRITES)
def test_writing_into_a_cache(place, name):
    sanitize_decode.check_write(place, name)


@pytest.mark.parametrize("kind", sanitize_decode.MERGES)
def test_merging(place, kind):
    sanitize_decode.check_merge(place, kind)


@pytest.mark.parametrize("kernel", ["mma_short", "wgmma_short", "wgmma"])
def test_a_row_whose_scores_float32_has_no_room_for_is_none_that_sees_no_key(place, kernel):
    case = sanitize_arrays.Case(B=1, H=1, Hkv=1, M=20, N=20, mask=(1, 1, 1, 20))
    whole, view = sanitize_arrays.arrays(case)
    for name in "qk":
        view[name][...] = 2.0**64
    called = [sanitize_arrays.CALLED.get(name, name) for name in POINTERS]
    prepared = prepare(place, ATTENTION, *sanitize_arrays.asked(case, kernel))
    compute(place, prepared, called, whole, view, {"out": whole["out"]})
    assert np.isnan(view["out"]).all()
