"""A model of an attention kernel's time on arrays in place, in microseconds, fitted to the record of the grid.

    time = launch + start · rounds + megabyte · megabytes + pair · max(path · longest, pairs)

`Work` says what these count. `costs.py` has the constants of each kernel, ``pair`` for some sizes of heads;
``python -m bench.fit cuda/records/grid.json`` fits them anew. They are of an H200. For other GPUs, `problem.speed` says
how many times as long its parts take, or what `flashcli bench --tune` has measured there.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from flashcli.asked.shape import ceil_div, round_up
from flashcli.kernels.operation import Kernel
from flashcli.kernels.problem import Problem
from flashcli.kernels.speed import CLOCK, H200_PRODUCTS, MULTIPROCESSORS
from flashcli.kernels.tuning import chunks
from flashcli.kernels.tuning.costs import COSTS, Cost

PAIR = 128 * 128  # scores of a pair of tiles, the unit of work
SHARED_WORK = 0.8  # of a lone warpgroup's time for 64 rows, where a second one multiplies, or two split K and V
LATE = 0.5  # of the longest row tile: when the last block ends, the others have been idle for about so long
SHORT_ROW_TILES, LONG_ROW_TILES = 3, 2  # on which a block of wgmma_short works at a time: up to five with short heads
SHORT_THREADS = 640  # of mma_short, for which a multiprocessor has registers, with few keys
PRODUCT = 2 * PAIR / (H200_PRODUCTS * CLOCK)  # microseconds of mma.sync for a pair, a number of the heads, a product
HEADS = (16, 32, 64, 96, 128, 192, 256)  # the longest heads that share constants


class Work(NamedTuple):
    """The work of a call, as the model counts it. A pair is `PAIR` scores; a tile counts whole, even past the keys."""

    rounds: int  # row tiles of the multiprocessor that has most; those that it works on at a time are one
    megabytes: float  # of Q, K, V and O
    longest: float  # pairs of the block that has most, one after the other
    pairs: float  # of all row tiles, over the multiprocessors, and what the last ones are late


def work(kernel: Kernel, problem: Problem) -> Work:
    tiling = kernel.tiling(problem)
    Br, Bc, area = tiling.Br, tiling.Bc, tiling.Br * tiling.Bc / PAIR
    if kernel.name == "wgmma" and Br == 64:
        area *= 2 * chunks.lone_warpgroup_share(problem.d) * (SHARED_WORK if tiling.threads > 2 * 128 else 1)
    Tr, Tc = ceil_div(problem.M, Br), ceil_div(problem.N, Bc)
    mean = float(Tc)  # key tiles of a row tile
    if problem.causal:  # the last query sees the last key
        cut = max(0.0, 1 - Br / Bc) / 2  # the part of a tile of keys, on average, that is beyond the last row's
        mean = min(Tc, (max(problem.N - problem.M, 0) + (problem.M + Br) / 2) / Bc + cut)
    *_, launch = kernel.launches(tiling, problem)
    megabytes = 4 * problem.B * problem.d * 2 * (problem.M + problem.N) / 1e6
    if dict(tiling.macros).get("SHARING") in (chunks.SPREAD, chunks.MEET):
        chunk = chunks.chunk_tiles(problem, Bc)
        pieces = problem.B * Tr * mean / chunk
        rounds, longest = ceil_div(math.ceil(pieces), problem.sms), float(chunk)
        if not problem.causal:
            longest *= rounds
        pairs = pieces * chunk / problem.sms + longest * LATE * problem.causal
        return Work(1 + rounds, megabytes, longest * area, pairs * area)  # what is merged takes about a round's start
    short_row_tiles = SHORT_ROW_TILES if problem.d <= 64 else LONG_ROW_TILES
    at_once = {"wgmma_short": short_row_tiles, "mma_short": max(1, SHORT_THREADS // tiling.threads)}.get(kernel.name, 1)
    row_tiles, area = problem.B * Tr / at_once, area * at_once
    each = math.ceil(row_tiles / launch.grid)  # of a block
    rounds = math.ceil(row_tiles / problem.sms)
    longest, pairs = max(Tc, each * mean), row_tiles * mean / problem.sms
    if rounds > 1 and (problem.causal or each == 1):  # else all blocks have the same, and end at once
        pairs += Tc * LATE
    return Work(rounds, megabytes, longest * area, pairs * area)


def head_class(d: int) -> int:
    return next(longest for longest in HEADS if d <= longest)


def microseconds(kernel: Kernel, problem: Problem) -> float | None:
    """The model's microseconds for a kernel; None for a kernel that has not been measured."""
    if (found := parts(kernel, problem)) is None:
        return None
    fixed, pairs, pair = found
    return fixed + pairs * _pair(kernel, problem, pair)


def parts(kernel: Kernel, problem: Problem) -> tuple[float, float, float] | None:
    """The microseconds beside the tiles, the pairs of tiles one after the other, an H200's microseconds for a pair."""
    cost, speed = COSTS.get(kernel.name), problem.speed
    if cost is None:
        return None
    todo = work(kernel, problem)
    megabyte = cost.megabyte * speed.byte * MULTIPROCESSORS / problem.sms
    fixed = cost.launch + cost.start * speed.ffma * todo.rounds + megabyte * todo.megabytes
    return fixed, max(cost.path * todo.longest, todo.pairs), _pair_of(cost, head_class(problem.d))


def _pair_of(cost: Cost, head: int) -> float:
    """An H200's microseconds for a pair of tiles; of a length not measured by that of longer ones, or the longest."""
    measured = min((d for d in cost.pair if d >= head), default=max(cost.pair))
    return cost.pair[measured] * head / measured


def _pair(kernel: Kernel, problem: Problem, pair: float) -> float:
    """The microseconds for a pair of tiles that take an H200 ``pair``: as measured, or by the rates of its parts."""
    speed = problem.speed
    if (factor := speed.factor(kernel.name, head_class(problem.d))) is not None:
        return pair * factor
    of_tensor_cores = PRODUCT * problem.products * round_up(problem.d, 32) if kernel.splits else 0.0
    products = min(pair, of_tensor_cores)
    if problem.halves_corrections:
        products *= 2 / 3  # two of three at twice the rate
    return products * speed.products + (pair - products) * speed.ffma
