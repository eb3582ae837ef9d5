"""The CPU backend against the oracle, over everything that a request may ask for."""

from __future__ import annotations

import dataclasses
import itertools
import tracemalloc
import warnings

import numpy as np
import pytest
from paged_oracle import oracle

import flashcli
from flashcli.asked.decode import LAYOUTS, BlockSparse
from flashcli.cpu import decode as decode_cpu
from flashcli.cpu.decode import DecodeCpu
from flashcli.cpu.pages import DecodeArrays
from flashcli.files.decode.cases import Case, make
from flashcli.run.decode_cuda import only_used_pages

SMALL = Case(3, 4, 2, 32, "5,37,0", page=8, query_type="float32")
ERROR = {"float32": 2e-6, "float16": 1e-3, "bfloat16": 8e-3}  # of the answer's own rounding


def answer(asked: DecodeArrays, threads: int = 2) -> tuple[np.ndarray, np.ndarray]:
    with DecodeCpu(threads) as backend:
        return backend.decode(asked, range(asked.S))


def check(case: Case) -> None:
    asked = make(case)
    got, got_lse = answer(asked)
    want, want_lse = oracle(asked)
    assert got.dtype == asked.query.dtype
    bound = ERROR[got.dtype.name] * max(1, np.abs(want).max())
    np.testing.assert_allclose(got.astype(np.float64), want, rtol=0, atol=bound)
    np.testing.assert_allclose(got_lse, want_lse, rtol=1e-5, atol=1e-5)
    for void in (np.zeros_like(want), np.broadcast_to(want.mean(), want.shape)):
        assert np.abs(void - want).max() > 10 * bound, "such an answer must not pass"


TYPES = [
    ("float32", ""), ("float16", ""), ("bfloat16", ""), ("float32", "float8_e4m3fn"), ("float16", "float8_e5m2"),
    ("bfloat16", "float8_e4m3fn"), ("float16", "int8"), ("float32", "int8"),
]  # fmt: skip


@pytest.mark.parametrize(("layout", "types"), list(itertools.product(LAYOUTS, TYPES)))
def test_every_layout_and_type_gives_the_oracles_answer(layout, types):
    check(dataclasses.replace(SMALL, layout=layout, query_type=types[0], cache_type=types[1]))


@pytest.mark.parametrize(
    "changes",
    [
        {"alibi": True}, {"window": 6}, {"T": 4}, {"T": 8, "window": 3}, {"T": 3, "alibi": True}, {"H": 7, "Hkv": 1},
        {"H": 6, "Hkv": 6}, {"H": 10, "Hkv": 2}, {"page": 1}, {"page": 64}, {"D": 80}, {"D": 256},
        {"sharpness": 30.0}, {"value_scale": 1e4}, {"pages": "shared"}, {"pages": "reversed"},
    ],
    ids=str,
)  # fmt: skip
def test_everything_that_can_be_asked_for_gives_the_oracles_answer(changes):
    check(dataclasses.replace(SMALL, **changes))


@pytest.mark.parametrize("step", [0, 1, 2, -1, -2])
@pytest.mark.parametrize("T", [1, 3])
def test_block_sparse_heads_see_their_own_blocks(step, T):
    sparse = BlockSparse(vert_stride=3, block_size=8, local_blocks=1, head_sliding_step=step, tp_rank=1)
    check(dataclasses.replace(SMALL, lengths="5,60,33", T=T, sparse=sparse))


def test_a_block_sparse_pattern_may_slide_by_more_than_64_bits():
    far = BlockSparse(vert_stride=4, block_size=8, head_sliding_step=2**30, tp_rank=2**31 - 1)
    near = dataclasses.replace(far, head_sliding_step=0)  # as far, for 2**30 is a multiple of the stride
    (out, lse), (want, want_lse) = (answer(make(dataclasses.replace(SMALL, H=32, sparse=x))) for x in (far, near))
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(lse, want_lse)


def test_of_a_long_sequence_a_block_sparse_head_looks_at_its_own_blocks_alone():
    asked = make(Case(1, 2, 1, 8, "9", layout="nhd", page=2**14, sparse=BlockSparse(1000, 2**14, 1)))
    long = dataclasses.replace(asked, block_tables=np.zeros((1, 2**11), np.int32), seq_lens=np.array([2**25], np.int32))
    tracemalloc.start()
    tokens = long.tokens_seen(0, 0, 1)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert np.array_equal(np.unique(tokens // 2**14), [999, 1999, 2047]) and len(tokens) == 3 * 2**14
    assert peak < 2**25
    wide = dataclasses.replace(asked, sparse=BlockSparse(2, 2**30, 1))
    assert np.array_equal(wide.tokens_seen(0, 0, 0), np.arange(9))


def test_a_block_sparse_head_that_sees_nothing_gives_zeros():
    sparse = BlockSparse(vert_stride=3, block_size=8, local_blocks=0)
    asked = make(dataclasses.replace(SMALL, lengths="7,7,7", sparse=sparse))
    got, lse = answer(asked)
    assert not got.any() and np.isneginf(lse).all()


def test_a_head_whose_scores_are_all_minus_infinity_gives_zeros():
    asked = make(dataclasses.replace(SMALL, lengths="7,5,2", layout="nhd"))
    asked.key_cache[..., 0], asked.query[..., 0] = -np.inf, 1
    got, lse = answer(asked)
    assert not got.any() and np.isneginf(lse).all()


@pytest.mark.parametrize("huge", [(-1e30, 1e20, 1), (1e30, 1e20, 1), (1e30, -1e8, 5e37), (1, 1e-3, 5e37)], ids=str)
def test_a_head_of_numbers_that_exceed_float32_in_between_has_its_answer_and_leaves_the_others_alone(huge):
    asked = make(dataclasses.replace(SMALL, lengths="37,25,12", layout="nhd"))
    asked.key_cache[..., 0], asked.query[..., 0] = huge[0], 0
    asked.value_cache[:] = np.abs(asked.value_cache) * huge[2]
    want, want_lse = answer(asked)
    asked.query[:, :, 1, 0] = huge[1]
    got, lse = answer(asked)
    exact, exact_lse = oracle(asked)
    np.testing.assert_allclose(got, exact, rtol=0, atol=2e-6 * huge[2])
    with np.errstate(over="ignore"):
        np.testing.assert_allclose(lse, exact_lse.astype(np.float32), rtol=1e-5)
    others = [0, 2, 3]
    np.testing.assert_array_equal(got[:, :, others], want[:, :, others])
    np.testing.assert_array_equal(lse[:, :, others], want_lse[:, :, others])


def test_a_long_sequence_comes_in_pieces(monkeypatch):
    monkeypatch.setattr(decode_cpu, "TOKENS", 16)
    check(dataclasses.replace(SMALL, lengths="5,99,64"))


def test_two_pages_that_are_swapped_are_noticed():
    asked = make(dataclasses.replace(SMALL, lengths="40,40,40", T=1))
    got, _ = answer(asked)
    tables = asked.block_tables.copy()
    tables[0, 0] = tables[1, 0]
    swapped, _ = answer(dataclasses.replace(asked, block_tables=tables))
    assert np.abs(got - swapped).max() > 0.1


def test_the_order_of_pages_and_the_company_of_others_change_no_byte():
    alone = make(dataclasses.replace(SMALL, lengths="61,33,50"))
    got, got_lse = answer(alone)
    backwards = dataclasses.replace(
        alone, query=alone.query[::-1], block_tables=alone.block_tables[::-1], seq_lens=alone.seq_lens[::-1]
    )
    again, again_lse = answer(backwards, threads=1)
    np.testing.assert_array_equal(again[::-1], got)
    np.testing.assert_array_equal(again_lse[::-1], got_lse)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_how_arrays_lie_changes_no_byte(layout):
    asked = make(Case(2, 6, 2, 64, "70,33", query_type="float32", layout=layout))
    names = "query", "key_cache", "value_cache", "block_tables"
    turned = dataclasses.replace(asked, **{name: np.asfortranarray(getattr(asked, name)) for name in names})
    assert answer(turned)[0].tobytes() == answer(asked)[0].tobytes()


def test_more_query_tokens_than_tokens_see_nothing_before_the_sequence():
    asked = make(dataclasses.replace(SMALL, lengths="2,1,0", T=4))
    got, lse = answer(asked)
    assert np.isneginf(lse).sum(axis=1).tolist() == [[2] * 4, [3] * 4, [4] * 4]
    assert not got[2].any() and not got[0, :2].any() and got[0, 2:].all()


def test_a_nan_in_a_used_slot_is_no_secret():
    asked = make(SMALL)
    asked.value_cache[asked.block_tables[0, 0]] = np.nan
    got, _ = answer(asked)
    assert np.isnan(got[0]).all() and np.isfinite(got[1:]).all()


@pytest.mark.parametrize("changes", [{}, {"window": 9, "lengths": "40,37,0"}, {"lengths": "0,0,0"}], ids=str)
def test_a_cache_of_the_used_pages_alone_gives_the_same_bytes(changes):
    asked = make(dataclasses.replace(SMALL, **changes))
    some = dataclasses.replace(
        asked, query=asked.query[:1], block_tables=asked.block_tables[:1], seq_lens=asked.seq_lens[:1]
    )
    small = only_used_pages(some)
    assert small.pages < asked.pages or not asked.seq_lens.any()
    np.testing.assert_array_equal(answer(small)[0], answer(asked)[0][:1])


# flashcli.decode of NumPy's arrays


def arguments(asked: DecodeArrays) -> dict[str, object]:
    names = "query", "key_cache", "value_cache", "block_tables", "seq_lens", "alibi_slopes", "layout", "scale"
    return {name: getattr(asked, name) for name in names} | {"sliding_window": asked.window, "backend": "cpu"}


@pytest.mark.parametrize("T", [1, 3])
def test_the_function_gives_the_answer_of_the_query_s_shape_and_type(T):
    asked = make(dataclasses.replace(SMALL, T=T, window=9))
    given = arguments(asked) | ({"query": asked.query[:, 0]} if T == 1 else {})
    out, lse = flashcli.decode(**given, return_lse=True)
    want, want_lse = answer(asked)
    assert (out.shape, out.dtype) == (given["query"].shape, given["query"].dtype) and lse.shape == out.shape[:-1]
    assert out.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"query": None}, "query must be a NumPy array, not NoneType"),
        ({"query": np.float32(1)}, "query must be a NumPy array, not float32"),
        ({"query": np.ones((), np.float32)}, "query has shape [], where 3 or 4 dimensions are wanted"),
        ({"query": np.ones((), np.float32), "scale": None}, "query has shape [], where 3 or 4 dimensions are wanted"),
        ({"seq_lens": np.ma.array([5, 37, 0])}, "seq_lens must not be a masked array"),
        ({"query": np.ones((3, 4, 32), ">f4")}, "query must have this machine's byte order, not that of >f4"),
        ({"seq_lens": [5, 37, 0]}, "seq_lens must be a NumPy array, not list"),
        ({"seq_lens": np.ones((3, 1), np.int32)}, "seq_lens has shape [3, 1], where one dimension is wanted"),
        ({"alibi_slopes": [1.0] * 4}, "alibi_slopes must be a NumPy array, not list"),
        ({"scale": "1"}, "scale must be a number, not str"),
        ({"scale": 1e39}, "scale is 1e+39, not a finite number of up to 2.3587e+38"),
        pytest.param({"scale": 10**400}, "not a finite number of up to 2.3587e+38", id="no float holds it"),
        ({"k_scale": np.ones(2)}, "k_scale must be a number or one float32, not float64 [2]"),
        ({"k_scale": np.ones(1)}, "k_scale must be a number or one float32, not float64 [1]"),
        ({"query": np.ones((3, 4, 32), "V0")}, "query is void, not float32"),
        ({"v_scale": None}, "v_scale must be a number or one float32, not object []"),
        ({"sliding_window": 1.5}, "sliding_window must be a whole number, not float"),
        ({"sliding_window": None}, "sliding_window must be a whole number, not NoneType"),
        ({"block_sparse": {"vert_stride": 2}}, "block_sparse must be a BlockSparse of flashcli.asked.decode, not dict"),
        ({"block_sparse": BlockSparse(2.5, 8)}, "vert_stride is 2.5, not a whole number"),
        ({"backend": "tpu"}, "backend must be one of auto, cuda, cpu, not 'tpu'"),
    ],
    ids=str,
)
def test_the_function_names_the_argument_that_is_wrong(change, complaint):
    with pytest.raises((TypeError, ValueError)) as caught:
        flashcli.decode(**arguments(make(SMALL)) | change)
    assert complaint in str(caught.value)


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
def test_factors_of_a_cache_that_is_not_fp8_are_ignored(kind):
    given = arguments(make(dataclasses.replace(SMALL, query_type=kind)))
    plain = flashcli.decode(**given)
    assert plain.tobytes() == flashcli.decode(**given | {"k_scale": 2.0, "v_scale": np.float32(np.nan)}).tobytes()


@pytest.mark.parametrize(
    ("short", "same"),
    [
        ({"sliding_window": np.int8(100)}, {"sliding_window": 100}),
        ({"scale": np.float16(0.3), "k_scale": 0.0123}, {"scale": float(np.float16(0.3)), "k_scale": 0.0123}),
        (
            {"block_sparse": BlockSparse(*map(np.int8, (3, 8, 1, 7, 100)))},
            {"block_sparse": BlockSparse(3, 8, 1, 7, 100)},
        ),
    ],
    ids=["window", "scale", "sparse"],
)
def test_short_numbers_of_numpys_do_not_overflow(short, same):
    given = arguments(make(dataclasses.replace(SMALL, lengths="300"))) | {"scale": None}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert flashcli.decode(**given | short).tobytes() == flashcli.decode(**given | same).tobytes()


# ragged queries, soft caps, sinks

RAGGED = dataclasses.replace(SMALL, S=5, lengths="5,37,0,20,9", queries="2,37,0,0,1")


@pytest.mark.parametrize(
    "changes",
    [
        {}, {"window": 6}, {"alibi": True, "layout": "nhd"}, {"queries": "9,1,3,20,4", "query_type": "float16"},
        {"sparse": BlockSparse(3, 8, 1, 1)}, {"sinks": True, "softcap": 2.0},
        {"causal": False}, {"causal": False, "window": 6, "alibi": True},
    ],
    ids=str,
)  # fmt: skip
def test_ragged_queries_give_the_oracles_answer(changes):
    check(dataclasses.replace(RAGGED, **changes))


@pytest.mark.parametrize("changes", [{"softcap": 2.0}, {"sinks": True}, {"softcap": 1.0, "sinks": True, "alibi": True}])
def test_softcaps_and_sinks_give_the_oracles_answer(changes):
    check(dataclasses.replace(SMALL, **changes))


def test_a_query_that_sees_nothing_has_the_lse_of_its_sink():
    asked = make(dataclasses.replace(SMALL, lengths="0,0,3", sinks=True))
    out, lse = answer(asked)
    assert not out[:2].any() and (lse[0, 0] == asked.sinks).all() and (lse[2, 0] > asked.sinks).all()


@pytest.mark.parametrize("changes", [{}, {"window": 9}, {"alibi": True, "layout": "nhd"}, {"H": 2}], ids=str)
def test_a_token_has_the_same_bytes_alone_among_eight_in_a_chunk_and_in_the_whole_prompt(changes, monkeypatch):
    monkeypatch.setattr(decode_cpu, "TOKENS", 16)
    case = Case(1, **{"H": 4, "Hkv": 2, "D": 32, "lengths": "50", "page": 8, "queries": "50", **changes})
    whole = make(case)
    out, lse = answer(whole)

    def some(first: int, last: int, ragged: bool) -> DecodeArrays:
        queries = whole.query[first:last]
        changed = {"query": queries if ragged else queries[None, :, 0], "seq_lens": np.array([last], np.int32)}
        starts = np.array([0, last - first], np.int32) if ragged else None
        return dataclasses.replace(whole, **changed, query_starts=starts)

    for first, last, ragged in [(30, 31, False), (25, 33, False), (17, 40, True), (49, 50, True)]:
        got, got_lse = answer(some(first, last, ragged))
        assert got.tobytes() == out[first:last].tobytes(), (first, last)
        assert got_lse.tobytes() == lse[first:last].tobytes()


def test_sequences_without_queries_need_no_pages():
    asked = make(RAGGED)
    asked.block_tables[3] = -1
    given = arguments(asked) | {"query": asked.query[:, 0], "query_starts": asked.query_starts}
    assert flashcli.decode(**given).tobytes() == answer(asked)[0].tobytes()


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"query_starts": np.array([0, 2, 39, 38, 39, 40], np.int32)}, "query_starts[3] is 38, below 39 before it"),
        ({"query_starts": np.array([1, 2, 39, 39, 39, 40], np.int32)}, "query_starts[0] is 1, not 0"),
        (
            {"query_starts": np.array([0, 2, 39, 39, 39, 39], np.int32)},
            "query_starts[5], the last, is 39, not 40, the number of query tokens",
        ),
        (
            {"query_starts": np.array([0, 2, 40], np.int32)},
            "seq_lens has shape [5], but query_starts are of 2 sequences",
        ),
        (
            {"query_starts": None},
            "but query is of 40 sequences; more than one query token of a sequence needs query_starts",
        ),
        ({"query": np.ones((0, 4, 32), np.float32)}, "query holds nothing: one of its axes has length 0"),
        ({"query_starts": np.zeros(6)}, "query_starts is float64, not int32"),
        ({"query_starts": np.int32([0])}, "query_starts has shape [1], where [S + 1] is wanted"),
        ({"query": np.ones((40, 1, 4, 32), np.float32)}, "where [tokens, H, D] is wanted with query_starts"),
        ({"query_starts": [0, 2]}, "query_starts must be a NumPy array, not list"),
        ({"max_query_len": 36}, "query_starts give sequence 1 37 query tokens, more than max_query_len = 36"),
        ({"max_query_len": 0}, "max_query_len is 0, not from 1 to"),
        ({"max_query_len": 1.5}, "max_query_len must be a whole number, not float"),
        (
            {"query_starts": None, "query": np.ones((5, 8, 4, 32), np.float32), "max_query_len": 7},
            "query has 8 tokens a sequence, more than max_query_len = 7",
        ),
        ({"softcap": -1.0}, "softcap is -1.0, not a finite number from 0 to"),
        ({"causal": 0}, "causal must be True or False, not int"),
        (
            {"query_starts": None, "query": np.ones((5, 8, 4, 32), np.float32), "causal": False},
            "goes with query_starts",
        ),
        ({"softcap": "2"}, "softcap must be a number, not str"),
        ({"sinks": np.ones(3, np.float32)}, "sinks has shape [3], where [4] is wanted"),
        ({"sinks": np.full(4, np.nan, np.float32)}, "sinks hold a number that is not finite"),
    ],
    ids=str,
)
def test_a_ragged_call_names_the_argument_that_is_wrong(change, complaint):
    asked = make(RAGGED)
    given = arguments(asked) | {"query": asked.query[:, 0], "query_starts": asked.query_starts}
    with pytest.raises((TypeError, ValueError)) as caught:
        flashcli.decode(**given | change)
    assert complaint in str(caught.value)
