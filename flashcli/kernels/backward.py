"""The ladder of backward kernels: their tiles, their launches, their scratch and their argument.

One kernel is one file in ``cuda/backward/`` and one entry in `KERNELS`. Each computes dQ, dK and dV, and dbias where it
is wanted, in the same steps: numbers of a row, dQ by tiles of queries, dK and dV by tiles of keys, dbias.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Iterable, Iterator
from typing import Any

from flashcli.asked.attention import Backward
from flashcli.asked.how import How
from flashcli.asked.shape import ceil_div, round_up
from flashcli.kernels import operation
from flashcli.kernels import plan as plan_of_attention
from flashcli.kernels.arguments import MASK, SIGHT, SIGHT_POINTERS, Strides, numbers
from flashcli.kernels.occupancy import OF_AN_H200, occupancy
from flashcli.kernels.operation import STATIC_SHARED, Build, Gpu, Kernel, Launch, Operation, Plan, Step, Tiling, ladder
from flashcli.kernels.problem import Problem, bias_macros, sight_macros, type_macros
from flashcli.kernels.speed import MULTIPROCESSORS

ROW_THREADS = 256  # of a block that takes rows one by one
DBIAS_BLOCKS = 1024  # to which the tiles of dbias are cut, about, at most
AGAIN = 264  # blocks, at most, two a multiprocessor, that compute what is not finite: mostly there is nothing
ROW_BYTES = 16  # that are kept of a row: ``Row`` of cuda/backward/backward.cuh
TAIL = 3 * 4 * 64 + 16  # bytes: ``Tail`` of cuda/backward/warpgroup.cuh
MATRICES = "dO", "Q", "K", "V", "O"
ADDRESSES = (*MATRICES, "lse", "dlse", "bias", "dQ", "dK", "dV", "dbias", "workspace", "notes")
POINTERS = (*ADDRESSES, "mask", *SIGHT_POINTERS)
STRIDES = "d_o", "q", "k", "v", "o", "lse_at", "dlse_at", "dq", "dk", "dv", "bias_strides", "dbias_at"


class Argument(ctypes.Structure):
    """The argument of backward kernels: ``Backward`` of cuda/backward/arguments.h, which says what each field means."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, Strides) for name in STRIDES),
        *((name, ctypes.c_longlong) for name in ("bias_column", "dbias_column")),
        *((name, ctypes.c_int) for name in ("B", "H", "Hkv", "M", "N", "q_start")),
        ("scale", ctypes.c_float),
        *MASK,
        *SIGHT,
    )


def argument(asked: Backward, kind: type[Argument] = Argument) -> Argument:
    """The argument for a call, without addresses, in a struct that begins with `Argument`."""
    call = asked.of
    strides = {
        "d_o": asked.do, "q": call.q, "k": call.k, "v": call.v, "o": call.o, "lse_at": asked.lse,
        "dlse_at": asked.dlse or (0, 0, 0), "dq": asked.dq, "dk": asked.dk, "dv": asked.dv,
        "bias_strides": call.bias_strides[:3], "dbias_at": asked.dbias[:3], "mask_strides": call.mask_strides[:3],
    }  # fmt: skip
    by_name = {name: Strides(*by) for name, by in strides.items()}
    return kind(**by_name, dbias_column=asked.dbias[3], **numbers(call))


def problem_of(asked: Backward, gpu: Gpu) -> Problem:
    """The problem that kernels are built for to compute these gradients: that of the attention, and what they add."""
    call, dbias = asked.of, (0, 0, 0, 0)
    if asked.dbias_shape is not None:
        lengths = (call.B, call.H, call.M, call.N)
        dbias = tuple(n if stride else 1 for n, stride in zip(lengths, asked.dbias, strict=True))  # type: ignore[assignment]
    own: dict[str, Any] = {"heads": call.H, "dbias": dbias, "gradient": asked.out_dtype}
    return plan_of_attention.problem_of(call, gpu, How())._replace(aligned=asked.aligned, **own)


def of_sizes(
    d: int, causal: bool = False, bias: str = "", *, B: int = 1, H: int = 1, Hkv: int = 1, M: int = 1, N: int = 1,
    **others: Any,
) -> Problem:  # fmt: skip
    """The problem of gradients of arrays of these sizes, in float32 unless ``others`` say otherwise."""
    return Problem(B * H, M, N, d, causal, bias=bias, group=H // Hkv, heads=H, **{"gradient": "float32"} | others)


def macros(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """Macros that every kernel of the ladder is compiled with."""
    found = {
        "HEAD_DIM": problem.d, "BR": tiling.Br, "BC": tiling.Bc, "THREADS": tiling.threads, "SHARED": tiling.shared,
        "CAUSAL": int(problem.causal), "ALIGNED": int(problem.aligned and problem.d % 4 == 0),
        "ROW_THREADS": ROW_THREADS, "ARGUMENT_BYTES": ctypes.sizeof(Argument),
    }  # fmt: skip
    types = type_macros(INPUT=problem.dtype, ANSWER=problem.out_dtype, GRADIENT=problem.gradient)
    return found | bias_macros(problem) | sight_macros(problem) | types


def smallest(problem: Problem) -> Problem:
    """The problem of one query and one key, with all steps."""
    return problem._replace(B=1, M=1, N=1, group=1, heads=1, dbias=(1, 1, 1, 1))


# A rung of the ladder. Its tiles have Br rows that a block owns in `dq`, and Bc that pass it by.
_rung = functools.partial(
    Kernel,
    macros=macros,
    smallest=smallest,
    workspace=lambda tiling, problem: ROW_BYTES * problem.rows,
)
_hopper_rung = functools.partial(_rung, needs=(9, 0), arch_only=True, splits=True, explicit=True)


def _delta(problem: Problem) -> Launch:
    """The launch of `delta`: D = rowsum(dO ∘ O) of every row."""
    return Launch("delta", ceil_div(problem.rows, ROW_THREADS // _row_lanes(problem.d)), ROW_THREADS)


def _row_lanes(d: int) -> int:
    """The number of threads that take a row together, as in cuda/backward/backward.cuh."""
    return next(lanes for lanes in (4, 8, 16, 32) if lanes == 32 or d <= 4 * lanes)


def _passes(tiling: Tiling, problem: Problem, owned_keys: int) -> tuple[Launch, Launch]:
    """The launches of dQ, a block for Br rows, and of dK and dV, a block for ``owned_keys`` keys."""
    return (
        Launch("dq", problem.row_tiles(tiling.Br), tiling.threads, tiling.shared),
        Launch("dk_dv", problem.key_tiles(owned_keys), tiling.threads, tiling.shared),
    )


def plan(asked: Backward, gpu: Gpu, how: How) -> Plan:
    """The launches of gradients that are not empty; BackendUnavailable says why the kernel named cannot.

    A kernel that splits numbers notes in its scratch whether something is not finite, and which heads of K and V that
    concerns, but where blocks compute such heads themselves (macro NOTES 0). These heads are computed once more,
    without splitting numbers. Where there are none, those launches return at once, so that the host need not wait for
    anything.
    """
    problem = problem_of(asked, gpu)
    build, *exactly = builds(gpu, problem, how.kernel)
    steps = [*build.steps()]
    if not exactly:
        return _with_one_key(Plan(tuple(steps), argument(asked), build.workspace()), problem)
    [exact] = exactly
    for launch in exact.launches():
        if launch.function in ("dq", "dk_dv"):
            steps.append(Step(exact, launch._replace(grid=min(launch.grid, AGAIN))))
        elif launch.function == "dbias":
            there = any(step.launch.function == "dbias" for step in steps)
            steps.append(Step(exact, launch._replace(function="dbias_again") if there else launch))
    words = 1 + (problem.sequences or 1) * problem.B // problem.group + build.counters()
    return _with_one_key(with_notes(steps, argument(asked), build.workspace(), words), problem)


def with_notes(steps: Iterable[Step], given: Argument, scratch: int, words: int) -> Plan:
    """The plan with so many words, cleared, behind the scratch: where kernels note what is not finite."""
    notes = round_up(scratch, 16)
    inside = ((POINTERS.index("notes"), notes),)
    return Plan(tuple(steps), given, notes + 4 * words, ((notes, 0, words),), inside)


def _with_one_key(found: Plan, problem: Problem) -> Plan:
    """The plan, with zeros for V and O where there is one key: then dP - D is the LSE's gradient, without roundings.

    What all rows of V have in common changes dP and D alike. One key's V is O, so that nothing is left of both, but the
    roundings of as many rows as there are, in dK.
    """
    if problem.N > 1 or problem.sequences:
        return found
    zeros = round_up(found.workspace, 16)
    found.argument.v = found.argument.o = Strides(0, 0, 0)
    taken = tuple(POINTERS.index(name) for name in "VO")
    return found._replace(
        workspace=zeros + 4 * problem.d, clear=(*found.clear, (zeros, 0, problem.d)),
        inside=(*found.inside, *((which, zeros) for which in taken)), unread=taken,
    )  # fmt: skip


def builds(gpu: Gpu, problem: Problem, kernel: str | None = None) -> Iterator[Build]:
    """The build for a problem, and one that does not split numbers, if the first leaves what is not finite to it."""
    build = Build(choose(gpu.capability, problem, kernel), problem)
    yield build
    if dict(build.tiling.macros).get("NOTES", build.kernel.splits):
        yield Build(KERNELS["register_tiled"], problem)


# ---- plain


def _plain_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    yield _delta(problem)
    yield from _passes(tiling, problem, tiling.Bc)
    if any(problem.dbias):
        batches, heads, rows, keys = problem.dbias
        blocks = ceil_div(batches * heads * rows * keys, tiling.threads)  # a thread for each number
        yield Launch("dbias", blocks, tiling.threads, tiling.shared)


def _plain(problem: Problem) -> Tiling:
    def shared(rows: int) -> int:
        return 4 * (4 * rows * (problem.d + 1) + 2 * rows * (rows + 1))

    rows = 16 if shared(16) <= STATIC_SHARED else 8
    return Tiling(rows, rows, rows * rows, shared(rows))


# ---- register_tiled


def _register_tiled(problem: Problem) -> Tiling:
    D = round_up(problem.d, 32)
    own, passing, threads = next(
        tiles
        for largest, tiles in {64: (64, 64, 128), 128: (32, 32, 128), 192: (16, 32, 64), 256: (8, 32, 64)}.items()
        if largest >= D
    )
    return Tiling(own, passing, threads, 4 * 2 * ((own + passing) * D + own * passing))


def _register_tiled_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    yield _delta(problem)
    yield from _passes(tiling, problem, tiling.Br)
    if any(problem.dbias):
        batches, heads, rows, keys = problem.dbias
        blocks = batches * heads * ceil_div(rows, tiling.Br) * ceil_div(keys, tiling.Bc)
        yield Launch("dbias", blocks, tiling.threads, tiling.shared)


# ---- mma


def _split_row(d: int, pad: int = 32, parts: int = 2) -> int:
    """Bytes of a row of a split tile, hi and lo, or of halves hi alone; see cuda/split.cuh."""
    return 2 * parts * round_up(d, pad)


def _mma(problem: Problem) -> Tiling:
    D, threads = round_up(problem.d, 32), 128
    own, passing = 64, 32 if D <= 64 else 16
    pairs = 2 * 2 * passing * _split_row(problem.d)  # two, of which one is on its way
    owned = 2 * (D // 16) * 2 * threads * 16  # fragments of two matrices
    prepare = min(256, passing * D // 8)  # a thread for each 8 columns of a row
    return Tiling(own, passing, threads, pairs + owned, (("PREPARE_THREADS", prepare),))


def _mma_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    yield _delta(problem)
    yield Launch("prepare", 2 * sum(_tiles(tiling, problem)), dict(tiling.macros)["PREPARE_THREADS"])
    yield from _passes(tiling, problem, tiling.Br)


def _mma_workspace(tiling: Tiling, problem: Problem) -> int:
    tile = 2 * tiling.Bc * _split_row(problem.d) + 8
    return round_up(ROW_BYTES * problem.rows, 128) + sum(_tiles(tiling, problem)) * tile


def _tiles(tiling: Tiling, problem: Problem) -> tuple[int, int]:
    """The numbers of tiles of Bc rows of Q (and dO), and of K (and V), in all batches and heads."""
    return problem.row_tiles(tiling.Bc), problem.key_tiles(tiling.Bc)


def _up_to_128(problem: Problem) -> str:
    return "" if problem.d <= 128 else "it takes heads of up to 128 numbers"


# ---- wgmma

MANY_HEADS = 128  # that keep a GPU busy
HALF_SHARED, MOST_SHARED = 110 * 1024, 220 * 1024  # of two blocks, and of one, beside what is declared in kernels


def _exact(problem: Problem) -> bool:
    """Whether all matrices are halves, of which nothing is left to split; for dbias all are split nevertheless."""
    return problem.dtype != "float32" and problem.out_dtype == problem.dtype and not any(problem.dbias)


def _records(problem: Problem, pad: int) -> dict[str, int]:
    """Macros of split tiles with rows padded to a multiple of ``pad``."""
    return {"TAIL": TAIL, **({"PAD": 64, "PRODUCTS": 2} if _exact(problem) else {"PAD": pad})}


def _row_bytes(macros: dict[str, int], d: int) -> int:
    return _split_row(d, macros["PAD"], 1 if "PRODUCTS" in macros else 2)


def _with_dbias(tiling: Tiling, problem: Problem) -> Tiling:
    """The tiling with the macros of dbias.cuh, if tensor cores compute dbias: of heads of up to 64 numbers.

    With a window or ALiBi's slopes beside the bias, `register_tiled` does.
    """
    if not any(problem.dbias) or problem.bias not in ("float32", "both") or problem.windowed or problem.d > 64:
        return tiling
    slots, kept = (8, 128 * 128 * 4) if problem.d <= 32 else (6, 0)  # records in flight; bytes of biases beside them
    record = 2 * 64 * 2 * 2 * round_up(problem.d, dict(tiling.macros)["PAD"])
    shared = slots * (record + 1024) + kept + 1024
    return tiling._replace(macros=(*tiling.macros, ("DBIAS_SLOTS", slots), ("DBIAS_SHARED", shared)))


def _dbias_shared(tiling: Tiling) -> int:
    """Bytes of shared memory of `dbias`, 0 if tensor cores do not compute it."""
    return dict(tiling.macros).get("DBIAS_SHARED", 0)


def _dbias_tiles(problem: Problem) -> tuple[int, int]:
    """The number of tiles of dbias, 128 x 128 numbers or less, and the number of chunks of the steps of each.

    A step is a pair of a head's 128 queries and 128 keys, whose dS a tile adds up. There are as many chunks as let an
    H200's multiprocessors take the fewest steps in turn; to begin a block, and to add up its sums, takes some three.
    """
    batches, heads, rows, keys = problem.dbias
    lengths = problem.B // problem.heads, problem.heads, ceil_div(problem.M, 128), ceil_div(problem.N, 128)
    own = batches, heads, ceil_div(rows, 128), ceil_div(keys, 128)
    tiles, steps = math.prod(own), math.prod(n // m for n, m in zip(lengths, own, strict=True))
    counts = range(1, min(ceil_div(DBIAS_BLOCKS, tiles), steps) + 1)
    return tiles, min(counts, key=lambda n: ceil_div(tiles * n, MULTIPROCESSORS) * (ceil_div(steps, n) + 3))


def _dbias_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    shared = _dbias_shared(tiling)
    if not shared:
        return
    tiles, chunks = _dbias_tiles(problem)
    yield Launch("dbias", tiles * chunks, 3 * 128, shared)
    of_tile = math.prod(128 if n > 1 else 1 for n in problem.dbias[2:])
    if chunks > 1 or 1 in problem.dbias[2:]:
        yield Launch("sum_dbias", ceil_div(tiles * of_tile, ROW_THREADS), ROW_THREADS)


def _dbias_workspace(tiling: Tiling, problem: Problem) -> int:
    """Bytes of the sums of chunks, behind the records."""
    return 128 + 128 * 128 * 4 * math.prod(_dbias_tiles(problem)) if _dbias_shared(tiling) else 0


def _wgmma(problem: Problem) -> Tiling:
    """wgmma's tiling: a warpgroup that copies, one that multiplies, two blocks a multiprocessor; if d > 64, 2 and 1."""
    own, blocks, pad, passing, stages = (64, 2, 32, 64, 4 if problem.d <= 32 or _exact(problem) else 2)
    if problem.d > 64:
        own, blocks, pad, passing, stages = (128, 1, 64, 32, 6 if _exact(problem) else 3)
    macros = {"PASS": passing, "STAGES": stages, "BLOCKS": blocks, "PREPARE_THREADS": 256, **_records(problem, pad)}
    shared = 2 * (own + stages * passing) * _row_bytes(macros, problem.d) + 1024
    return _with_dbias(Tiling(own, 64, 128 + 2 * own, shared, tuple(macros.items())), problem)


def _wgmma_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    _, keys = _tiles(tiling, problem)
    yield Launch("prepare_keys", 2 * keys, dict(tiling.macros)["PREPARE_THREADS"])
    for launch in _passes(tiling, problem, tiling.Br):
        yield launch._replace(early=True)
    yield from _dbias_launches(tiling, problem)


def _wgmma_workspace(tiling: Tiling, problem: Problem) -> int:
    macros = dict(tiling.macros)
    records = sum(_tiles(tiling, problem)) * (2 * tiling.Bc * _row_bytes(macros, problem.d) + macros["TAIL"])
    return round_up(ROW_BYTES * problem.rows, 128) + records + _dbias_workspace(tiling, problem)


def _heads(tiling: Tiling, problem: Problem) -> int:
    """The number of counters, one a head of Q: each counts the head's records of Q and dO that are whole."""
    return (problem.sequences or 1) * problem.B


# ---- wgmma_short


def _whole_heads(problem: Problem) -> tuple[int, int]:
    """The numbers of tiles of 64 queries and 64 keys of a head that one block takes; (0, 0) if heads of Q share K."""
    return (ceil_div(problem.M, 64), ceil_div(problem.N, 64)) if problem.group == 1 else (0, 0)


def _wgmma_short(problem: Problem) -> Tiling:
    """wgmma_short's tiling: two blocks of one warpgroup if a multiprocessor has room for two heads, else one of two."""
    tiles, records = _whole_heads(problem), _records(problem, 32 if problem.d <= 32 else 64)
    shared = sum(tiles) * 2 * 64 * _row_bytes(records, problem.d) + 1024
    blocks = 2 if shared <= HALF_SHARED else 1
    macros = {"PASS": 64, "BLOCKS": blocks, "ROW_TILES": tiles[0], "KEY_TILES": tiles[1], **records}
    macros["NOTES"] = int(any(problem.dbias))  # which is a sum over heads, of several blocks
    return _with_dbias(Tiling(64, 64, 256 // blocks, shared, tuple(macros.items())), problem)


def _whole_heads_launches(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    return (Launch("gradients", problem.B, tiling.threads, tiling.shared),)


def _wgmma_short_launches(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    return *_whole_heads_launches(tiling, problem), *_dbias_launches(tiling, problem)


def _wgmma_short_workspace(tiling: Tiling, problem: Problem) -> int:
    """Bytes of what is kept of rows, if another kernel follows; for dbias of records, too, as `wgmma` has them."""
    if _dbias_shared(tiling):
        return _wgmma_workspace(tiling, problem)
    return dict(tiling.macros)["NOTES"] * ROW_BYTES * problem.rows


def _refused_by_wgmma_short(problem: Problem) -> str:
    if problem.windowed or problem.sequences:
        return "it takes neither windows nor packed sequences"
    if problem.d > 64:
        return "it takes heads of up to 64 numbers"
    if _whole_heads(problem) == (0, 0):
        return "each head of Q must have its own of K"
    return "its heads are too long" if _wgmma_short(problem).shared > MOST_SHARED else ""


# ---- mma_short

LONGEST = 128  # rows of a head, whose scores a thread has in registers


def _one_pass(rows: int, keys: int, row_bytes: int, score_bytes: int, threads: int, registers: int) -> Tiling:
    """The tiling of a head's one pass (whole_head.cuh), with as many blocks as a multiprocessor has room for.

    ``row_bytes`` are those of a split row of Q or K, ``score_bytes`` of P.
    """
    beside = 2 * 16 * (threads // 32) + 16
    shared = (rows + keys + max(rows, keys)) * row_bytes + rows * score_bytes + beside
    blocks = max(1, occupancy(OF_AN_H200, threads, registers, shared).blocks)
    return Tiling(rows, keys, threads, shared, (("BLOCKS", blocks), ("NOTES", 0)))


def _registers_of_long(problem: Problem, rows: int, keys: int) -> int:
    """Registers of a thread in the one pass over a head of more than 32 numbers: 168 leave room for a third block."""
    return 168 if max(rows, keys) <= 64 and problem.bias not in ("bool", "both") else 255


def _mma_short(problem: Problem) -> Tiling:
    """mma_short's tiling: a head a block, a warp for each 16 queries and 16 keys."""
    rows, keys = round_up(problem.M, 16), round_up(problem.N, 16)
    if problem.d > 32:
        registers = _registers_of_long(problem, rows, keys)
    else:
        registers = 255 if keys > 96 else 168 if keys > 64 else 128
    return _one_pass(rows, keys, _split_row(problem.d), _split_row(keys), 2 * max(rows, keys), registers)


def _wgmma_whole(problem: Problem) -> Tiling:
    """wgmma_whole's tiling: a head a block, a warpgroup for each 64 queries and 64 keys."""
    rows, keys, pad = round_up(problem.M, 64), round_up(problem.N, 16), 32 if problem.d <= 32 else 64
    threads = 2 * max(rows, round_up(keys, 64))
    registers = _registers_of_long(problem, rows, keys) if problem.d > 32 else 128
    return _one_pass(rows, keys, _split_row(problem.d, pad), _split_row(keys, 64), threads, registers)


def _refused_by_mma_short(problem: Problem) -> str:
    if problem.windowed or problem.sequences or any(problem.dbias):
        return "it takes neither windows nor packed sequences, and no gradient of a bias"
    if problem.d > 64 or max(problem.M, problem.N) > LONGEST:
        return f"it takes heads of up to {LONGEST} rows of up to 64 numbers"
    if problem.group > 1:
        return "each head of Q must have its own of K"
    return "" if problem.dtype == problem.out_dtype == "float32" else "it splits float32 alone"


KERNELS = ladder(
    _rung("backward/01_plain.cu", "the formulas as they stand, a thread a score: for any GPU", _plain, _plain_launches),
    _rung(
        "backward/02_register_tiled.cu", "a register tile of scores and of sums a thread: FFMA near its full rate",
        _register_tiled, _register_tiled_launches, needs=(8, 0), explicit=True,
        beside=lambda problem: (Launch("dbias_again", 1, _register_tiled(problem).threads),),
    ),
    _rung(
        "backward/03_mma.cu", "tensor cores at fp32 accuracy: three fp16 products for one, mma.sync",
        _mma, _mma_launches, workspace=_mma_workspace, needs=(8, 0), splits=True, explicit=True,
        refuses=_up_to_128,
    ),
    _hopper_rung(
        "backward/04_wgmma.cu", "tensor cores by Hopper's wgmma: warps specialised, copies in the background",
        _wgmma, _wgmma_launches, workspace=_wgmma_workspace, counters=_heads, refuses=_up_to_128,
    ),
    _hopper_rung(
        "backward/05_wgmma_short.cu", "short heads on Hopper: a block has all of one",
        _wgmma_short, _wgmma_short_launches, workspace=_wgmma_short_workspace, refuses=_refused_by_wgmma_short,
    ),
    _hopper_rung(
        "backward/06_mma_short.cu", "the shortest heads: rows of P and dS whole in registers, one pass",
        _mma_short, _whole_heads_launches, workspace=operation.zero, refuses=_refused_by_mma_short,
    ),
    _hopper_rung(
        "backward/07_wgmma_whole.cu", "one pass by wgmma, for heads of up to 128 rows",
        _wgmma_whole, _whole_heads_launches, workspace=operation.zero, refuses=_refused_by_mma_short,
    ),
)  # fmt: skip

PREFERENCE = ("mma_short", "wgmma_whole", "wgmma_short", "wgmma", "mma", "register_tiled", "plain")  # fastest first
SHORT_HEAD = 16  # where inputs have outliers, dK of fewer numbers shows the halves


def check_name(name: str | None) -> None:
    """Raise UsageError for a name that no backward kernel has; None is allowed."""
    if name is not None:
        operation.named(KERNELS, name, "gradients")


def choose(capability: tuple[int, int], problem: Problem, name: str | None = None) -> Kernel:
    """The kernel of that name, or the fastest for the problem on a GPU of this compute capability.

    BackendUnavailable says why a kernel that is named cannot compute the problem.
    """
    if name is None:
        able = (KERNELS[each] for each in PREFERENCE if not KERNELS[each].refusal(capability, problem))
        return next(kernel for kernel in able if _pays(kernel, problem))
    hint = "see `flashcli kernels --operation backward`."
    return operation.named(KERNELS, name, "gradients").check(capability, problem, hint)


def _pays(kernel: Kernel, problem: Problem) -> bool:
    """Whether a kernel that can compute is worth choosing.

    Heads shorter than `SHORT_HEAD` are left to FFMA. A block of mma_short must not be alone on its multiprocessor, or
    nobody computes while it waits for memory; and it loses to wgmma_whole where the 64 rows to which that one pads are
    nearly full. A block of wgmma_short takes the tiles of a head one after the other. So it pays only with one tile a
    head, or with many heads.
    """
    if kernel.splits and problem.d < SHORT_HEAD:
        return False
    rows = max(problem.M, problem.N)
    if kernel.name == "mma_short":
        full = (40 if problem.d > 48 else 48) < rows <= 64 and problem.d > 16
        return dict(kernel.tiling(problem).macros)["BLOCKS"] > 1 and not full
    return kernel.name != "wgmma_short" or rows <= 64 or problem.B >= MANY_HEADS


BACKWARD = Operation("backward", POINTERS, KERNELS, plan)
