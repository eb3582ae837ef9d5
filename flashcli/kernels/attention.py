"""The ladder of attention kernels: their tiles, their launches, their scratch.

One kernel is one file in ``cuda/attention/`` and one entry in `KERNELS`. The command line's choices, the tests, the
benchmark and the table of ``flashcli kernels`` all derive from it.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Iterable, Iterator

from flashcli.asked.shape import ceil_div, round_up
from flashcli.kernels.arguments import Attention
from flashcli.kernels.operation import STATIC_SHARED, Kernel, Launch, Tiling, ladder, zero
from flashcli.kernels.problem import Problem, bias_macros, sight_macros, type_macros
from flashcli.kernels.tuning import chunks

PREPARE_THREADS = 256  # of a block of the pre-pass that splits K and V
LOOK_THREADS = 256  # of a block that looks for NaN and Inf, a warp a row


def look(problem: Problem, rows: int) -> Launch:
    """The launch that looks for NaN and Inf among ``rows`` rows of Q, K and V, a warp a row."""
    enough = 8 * problem.sms  # blocks; each goes on to further rows
    return Launch("find_nonfinite", min(ceil_div(rows, LOOK_THREADS // 32), enough), LOOK_THREADS)


def _macros(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """Macros that every kernel of the ladder is compiled with."""
    return {
        "HEAD_DIM": problem.d, "BR": tiling.Br, "BC": tiling.Bc, "THREADS": tiling.threads, "SHARED": tiling.shared,
        "CAUSAL": int(problem.causal), "ARGUMENT_BYTES": ctypes.sizeof(Attention),
    }  # fmt: skip


def _strided_macros(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """Macros of kernels that take arrays with any strides."""
    macros = _macros(tiling, problem) | {"IN_PLACE": int(problem.in_place), "DENSE": int(problem.dense)}
    macros |= {"ALIGNED": int(problem.aligned and problem.d % 4 == 0), "LSE": int(problem.lse)}
    types = type_macros(INPUT=problem.dtype, ANSWER=problem.out_dtype)
    return macros | bias_macros(problem) | sight_macros(problem) | types


def _split_macros(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """Macros of kernels that split numbers into fp16 halves."""
    macros = _strided_macros(tiling, problem)
    return macros | {"PRODUCTS": problem.products, "PREPARE_THREADS": PREPARE_THREADS}


def block_per_row_tile(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """The launch of most kernels: a block for each of the B * Tr row tiles."""
    return (Launch("attention", problem.row_tiles(tiling.Br), tiling.threads, tiling.shared),)


# A rung of the ladder: most launch a block for each row tile.
_rung = functools.partial(
    Kernel,
    launches=block_per_row_tile,
    macros=_macros,
    smallest=lambda problem: problem._replace(B=1, M=1, N=1),
    beside=lambda problem: (look(problem, rows=1),),
)
_strided_rung = functools.partial(_rung, macros=_strided_macros, strided=True)
_split_rung = functools.partial(_rung, macros=_split_macros, strided=True, splits=True, explicit=True)
_hopper_rung = functools.partial(_split_rung, needs=(9, 0), arch_only=True)

# ---- sequential and baseline: one algorithm on the same tiles


def _steps_of_each_tile_pair(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    """Five launches for each pair of tiles, one block a batch, with a thread for each score or for each row."""
    score, row = tiling.threads, tiling.Br
    steps = {"scores": score, "row_max": row, "minus_max_and_exp": score, "row_sum": row, "update": score}
    for tile in itertools.product(range(ceil_div(problem.M, tiling.Br)), range(ceil_div(problem.N, tiling.Bc))):
        for step, threads in steps.items():
            yield Launch(step, problem.B, threads, tile=tile)


def _block_per_batch(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    return (Launch("attention", problem.B, tiling.threads),)


def _maxima_and_sums(tiling: Tiling, problem: Problem) -> int:
    """Bytes of m and l of every row, in float."""
    return problem.B * problem.M * 2 * 4


def _baseline_workspace(tiling: Tiling, problem: Problem) -> int:
    """Bytes of m and l of every row, and of one tile's row maxima, row sums and scores in each batch, in float."""
    return _maxima_and_sums(tiling, problem) + problem.B * (2 * tiling.Br + tiling.Br * tiling.Bc) * 4


# ---- fused to o_in_registers: a thread has a row, or some lanes do; tiles fill static shared memory

SIZES = (128, 32), (128, 16), (64, 32), (64, 16), (32, 32), (32, 16), (32, 8), (32, 4)
TRIED = [(Br, Bc) for Br in (32, 64, 128, 256) for Bc in (4, 8, 16, 32, 64, 128)]  # by `flashcli bench --tiles`


def _that_fit(
    problem: Problem, sizes: Iterable[tuple[int, int]] = TRIED, Q: bool = True, lanes: int = 1
) -> Iterator[Tiling]:
    """The tilings of such Br and Bc whose K, V, S and, where it is one, tile of ``Q`` fit; ``lanes`` share a row."""
    padded = round_up(problem.d, 4 * lanes)
    for Br, Bc in sizes:
        floats = (Br * padded if Q else 0) + Bc * (2 * padded + Br)
        if 4 * floats <= STATIC_SHARED:
            yield Tiling(Br, Bc, Br * lanes)


def _copied_by_rows(problem: Problem) -> Iterator[Tiling]:
    """The tilings with a thread for each row of K and V, too, which copies it."""
    return (tiling for tiling in _that_fit(problem) if tiling.Bc <= tiling.threads)


def _fused(problem: Problem) -> Tiling:
    return next(_that_fit(problem, SIZES[SIZES.index((32, 32)) :]))


def _row_per_thread(problem: Problem) -> Tiling:
    return next(_that_fit(problem, SIZES))


# With a thread for each row; m and l are in global memory.
_row_rung = functools.partial(_rung, tiling=_row_per_thread, tilings=_copied_by_rows, workspace=_maxima_and_sums)


def _without_Q(problem: Problem) -> Iterator[Tiling]:
    return _that_fit(problem, Q=False)


def _q_in_registers(problem: Problem) -> Tiling:
    return next(_that_fit(problem, [(128, 64), *SIZES], Q=False))


def _refused_by_q_in_registers(problem: Problem) -> str:
    return "a thread's registers hold heads of up to 128 numbers" if problem.d > 128 else ""


def _lanes(problem: Problem) -> int:
    """The threads that share a row, so that each has at most 64 numbers of Q and of O in its registers."""
    return next(lanes for lanes in (1, 2, 4) if problem.d <= 64 * lanes)


def _o_in_registers(problem: Problem) -> Tiling:
    lanes = _lanes(problem)
    return next(_that_fit(problem, [(128 // lanes, Bc) for Bc in (64, 32, 16)], Q=False, lanes=lanes))


# ---- register_tiled


def _register_tiled(problem: Problem) -> Tiling:
    d = problem.d
    panel = 32 if d <= 32 else 64
    padded = round_up(d, panel)
    Br = 64 if d <= 64 else 32 if d <= 128 else 16
    Bc = 64 if d <= 32 and not problem.bias else 32
    return Tiling(Br, Bc, 64, 4 * (Br * padded + 2 * Bc * panel + Br * Bc))  # Q, two panels of K or V, P


# ---- kernels on split tiles: see cuda/split.cuh for their layout


def _padded(d: int, least: int = 32) -> int:
    return round_up(d, least if d <= 16 else 32 if d <= 128 else 64)


def _split_bytes(rows: int, columns: int, products: int) -> int:
    """Bytes of a split tile, fp16 hi with lo beside it: panels of 64 columns, 128 bytes a row; fp16 has hi alone."""
    return ceil_div(2 * columns if products == 3 else columns, 64) * rows * 128


def _tile_bytes(Bc: int, problem: Problem, least: int = 32) -> int:
    """Bytes of a split tile of K and of a split tile of V, Bc keys each."""
    D = _padded(problem.d, least)
    return _split_bytes(Bc, D, problem.products) + _split_bytes(D, Bc, problem.products)


def _split_workspace(tiling: Tiling, problem: Problem, least: int = 32) -> int:
    """Bytes of all split tiles of K and V, and of the exponents of their scales."""
    return problem.key_tiles(tiling.Bc) * (_tile_bytes(tiling.Bc, problem, least) + 2 * 16)


def _split_keys(tiling: Tiling, problem: Problem) -> Launch:
    """The launch of the pre-pass: a block splits a tile of K, or of V, into fp16 halves."""
    return Launch("prepare", 2 * problem.key_tiles(tiling.Bc), PREPARE_THREADS, once=True)


def _split_then_block_per_row_tile(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    return _split_keys(tiling, problem), *block_per_row_tile(tiling, problem)


# ---- mma


def _mma(problem: Problem) -> Tiling:
    D = _padded(problem.d)
    Br, Bc, threads = next(
        sizes
        for largest, sizes in {
            32: (64, 64, 128), 64: (128, 48, 128), 128: (64, 64, 128), 192: (32, 32, 64), 256: (32, 16, 64)
        }.items()
        if largest >= D
    )  # fmt: skip
    if problem.bias and D <= 128:  # which wants registers
        Bc = 32
    fragments = 2 * (D // 16) * threads * 16 if D > 128 else 0  # of Q: shorter heads keep them in registers
    macros = (("HALF_CORRECTIONS", 1),) if problem.halves_corrections else ()
    return Tiling(Br, Bc, threads, _tile_bytes(Bc, problem) + fragments, macros)


# ---- wgmma

ALIGNMENT = 1024  # bytes to spare, so that tiles start where the swizzle repeats
HOPPER_SHARED = 227 * 1024  # bytes of shared memory that a block can have
STATIC, SHORT_STATIC = 1024, 2048  # of which so many at most are wgmma's static ones, and wgmma_short's
LEAST_HEAD = 16  # numbers to which shorter heads are padded
LONG_BC, MOST_PANELS = 64, 12  # of heads of more than 128 numbers: keys of a tile, panels in flight
SPLITTERS = 256  # threads that split K and V of such heads, where there is no pre-pass


@functools.lru_cache(maxsize=8)  # to plan a call asks for it over and over
def _wgmma(problem: Problem) -> Tiling:
    d = problem.d
    if d > 128:
        return _wgmma_long(problem)
    Bc, stages = _whatever_length(problem)
    if problem.windowed or problem.sequences:  # keys are not cut
        return _wgmma_tiling(problem, 128, Bc, stages, pingpong=1)
    if d > 64 or problem.bias:
        return _shared_out(problem, Bc, stages)
    if problem.in_place and problem.batch_invariant:
        longest = longest_short(problem) if d % 4 == 0 else 0  # wgmma_short refuses rows that are not aligned
        Bc = _wgmma_short(problem).Bc if longest >= problem.N else Bc
        return _shared_out(problem, Bc, stages=2 if Bc * d > 4096 else 3)
    if _rounds(192, problem) * 192 < _rounds(128, problem) * 128:  # few row tiles: fewer, larger ones end sooner
        narrow = 64 if d > 32 else 96
        if not problem.in_place or _is_best(chunks.Sharing(192, False), narrow, problem):
            return _wgmma_tiling(problem, 192, narrow, stages=3)
    if problem.in_place:
        return _shared_out(problem, Bc, stages)
    if d > 32 and problem.precision == "fp16":  # the products are short: waiting for a turn at them is not worth it
        return _wgmma_tiling(problem, 128, Bc, stages=3)
    return _wgmma_tiling(problem, 128, Bc, stages, pingpong=1)


def _whatever_length(problem: Problem) -> tuple[int, int]:
    """The number of keys of a tile, and of tiles in flight, that suit heads of up to 128 numbers, however many keys."""
    d = problem.d
    if d > 64:
        return (32 if d > 96 and problem.bias else 64), 2
    if problem.bias:
        return 64, 3
    return 128, 2 if d > 32 else 3


def _shared_out(problem: Problem, Bc: int, stages: int) -> Tiling:
    """wgmma's tiling with the row tiles and chunks that `chunks.best` expects to be fastest; for files, 128 rows."""
    if not problem.in_place:
        return _wgmma_tiling(problem, 128, Bc, stages, pingpong=1)
    sharing = chunks.best(problem, Bc)
    if sharing.paired:
        return _with_chunks(_paired_tiling(problem, Bc), problem, sharing)
    return _with_chunks(_wgmma_tiling(problem, sharing.Br, Bc, stages, int(sharing.Br > 64)), problem, sharing)


def _paired_tiling(problem: Problem, Bc: int) -> Tiling:
    """wgmma's tiling for two warpgroups that share 64 rows: two tiles of K, two or three of V (paired.cuh)."""
    D, Br, stages = _padded(problem.d, LEAST_HEAD), 64, 3 if problem.d <= 96 else 2
    K, V = _split_bytes(Bc, D, problem.products), _split_bytes(D, Bc, problem.products)
    shared = _beside_tiles(problem, Br) + 2 * K + stages * V + _slot_bytes(problem)
    return Tiling(Br, Bc, 3 * 128, shared, (("STAGES", stages), ("PINGPONG", 0)))


def _with_chunks(tiling: Tiling, problem: Problem, sharing: chunks.Sharing) -> Tiling:
    """A tiling of wgmma, with the shared memory and macros for chunks of keys where keys are cut."""
    if chunks.chunks(problem, tiling.Bc) == 1:
        return tiling
    cluster = chunks.cluster(problem, tiling.Bc, sharing)
    with_slots = tiling.shared + tiling.Br // 64 * _slot_bytes(problem)
    way = chunks.FOLD_SHARED if with_slots <= HOPPER_SHARED - STATIC else chunks.FOLD
    if sharing.spread:
        way = chunks.MEET if cluster > 1 else chunks.SPREAD
    shared = with_slots if way in (chunks.FOLD_SHARED, chunks.MEET) else tiling.shared
    return tiling._replace(shared=shared, macros=(*tiling.macros, ("SHARING", way), ("CLUSTER", cluster)))


def _is_best(sharing: chunks.Sharing, Bc: int, problem: Problem) -> bool:
    """Whether tiles of Bc keys, shared out so, are expected to be faster than the best with tiles of 128 keys."""
    other = chunks.microseconds(problem, 128, chunks.best(problem, 128))
    return chunks.microseconds(problem, Bc, sharing) < other


def _rounds(Br: int, problem: Problem) -> int:
    """The number of row tiles that the busiest multiprocessor gets."""
    return ceil_div(problem.B * ceil_div(problem.M, Br), problem.sms)


def _beside_tiles(problem: Problem, Br: int) -> int:
    """Bytes of shared memory for Q, and for the alignment of the tiles of K and V."""
    return Br // 64 * _split_bytes(64, _padded(problem.d, LEAST_HEAD), problem.products) + ALIGNMENT


def _wgmma_tiling(problem: Problem, Br: int, Bc: int, stages: int, pingpong: int = 0, stage: int = 0) -> Tiling:
    """wgmma's tiling, ``stages`` deep; a ``stage`` is so many bytes of K and V, by default a tile of each."""
    threads = 128 + 2 * Br  # a warpgroup that copies, and one for each 64 rows
    shared = _beside_tiles(problem, Br) + stages * (stage or _tile_bytes(Bc, problem, LEAST_HEAD))
    return Tiling(Br, Bc, threads, shared, (("STAGES", stages), ("PINGPONG", pingpong)))


def _wgmma_long(problem: Problem) -> Tiling:
    """wgmma's tiling for d > 128: panels of 64 rows and 64 columns of K and V, as many as fit beside Q (long.cuh)."""
    panel = _split_bytes(64, 64, problem.products)
    one = _wgmma_tiling(problem, 64, LONG_BC, 2 * (_padded(problem.d) // 64), stage=panel)  # a tile of K and one of V
    if (blocks := chunks.joined(problem, LONG_BC)) > 1:
        return one._replace(macros=(*one.macros, ("SHARING", chunks.JOIN), ("CLUSTER", blocks)))
    if chunks.splits(problem, LONG_BC):
        return _wgmma_splitting(problem)
    sharing = chunks.best(problem, LONG_BC)
    stages = min(MOST_PANELS, (HOPPER_SHARED - STATIC - _beside_tiles(problem, sharing.Br)) // panel)
    tiling = _wgmma_tiling(problem, sharing.Br, LONG_BC, stages, int(sharing.Br > 64), panel)
    return _with_chunks(tiling, problem, sharing)


def _wgmma_splitting(problem: Problem) -> Tiling:
    """wgmma's tiling where blocks split K and V: 64 rows if all blocks run at once, else up to 128 (splitters.cuh)."""
    row_tiles = problem.B * ceil_div(problem.M, 64)
    Br = 64 if problem.M <= 64 or row_tiles <= problem.sms else 128
    tile = _split_bytes(LONG_BC, _padded(problem.d), problem.products)  # of K as of V, and of 64 rows of Q
    key_tiles = ceil_div(problem.N, LONG_BC)
    macros = ("STAGES", 1), ("PINGPONG", 0), ("SPLITTERS", SPLITTERS), ("KEY_TILES", key_tiles)
    return Tiling(Br, LONG_BC, SPLITTERS + 2 * Br, 3 * tile + ALIGNMENT, macros)


def _block_per_multiprocessor(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """The launch of a block a multiprocessor, each for many row tiles; fewer blocks where there are fewer tiles."""
    tiles = problem.B * ceil_div(problem.M, tiling.Br)
    return (Launch("attention", min(tiles, problem.sms), tiling.threads, tiling.shared),)


def _slot_bytes(problem: Problem) -> int:
    """Bytes of a chunk's partial answer for 64 rows: O, and for each of 128 threads m, l and O's units of two rows."""
    columns = round_up(problem.d, 8) if problem.d <= 128 else _padded(problem.d)
    return 64 * columns * 4 + 128 * 2 * 16


def way_of(tiling: Tiling) -> int:
    """The way in which blocks share the keys of a row tile, `chunks.WHOLE` (not at all) to `chunks.JOIN`."""
    return dict(tiling.macros).get("SHARING", chunks.WHOLE)


def splits(tiling: Tiling) -> bool:
    """Whether blocks split K and V themselves, so that there is no pre-pass."""
    return "SPLITTERS" in dict(tiling.macros)


def is_paired(tiling: Tiling) -> bool:
    """Whether two warpgroups share each 64 rows, so that a block has more threads than its rows need."""
    return tiling.threads > 128 + 2 * tiling.Br and not splits(tiling)


def _wgmma_launches(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """wgmma's launches: the pre-pass, and the products; each may begin before what is before it has ended.

    Not causal, with a window, or without a pre-pass: one block a multiprocessor, looping over row tiles or chunks.
    Causal, or packed: one block a row tile or chunk, balanced by the hardware. So do clusters, and pairs of warpgroups
    that share 64 rows.
    """
    products = _wgmma_products(tiling, problem)
    if splits(tiling):
        return (products,)
    return tuple(launch._replace(early=True) for launch in (_split_keys(tiling, problem), products))


def _wgmma_products(tiling: Tiling, problem: Problem) -> Launch:
    way = way_of(tiling)
    unequal = problem.causal and not problem.windowed and not splits(tiling)
    single = unequal or bool(problem.sequences) or is_paired(tiling)
    if way not in (chunks.SPREAD, chunks.MEET, chunks.JOIN):
        [launch] = (block_per_row_tile if single else _block_per_multiprocessor)(tiling, problem)
        return launch
    each = ceil_div(problem.N, tiling.Bc) if way == chunks.JOIN else chunks.chunks(problem, tiling.Bc)
    pieces = problem.B * ceil_div(problem.M, tiling.Br) * each
    grid = pieces if single or way in (chunks.MEET, chunks.JOIN) else min(pieces, problem.sms)
    return Launch("attention", grid, tiling.threads, tiling.shared)


def chunk_tiles(tiling: Tiling, problem: Problem) -> int:
    """The number of tiles of keys in a chunk; 0 where the tiling does not cut keys."""
    way = way_of(tiling)
    return 0 if way == chunks.WHOLE else 1 if way == chunks.JOIN else chunks.chunk_tiles(problem, tiling.Bc)


def _wgmma_workspace(tiling: Tiling, problem: Problem) -> int:
    return 0 if splits(tiling) else _split_workspace(tiling, problem, LEAST_HEAD) + wgmma_partial(tiling, problem)


def wgmma_partial(tiling: Tiling, problem: Problem) -> int:
    """Bytes of scratch for chunks of keys: their partial answers, and a counter of those done (chunks.cuh)."""
    row_tiles, spread = problem.B * ceil_div(problem.M, tiling.Br), way_of(tiling) == chunks.SPREAD
    if not spread and way_of(tiling) != chunks.FOLD:
        return 0
    launch = _wgmma_products(tiling, problem)
    warpgroups, alignment = tiling.Br // 64, 16
    slots = chunks.chunks(problem, tiling.Bc) if spread else 1  # of a set, for a warpgroup
    sets = launch.grid if not spread else row_tiles if row_tiles <= launch.grid else 2 * launch.grid
    return 4 * row_tiles * warpgroups + alignment + sets * slots * warpgroups * _slot_bytes(problem)


# ---- wgmma_short

MOST_SHORT_HEAD = 128  # numbers, to which heads of more than 64 are padded


def longest_short(problem: Problem) -> int:
    """The largest N for `wgmma_short`: a head's K and V stay in shared memory; longer ones are split over and over."""
    tiling = _wgmma_short(problem)
    return tiling.Bc * dict(tiling.macros)["STAGES"]


def _short_Bc(problem: Problem) -> int:
    """wgmma_short's Bc: 128 where registers suffice for such a tile of S and it is filled, else 64.

    Registers do not suffice with long heads, a mask, a bias, or heads of 4 and 8 (there ptxas finds too few). Nor do
    they on arrays whose rows lie apart; so all arrays get 64, lest the layout change a byte.
    """
    masked = problem.causal or bool(problem.bias)
    return 128 if 8 < problem.d <= 32 and problem.N > 64 and not (masked or problem.in_place) else 64


def _mask_in_sums(problem: Problem) -> bool:
    """Whether sums of scores begin with -inf where a key is taken away: by a mask of keys with no bias beside it."""
    return problem.mask_of_keys and problem.bias == "bool"


def _by_score(problem: Problem) -> bool:
    """Whether a bias or a mask changes scores one by one."""
    return bool(problem.bias) and not _mask_in_sums(problem)


@functools.lru_cache(maxsize=8)
def _wgmma_short(problem: Problem) -> Tiling:
    """wgmma_short's tiling: as many slots for split tiles of K and V as fit shared memory, and Q of the next rows.

    One warpgroup splits the tiles, of long heads two; the others multiply. Short heads on arrays leave registers for
    one more warpgroup; those of up to `LEAST_HEAD` numbers for two, which pay without the causal mask where blocks
    have several heads of several row tiles.
    """
    D = _padded(problem.d, LEAST_HEAD if problem.in_place else 32) if problem.d <= 64 else MOST_SHORT_HEAD
    Bc = _short_Bc(problem)
    small = problem.in_place and D <= 32 and not _by_score(problem) and problem.precision == "fp32"
    many = problem.sms < problem.B and problem.M > 64 and not problem.causal
    warpgroups = 4 + small + (small and many and D <= LEAST_HEAD)
    sizes = _split_bytes(Bc, D, problem.products), _split_bytes(D, Bc, problem.products)
    slot = max(*sizes, round_up(Bc * problem.d * 4, 1024))
    stage = 2 * slot + (8 * Bc if _mask_in_sums(problem) else 0)  # two numbers for each key that a mask may take away
    room, Q = HOPPER_SHARED - SHORT_STATIC - ALIGNMENT, (warpgroups - 1) * 64 * round_up(problem.d, 16) * 4
    ahead = D <= 64 and (room - Q) // stage > ceil_div(problem.N, Bc)
    stages = (room - Q * ahead) // stage
    macros = ("STAGES", stages), ("Q_AHEAD", int(ahead))
    return Tiling(64, Bc, 128 * warpgroups, stages * stage + Q * ahead + ALIGNMENT, macros)


def _refused_by_wgmma(problem: Problem) -> str:
    long = problem.d > 128 and (problem.windowed or problem.sequences)
    return "with a window or packed sequences it takes heads of up to 128 numbers" if long else ""


def _refused_by_wgmma_short(problem: Problem) -> str:
    if problem.windowed or problem.sequences:
        return "it takes neither windows nor packed sequences"
    if problem.d > MOST_SHORT_HEAD or problem.d % 4:
        return f"it takes heads of 4, 8, .. {MOST_SHORT_HEAD} numbers"
    if _by_score(problem) and problem.d > 32:  # registers end
        return "with a bias it takes heads of up to 32 numbers"
    if problem.dtype != "float32":
        return "it splits float32 alone"
    return "" if problem.aligned else "it takes rows that start on 16 bytes"


# ---- mma_short

MOST_KEYS, MOST_BIASED, MOST_ROWS = 128, 112, 128  # keys whose scores a thread has in registers; rows of Q in a block


def _mma_short(problem: Problem) -> Tiling:
    """mma_short's tiling: all keys in one tile, and a warp for each 16 queries or 16 keys, whichever are more."""
    keys, rows = round_up(problem.N, 16), ceil_div(problem.M, ceil_div(problem.M, MOST_ROWS))
    warps = ceil_div(max(min(keys, MOST_ROWS), rows), 16)
    return Tiling(16 * warps, keys, 32 * warps, 2 * _split_bytes(keys, round_up(problem.d, 16), problem.products))


def _refused_by_mma_short(problem: Problem) -> str:
    most = MOST_BIASED if problem.bias else MOST_KEYS
    if most < problem.N or problem.d > 64:
        return f"it takes up to {most} keys of up to 64 numbers"
    return "it takes no packed sequences" if problem.sequences else ""


KERNELS = ladder(
    _rung(
        "attention/00_sequential.c", "plain C on one CPU core: the zero point", lambda problem: Tiling(32, 32, 1),
        on_host=True,
    ),
    _rung(
        "attention/01_baseline.cu",
        "five kernels for each pair of tiles, launched from the host; everything in global memory",
        lambda problem: Tiling(32, 32, 32 * 32), launches=_steps_of_each_tile_pair, workspace=_baseline_workspace,
    ),
    _rung(
        "attention/02_fused.cu",
        "one kernel, a block of 32 threads a batch, a thread a row; Q, K, V and S in shared memory",
        _fused, launches=_block_per_batch, tilings=_copied_by_rows, workspace=_maxima_and_sums,
    ),
    _row_rung(
        "attention/03_max_shared.cu", "tiles as large as 48 KB of shared memory allow, and so 128 threads",
        launches=_block_per_batch,
    ),
    _row_rung("attention/04_split_q.cu", "a block for each tile of Q, not for each batch"),
    _row_rung("attention/05_float4.cu", "four numbers of Q, K and V to an instruction"),
    _row_rung(
        "attention/06_restructured.cu", "Q loaded once, factors computed once a tile, approximate exponentials"
    ),
    _row_rung(
        "attention/07_coalesced.cu", "neighbouring threads read neighbouring addresses of Q, K and V",
        tilings=_that_fit,
    ),
    _row_rung(
        "attention/08_ml_in_registers.cu", "m and l in registers of the thread that owns the row",
        tilings=_that_fit, workspace=zero,
    ),
    _row_rung(
        "attention/09_no_bank_conflicts.cu",
        "S by keys, Q by columns: the threads of a warp do not meet in a bank of shared memory",
        tilings=_that_fit, workspace=zero,
    ),
    _rung(
        "attention/10_q_in_registers.cu",
        "Q in registers, larger tiles of K and V in the room that it leaves (the report's last)",
        _q_in_registers, tilings=_without_Q, refuses=_refused_by_q_in_registers,
    ),
    _rung(
        "attention/11_deferred.cu", "O divided by l at the end, one factor a tile, 2^x for exp",
        _q_in_registers, tilings=_without_Q, refuses=_refused_by_q_in_registers,
    ),
    _rung(
        "attention/12_o_in_registers.cu",
        "O in registers, too: what is left is the way from shared memory to FFMA",
        _o_in_registers, tilings=lambda problem: _that_fit(problem, Q=False, lanes=_lanes(problem)),
    ),
    _strided_rung(
        "attention/13_register_tiled.cu",
        "a register tile of S and of O a thread, so that shared memory feeds FFMA at full rate", _register_tiled,
    ),
    _split_rung(
        "attention/14_mma.cu", "tensor cores at fp32 accuracy: three fp16 products for one, mma.sync",
        _mma, launches=_split_then_block_per_row_tile, workspace=_split_workspace, needs=(8, 0),
    ),
    _hopper_rung(
        "attention/15_wgmma.cu",
        "tensor cores by Hopper's wgmma: warps that copy, warps that multiply, everything overlapped",
        _wgmma, launches=_wgmma_launches, workspace=_wgmma_workspace, refuses=_refused_by_wgmma,
    ),
    _hopper_rung(
        "attention/16_wgmma_short.cu",
        "for short sequences: K and V split in shared memory, without a pre-pass (heads of 4, 8, .. 128)",
        _wgmma_short, launches=_block_per_multiprocessor, refuses=_refused_by_wgmma_short,
    ),
    _split_rung(
        "attention/17_mma_short.cu",
        "for up to 128 keys: each warp for itself on a head's split keys (heads of up to 64 numbers)",
        _mma_short, refuses=_refused_by_mma_short, needs=(8, 0),
    ),
)  # fmt: skip
