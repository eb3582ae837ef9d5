"""merge() on NumPy's arrays: parts of the keys give the answer to all; what is wrong is named."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

import flashcli
from flashcli.asked.attention import Operand
from flashcli.asked.merge import ask
from flashcli.cpu.decode import DecodeCpu
from flashcli.cpu.pages import DecodeArrays
from flashcli.files.decode.cases import Case, make
from flashcli.kernels import merge
from flashcli.kernels.tuning.decode import HOPPER

WHOLE = Case(3, 4, 2, 32, "48,37,40", page=8, query_type="float32", layout="nhd")


def answer(asked: DecodeArrays) -> tuple[np.ndarray, np.ndarray]:
    with DecodeCpu(1) as backend:
        return backend.decode(asked, range(asked.S))


def cut(asked: DecodeArrays, at: list[int]) -> list[DecodeArrays]:
    """The parts of a call's keys between pages ``at``, which no query token stands in but in the last."""
    ends = [*(end * asked.page for end in at[1:-1]), None]
    return [
        dataclasses.replace(
            asked, block_tables=np.ascontiguousarray(asked.block_tables[:, first:last]),
            seq_lens=np.clip(asked.seq_lens if end is None else np.minimum(asked.seq_lens, end), 0, None)
            - np.int32(first * asked.page),
        )
        for first, last, end in zip(at[:-1], at[1:], ends, strict=True)
    ]  # fmt: skip


@pytest.mark.parametrize("kind", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("at", [[0, 2, 6], [0, 1, 2, 4, 6]], ids=str)
def test_parts_of_the_keys_give_the_answer_to_all(kind, at):
    asked = make(dataclasses.replace(WHOLE, query_type=kind))
    parts = [answer(part) for part in cut(asked, at)]
    out, lse = flashcli.merge(*zip(*parts, strict=True))
    want, want_lse = answer(asked)
    unit = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 2e-2}[kind]
    np.testing.assert_allclose(out.astype(np.float64), want.astype(np.float64), rtol=0, atol=unit * 3)
    np.testing.assert_allclose(lse, want_lse, rtol=1e-6, atol=1e-6)
    assert out.dtype == want.dtype and np.abs(parts[0][0].astype(float) - want.astype(float)).max() > 0.1


def test_a_part_that_has_seen_nothing_counts_nothing_whatever_it_holds():
    rng = np.random.default_rng(0)
    outs, lses = rng.normal(size=(2, 3, 2, 8)).astype(np.float32), rng.normal(size=(2, 3, 2)).astype(np.float32)
    lses[0, 0], outs[0, 0] = -np.inf, np.nan
    lses[:, 1] = -np.inf
    out, lse = flashcli.merge(list(outs), list(lses))
    assert np.isfinite(out).all()
    np.testing.assert_allclose(out[0], outs[1, 0], rtol=1e-6)
    np.testing.assert_array_equal(lse[0], lses[1, 0])
    assert not out[1].any() and np.isneginf(lse[1]).all() and np.isfinite(lse[2]).all()


def test_one_part_is_the_answer():
    out, lse = answer(make(WHOLE))
    got = flashcli.merge([out], [lse])
    assert got[0].tobytes() == out.tobytes() and got[1].tobytes() == lse.tobytes()


OUT, LSE = np.ones((3, 2, 8), np.float32), np.ones((3, 2), np.float32)


@pytest.mark.parametrize(
    ("outs", "lses", "complaint"),
    [
        ([], [], "there are no outs"),
        (None, LSE, "outs and lses must be sequences of arrays"),
        ([OUT], [LSE, LSE], "there are 1 outs and 2 lses, not as many of both, from 1 to 16"),
        ([OUT] * 17, [LSE] * 17, "there are 17 outs and 17 lses"),
        ([OUT, OUT[:2]], [LSE, LSE], "outs[1] is float32 [2, 2, 8], where float32 [3, 2, 8] is wanted"),
        ([OUT, OUT.astype(np.float16)], [LSE, LSE], "outs[1] is float16 [3, 2, 8], where float32"),
        ([OUT, OUT], [LSE, LSE.astype(float)], "lses[1] is float64 [3, 2], where float32 [3, 2] is wanted"),
        ([OUT[..., :7]], [LSE], "outs[0] has shape [3, 2, 7], where [.., H, D] is wanted, D a multiple of 8"),
        ([OUT.astype(int)], [LSE], "outs[0] is int64, not float32, float16, bfloat16"),
        ([OUT, [1]], [LSE, LSE], "outs[1] must be a NumPy array, not list"),
    ],
    ids=str,
)
def test_what_cannot_be_merged_is_named(outs, lses, complaint):
    with pytest.raises((TypeError, ValueError)) as caught:
        flashcli.merge(outs, lses)
    assert complaint in str(caught.value)


def test_a_prefix_that_sequences_share_is_one_sequence_of_all_their_queries():
    """The example of docs/decode.md: 64 sequences that begin alike."""
    S, prefix, own, page = 64, 4, 2, 8
    case = Case(1, 4, 2, 16, str((prefix + S * own) * page), page=page, query_type="float32", layout="nhd")
    pool, rng = make(case), np.random.default_rng(0)
    pages = pool.block_tables[0]
    tables = np.concatenate([np.tile(pages[:prefix], (S, 1)), pages[prefix:].reshape(S, own)], axis=1)
    lengths = rng.integers(prefix * page + 1, (prefix + own) * page, S, np.int32, endpoint=True)
    query = rng.normal(size=(S, 4, 16)).astype(np.float32) * 3
    caches = {"key_cache": pool.key_cache, "value_cache": pool.value_cache, "layout": "nhd", "backend": "cpu"}
    want = flashcli.decode(query, block_tables=tables, seq_lens=lengths, **caches)
    shared = flashcli.decode(
        query, block_tables=tables[:1, :prefix], seq_lens=np.int32([prefix * page]), return_lse=True, causal=False,
        query_starts=np.int32([0, S]), **caches,
    )  # fmt: skip
    rest = flashcli.decode(
        query, block_tables=tables[:, prefix:], seq_lens=lengths - np.int32(prefix * page), return_lse=True, **caches
    )
    out, _ = flashcli.merge(*zip(shared, rest, strict=True))
    np.testing.assert_allclose(out, want, rtol=0, atol=3e-6)
    assert np.abs(shared[0] - want).max() > 0.1 and np.abs(rest[0] - want).max() > 0.1


def test_on_a_gpu_strides_of_an_axis_of_one_mean_nothing():
    out = Operand((40, 1, 16), (16, 7, 1), "float32")
    assert merge.plan(ask((out,), (Operand((40, 1), (1, 40), "float32"),)), HOPPER).steps
    with pytest.raises(ValueError, match=r"^lses\[0\] has strides \[2, 1\], where .* wanted: give a contiguous copy$"):
        merge.plan(ask((out,), (Operand((40, 1), (2, 1), "float32"),)), HOPPER)
