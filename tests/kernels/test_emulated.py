"""What the kernels of attention's ladder answer, emulated on the CPU; the same on a GPU is tested file by file."""

from __future__ import annotations

import numpy as np
import pytest
from emulator.attention import attend
from oracle import Asked, assert_accurate, plain
from support import IN_USE, THOROUGH, sampled

from flashcli.files.distributions import DISTRIBUTIONS
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem
from flashcli.kernels.speed import Speed

LADDER = [name for name, kernel in KERNELS.items() if not kernel.on_host]
SHAPES = [  # (B, N, d, causal): several tiles, the last ones partly filled
    (2, 130, 64, True), (1, 33, 80, False), (3, 1, 5, False), (1, 150, 256, True), (2, 130, 64, False),
]  # fmt: skip


@pytest.mark.parametrize("name", LADDER)
def test_every_kernel_is_as_accurate_as_naive_attention_in_any_order_of_its_threads(emulated, name):
    cases = []
    for B, N, d, causal in SHAPES if THOROUGH and name in IN_USE else SHAPES[:2]:
        if KERNELS[name].refuses(Problem(B, N, N, d, causal=causal)):
            continue
        q, k, v = np.random.default_rng(d).normal(size=(3, B, N, d)).astype(np.float32)
        found = [attend(name, q, k, v, emulated, causal, backwards) for backwards in (False, True)]
        assert found[0].tobytes() == found[1].tobytes()
        cases.append((Asked(q, k, v, causal), found[0], None))
    assert_accurate(cases)


DRAWN = {**DISTRIBUTIONS, "lognormal": lambda rng, size: np.exp(rng.standard_normal(size)).astype(np.float32)}


@pytest.mark.parametrize("name", sampled(list(reversed(DRAWN))))
def test_corrections_that_are_added_in_fp16_are_accurate_on_every_distribution(emulated, name):
    """`mma` on a GeForce, where the two small products of three are added so."""
    cases, differ = [], False
    for N, d in ((200, 64), (100, 96), (70, 160)) if name == "lognormal" else ((200, 64),):
        q, k, v = (np.ascontiguousarray(x)[None] for x in DRAWN[name](np.random.default_rng(d), (3, N, d)))
        halved = attend("mma", q, k, v, emulated, speed=Speed(halved=True))
        differ |= halved.tobytes() != attend("mma", q, k, v, emulated).tobytes()
        cases.append((Asked(q, k, v, False), halved, None))
    assert differ or name in ("large", "equal")  # where one key has all the weight, or all keys have the same
    assert_accurate(cases)


def test_sums_in_fp16_have_room_for_the_largest_products(emulated):
    """Numbers whose halves, high and low, are as large as they can be, all of one sign."""
    worst = np.float32(2 - 2**-11 - 2**-23)  # rounds up to the next half: its low half is the largest
    q, k, v = (np.full((1, 64, d), worst, np.float32) for d in (96, 96, 96))
    found = attend("mma", q, k, v, emulated, speed=Speed(halved=True))
    assert np.abs(found / worst - 1).max() < 2**-21


def test_chunks_of_causal_rows_are_all_there_in_the_order_that_blocks_take_them_in(emulated):
    """Row tiles of three chunks and of two, whose last ones differ in length."""
    q, k, v = (np.random.default_rng(n).normal(size=(1, n, 24)).astype(np.float32) for n in (500, 1100, 1100))
    found = attend("wgmma", q, k, v, emulated, True, in_place=True)
    assert_accurate([(Asked(q, k, v, True, q_start=600), found, None)])


@pytest.mark.parametrize("name", ["register_tiled", "mma", "mma_short", "wgmma_short", "wgmma"])
def test_the_lse_is_rounded_no_more_than_naive_attention_rounds_it(emulated, name):
    q, k, v = np.random.default_rng(1).normal(size=(3, 3, 100, 64)).astype(np.float32)
    lse = attend(name, q, k, v, emulated, in_place=True, lse=True)[1]
    want, naive = plain(Asked(q, k, v))[1], plain(Asked(q, k, v), np.float32)[1]
    assert np.linalg.norm(lse - want) < 1.1 * np.linalg.norm(naive - want)


@pytest.mark.parametrize(
    ("name", "d"), [("mma", 64), ("mma_short", 64), ("wgmma_short", 64), ("wgmma", 64), ("wgmma", 256)]
)
def test_scores_up_to_the_end_of_float32_are_compared_over_tiles_of_any_scale(emulated, name, d):
    """Keys of which one is so large, in a number that no query looks at, that its whole tile has another scale."""
    N = 100 if name == "mma_short" else 300
    q, k, v = np.random.default_rng(1).uniform(1, 2, (3, 1, N, d)).astype(np.float32)
    q, k = q * np.float32(2**60), k * np.float32(2**57)
    k[:, :20] *= 2
    q[..., 0], k[:, 5, 0] = 0, 2**66
    want, naive = plain(Asked(q, k, v)), plain(Asked(q, k, v), np.float32)
    found = attend(name, q, k, v, emulated, in_place=True, lse=True)
    for mine, right, other in zip(found, want, naive, strict=True):
        np.testing.assert_allclose(mine, right, rtol=1e-5)
        np.testing.assert_allclose(other, right, rtol=1e-5)


@pytest.mark.parametrize(("B", "M", "N", "d"), [(1, 70, 450, 160), (2, 20, 130, 256)])
@pytest.mark.parametrize("finite", [True, False])
def test_a_cluster_whose_blocks_have_a_tile_of_keys_each_gives_the_bytes_of_one_block(emulated, B, M, N, d, finite):
    q, k, v = (np.random.default_rng(n).normal(size=(B, n, d)).astype(np.float32) for n in (M, N, N))
    k[:, : N // 3] *= 3  # the largest score of a row is in no one tile, nor are scales the same
    v[:, N // 2 :] /= 1000
    if not finite:
        q[0, -3], k[-1, N - 2, 7], v[0, 5, 3] = np.inf, -np.inf, np.nan
    alone, *others = (
        attend("wgmma", q, k, v, emulated, False, backwards, in_place=True, sms=sms)
        for sms, backwards in ((1, False), (132, False), (132, True))
    )
    assert all(other.tobytes() == alone.tobytes() for other in others)
    if finite:
        assert_accurate([(Asked(q, k, v, False), alone, None)])


SPLIT_BY_BLOCKS = [  # (M, N, d, causal, multiprocessors)
    (60, 64, 256, False, 1), (60, 50, 160, False, 1), (128, 128, 256, False, 2), (100, 70, 192, True, 1),
    (128, 100, 256, False, 6), (40, 128, 200, False, 2), (70, 128, 130, False, 1),
]  # fmt: skip


@pytest.mark.parametrize(("M", "N", "d", "causal", "sms"), SPLIT_BY_BLOCKS)
def test_long_heads_that_blocks_split_have_the_bytes_of_those_that_a_pre_pass_splits(emulated, M, N, d, causal, sms):
    q, k, v = (np.random.default_rng(n).normal(size=(3, n, d)).astype(np.float32) for n in (M, N, N))
    k[0, 7, 7] = np.inf
    v[:, N // 2 :] /= 1000  # nor are scales the same
    few, *many = (
        attend("wgmma", q, k, v, emulated, causal, backwards, in_place=True, sms=each)
        for each, backwards in ((132, False), (sms, False), (sms, True))
    )
    assert all(found.tobytes() == few.tobytes() for found in many)
    asked = Asked(q[1:], k[1:], v[1:], causal, q_start=N - M if causal else 0)
    assert_accurate([(asked, few[1:], None)])
