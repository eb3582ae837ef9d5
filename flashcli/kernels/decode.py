"""The ladder of kernels for paged decode: their tunings, their launches, their scratch, the argument they all take.

One kernel is one file in ``cuda/decode/`` and one entry in `KERNELS`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import struct
from collections.abc import Callable

from flashcli.asked.attention import ALIGNMENT, NO_WINDOW, Operand, call, contiguous
from flashcli.asked.decode import FACTORS, ITEM_SIZES, Decode
from flashcli.asked.how import How
from flashcli.asked.shape import MAX_INT32, ceil_div, round_up
from flashcli.errors import UsageError
from flashcli.kernels import pages
from flashcli.kernels.boxes import Boxes
from flashcli.kernels.occupancy import most_shared
from flashcli.kernels.operation import Build, Gpu, Kernel, Launch, Operation, Part, Plan, Step, Tiling, ladder, named
from flashcli.kernels.plan import ATTENTION
from flashcli.kernels.tuning import decode as rules
from flashcli.kernels.tuning.decode import HOPPER, SHORT, Problem, Tuning, most_pieces, tiled, uncut

PARTITION = 512  # tokens, as in 02_paged_v2.cu and 03_grouped.cu
LAUNCH_COUNTERS = 4  # at the beginning of the workspace, see pieces.cuh
MERGED_BY_A_WARP = 8  # partial answers of a row, see merge.cuh
MERGED_ROWS = 4  # that a block merges, where a warp is enough for each
STATIC = 2048  # bytes at most of vLLM's kernels' shared memory that are static
QUERY_UNIT = 4  # bytes of a query that are read at a time

POINTERS = (
    "query", "key_cache", "value_cache", "block_tables", "seq_lens", "alibi_slopes", "k_scale", "v_scale",
    "query_starts", "sinks", "out", "lse", "workspace",
)  # fmt: skip
STRIDES = (
    "query_sequence", "query_token", "table_row", "key_page", "key_head", "key_slot", "key_chunk", "value_page",
    "value_head", "value_slot",
)  # fmt: skip
NUMBERS = (
    "sequences", "tokens", "heads", "kv_heads", "group", "pages", "table_width", "window", "sparse_stride",
    "sparse_block", "sparse_local", "sparse_slide", "tp_rank", "total", "causal", "pass", "passes", "together",
)  # fmt: skip


BOXES = {"key_boxes": "key_cache", "value_boxes": "value_cache"}  # fields, and whose boxes these tell


class Argument(ctypes.Structure):
    """The argument of decode kernels: ``struct Decode`` of cuda/decode/decode.cuh; a test compares the two layouts."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in STRIDES),
        *((name, ctypes.c_int) for name in NUMBERS),
        ("scale", ctypes.c_float),
        ("softcap", ctypes.c_float),
        ("unused", ctypes.c_int * 10),  # so that maps start on multiples of 64 bytes
        *((name, Boxes) for name in BOXES),
    )


def problem_of(asked: Decode, gpu: Gpu = HOPPER) -> Problem:
    """The problem of a call of decode, with the rows and tuning that a kernel chooses still at their defaults."""
    return Problem(
        asked.D, asked.page, asked.query.dtype, asked.cache_type, asked.layout == "vllm", ragged=asked.is_ragged,
        softcap=asked.softcap > 0, sinks=asked.sinks is not None, sequences=asked.S, tokens=asked.T, heads=asked.H,
        kv_heads=asked.Hkv, table_width=asked.block_tables.shape[1], gpu=gpu, total=asked.total,
        sparse=asked.sparse is not None, one_result=asked.one_result, max_query_len=asked.max_query_len or 0,
        packs=_packs(asked), boxes=_has_boxes(asked),
    )  # fmt: skip


def _has_boxes(asked: Decode) -> bool:
    """Whether a cache's pages, heads and slots are apart, as an array of axes is."""
    axes = [axis for x in (asked.key_cache, asked.value_cache) for axis in zip(x.shape, x.strides, strict=True)]
    return all(n == 1 or stride > 0 for n, stride in axes)


def _packs(asked: Decode) -> bool:
    """Whether attention of packed sequences computes a call: it has neither sinks nor bounds of scores."""
    more = asked.softcap or asked.sinks is not None or asked.sparse or asked.one_result
    standing = not asked.causal and (asked.window or asked.alibi_slopes is not None)  # where the last query stands
    return asked.is_ragged and not (more or standing)


def _smallest(problem: Problem) -> Problem:
    """The problem of one sequence longer than a piece, so that every launch, the merge too, occurs."""
    width = ceil_div(2 * rules.MOST_OF_A_PIECE, problem.page)
    return problem._replace(
        tuning=problem.tuning._replace(cluster=1), sequences=1, tokens=1, heads=1, kv_heads=1, table_width=width,
        gpu=Gpu(rules.HAS_CLUSTERS, 1), total=1,
    )  # fmt: skip


def _chooses(
    rows: Callable[[Problem], int] = lambda problem: 1, tuning: Callable[[Problem], Tuning] = lambda problem: Tuning()
) -> Callable:
    """Return a kernel's ``fitted``: it sets how many of a cache head's rows a block takes, and then the tuning."""

    def fitted(problem: Problem) -> Problem:
        problem = problem._replace(rows=rows(problem), tuning=Tuning())
        return problem._replace(tuning=tuning(problem))

    return fitted


def _tiles(macros: Callable[[Problem], dict[str, int]] = lambda problem: {}) -> Callable[[Problem], Tiling]:
    """Return a kernel's ``tiling``, which has these macros beside those of all decode kernels."""

    def tiling(problem: Problem) -> Tiling:
        return Tiling(problem.rows, 0, problem.tuning.threads, macros=tuple(macros(problem).items()))

    return tiling


_rung = functools.partial(Kernel, macros=pages.macros, smallest=_smallest, refuses=pages.odd_heads)


def partial_bytes(problem: Problem) -> int:
    """Bytes of one partial answer: m, l and O in float, O on a multiple of 16 bytes."""
    return 4 * (problem.d + 4)


# ---- vLLM's V1 and V2, one query row a block

VALUES_AT_ONCE = 16  # bytes of the query's type that a thread fetches of a row of values, see paged.cuh


def _paged_refuses(problem: Problem) -> str:
    if not problem.transposed:
        return "vLLM's kernels read layout vllm alone"
    if problem.page < 4:
        return "pages of less than four tokens"
    if problem.page * ITEM_SIZES[problem.query_type] > 32 * VALUES_AT_ONCE:
        return f"a warp does not reach over {problem.page} tokens of {problem.query_type}"
    if problem.sinks:
        return "vLLM's first kernels know no sinks"
    return pages.odd_heads(problem)


def _shared_of(kernel: str, problem: Problem, what: str, numbers: int) -> int:
    """Bytes of dynamic shared memory for so many floats; UsageError if no block has as many."""
    if 4 * numbers > most_shared(problem.gpu.capability) - STATIC:
        raise UsageError(
            f"kernel {kernel} keeps {what} in shared memory: {problem.room} tokens are too many.",
            "choose another kernel.",
        )
    return 4 * numbers


def _v1(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    at_the_end = problem.tuning.threads // 64 * problem.d  # what half the warps hand to the others
    shared = _shared_of("paged_v1", problem, "the scores of a sequence", max(problem.room, at_the_end))
    return (Launch("paged_v1", problem.places, problem.tuning.threads, shared),)


def _partitions(problem: Problem) -> int:
    return max(1, ceil_div(problem.room, PARTITION))


def _v2(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    partitions, threads = _partitions(problem), problem.tuning.threads
    shared = _shared_of("paged_v2", problem, "the weights of partitions", round_up(partitions, 4))
    return (
        Launch("paged_v2", problem.places * partitions, threads),
        Launch("reduce", problem.places, threads, shared),
    )


VERSIONS = ("paged_v1", "paged_v2")  # that vLLM chooses between


def takes_v1(longest: int, sequences: int, heads: int) -> bool:
    """Whether vLLM takes V1, not V2, for so many sequences and heads, the longest sequence of ``longest`` tokens.

    It takes V1 for up to 8192 tokens, if they are one partition or there are more than 512 blocks without cutting.

    Source: ``PagedAttention.forward_decode`` in vLLM's ``vllm/attention/ops/paged_attn.py``.
    """
    return longest <= 8192 and (longest <= PARTITION or sequences * heads > 512)


# ---- all heads of a group together

MOST_BLOCKS = 2**16  # with a partition each, of which many may be missing: each block takes a nanosecond of the GPU


def _grouped(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    blocks = _grouped_uncut(problem) * (_step(problem) or _partitions(problem))
    return (
        Launch("grouped", blocks, problem.tuning.threads),
        Launch("merge", _grouped_rows(problem), problem.d // 4),
    )


def _step(problem: Problem) -> int:
    """The number of blocks that take the partitions of a sequence in turn, a power of two; 0 if each has its block."""
    few = max(1, MOST_BLOCKS // _grouped_uncut(problem))
    return 1 << few.bit_length() - 1 if few < _partitions(problem) else 0


def _grouped_uncut(problem: Problem) -> int:
    """The number of grouped's blocks if each had all of its sequence's partitions."""
    askers = _grouped_rows(problem) // (problem.tokens * problem.heads)
    return askers * problem.kv_heads * ceil_div(problem.head_rows, problem.rows)


def _grouped_rows(problem: Problem) -> int:
    """The number of answers that there are blocks for: of short sequences alone, as many as these may have."""
    return problem.sequences * problem.short * problem.heads if problem.short else problem.places


# ---- pieces by the actual length


def _split(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    blocks = _over_pieces(problem, (problem.tuning.blocks or 4) * problem.gpu.multiprocessors)
    return (Launch("split", blocks, problem.tuning.threads),)


def _over_pieces(problem: Problem, at_once: int) -> int:
    """The number of blocks: one a piece, or, if a block takes piece after piece, at most ``at_once``."""
    if problem.tuning.finds == rules.PIECE_AFTER_PIECE:
        return min(rules.all_pieces(problem), at_once)
    return uncut(problem) * max(problem.tuning.cluster, most_pieces(problem))


def _counters(tiling: Tiling, problem: Problem) -> int:
    return LAUNCH_COUNTERS + round_up(uncut(problem), 4)


def _partials(problem: Problem) -> int:
    return problem.places * most_pieces(problem) * partial_bytes(problem)


def _piece_macros(problem: Problem) -> dict[str, int]:
    return {
        "PIECE": rules.piece_tokens(problem),
        "WHOLE": rules.most_uncut(problem),
        "MAX_PIECES": problem.tuning.pieces,
    }


# ---- tensor cores


def _tensor_macros(problem: Problem) -> dict[str, int]:
    tuning = problem.tuning
    own = {"BLOCKS": rules.tensor_blocks(problem), "FINDS": tuning.finds, "UNDER_WAY": tuning.under_way}
    own |= {"CLUSTER": tuning.cluster, "MERGED_ROWS": MERGED_ROWS}
    if tiled(problem):
        own |= {"TILED": 1} | _ragged_macros(problem) | ({"BY_ROWS": 1} if rules.by_rows(problem) else {})
    return _piece_macros(problem) | own


def _of_warps(problem: Problem) -> int:
    """Bytes of shared memory for the warps' O."""
    row, warps = problem.d + 4, problem.tuning.threads // 32
    if rules.by_rows(problem):
        size = ITEM_SIZES[problem.cache_type]
        row, warps = max(row, ceil_div(problem.d * size, 64) * 32 // size), 1  # O_ROW of tensor.cuh
    return warps * problem.rows * 4 * row


def _tensor(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """The launches of tensor: ``begin`` where blocks draw pieces, then the pieces, then a merge where one is needed."""
    tuning, most = problem.tuning, most_pieces(problem)
    if tiled(problem):
        blocks = _row_tiles(problem)
        if tuning.finds != rules.BY_LENGTHS:
            blocks = min(blocks, rules.tensor_blocks(problem) * problem.gpu.multiprocessors)
        pieces = Launch("tensor", blocks, tuning.threads, _of_warps(problem))
        return (pieces,) if problem.from_rows else (pieces, *_merge_cut(problem))
    if tuning.cluster > 1 and (tuning.finds != rules.AHEAD_OF_LENGTH or tuning.cluster < most):
        told = f"clusters of {tuning.cluster} blocks do not merge {most} pieces, finds={tuning.finds}."
        raise UsageError(told, f"choose finds={rules.AHEAD_OF_LENGTH} and as many blocks as pieces, or cluster=1.")
    blocks = _over_pieces(problem, rules.tensor_blocks(problem) * problem.gpu.multiprocessors)
    drawn = tuning.finds == rules.PIECE_AFTER_PIECE
    over = Launch("tensor", blocks, tuning.threads, _of_warps(problem), early=drawn)
    begin = (Launch("begin", 1, 32),) if drawn else ()
    merged = most == 1 or (tuning.cluster > 1 and problem.gpu.capability >= rules.HAS_CLUSTERS)
    return *begin, over, *(() if merged else (_merge(problem),))


def _merge(problem: Problem) -> Launch:
    """The launch that merges partial answers: several rows a block, or a block a row with as many warps as it needs."""
    warps = ceil_div(most_pieces(problem), MERGED_BY_A_WARP)
    if warps == 1:
        return Launch("merge", ceil_div(problem.places, MERGED_ROWS), 32 * MERGED_ROWS, early=True)
    return Launch("merge", problem.places, 32 * warps, warps * partial_bytes(problem), early=True)


def _tensor_refuses(problem: Problem) -> str:
    size = ITEM_SIZES[problem.cache_type]
    if problem.query_type == "float32":
        return "tensor cores have no float32"
    if problem.d * size % 16:
        return "rows of the cache are no multiple of 16 bytes"
    if problem.transposed and problem.page < 4:
        return "pages of less than four tokens"
    return ""


def _draws_and_partials(tiling: Tiling, problem: Problem) -> int:
    return _ragged_workspace(problem) if tiled(problem) else 4 * LAUNCH_COUNTERS + _partials(problem)


# ---- row tiles that are found on the device: ragged queries, and many query rows together

MERGING = 128  # threads of a block that merges
MERGING_BLOCKS = 8  # on a multiprocessor


def _row_tiles(problem: Problem) -> int:
    """The largest number of pieces of row tiles that all sequences together can be cut into."""
    tiles = ceil_div(problem.places // problem.kv_heads, problem.rows) + problem.sequences
    return tiles * problem.kv_heads * most_pieces(problem)


def _ragged_macros(problem: Problem) -> dict[str, int]:
    own = {"SHARE": rules.SHARE, "FROM_ROWS": problem.from_rows, "TO_ROWS": problem.to_rows}
    return own | {"MERGING": MERGING}


def _ragged_workspace(problem: Problem) -> int:
    """The numbers drawn, and partial answers of all rows, or of `SHARE` query tokens a sequence where that is less."""
    partials = min(problem.places * most_pieces(problem), problem.sequences * rules.SHARE * problem.heads)
    return 4 * LAUNCH_COUNTERS + partials * partial_bytes(problem)


def _merge_cut(problem: Problem) -> tuple[Launch, ...]:
    """The launch that merges rows of sequences that were cut, a warp each; none where no sequence is."""
    if most_pieces(problem) == 1:
        return ()
    rows = min(problem.places, problem.sequences * rules.SHARE // 2 * problem.heads)
    blocks = min(ceil_div(rows, MERGING // 32), MERGING_BLOCKS * problem.gpu.multiprocessors)
    return (Launch("merge", blocks, MERGING, early=True),)


def _prompt_tiling(problem: Problem) -> Tiling:
    """128 query rows, and as many tiles of keys and values as shared memory has room for."""
    keys, stages = rules.prompt_keys(problem), rules.prompt_stages(problem)
    shared = rules.prompt_shared(problem, stages)
    own = {
        "BC": keys,
        "STAGES": stages,
        "SHARED": shared,
        "FEW_OF": 1 if rules.has_few_alone(problem) else rules.FEW_OF,
        "BOXES": int(rules.by_boxes(problem)),
    }
    macros = _piece_macros(problem) | _ragged_macros(problem) | own
    return Tiling(problem.rows, keys, rules.PROMPT_THREADS, shared, macros=tuple(macros.items()))


def _prompt(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    blocks = min(problem.gpu.multiprocessors, _row_tiles(problem))
    return Launch("prompt", blocks, tiling.threads, tiling.shared), *_merge_cut(problem)


def _boxes(asked: Decode, keys: bool, own: Argument) -> Boxes:
    """The boxes of a cache that a warp of `prompt` copies of a page: up to ``KEYS_OF_PAGE`` keys, see staged.cuh.

    Layout vllm has eight keys in a row, chunk by chunk; a page's values as they are. Others have 64 numbers of a key.
    """
    name, page, d = "key" if keys else "value", asked.page, asked.D
    slot, head, page_apart = (2 * getattr(own, f"{name}_{axis}") or 16 for axis in ("slot", "head", "page"))
    few, padded = min(page, 32 if d <= 128 else 16), round_up(d, 64)
    if asked.layout != "vllm":
        sizes, first, box, row = (d, page), slot, (64, few), 128
    elif keys:
        sizes, first, box, row = (8 * page, d // 8), 2 * own.key_chunk, (64, padded // 8), 0
    else:
        sizes, first, box, row = (page, d), 2 * page, (few, padded), 2 * few if few > 8 else 0
    sizes_of_all = *sizes, asked.Hkv, asked.pages
    return Boxes(strides=(first, head, page_apart), sizes=sizes_of_all, box=(*box, 1, 1), row=row)


def _prompt_refuses(problem: Problem) -> str:
    if problem.sparse:
        return "block-sparse heads see tokens of their own"
    return _tensor_refuses(problem)


# ---- gathered, for attention of packed sequences

GATHER_THREADS = 256
GATHER_BLOCKS = 8  # on a multiprocessor


def _gather_steps(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """The launches of its file; between the last two are those of attention, see `_gathered`."""
    blocks = GATHER_BLOCKS * problem.gpu.multiprocessors
    return (
        Launch("lay_out", 1, tiling.threads),
        *(Launch(name, blocks, tiling.threads) for name in ("gather", "finish")),
    )


def _gather_places(problem: Problem) -> tuple[int, ...]:
    """Where things are in the scratch, see `Layout` of 07_gather.cu: starts of Q and K, LSE, keys, values, the end."""
    many, starts = rules.passes(problem), problem.sequences + 1
    kept = 4 * problem.room * problem.kv_heads * problem.d * rules.gathered_together(problem)
    sizes = (
        4 * many * starts, 4 * many * starts, 4 * many, 4 * many, 8 * (many + 1), 8 * starts,
        4 * problem.heads * problem.total, kept, kept,
    )  # fmt: skip
    ends = [0, *itertools.accumulate(round_up(size, ALIGNMENT) for size in sizes)]
    return ends[0], ends[1], *ends[6:]


def _gather_refuses(problem: Problem) -> str:
    if problem.query_type != "float32" or not problem.ragged:
        return "it is for ragged queries in float32"
    if not problem.packs:
        return "attention of packed sequences has no softcap, sinks, block-sparse heads or one result"
    if problem.room * problem.kv_heads * rules.gathered_together(problem) > MAX_INT32 // 2:
        return f"a row of the table has room for {problem.room} tokens, more than can be gathered"
    return pages.odd_heads(problem)


def _gathered(build: Build, asked: Decode) -> Plan:
    """The launches of gather, those of attention for what each pass has gathered, and grouped for short sequences."""
    problem, own = build.problem, argument(asked)
    own.passes, own.together = rules.passes(problem), rules.gathered_together(problem)
    at_q, at_k, at_lse, at_keys, at_values, end = _gather_places(problem)
    starts = contiguous((asked.S + 1,), "int32")
    keys = contiguous((own.together * problem.room, asked.Hkv, asked.D), "float32")
    query = Operand((asked.total, asked.H, asked.D), (asked.query.strides[0], *asked.query.strides[2:]), "float32")
    packed = call(
        query, keys, keys, causal=asked.causal, scale=asked.scale, alibi_slopes=asked.alibi_slopes,
        window=(asked.window - 1, 0) if asked.window else NO_WINDOW, cu_seqlens_q=starts, cu_seqlens_k=starts,
    ).at(asked.vector_bytes % ALIGNMENT)  # fmt: skip
    attend = ATTENTION.plan(packed, problem.gpu, How(return_lse=True))
    lay_out, gather, finish = build.steps()
    everywhere = tuple((i, 0) for i in range(len(POINTERS)))
    scratch = POINTERS.index("workspace")
    parts = []
    for number in range(own.passes):
        this = Argument.from_buffer_copy(own)
        setattr(this, "pass", number)
        offset = 4 * number * (asked.S + 1)
        where = {"Q": (POINTERS.index("query"), 0), "O": (POINTERS.index("out"), 0)}
        inside = {"q_starts": at_q + offset, "k_starts": at_k + offset, "lse": at_lse, "K": at_keys, "V": at_values}
        where |= {name: (scratch, at) for name, at in {**inside, "workspace": end}.items()}
        where |= {"slopes": (POINTERS.index("alibi_slopes"), 0)}
        parts.append(Part(DECODE, Plan((gather,), this), everywhere))
        parts.append(Part(ATTENTION, attend, tuple(where.get(name) for name in ATTENTION.pointers)))
    short = KERNELS["grouped"].fitted(problem)._replace(short=SHORT)
    others = Build(KERNELS["grouped"], short)
    parts.append(Part(DECODE, Plan((finish, *others.steps()), own), everywhere))
    return Plan((lay_out,), own, max(end + attend.workspace, others.workspace()), parts=tuple(parts))


KERNELS = ladder(
    _rung(
        "decode/01_paged_v1.cu", "vLLM's V1: one block a sequence and head, with all scores in shared memory",
        _tiles(), _v1, fitted=_chooses(), refuses=_paged_refuses,
    ),
    _rung(
        "decode/02_paged_v2.cu", "vLLM's V2: partitions of 512 tokens, and a reduction",
        _tiles(), _v2, fitted=_chooses(), refuses=_paged_refuses,
        workspace=lambda tiling, problem: problem.places * _partitions(problem) * 4 * (problem.d + 2),
    ),
    _rung(
        "decode/03_grouped.cu", "all heads of a group together: keys and values are read once",
        _tiles(lambda problem: {"STEP": _step(problem)}), _grouped, fitted=_chooses(rules.some_rows),
        workspace=lambda tiling, problem: _grouped_rows(problem) * _partitions(problem) * partial_bytes(problem),
    ),
    _rung(
        "decode/04_split.cu", "pieces by the actual lengths, in one launch",
        _tiles(_piece_macros), _split, counters=_counters, fitted=_chooses(rules.some_rows),
        workspace=lambda tiling, problem: 4 * _counters(tiling, problem) + _partials(problem),
    ),
    _rung(
        "decode/05_tensor.cu", "tensor cores, fed straight from memory",
        _tiles(_tensor_macros), _tensor, workspace=_draws_and_partials, needs=(8, 0), explicit=True,
        counters=lambda tiling, problem: LAUNCH_COUNTERS if tiled(problem) else 0,
        fitted=_chooses(rules.tensor_rows, rules.tensor_tuning), refuses=_tensor_refuses,
    ),
    _rung(
        "decode/06_prompt.cu", "128 query rows together on Hopper's tensor cores: prompts, chunks, drafts",
        _prompt_tiling, _prompt, needs=rules.HAS_CLUSTERS, arch_only=True, refuses=_prompt_refuses,
        workspace=lambda tiling, problem: _ragged_workspace(problem),
        counters=lambda tiling, problem: LAUNCH_COUNTERS,
        fitted=_chooses(lambda problem: rules.PROMPT_ROWS, rules.prompt_tuning),
    ),
    _rung(
        "decode/07_gather.cu", "float32 prompts out of their pages, for attention of packed sequences",
        lambda problem: Tiling(problem.rows, 0, GATHER_THREADS), _gather_steps,
        workspace=lambda tiling, problem: _gather_places(problem)[-1], refuses=_gather_refuses,
        fitted=lambda problem: problem._replace(rows=1, tuning=Tuning(), short=SHORT),
    ),
)  # fmt: skip


def _read(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    blocks = _over_pieces(problem, rules.readers(problem) * problem.gpu.multiprocessors)
    return (Launch("read", blocks, problem.tuning.threads),)


# A lower bound of every kernel's time: it reads the same bytes and computes nothing. Any type of query will do.
CEILING = _rung(
    "decode/00_read.cu", "the same keys and values read, and nothing computed",
    _tiles(lambda problem: _piece_macros(problem) | {"BLOCKS": rules.readers(problem), "FINDS": problem.tuning.finds}),
    _read,
    workspace=lambda tiling, problem: 4 * LAUNCH_COUNTERS, counters=lambda tiling, problem: LAUNCH_COUNTERS,
    fitted=_chooses(rules.all_rows, rules.read_tuning),
    refuses=lambda problem: _tensor_refuses(problem._replace(query_type="float16")),
)  # fmt: skip
DEFAULTS = ("tensor", "grouped")  # the fastest, and the fastest of those that take every problem
FOR_MANY_ROWS = ("prompt", "gather", *DEFAULTS)  # where `takes_many_rows`


def choose(problem: Problem, name: str | None = None) -> Build:
    """The build of the kernel of that name, or of the fastest that computes the problem on its GPU.

    UsageError says why a kernel that was named cannot compute it, BackendUnavailable which GPU that kernel needs.
    """
    if name is None:
        fastest = FOR_MANY_ROWS if rules.takes_many_rows(problem) else DEFAULTS
        able = (KERNELS[one] for one in fastest if not KERNELS[one].refusal(problem.gpu.capability, problem))
        kernel = next(able)
        if kernel.name == "tensor" and rules.by_rows(problem) and (few := rules.few_rows(problem)):
            problem = problem._replace(from_rows=few + 1)
    else:
        kernel = named(KERNELS, name, "paged decode")
        if reason := kernel.refuses(problem):
            raise UsageError(f"kernel {name} cannot compute this: {reason}.", "choose another kernel.")
        kernel.check(problem.gpu.capability, problem, "see `flashcli kernels --operation decode`.", problem.gpu.name)
    return Build(kernel, kernel.fitted(problem))


def build_of(kernel: Kernel, asked: Decode, gpu: Gpu = HOPPER) -> Build:
    """The build of a kernel for a call, with its own rows and tuning, whether it refuses the problem or not."""
    return Build(kernel, kernel.fitted(problem_of(asked, gpu)))


def plan(asked: Decode, gpu: Gpu, how: How = How()) -> Plan:  # noqa: B008  it is never changed
    """The launches of `flashcli.decode`; ValueError for arrays with strides that no kernel reads."""
    return plan_of(choose(problem_of(asked, gpu), how.kernel), asked)


def plan_of(build: Build, asked: Decode) -> Plan:
    """The launches of a call of decode by a build.

    At the end of the scratch are the factors of an fp8 cache that are not 1, and room for an LSE that nobody wants.
    """
    factors = {name: getattr(asked, name) for name in FACTORS if getattr(asked, name) != 1}
    whole = _gathered(build, asked) if build.kernel.name == "gather" else _with_boxes(build, asked)
    counters, end = build.counters(), round_up(whole.workspace or build.workspace(), 16)
    lse = end + 4 * len(factors)
    clear = [(0, 0, counters)] if counters else []
    clear += [(end + 4 * i, _bits(factor), 1) for i, factor in enumerate(factors.values())]
    inside = (*((POINTERS.index(name), end + 4 * i) for i, name in enumerate(factors)), (POINTERS.index("lse"), lse))
    unread = () if asked.is_scaled else tuple(POINTERS.index(name) for name in FACTORS)
    others = {"workspace": lse + 4 * build.problem.places, "clear": tuple(clear), "inside": inside, "unread": unread}
    return whole._replace(**others)


def _with_boxes(build: Build, asked: Decode) -> Plan:
    """The launches of a build, and what prompt's copies need to know of a cache."""
    own = argument(asked)
    if build.kernel.name != "prompt" or not rules.by_boxes(build.problem):
        return Plan(steps(build), own)
    own.key_boxes, own.value_boxes = _boxes(asked, True, own), _boxes(asked, False, own)
    return Plan(steps(build), own, boxes=tuple((field, POINTERS.index(pointer)) for field, pointer in BOXES.items()))


def steps(build: Build) -> tuple[Step, ...]:
    """The launches of a build, in order, and those of tensor for sequences of few rows, if the build leaves these."""
    if not build.problem.from_rows:
        return build.steps()
    of_few = build.problem._replace(from_rows=0, to_rows=build.problem.from_rows - 1)
    return build.steps() + Build(build.kernel, build.kernel.fitted(of_few)).steps()


def _bits(number: float) -> int:
    """The bits of a number as float32."""
    return struct.unpack("I", struct.pack("f", number))[0]


def argument(asked: Decode) -> Argument:
    """The argument for a call, without addresses."""
    sparse, room = asked.sparse, asked.block_tables.shape[1] * asked.page
    numbers = {
        **_strides(asked), "sequences": asked.S, "tokens": asked.T, "heads": asked.H, "kv_heads": asked.Hkv,
        "group": asked.group, "pages": asked.pages, "table_width": asked.block_tables.shape[1], "scale": asked.scale,
        "total": asked.total, "softcap": asked.softcap, "causal": asked.causal,
        "window": min(asked.window, room),  # where a larger one begins may be beyond what an int holds
    }  # fmt: skip
    if sparse:
        numbers |= {
            "sparse_stride": sparse.vert_stride, "sparse_block": sparse.block_size, "tp_rank": sparse.tp_rank,
            "sparse_local": sparse.local_blocks, "sparse_slide": sparse.head_sliding_step,
        }  # fmt: skip
    return Argument(**numbers)


def _strides(asked: Decode) -> dict[str, int]:
    """The strides in the argument, in elements; ValueError for an array whose strides no kernel reads."""
    fixed: dict[str, tuple[int, ...]] = {
        "query": (pages.FREE, pages.FREE, asked.D, 1), "block_tables": (pages.FREE, 1), "seq_lens": (1,),
        "alibi_slopes": (1,), "query_starts": (1,), "sinks": (1,),
    }  # fmt: skip
    for name, wanted in fixed.items():
        if (array := getattr(asked, name)) is not None:
            pages.check_strides(name, array, wanted)
    query = {"query_sequence": pages.stride(asked.query, 0), "query_token": pages.stride(asked.query, 1)}
    pages.check_rows("query", query.values(), ITEM_SIZES[asked.query.dtype], QUERY_UNIT)
    return query | {"table_row": pages.stride(asked.block_tables, 0)} | pages.cache_strides(asked)


DECODE = Operation("decode", POINTERS, KERNELS, plan)
