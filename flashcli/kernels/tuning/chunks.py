"""Chunks of keys in kernel ``wgmma``: the places where a row tile's keys are cut, and the blocks that share them.

Few row tiles leave multiprocessors idle. So the keys of one can be cut into chunks for several blocks, whose results
are merged in the order of the keys (``cuda/attention/chunks.cuh``). The cuts decide a row's last bits, and so depend
on M, N, d and the mask alone. The block that computes a chunk changes no bit, and depends on the batch and the GPU.
Nor does the number of rows of a tile change a bit.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from flashcli.asked.shape import ceil_div
from flashcli.kernels.problem import Problem

WHOLE, FOLD, FOLD_SHARED, SPREAD, MEET, JOIN = range(6)  # macro SHARING: see cuda/attention/attention.cuh
SHORTEST = 1024  # keys: shorter sequences are not cut
CHUNKS, MOST_CHUNKS = 4, 32  # of a row tile; and where rows are few, so that even one head fills a GPU
FEW_ROWS = 512
MOST_JOINED = 8  # blocks of a cluster, on any GPU that has them
FEWEST_KEYS = 256  # of a chunk; with the causal mask, where later rows have more of them, twice as many

# A model of times on an H200, in microseconds: what it says of times on another GPU is wrong, but hardly what is best.
IN_CACHE = 32 * 2**20  # bytes of K and V, split, for which blocks need not share them at about the same time
CACHED = 128  # the longest heads of which that is so: a tile of longer ones takes so long that no size matters
START = 3.0  # of a block: until its first products, and from its last ones on
NEXT = 1.8  # the same of a further row tile of the block's, if it has all of its chunks
MERGE = 1.5  # from the last chunk until all are merged
MEETING = 1.0  # from the last chunk until a cluster has merged them
PAIRED = 0.6  # of the time of a further tile of one warpgroup, where two share 64 rows


class Sharing(NamedTuple):
    """A way to share out the work: tiles of Br rows, whole or in chunks.

    With ``spread``, several blocks may have chunks of one row tile, else a block has all of it. With ``paired``, two
    warpgroups share 64 rows and take their tiles of keys in turn.
    """

    Br: int
    spread: bool
    paired: bool = False


def chunk_tiles(problem: Problem, Bc: int) -> int:
    """The number of tiles of Bc keys in a chunk; all, where keys are not cut: few keys, files, fp16, or a bias."""
    if not problem.in_place or problem.N < SHORTEST or problem.precision != "fp32" or problem.bias:
        return ceil_div(problem.N, Bc)
    most = CHUNKS if problem.M > FEW_ROWS else MOST_CHUNKS
    fewest = FEWEST_KEYS * (2 if problem.causal else 1)
    return ceil_div(max(fewest, ceil_div(problem.N, most)), Bc)


def chunks(problem: Problem, Bc: int) -> int:
    """The number of chunks that a row tile's keys are cut into; of the longest row, if causal; 1 if not cut."""
    return ceil_div(ceil_div(problem.N, Bc), chunk_tiles(problem, Bc))


def cluster(problem: Problem, Bc: int, sharing: Sharing) -> int:
    """The number of blocks in a cluster, one for each chunk of a row tile; 1 where blocks merge through memory.

    All clusters must run at once. With the causal mask, where a row tile may have fewer chunks, there are none.
    """
    count, row_tiles = chunks(problem, Bc), problem.B * ceil_div(problem.M, sharing.Br)
    fits = sharing.Br == 64 and problem.d <= 128 and count <= CHUNKS and row_tiles * count <= _in_clusters(problem)
    return count if sharing.spread and fits and not problem.causal else 1


def _in_clusters(problem: Problem) -> int:
    """The number of blocks that run at once in clusters, whose multiprocessors are neighbours: some are left over."""
    return problem.sms * 7 // 8


def joined(problem: Problem, Bc: int) -> int:
    """The number of blocks in a cluster that have a row tile whose keys are not cut, a tile each; 1 where none do.

    All clusters must run at once. It is for long heads, whose tiles take so long that the meetings pay.
    """
    count, row_tiles = ceil_div(problem.N, Bc), problem.B * ceil_div(problem.M, 64)
    fits = count <= MOST_JOINED and row_tiles * count <= _in_clusters(problem)
    return count if fits and _is_plain(problem) and not problem.causal else 1


def splits(problem: Problem, Bc: int) -> bool:
    """Whether blocks split K and V themselves, unless they are `joined`: of many long heads with few rows and keys.

    Two tiles of keys are what registers hold. More rows would split them anew, in about the time of their products.
    Heads for less than a third of the multiprocessors are faster with a launch that splits, and more blocks each.
    """
    few = ceil_div(problem.M, 64) <= ceil_div(problem.N, Bc) <= 2 and problem.group == 1
    return few and problem.sms < 3 * problem.B and _is_plain(problem)


def _is_plain(problem: Problem) -> bool:
    """Whether a call is for arrays, at fp32 accuracy and without a bias: `joined` and `splits` are for no others."""
    return problem.in_place and problem.products == 3 and not problem.bias


@functools.lru_cache(maxsize=1024)
def best(problem: Problem, Bc: int) -> Sharing:
    """The `Sharing` that the model expects to be the fastest for tiles of Bc keys."""
    Brs = (128,) if problem.precision == "fp16" else (128, 64)
    apart = problem.d > CACHED or _split_bytes(problem) <= IN_CACHE
    ways = (False, True) if chunks(problem, Bc) > 1 and apart else (False,)
    found = [Sharing(Br, spread) for Br in Brs for spread in ways]
    found += [Sharing(64, spread, paired=True) for spread in ways if _can_pair(problem, Bc, spread)]
    return min(found, key=lambda way: microseconds(problem, Bc, way))


def _can_pair(problem: Problem, Bc: int, spread: bool) -> bool:
    """Whether shared memory and registers suffice for pairs, and all blocks, with a chunk each, run at once.

    Else larger row tiles are better, whose warpgroups need not exchange anything. But with the causal mask, blocks of
    whole rows that come later are short.
    """
    count = chunks(problem, Bc)
    fits = problem.d <= (96 if spread else 128) and not problem.bias and problem.precision == "fp32"
    at_once = problem.B * ceil_div(problem.M, 64) * count <= problem.sms
    return fits and (at_once or (problem.causal and count == 1)) and spread == (count > 1)


def microseconds(problem: Problem, Bc: int, sharing: Sharing) -> float:
    """The model's microseconds until the multiprocessor with the most work has ended."""
    Br, spread, paired = sharing
    pair, Tr, Tc = _pair(problem.d, Br, Bc), ceil_div(problem.M, Br), ceil_div(problem.N, Bc)
    row_tiles, tiles = problem.B * Tr, chunk_tiles(problem, Bc)

    def take(n: int) -> float:  # tiles of keys, one after the other
        return pair * (1 + (n - 1) * (PAIRED if paired else 1))

    if problem.causal:  # a block for each row tile or chunk; the hardware balances them
        first = max(problem.N - problem.M, 0)
        seen = [max(1, min(Tc, ceil_div(first + (i + 1) * Br, Bc))) for i in range(Tr)]
        pieces = [min(tiles, n - j) for n in seen for j in range(0, n, tiles)] if spread else seen
        total = problem.B * sum(take(n) + START for n in pieces)
        merge = START + MERGE if spread else 0.0  # there are more blocks than run at a time
        return max(take(max(pieces)) + START, total / problem.sms) + merge
    if not spread:
        rounds = ceil_div(row_tiles, problem.sms)
        return rounds * (take(Tc) + NEXT) + START - NEXT
    if cluster(problem, Bc, sharing) > 1:
        return take(tiles) + START + MEETING
    pieces_of_all = row_tiles * chunks(problem, Bc)
    each = ceil_div(pieces_of_all, min(pieces_of_all, problem.sms))
    further = ceil_div(each - 1, chunks(problem, Bc))  # row tiles
    return each * take(tiles) + (1 + further) * (START + MERGE)


def _split_bytes(problem: Problem) -> int:
    """Bytes of K and V, split, if each head of Q has its own."""
    return problem.B * problem.N * 8 * problem.d


def lone_warpgroup_share(d: int) -> float:
    """A lone warpgroup's time for a tile, as a share of a pair's: it has no partner to fill its gaps."""
    return 0.97 if d <= 128 else 0.78


def _pair(d: int, Br: int, Bc: int) -> float:
    """The model's microseconds for a tile of Br rows and one of Bc keys."""
    return Bc / 128 * (0.95 + (0.025 if d <= 128 else 0.0345) * d) * (lone_warpgroup_share(d) if Br == 64 else Br / 128)
