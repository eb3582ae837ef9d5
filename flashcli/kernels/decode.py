"""The ladder of kernels for paged decode: their builds, their launches, their scratch, the argument they all take.

One kernel is one file in ``cuda/decode/`` and one entry in `KERNELS`. A kernel is compiled for what `Problem` names;
the rest comes with the argument.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashcli.asked.shape import ceil_div, round_up
from flashcli.compiler import compiler
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels.types import Launch

if TYPE_CHECKING:
    from flashcli.asked.decode import Decode

ITEM_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1}  # bytes
TYPE_NUMBERS = {"float32": 0, "float16": 1, "bfloat16": 2, "float8_e4m3fn": 3, "float8_e5m2": 4}  # see decode.cuh
THREADS = 128
PARTITION = 512  # tokens, as in 02_paged_v2.cu and 03_grouped.cu
LAUNCH_COUNTERS = 4  # at the beginning of the workspace, see pieces.cuh
MERGED_BY_A_WARP = 8  # partial answers of a row, see merge.cuh
MERGED_ROWS = 4  # that a block merges, where a warp is enough for each
MOST_OF_A_PIECE = 1024  # tokens
MAX_SHARED = 227 * 1024  # bytes of shared memory that a block can have on Hopper
MULTIPROCESSORS = 132  # of an H100 or H200; on other GPUs answers are the same, and may come later
HAS_CLUSTERS = (9, 0)  # the first compute capability that has
MOST_IN_A_CLUSTER = 8  # blocks, on any GPU; as many as a warp merges
MAX_ROWS = 8  # query rows that a block takes together
PIECE_AFTER_PIECE, BY_LENGTHS, BY_NUMBER, AHEAD_OF_LENGTH = range(4)  # how a block finds its pieces, see pieces.cuh
MOST_BY_NUMBER = 16  # pieces of a sequence, where blocks know their own by number
MOST_MISSING = 6144  # of these blocks, that may have none

POINTERS = (
    "query", "key_cache", "value_cache", "block_tables", "seq_lens", "alibi_slopes", "k_scale", "v_scale", "out", "lse",
    "workspace",
)  # fmt: skip
STRIDES = (
    "query_sequence", "query_token", "table_row", "key_page", "key_head", "key_slot", "key_chunk", "value_page",
    "value_head", "value_slot",
)  # fmt: skip
NUMBERS = (
    "sequences", "tokens", "heads", "kv_heads", "group", "pages", "table_width", "window", "sparse_stride",
    "sparse_block", "sparse_local", "sparse_slide", "tp_rank",
)  # fmt: skip


class Argument(ctypes.Structure):
    """``struct Decode`` of cuda/decode/decode.cuh; a test has the compiler hold the two together."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in STRIDES),
        *((name, ctypes.c_int) for name in NUMBERS),
        ("scale", ctypes.c_float),
    )


class Sizes(NamedTuple):
    """What the number of blocks and the scratch depend on: known without a look at lengths or pages."""

    sequences: int
    tokens: int
    heads: int
    kv_heads: int
    table_width: int
    page: int

    @property
    def rows(self) -> int:
        """Query rows that share a head of the cache."""
        return self.tokens * self.heads // self.kv_heads

    @property
    def places(self) -> int:
        """Rows of all sequences and heads: answers to be written."""
        return self.sequences * self.tokens * self.heads

    @property
    def room(self) -> int:
        """The longest sequence that the tables have room for."""
        return self.table_width * self.page


class Gpu(NamedTuple):
    """What launches depend on of a GPU."""

    multiprocessors: int
    capability: tuple[int, int]


class Tuning(NamedTuple):
    """What may be chosen freely, within what a GPU has room for; ``measure.decode --variant`` tries others."""

    threads: int = THREADS  # in a block
    piece: int = 2**18  # bytes of keys and values in a piece
    pieces: int = 48  # what a long sequence is cut into at most
    blocks: int = 0  # to a multiprocessor; 0: as many as the kernel is fastest with
    finds: int = PIECE_AFTER_PIECE  # of tensor and read; all others are ways for a block to have one piece
    under_way: int = 1  # of tensor, tiles of a warp at a time, where a block has one piece
    cluster: int = 1  # blocks that merge a sequence's pieces, no fewer than it may have; 1: a launch of its own does

    def piece_after_piece(self) -> Tuning:
        """The same pieces, several to a block, which looks for the next one while it computes."""
        return self._replace(blocks=0, finds=PIECE_AFTER_PIECE, under_way=1, cluster=1)

    def a_block_a_piece(self) -> Tuning:
        """The same pieces, each by a block of its own that knows it by its number, in batches of any size."""
        return self._replace(blocks=0, finds=BY_NUMBER, under_way=1, cluster=1)


class Problem(NamedTuple):
    """What a kernel is compiled for."""

    d: int
    page: int
    query_type: str
    cache_type: str
    transposed: bool  # vLLM's layout of values
    rows: int  # query rows that a block takes together
    tuning: Tuning = Tuning()


@dataclass(frozen=True)
class Kernel:
    """One rung. ``launches(sizes, problem, gpu)`` are in order; ``workspace(sizes, problem)`` is its scratch in bytes.

    The first ``counters(sizes, problem)`` of those are to be zero before a launch, which leaves zeros again; nothing
    else of it is read before it is written. Two launches that may run at a time need a workspace each.
    ``rows(rows, d)`` says how many of a cache head's rows a block takes together, ``tuning(sizes, problem)`` what is
    fastest for these sizes, and ``macros(problem)`` are those beyond the ones that all have. ``refuses(problem)`` says
    why it cannot be built for a problem; empty if it can.
    """

    name: str
    file: str
    summary: str
    launches: Callable[[Sizes, Problem, Gpu], tuple[Launch, ...]]
    workspace: Callable[[Sizes, Problem], int]
    rows: Callable[[int, int], int]
    macros: Callable[[Problem], dict[str, int]] = lambda problem: {}
    refuses: Callable[[Problem], str] = lambda problem: ""
    counters: Callable[[Sizes, Problem], int] = lambda sizes, problem: 0
    tuning: Callable[[Sizes, Problem], Tuning] = lambda sizes, problem: Tuning()
    on_host: bool = False


@dataclass(frozen=True)
class Build:
    """A kernel compiled for a problem."""

    kernel: Kernel
    problem: Problem

    def macros(self) -> dict[str, int]:
        asked = self.problem
        return {
            "HEAD_DIM": asked.d, "PAGE": asked.page, "QUERY_TYPE": TYPE_NUMBERS[asked.query_type],
            "CACHE_TYPE": TYPE_NUMBERS[asked.cache_type], "TRANSPOSED": int(asked.transposed), "ROWS": asked.rows,
            "THREADS": asked.tuning.threads, **self.kernel.macros(asked),
        }  # fmt: skip

    def check(self, capability: tuple[int, int], gpu: str, hint: str) -> None:
        """Raise BackendUnavailable if a GPU of this compute capability does not run it."""
        check_type(self.problem.cache_type, capability, gpu, hint)

    def functions(self) -> tuple[Launch, ...]:
        """Every function of the kernel's file, launched as for one sequence of more than a piece."""
        sizes = Sizes(1, 1, 1, 1, ceil_div(2 * MOST_OF_A_PIECE, self.problem.page), self.problem.page)
        problem = self.problem._replace(tuning=self.problem.tuning._replace(cluster=1))  # then another launch merges
        return self.kernel.launches(sizes, problem, Gpu(1, HAS_CLUSTERS))


def check_type(cache_type: str, capability: tuple[int, int], gpu: str, hint: str) -> None:
    """Raise BackendUnavailable for a type that a GPU lacks: fp8 is converted by instructions that came with Ada."""
    needed = (8, 9) if ITEM_SIZES[cache_type] == 1 else (6, 0)
    if capability < needed:
        has, needs = compiler.architecture(capability), compiler.architecture(needed)
        raise BackendUnavailable(f"{cache_type} needs {needs} or later, {gpu} is {has}.", hint)


def partial_bytes(problem: Problem) -> int:
    """Of one partial answer: m, l and O in float, O on a multiple of 16 bytes."""
    return 4 * (problem.d + 4)


# ---- V1


def _v1(sizes: Sizes, problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    shared = 5 * sizes.room  # a score, and whether the token is seen
    if shared > MAX_SHARED - 2048:
        raise UsageError(
            f"kernel paged_v1 keeps the scores of a sequence in shared memory: {sizes.room} tokens are too many.",
            "choose another kernel.",
        )
    return (Launch("paged_v1", sizes.places, problem.tuning.threads, shared),)


# ---- V2, and all heads of a group together


def _partitions(sizes: Sizes) -> int:
    return max(1, ceil_div(sizes.room, PARTITION))


def _v2(sizes: Sizes, problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    return _partitioned("paged_v2", sizes, problem)


def _grouped(sizes: Sizes, problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    return _partitioned("grouped", sizes, problem)


def _partitioned(function: str, sizes: Sizes, problem: Problem) -> tuple[Launch, ...]:
    tiles = ceil_div(sizes.rows, problem.rows)
    blocks = sizes.sequences * sizes.kv_heads * tiles * _partitions(sizes)
    return Launch(function, blocks, problem.tuning.threads), Launch("merge", sizes.places, problem.d // 4)


def _partials_of_partitions(sizes: Sizes, problem: Problem) -> int:
    return sizes.places * _partitions(sizes) * partial_bytes(problem)


# ---- pieces by the actual length


def _split(sizes: Sizes, problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    blocks = _over_pieces(sizes, problem, (problem.tuning.blocks or 4) * gpu.multiprocessors)
    return (Launch("split", blocks, problem.tuning.threads),)


def _over_pieces(sizes: Sizes, problem: Problem, at_once: int) -> int:
    """How many blocks: one for each piece, or, if they take piece after piece, no more than the GPU holds at a time."""
    if problem.tuning.finds == PIECE_AFTER_PIECE:
        return min(_all_pieces(sizes, problem), at_once)
    return _uncut(sizes, problem) * max(problem.tuning.cluster, _most_pieces(sizes, problem))


def _all_pieces(sizes: Sizes, problem: Problem) -> int:
    """How many there can be, of all sequences."""
    return _uncut(sizes, problem) * _most_pieces(sizes, problem)


def _uncut(sizes: Sizes, problem: Problem) -> int:
    """How many pieces there are if no sequence is cut: one for each head of the cache and tile of rows."""
    return sizes.sequences * sizes.kv_heads * ceil_div(sizes.rows, problem.rows)


def _piece(problem: Problem) -> int:
    """Tokens of a piece, a power of two."""
    tokens = problem.tuning.piece // (2 * problem.d * _item_size(problem))
    return 1 << min(max(tokens, 64), MOST_OF_A_PIECE).bit_length() - 1


def _whole(problem: Problem) -> int:
    """The most tokens that are not cut."""
    return max(_piece(problem), _piece(problem._replace(tuning=Tuning())))


def _most_pieces(sizes: Sizes, problem: Problem) -> int:
    if sizes.room <= _whole(problem):
        return 1
    return max(1, min(problem.tuning.pieces, ceil_div(sizes.room, _piece(problem))))


def _how_to_find(sizes: Sizes, problem: Problem, at_once: int) -> int:
    """How blocks find pieces, of which the GPU computes so many at once: each its own, unless many may be missing.

    A block whose piece is missing takes a nanosecond of the GPU, a short piece some ten (docs/tuning/decode.md).
    """
    pieces = _all_pieces(sizes, problem)
    if pieces <= at_once:
        return BY_LENGTHS
    few_missing = pieces - _uncut(sizes, problem) <= MOST_MISSING and _most_pieces(sizes, problem) <= MOST_BY_NUMBER
    return BY_NUMBER if few_missing else PIECE_AFTER_PIECE


def _counters(sizes: Sizes, problem: Problem) -> int:
    return 4 * (LAUNCH_COUNTERS + round_up(_uncut(sizes, problem), 4))


def _counters_and_partials(sizes: Sizes, problem: Problem) -> int:
    return _counters(sizes, problem) + _partials(sizes, problem)


def _partials(sizes: Sizes, problem: Problem) -> int:
    return sizes.places * _most_pieces(sizes, problem) * partial_bytes(problem)


def _one(rows: int, d: int) -> int:
    return 1


def _some(rows: int, d: int) -> int:
    """A number that few builds are needed for: 1, 2, 4 or 8."""
    return min(MAX_ROWS, _power_of_two(rows))


def _power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def _piece_macros(problem: Problem) -> dict[str, int]:
    return {"PIECE": _piece(problem), "WHOLE": _whole(problem), "MAX_PIECES": problem.tuning.pieces}


# ---- tensor cores


def _tensor_rows(rows: int, d: int) -> int:
    """Eight, or sixteen where there are more and registers hold them."""
    return 8 if rows <= 8 or d > 128 else 16


def _tensor_blocks(problem: Problem) -> int:
    """How many a multiprocessor holds: as registers allow, but piece after piece long rows are faster with three."""
    if problem.tuning.blocks or problem.d > 128:
        return problem.tuning.blocks or 2
    piece_after_piece = problem.tuning.finds == PIECE_AFTER_PIECE
    if problem.rows == 16 and problem.d > 64:
        return 2 if piece_after_piece else 3
    return 3 if piece_after_piece and problem.d * _item_size(problem) > 128 else 4


def _tensor_tuning(sizes: Sizes, problem: Problem) -> Tuning:
    """A block a piece, unless many may be missing; where pieces are few, blocks ask for theirs ahead of the length.

    Clusters of blocks, two on a multiprocessor, are slower than another launch, by half (docs/tuning/decode.md).
    Pieces are smaller where few rows share a head of the cache, so that partial answers are little beside it. They
    must not depend on the number of sequences.
    """
    row = problem.d * _item_size(problem)
    cut = Tuning(piece=2**17) if sizes.rows <= 2 and row >= 256 else Tuning()
    problem = problem._replace(tuning=cut)
    pieces = _all_pieces(sizes, problem)
    # All run at once, two blocks to a multiprocessor, and a tile of each warp is less than the memory's rate needs.
    few = pieces * max(row, 128) <= 2 * MULTIPROCESSORS * 128
    if few and row <= 256:
        cluster = _power_of_two(_most_pieces(sizes, problem))  # few builds
        fits = cluster <= MOST_IN_A_CLUSTER and _uncut(sizes, problem) * cluster <= MULTIPROCESSORS
        return cut._replace(blocks=2, finds=AHEAD_OF_LENGTH, under_way=2, cluster=cluster if fits else 1)
    at_once = _tensor_blocks(problem._replace(tuning=cut._replace(finds=BY_LENGTHS))) * MULTIPROCESSORS
    finds = _how_to_find(sizes, problem, at_once)
    if finds == PIECE_AFTER_PIECE or (finds == BY_NUMBER and problem.d > 128):
        return cut
    two = problem.rows == 8 and problem.d <= 64 and (finds == BY_NUMBER or row <= 64)
    return cut._replace(finds=finds, under_way=2 if two else 1)


def _tensor_macros(problem: Problem) -> dict[str, int]:
    tuning = problem.tuning
    own = {"BLOCKS": _tensor_blocks(problem), "FINDS": tuning.finds, "UNDER_WAY": tuning.under_way}
    return _piece_macros(problem) | own | {"CLUSTER": tuning.cluster, "MERGED_ROWS": MERGED_ROWS}


def _of_warps(problem: Problem) -> int:
    """Bytes of shared memory for the warps' O."""
    return problem.tuning.threads // 32 * problem.rows * 4 * (problem.d + 4)


def _tensor(sizes: Sizes, problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    """What has to be there first, and what has to come last, only where it has."""
    tuning, most = problem.tuning, _most_pieces(sizes, problem)
    if tuning.cluster > 1 and (tuning.finds != AHEAD_OF_LENGTH or tuning.cluster < most):
        told = f"clusters of {tuning.cluster} blocks do not merge {most} pieces, finds={tuning.finds}."
        raise UsageError(told, f"choose finds={AHEAD_OF_LENGTH} and as many blocks as pieces, or cluster=1.")
    blocks = _over_pieces(sizes, problem, _tensor_blocks(problem) * gpu.multiprocessors)
    drawn = tuning.finds == PIECE_AFTER_PIECE
    over = Launch("tensor", blocks, tuning.threads, _of_warps(problem), early=drawn)
    begin = (Launch("begin", 1, 32),) if drawn else ()
    merged = most == 1 or (tuning.cluster > 1 and gpu.capability >= HAS_CLUSTERS)
    return *begin, over, *(() if merged else (_merge(sizes, problem),))


def _merge(sizes: Sizes, problem: Problem) -> Launch:
    """A block has several rows, or as many warps as one row needs."""
    warps = ceil_div(_most_pieces(sizes, problem), MERGED_BY_A_WARP)
    if warps == 1:
        return Launch("merge", ceil_div(sizes.places, MERGED_ROWS), 32 * MERGED_ROWS, early=True)
    return Launch("merge", sizes.places, 32 * warps, warps * partial_bytes(problem), early=True)


def _tensor_refuses(problem: Problem) -> str:
    size = _item_size(problem)
    if problem.query_type == "float32":
        return "tensor cores have no float32"
    if problem.d * size % 16:
        return "rows of the cache are no multiple of 16 bytes"
    if problem.transposed and problem.page < 4:
        return "pages of less than four tokens"
    return ""


def _draws_and_partials(sizes: Sizes, problem: Problem) -> int:
    return 4 * LAUNCH_COUNTERS + _partials(sizes, problem)


def _item_size(problem: Problem) -> int:
    """Bytes of a number in the cache."""
    return ITEM_SIZES[problem.cache_type]


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "paged_v1", "decode/01_paged_v1.cu",
            "vLLM's V1: one block a sequence and head, with all scores in shared memory",
            _v1, lambda sizes, problem: 0, _one,
        ),
        Kernel(
            "paged_v2", "decode/02_paged_v2.cu", "vLLM's V2: partitions of 512 tokens, and a reduction",
            _v2, _partials_of_partitions, _one,
        ),
        Kernel(
            "grouped", "decode/03_grouped.cu", "all heads of a group together: keys and values are read once",
            _grouped, _partials_of_partitions, _some,
        ),
        Kernel(
            "split", "decode/04_split.cu", "pieces by the actual lengths, in one launch",
            _split, _counters_and_partials, _some, _piece_macros, counters=_counters,
        ),
        Kernel(
            "tensor", "decode/05_tensor.cu", "tensor cores, fed straight from memory",
            _tensor, _draws_and_partials, _tensor_rows, _tensor_macros, _tensor_refuses, tuning=_tensor_tuning,
        ),
    )
}  # fmt: skip


def _read_tuning(sizes: Sizes, problem: Problem) -> Tuning:
    return Tuning(finds=_how_to_find(sizes, problem, _readers(problem) * MULTIPROCESSORS))


def _reading_refuses(problem: Problem) -> str:
    """It reads as tensor cores' lanes do, but computes nothing."""
    return _tensor_refuses(problem._replace(query_type="float16"))


def _readers(problem: Problem) -> int:
    return problem.tuning.blocks or 4


def _read(sizes: Sizes, problem: Problem, gpu: Gpu) -> tuple[Launch, ...]:
    blocks = _over_pieces(sizes, problem, _readers(problem) * gpu.multiprocessors)
    return (Launch("read", blocks, problem.tuning.threads),)


def _all(rows: int, d: int) -> int:
    """As many rows as there are, or more: each key and value is read once."""
    return _power_of_two(rows)


# What no kernel can be faster than: it reads the same bytes and computes nothing.
CEILING = Kernel(
    "read", "decode/00_read.cu", "the same keys and values read, and nothing computed",
    _read, lambda sizes, problem: 4 * LAUNCH_COUNTERS, _all,
    lambda problem: _piece_macros(problem) | {"BLOCKS": _readers(problem), "FINDS": problem.tuning.finds},
    _reading_refuses,
    counters=lambda sizes, problem: 4 * LAUNCH_COUNTERS, tuning=_read_tuning,
)  # fmt: skip


DEFAULTS = ("tensor", "grouped")  # the fastest, and the fastest of those that take every problem


def build_of(name: str | None, asked: Decode) -> Build:
    """The build of the kernel of that name, or of the first of `DEFAULTS` that does not refuse what is asked."""
    builds = [Build(kernel, problem_of(kernel, asked)) for kernel in map(named, (name,) if name else DEFAULTS)]
    build = next((build for build in builds if not build.kernel.refuses(build.problem)), builds[-1])
    if reason := build.kernel.refuses(build.problem):
        raise UsageError(f"kernel {name} cannot compute this: {reason}.", "choose another kernel.")
    return build


def named(name: str) -> Kernel:
    if name not in KERNELS:
        raise UsageError(f"there is no kernel {name!r} for paged decode.", f"choose one of {', '.join(KERNELS)}.")
    return KERNELS[name]


def problem_of(kernel: Kernel, asked: Decode) -> Problem:
    """What the kernel is compiled for to compute this."""
    rows = kernel.rows(asked.T * asked.group, asked.D)
    types = asked.query.dtype.name, asked.key_cache.dtype.name
    problem = Problem(asked.D, asked.page, *types, asked.layout == "vllm", rows)
    return problem._replace(tuning=kernel.tuning(sizes_of(asked), problem))


def sizes_of(asked: Decode) -> Sizes:
    return Sizes(asked.S, asked.T, asked.H, asked.Hkv, asked.block_tables.shape[1], asked.page)


def vector_bytes(D: int, itemsize: int) -> int:
    """Bytes of the cache that are loaded at a time, on multiples of which its rows start."""
    return 16 if D * itemsize % 16 == 0 else 8


def cache_strides(layout: str, kv_heads: int, page: int, D: int, itemsize: int) -> dict[str, int]:
    """How far apart pages, heads, slots and chunks are in contiguous caches, in numbers; see decode.cuh."""
    x = vector_bytes(D, itemsize) // itemsize
    whole = kv_heads * page * D
    if layout == "vllm":
        keys = {"key_page": whole, "key_head": page * D, "key_slot": x, "key_chunk": page * x}
        return keys | {"value_page": whole, "value_head": page * D, "value_slot": 1}
    head, slot = (D, kv_heads * D) if layout == "nhd" else (page * D, D)
    keys = {"key_page": whole, "key_head": head, "key_slot": slot, "key_chunk": x}
    return keys | {"value_page": whole, "value_head": head, "value_slot": slot}


def argument(asked: Decode, pointers: Mapping[str, int], strides: Mapping[str, int] | None = None) -> Argument:
    """The argument for arrays that are on the device at these addresses; what has none there is null.

    ``strides``, in numbers, are those of `STRIDES` that contiguous arrays do not have.
    """
    sparse = asked.sparse
    numbers = {
        "query_sequence": asked.T * asked.H * asked.D, "query_token": asked.H * asked.D,
        "table_row": asked.block_tables.shape[1],
        **cache_strides(asked.layout, asked.Hkv, asked.page, asked.D, asked.key_cache.dtype.itemsize),
        **(strides or {}),
        "sequences": asked.S, "tokens": asked.T, "heads": asked.H, "kv_heads": asked.Hkv, "group": asked.group,
        "pages": asked.pages, "table_width": asked.block_tables.shape[1], "scale": asked.scale,
        "window": min(asked.window, sizes_of(asked).room),  # where a larger one begins may be beyond what an int holds
    }  # fmt: skip
    if sparse:
        numbers |= {
            "sparse_stride": sparse.vert_stride, "sparse_block": sparse.block_size, "tp_rank": sparse.tp_rank,
            "sparse_local": sparse.local_blocks, "sparse_slide": sparse.head_sliding_step,
        }  # fmt: skip
    return Argument(**numbers, **{name: pointers.get(name) for name in POINTERS})
