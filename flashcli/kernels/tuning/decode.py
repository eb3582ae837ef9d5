"""Rules that cut paged decode into pieces and choose its fastest tuning, on an H200.

Their numbers come from the tries in docs/tuning/decode.md, and from cuda/records/decode.json.
"""

from __future__ import annotations

from typing import NamedTuple

from flashcli.asked.decode import ITEM_SIZES
from flashcli.asked.shape import ceil_div, round_up
from flashcli.kernels.occupancy import most_shared
from flashcli.kernels.operation import Gpu
from flashcli.kernels.speed import MULTIPROCESSORS  # of an H100 or H200; on others answers are the same

THREADS = 128
MOST_OF_A_PIECE = 1024  # tokens
HAS_CLUSTERS = (9, 0)  # the first compute capability that has
HOPPER = Gpu(HAS_CLUSTERS, MULTIPROCESSORS)
MOST_IN_A_CLUSTER = 8  # blocks, on any GPU; as many as a warp merges
MAX_ROWS = 8  # query rows that a block takes together
MOST_ROWS = 2**31 - 1  # of a sequence and head of the cache
PIECE_AFTER_PIECE, BY_LENGTHS, BY_NUMBER, AHEAD_OF_LENGTH = range(4)  # how a block finds its pieces, see pieces.cuh
MOST_BY_NUMBER = 16  # pieces of a sequence, where blocks know their own by number
MOST_MISSING = 6144  # of these blocks, that may have none


class Tuning(NamedTuple):
    """Free choices, within what a GPU has room for; ``python -m bench.decode --variant`` tries others."""

    threads: int = THREADS  # in a block
    piece: int = 2**18  # bytes of keys and values in a piece
    pieces: int = 48  # what a long sequence is cut into at most
    blocks: int = 0  # to a multiprocessor; 0: as many as the kernel is fastest with
    finds: int = PIECE_AFTER_PIECE  # of tensor and read; all others are ways for a block to have one piece
    under_way: int = 1  # of tensor, tiles of a warp at a time, where a block has one piece
    cluster: int = 1  # blocks that merge a sequence's pieces, no fewer than it may have; 1: a launch of its own does


class Problem(NamedTuple):
    """A problem of decode, known without a look at lengths or pages; a kernel chooses ``rows`` and ``tuning``.

    The machine code follows from the fields up to ``short``. The sizes behind it, and the GPU, decide the number of
    blocks and the scratch.
    """

    d: int
    page: int
    query_type: str
    cache_type: str
    transposed: bool  # vLLM's layout of values
    rows: int = 1  # query rows that a block takes together
    tuning: Tuning = Tuning()
    ragged: bool = False
    softcap: bool = False
    sinks: bool = False
    boxes: bool = True  # whether Hopper's copy engine can find the cache's pages
    short: int = 0  # the most query tokens of sequences that are answered; 0: of any
    from_rows: int = 0  # of a ragged sequence and head of the cache; those of others are another launch's
    to_rows: int = MOST_ROWS
    sequences: int = 1
    tokens: int = 1  # of a query; 1 if it is ragged
    heads: int = 1
    kv_heads: int = 1
    table_width: int = 1
    gpu: Gpu = HOPPER
    sparse: bool = False  # whether heads see blocks of their own
    one_result: bool = False  # whether a token's bytes must not depend on how many are asked with it
    total: int = 0  # query tokens of all sequences, if they are ragged; tokens to be written, rows to be merged
    max_query_len: int = 0  # of a sequence, if they are ragged; 0 where nobody says
    packs: bool = False  # whether attention of packed sequences computes this

    @property
    def askers(self) -> int:
        """The sequences as blocks see them: with ragged queries, each query token is one; see decode.cuh."""
        return self.total if self.ragged else self.sequences

    @property
    def head_rows(self) -> int:
        """The number of query rows that share a head of the cache."""
        return self.tokens * self.heads // self.kv_heads

    @property
    def group(self) -> int:
        """The number of query heads that share a head of the cache."""
        return self.heads // self.kv_heads

    @property
    def places(self) -> int:
        """The number of rows of all sequences, tokens and heads: answers to be written."""
        return self.askers * self.tokens * self.heads

    @property
    def work(self) -> int:
        """The number of products in Q Kᵀ on a multiprocessor, of sequences as long as the tables have room for."""
        return ceil_div(self.places * self.room * self.d, self.gpu.multiprocessors)

    @property
    def room(self) -> int:
        """The tokens of the longest sequence that the tables have room for."""
        return self.table_width * self.page


def all_pieces(problem: Problem) -> int:
    """The largest number of pieces that all sequences together can be cut into."""
    return uncut(problem) * most_pieces(problem)


def uncut(problem: Problem) -> int:
    """The number of pieces if no sequence is cut: one for each sequence, head of the cache and tile of rows."""
    return problem.askers * problem.kv_heads * ceil_div(problem.head_rows, problem.rows)


def piece_tokens(problem: Problem) -> int:
    """The number of tokens in a piece, a power of two."""
    tokens = problem.tuning.piece // (2 * problem.d * ITEM_SIZES[problem.cache_type])
    return 1 << min(max(tokens, 64), MOST_OF_A_PIECE).bit_length() - 1


def most_uncut(problem: Problem) -> int:
    """The number of tokens of the longest sequence that is not cut."""
    return max(piece_tokens(problem), piece_tokens(problem._replace(tuning=Tuning())))


def most_pieces(problem: Problem) -> int:
    if problem.room <= most_uncut(problem):
        return 1
    return max(1, min(problem.tuning.pieces, ceil_div(problem.room, piece_tokens(problem))))


def how_to_find(problem: Problem, at_once: int) -> int:
    """The way in which blocks find their pieces, such as `BY_LENGTHS`, on a GPU that computes ``at_once`` at a time.

    A block has one piece unless many pieces may be missing, of which each costs the GPU a nanosecond, where a short
    piece costs some ten (docs/tuning/decode.md).
    """
    pieces = all_pieces(problem)
    if pieces <= at_once:
        return BY_LENGTHS
    return BY_NUMBER if few_missing(problem) else PIECE_AFTER_PIECE


def few_missing(problem: Problem) -> bool:
    """Whether few blocks would be without a piece, if there were one for each that the tables have room for."""
    return all_pieces(problem) - uncut(problem) <= MOST_MISSING and most_pieces(problem) <= MOST_BY_NUMBER


def some_rows(problem: Problem) -> int:
    """The query rows that a block takes together: 1, 2, 4 or 8, so that there are few builds."""
    return min(MAX_ROWS, power_of_two(problem.head_rows))


def power_of_two(least: int) -> int:
    return 1 << (least - 1).bit_length()


def tensor_rows(problem: Problem) -> int:
    """The query rows that a block of tensor takes together: 8, or 16 where there are more and registers hold them."""
    if not tiled(problem):
        return 8 if problem.head_rows <= 8 or problem.d > 128 else 16
    if is_few(problem):
        return few_rows(problem)
    return (8 if problem.d > 128 else 16) * THREADS // 32


def tiled(problem: Problem) -> bool:
    """Whether blocks find row tiles of sequences with any number of query tokens; single ones are as [S, H, D]."""
    return problem.one_result or (problem.ragged and problem.max_query_len != 1)


def by_rows(problem: Problem) -> bool:
    """Whether each warp of tensor has rows of its own, and all keys of a piece, where sequences have many rows."""
    return tiled(problem) and not is_few(problem)


def is_few(problem: Problem) -> bool:
    """Whether ragged sequences have few rows, or those that a launch is for; see `few_rows`."""
    most = min(problem.to_rows, problem.max_query_len * problem.group or MOST_ROWS)
    return most <= few_rows(problem)


def tensor_blocks(problem: Problem) -> int:
    """The blocks of tensor on a multiprocessor: as registers allow, fewer where blocks take piece after piece."""
    if problem.tuning.blocks or problem.d > 128:
        return problem.tuning.blocks or 2
    piece_after_piece = problem.tuning.finds == PIECE_AFTER_PIECE
    if problem.rows > 8 and problem.d > 64:
        return 2 if piece_after_piece else 3
    return 3 if piece_after_piece and problem.d * ITEM_SIZES[problem.cache_type] > 128 else 4


def tensor_tuning(problem: Problem) -> Tuning:
    """The tuning of tensor: a block a piece, unless many may be missing; few pieces are found ahead of the lengths.

    Clusters of blocks, two on a multiprocessor, are slower than another launch, by half (docs/tuning/decode.md).
    Pieces are smaller where few rows share a head of the cache, so that partial answers are little beside it. They
    must not depend on the number of sequences.
    """
    row = problem.d * ITEM_SIZES[problem.cache_type]
    if tiled(problem):
        cut = prompt_tuning(problem)
        if not (is_few(problem) and few_missing(problem)):
            return cut._replace(finds=BY_NUMBER)
        few = problem.sequences * problem.kv_heads * most_pieces(problem) <= 2 * MULTIPROCESSORS and row <= 256
        return cut._replace(finds=BY_LENGTHS, blocks=2, under_way=2) if few else cut._replace(finds=BY_LENGTHS)
    cut = Tuning(piece=2**17) if problem.head_rows <= 2 and row >= 256 else Tuning()
    problem = problem._replace(tuning=cut)
    pieces = all_pieces(problem)
    # All run at once, two blocks to a multiprocessor, and a tile of each warp is less than the memory's rate needs.
    few = pieces * max(row, 128) <= 2 * MULTIPROCESSORS * 128
    if few and row <= 256:
        cluster = power_of_two(most_pieces(problem))  # few builds
        fits = cluster <= MOST_IN_A_CLUSTER and uncut(problem) * cluster <= MULTIPROCESSORS
        return cut._replace(blocks=2, finds=AHEAD_OF_LENGTH, under_way=2, cluster=cluster if fits else 1)
    at_once = tensor_blocks(problem._replace(tuning=cut._replace(finds=BY_LENGTHS))) * MULTIPROCESSORS
    finds = how_to_find(problem, at_once)
    if finds == PIECE_AFTER_PIECE or (finds == BY_NUMBER and problem.d > 128):
        return cut
    two = problem.rows == 8 and problem.d <= 64 and (finds == BY_NUMBER or row <= 64)
    return cut._replace(finds=finds, under_way=2 if two else 1)


def read_tuning(problem: Problem) -> Tuning:
    return Tuning(finds=how_to_find(problem, readers(problem) * MULTIPROCESSORS))


def readers(problem: Problem) -> int:
    return problem.tuning.blocks or 4


def all_rows(problem: Problem) -> int:
    """The query rows that `read` takes together: all, rounded up to a power of two, so that keys are read once."""
    return power_of_two(problem.head_rows)


# ---- prompt: 128 query rows together, and row tiles that are found on the device

PROMPT_ROWS, PROMPT_THREADS = 128, 384
MANY_ROWS = 16  # up to which tensor is as fast; with a cache of bytes, up to four times as many
SHARE = 128  # query tokens times pieces at most, of a sequence that is cut
ROWS_OF_FEW = 64  # of a sequence and head of the cache, as in work.cuh
FEW_OF = 3  # one block in so many begins with sequences of few rows
MOST_STAGES = 6  # tiles of keys, and of values, under way
STATIC = 1024  # bytes of shared memory beside tiles, and as many to align them


def takes_many_rows(problem: Problem) -> bool:
    """Whether many query rows share a head of the cache, or may; tensor goes past keys once for every 16 of them.

    Ragged queries are few where the caller says so: those of few rows, and in float32 those of short sequences.
    """
    if problem.query_type == "float32":
        ragged = problem.one_result or (problem.ragged and not 1 <= problem.max_query_len <= SHORT)
    else:
        ragged = by_rows(problem)
    most = MANY_ROWS * (4 if ITEM_SIZES[problem.cache_type] == 1 else 1)
    return ragged or problem.head_rows > most


def prompt_tuning(problem: Problem) -> Tuning:
    """The tuning of prompt: where a token's bytes must not depend on its company, no sequence is cut."""
    return Tuning(pieces=1) if problem.one_result else Tuning()


def few_rows(problem: Problem) -> int:
    """The rows of a ragged sequence for a head of the cache up to which its warps take keys in turn; 0: no such one.

    Other sequences have a launch of their own, of blocks of many rows. One result of all query tokens needs one launch
    for all.
    """
    if problem.one_result or not problem.ragged or problem.group > 16 or (problem.group > 8 and problem.d > 128):
        return 0
    told = problem.max_query_len * problem.group
    return 16 if problem.group > 8 or (8 < told <= 16 and problem.d <= 128) else 8


def has_few_alone(problem: Problem) -> bool:
    """Whether each sequence is known to have no more rows than wait for memory; see ``Kind`` of work.cuh."""
    tokens = problem.max_query_len if problem.ragged else problem.tokens
    return 0 < tokens * problem.group <= ROWS_OF_FEW


def prompt_keys(problem: Problem) -> int:
    """The number of keys in a tile of prompt: as many as registers hold scores of beside O."""
    return 128 if problem.d <= 128 else 64


def prompt_shared(problem: Problem, stages: int) -> int:
    """Bytes of shared memory for the queries and so many tiles of keys and values, each row padded to 128 bytes."""
    row = 2 * round_up(problem.d, 64)
    return (PROMPT_ROWS + 2 * stages * prompt_keys(problem)) * row + STATIC


def by_boxes(problem: Problem) -> bool:
    """Whether prompt has whole tiles copied by the copy engine: numbers of 16 bits, of pages with rows to swizzle."""
    return problem.boxes and ITEM_SIZES[problem.cache_type] == 2 and problem.page >= 8


def prompt_stages(problem: Problem) -> int:
    """The number of tiles of keys, and of values, that there is room for."""
    room = most_shared(HAS_CLUSTERS) - STATIC
    return max(n for n in range(1, MOST_STAGES + 1) if prompt_shared(problem, n) <= room)


# ---- gather: float32 prompts by attention of packed sequences

SHORT = 8  # query tokens of a sequence up to which grouped answers them
GATHERED = 2**28  # bytes of keys and values that are gathered at a time, or those of one sequence


def gathered_together(problem: Problem) -> int:
    """The number of sequences that are gathered at a time, each as long as its row of the table has room for."""
    of_one = 2 * 4 * problem.d * problem.kv_heads * max(1, problem.room)
    return max(1, min(GATHERED // of_one, problem.sequences))


def passes(problem: Problem) -> int:
    """The number of times that sequences are gathered: there are no more longer ones than query tokens allow."""
    return max(1, ceil_div(min(problem.sequences, problem.total // (SHORT + 1)), gathered_together(problem)))
