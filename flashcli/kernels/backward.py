"""The ladder of backward kernels: their tiles, their launches, their scratch, and what they are told.

One kernel is one file in ``cuda/backward/`` and one entry in `KERNELS`. Each computes dQ, dK and dV, and dbias where it
is wanted, in the same steps: numbers of a row, dQ by tiles of queries, dK and dV by tiles of keys, dbias.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from flashcli.asked.attention import Backward
from flashcli.asked.shape import ceil_div, round_up
from flashcli.errors import UsageError
from flashcli.kernels.arguments import Strides
from flashcli.kernels.choice import check_able
from flashcli.kernels.types import BIASES, STATIC_SHARED, Launch, Tiling

ROW_THREADS = 256  # of a block that takes rows one by one
AGAIN = 1024  # blocks, at most, that compute what is not finite: mostly they find that there is nothing
ROW_BYTES = 16  # that are kept of a row: ``Row`` of cuda/backward/backward.cuh
MATRICES = "dO", "Q", "K", "V", "O"
POINTERS = (*MATRICES, "lse", "dlse", "bias", "dQ", "dK", "dV", "dbias", "workspace", "notes")
STRIDES = "d_o", "q", "k", "v", "o", "lse_at", "dlse_at", "dq", "dk", "dv", "bias_at", "dbias_at"


class Argument(ctypes.Structure):
    """``Backward`` of cuda/backward/arguments.h, where it says what each means."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, Strides) for name in STRIDES),
        *((name, ctypes.c_longlong) for name in ("bias_column", "dbias_column")),
        *((name, ctypes.c_int) for name in ("B", "H", "Hkv", "M", "N", "q_start")),
        ("scale", ctypes.c_float),
    )


def argument(asked: Backward) -> Argument:
    """The arguments but for the addresses."""
    call = asked.of
    strides = {
        "d_o": asked.do, "q": call.q, "k": call.k, "v": call.v, "o": call.o, "lse_at": asked.lse,
        "dlse_at": asked.dlse or (0, 0, 0), "dq": asked.dq, "dk": asked.dk, "dv": asked.dv,
        "bias_at": call.bias_strides[:3], "dbias_at": asked.dbias[:3],
    }  # fmt: skip
    return Argument(
        **{name: Strides(*by) for name, by in strides.items()}, bias_column=call.bias_strides[3],
        dbias_column=asked.dbias[3], B=call.B, H=call.H, Hkv=call.Hkv, M=call.M, N=call.N, q_start=call.q_start,
        scale=call.scale,
    )  # fmt: skip


class Problem(NamedTuple):
    """What a kernel is compiled for; ``aligned``: whether all rows start on 16 bytes. ``bias`` is one of `BIASES`.

    ``tiles``: of 64 queries and of 64 keys, for a kernel whose blocks have whole heads; (0, 0) where several heads of Q
    share one of K.
    """

    d: int
    causal: bool = False
    bias: str = ""
    bias_contiguous: bool = True
    aligned: bool = True
    tiles: tuple[int, int] = (1, 1)


class Sizes(NamedTuple):
    """What is computed; ``dbias`` is the number of batches, heads, queries and keys that it has, 0 where there is none.

    An axis that it has not, or is of one element, counts as 1.
    """

    B: int
    H: int
    Hkv: int
    M: int
    N: int
    dbias: tuple[int, int, int, int] = (0, 0, 0, 0)

    @property
    def rows(self) -> int:
        return self.B * self.H * self.M


def sizes_of(asked: Backward) -> Sizes:
    call, dbias = asked.of, (0, 0, 0, 0)
    if asked.dbias_shape is not None:
        lengths = (call.B, call.H, call.M, call.N)
        dbias = tuple(n if stride else 1 for n, stride in zip(lengths, asked.dbias, strict=True))  # type: ignore[assignment]
    return Sizes(call.B, call.H, call.Hkv, call.M, call.N, dbias)


def takes_all(problem: Problem) -> str:
    """There is no problem that the kernel cannot be built for."""
    return ""


def of_any_size(problem: Problem, sizes: Sizes) -> Problem:
    """The kernel is the same for all sizes."""
    return problem


def always(sizes: Sizes) -> bool:
    """There is no size for which another kernel is to be preferred."""
    return True


def nothing(*of_call: object) -> int:
    """It needs none of them."""
    return 0


class Halves(NamedTuple):
    """How a kernel splits numbers into fp16 halves: the launches of all steps, and the bytes of scratch beyond rows.

    ``counters(sizes)`` ints, 0 at first, are behind the notes of what is not finite.
    """

    launches: Callable[[Build, Sizes], Iterator[Launch]]
    scratch: Callable[[Build, Sizes], int] = nothing
    counters: Callable[[Sizes], int] = nothing


@dataclass(frozen=True)
class Kernel:
    """One rung. ``tiling(problem)`` gives Br, the rows that a block owns in `dq`, and Bc, those that pass it by.

    In `dk_dv` a block owns ``owned_keys(tiling)`` keys. ``dbias_blocks(tiling, sizes)`` are those of `dbias`; a kernel
    that has none leaves it to the exact one. ``needs`` is the lowest compute capability; ``arch_only`` says that only
    that very architecture runs it. ``fitted(problem, sizes)`` is the problem with what in it follows from sizes,
    ``pays(sizes)`` whether the kernel is worth choosing. A kernel that splits numbers into fp16 ``halves`` turns an
    infinity into NaN. ``refuses(problem)`` says why it cannot be built for a problem; empty if it can.
    """

    name: str
    file: str
    summary: str
    tiling: Callable[[Problem], Tiling]
    owned_keys: Callable[[Tiling], int]
    dbias_blocks: Callable[[Tiling, Sizes], int] | None
    needs: tuple[int, int] = (5, 0)
    arch_only: bool = False
    fitted: Callable[[Problem, Sizes], Problem] = of_any_size
    pays: Callable[[Sizes], bool] = always
    halves: Halves | None = None
    refuses: Callable[[Problem], str] = takes_all
    on_host: bool = False

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs it."""
        return capability == self.needs if self.arch_only else capability >= self.needs


@dataclass(frozen=True)
class Build:
    """A kernel compiled for a problem."""

    kernel: Kernel
    problem: Problem

    @property
    def tiling(self) -> Tiling:
        return self.kernel.tiling(self.problem)

    def macros(self) -> dict[str, int]:
        asked, tiling = self.problem, self.tiling
        macros = {
            "HEAD_DIM": asked.d, "BR": tiling.Br, "BC": tiling.Bc, "THREADS": tiling.threads, "SHARED": tiling.shared,
            "CAUSAL": int(asked.causal), "ALIGNED": int(asked.aligned and asked.d % 4 == 0),
            "ROW_THREADS": ROW_THREADS, "ARGUMENT_BYTES": ctypes.sizeof(Argument), **dict(tiling.macros),
        }  # fmt: skip
        if asked.bias:
            macros |= {"BIAS": BIASES[asked.bias], "BIAS_COLUMN": int(asked.bias_contiguous)}
        return macros

    def functions(self) -> tuple[Launch, ...]:
        """Every function of the kernel's file, launched as for the smallest input."""
        smallest = Sizes(1, 1, 1, 1, 1, (1, 1, 1, 1))
        return (*self.gradients(smallest), *self.dbias(smallest))

    def gradients(self, sizes: Sizes) -> Iterator[Launch]:
        """Those that compute dQ, dK and dV, in order."""
        if self.kernel.halves:
            yield from self.kernel.halves.launches(self, sizes)
            return
        yield self.delta(sizes)
        yield from self.passes(sizes)

    def delta(self, sizes: Sizes) -> Launch:
        """That which finds what is known of rows beforehand."""
        return Launch("delta", ceil_div(sizes.rows, ROW_THREADS // _row_lanes(self.problem.d)), ROW_THREADS)

    def passes(self, sizes: Sizes) -> tuple[Launch, Launch]:
        """Those that compute them of what is known of rows."""
        tiling, keys = self.tiling, self.kernel.owned_keys(self.tiling)
        rows = sizes.B * sizes.H * ceil_div(sizes.M, tiling.Br)
        return (
            Launch("dq", rows, tiling.threads, tiling.shared),
            Launch("dk_dv", sizes.B * sizes.Hkv * ceil_div(sizes.N, keys), tiling.threads, tiling.shared),
        )

    def dbias(self, sizes: Sizes) -> Iterator[Launch]:
        """Those that compute dbias of what `dq` has found of rows."""
        if self.kernel.dbias_blocks and any(sizes.dbias):
            blocks = self.kernel.dbias_blocks(self.tiling, sizes)
            yield Launch("dbias", blocks, self.tiling.threads, self.tiling.shared)

    def workspace(self, sizes: Sizes) -> int:
        """Bytes of scratch that all launches share."""
        rows = ROW_BYTES * sizes.rows
        return round_up(rows, 128) + self.kernel.halves.scratch(self, sizes) if self.kernel.halves else rows


def _row_lanes(d: int) -> int:
    """Threads that take a row together, as in cuda/backward/backward.cuh."""
    return next(lanes for lanes in (4, 8, 16, 32) if lanes == 32 or d <= 4 * lanes)


class Step(NamedTuple):
    """A launch, and the build whose function it is."""

    build: Build
    launch: Launch


class Plan(NamedTuple):
    """The launches of one call, all given the same arguments, and the bytes of scratch that they need.

    ``notes`` is where in the scratch there are so many ``zeros``, ints that are 0 at first; None where there are none.
    The first notes whether something is not finite, the next ones, of each head of K and V, where; behind them are the
    kernel's counters. The heads noted are computed once more, without splitting numbers; those launches return at once
    where there are none, so that the host need not wait for anything.
    """

    steps: tuple[Step, ...]
    workspace: int
    notes: int | None
    zeros: int

    @property
    def kernel(self) -> str:
        """The name of the kernel that computes, or nearly always does."""
        return self.steps[0].build.kernel.name


def plan(capability: tuple[int, int], problem: Problem, sizes: Sizes, name: str | None = None) -> Plan:
    """By the kernel of that name, or the fastest, on a GPU of this compute capability."""
    kernel = choose(capability, problem, sizes, name)
    build = Build(kernel, kernel.fitted(problem, sizes))
    steps = [Step(build, launch) for launch in build.gradients(sizes)]
    scratch, exact = build.workspace(sizes), build
    if build.kernel.halves:
        exact = Build(KERNELS["register_tiled"], problem)
        few = (launch._replace(grid=min(launch.grid, AGAIN)) for launch in exact.passes(sizes))
        steps += [Step(exact, launch) for launch in few]
    steps += [Step(exact, launch) for launch in exact.dbias(sizes)]
    if not build.kernel.halves:
        return Plan(tuple(steps), scratch, None, 0)
    notes, zeros = round_up(scratch, 16), 1 + sizes.B * sizes.Hkv + build.kernel.halves.counters(sizes)
    return Plan(tuple(steps), notes + 4 * zeros, notes, zeros)


# ---- plain


def _plain(problem: Problem) -> Tiling:
    def shared(rows: int) -> int:
        return 4 * (4 * rows * (problem.d + 1) + 2 * rows * (rows + 1))

    rows = 16 if shared(16) <= STATIC_SHARED else 8
    return Tiling(rows, rows, rows * rows, shared(rows))


def _key_tile(tiling: Tiling) -> int:
    return tiling.Bc


def _thread_per_element(tiling: Tiling, sizes: Sizes) -> int:
    batches, heads, rows, keys = sizes.dbias
    return ceil_div(batches * heads * rows * keys, tiling.threads)


# ---- register_tiled


def _register_tiled(problem: Problem) -> Tiling:
    D = round_up(problem.d, 32)
    own, passing, threads = next(
        tiles
        for largest, tiles in {64: (64, 64, 128), 128: (32, 32, 128), 192: (16, 32, 64), 256: (8, 32, 64)}.items()
        if largest >= D
    )
    return Tiling(own, passing, threads, 4 * 2 * ((own + passing) * D + own * passing))


def _row_tile(tiling: Tiling) -> int:
    return tiling.Br


def _block_per_tile(tiling: Tiling, sizes: Sizes) -> int:
    batches, heads, rows, keys = sizes.dbias
    return batches * heads * ceil_div(rows, tiling.Br) * ceil_div(keys, tiling.Bc)


# ---- mma


def _split_row(d: int) -> int:
    """Bytes of a row of a split tile, hi and lo; see cuda/split.cuh."""
    return 2 * 2 * round_up(d, 32)


def _mma(problem: Problem) -> Tiling:
    D, threads = round_up(problem.d, 32), 128
    own, passing = 64, 32 if D <= 64 else 16
    pairs = 2 * 2 * passing * _split_row(problem.d)  # two, of which one is on its way
    owned = 2 * (D // 16) * 2 * threads * 16  # fragments of two matrices
    prepare = min(256, passing * D // 8)  # a thread for each 8 columns of a row
    return Tiling(own, passing, threads, pairs + owned, (("PREPARE_THREADS", prepare),))


def _mma_launches(build: Build, sizes: Sizes) -> Iterator[Launch]:
    yield build.delta(sizes)
    yield Launch("prepare", 2 * sum(_tiles(build.tiling, sizes)), build.macros()["PREPARE_THREADS"])
    yield from build.passes(sizes)


def _mma_scratch(build: Build, sizes: Sizes) -> int:
    return sum(_tiles(build.tiling, sizes)) * (2 * build.tiling.Bc * _split_row(build.problem.d) + 8)


def _tiles(tiling: Tiling, sizes: Sizes) -> tuple[int, int]:
    """Tiles of Bc rows of Q, and of K, each with one of dO or V."""
    Bc = tiling.Bc
    return sizes.B * sizes.H * ceil_div(sizes.M, Bc), sizes.B * sizes.Hkv * ceil_div(sizes.N, Bc)


def _up_to_128(problem: Problem) -> str:
    return "" if problem.d <= 128 else "it takes heads of up to 128 numbers"


# ---- wgmma

TAIL = 2 * 4 * 64 + 16  # bytes of ``Tail`` of cuda/backward/warpgroup.cuh
MANY_HEADS = 128  # that keep a GPU busy
HALF_SHARED, MOST_SHARED = 110 * 1024, 220 * 1024  # of two blocks, and of one, beside what is declared in kernels


def _wgmma(problem: Problem) -> Tiling:
    """A warpgroup that multiplies and one that copies, two blocks a multiprocessor; for long heads two and one."""
    own, blocks, pad, passing, stages = (64, 2, 32, 64, 4 if problem.d <= 32 else 2)
    if problem.d > 64:
        own, blocks, pad, passing, stages = (128, 1, 64, 32, 3)
    row = 2 * 2 * round_up(problem.d, pad)
    shared = 2 * own * row + stages * 2 * passing * row + 1024
    macros = {
        "PASS": passing, "STAGES": stages, "PAD": pad, "BLOCKS": blocks, "PREPARE_THREADS": 256, "TAIL": TAIL,
    }  # fmt: skip
    return Tiling(own, 64, 128 + 2 * own, shared, tuple(macros.items()))


def _wgmma_launches(build: Build, sizes: Sizes) -> Iterator[Launch]:
    _, keys = _tiles(build.tiling, sizes)
    dq, dk_dv = build.passes(sizes)
    yield Launch("prepare_keys", 2 * keys, build.macros()["PREPARE_THREADS"])
    yield dq._replace(early=True)
    yield dk_dv._replace(early=True)


def _wgmma_scratch(build: Build, sizes: Sizes) -> int:
    tile = build.tiling.Bc * 2 * 2 * round_up(build.problem.d, build.macros()["PAD"])
    return sum(_tiles(build.tiling, sizes)) * (2 * tile + TAIL)


def _of_each_head(sizes: Sizes) -> int:
    """How many of its records of Q and dO are whole."""
    return sizes.B * sizes.H


# ---- wgmma_short


def _wgmma_short(problem: Problem) -> Tiling:
    """Two blocks of a warpgroup, where a multiprocessor has room for two heads, or one of two."""
    pad = 32 if problem.d <= 32 else 64
    shared = sum(problem.tiles) * 2 * 64 * 2 * 2 * round_up(problem.d, pad) + 1024
    blocks = 2 if shared <= HALF_SHARED else 1
    macros = {
        "PASS": 64, "PAD": pad, "BLOCKS": blocks, "TAIL": TAIL, "ROW_TILES": problem.tiles[0],
        "KEY_TILES": problem.tiles[1],
    }  # fmt: skip
    return Tiling(64, 64, 256 // blocks, shared, tuple(macros.items()))


def _wgmma_short_fitted(problem: Problem, sizes: Sizes) -> Problem:
    own = sizes.Hkv == sizes.H
    return problem._replace(tiles=(ceil_div(sizes.M, 64), ceil_div(sizes.N, 64)) if own else (0, 0))


def _wgmma_short_pays(sizes: Sizes) -> bool:
    """A block takes the tiles of a head one after the other: one has one tile, or many heads are under way."""
    return sizes.B * sizes.H >= MANY_HEADS or max(sizes.M, sizes.N) <= 64


def _wgmma_short_launches(build: Build, sizes: Sizes) -> Iterator[Launch]:
    tiling = build.tiling
    yield Launch("gradients", sizes.B * sizes.H, tiling.threads, tiling.shared)


def _refused_by_wgmma_short(problem: Problem) -> str:
    if problem.d > 64:
        return "it takes heads of up to 64 numbers"
    if problem.tiles == (0, 0):
        return "each head of Q must have its own of K"
    return "its heads are too long" if _wgmma_short(problem).shared > MOST_SHARED else ""


KERNELS = {
    kernel.name: kernel
    for kernel in (
        Kernel(
            "plain", "backward/01_plain.cu", "the formulas as they stand, a thread a score: for any GPU",
            _plain, _key_tile, _thread_per_element,
        ),
        Kernel(
            "register_tiled", "backward/02_register_tiled.cu",
            "a register tile of scores and of sums a thread: FFMA near its full rate",
            _register_tiled, _row_tile, _block_per_tile, needs=(8, 0),
        ),
        Kernel(
            "mma", "backward/03_mma.cu", "tensor cores at fp32 accuracy: three fp16 products for one, mma.sync",
            _mma, _row_tile, None, needs=(8, 0), halves=Halves(_mma_launches, _mma_scratch), refuses=_up_to_128,
        ),
        Kernel(
            "wgmma", "backward/04_wgmma.cu", "the same on Hopper: wgmma, warps specialised, copies in the background",
            _wgmma, _row_tile, None, needs=(9, 0), arch_only=True,
            halves=Halves(_wgmma_launches, _wgmma_scratch, _of_each_head), refuses=_up_to_128,
        ),
        Kernel(
            "wgmma_short", "backward/05_wgmma_short.cu", "short heads on Hopper: a block has all of one",
            _wgmma_short, _row_tile, None, needs=(9, 0), arch_only=True, fitted=_wgmma_short_fitted,
            pays=_wgmma_short_pays, halves=Halves(_wgmma_short_launches),
            refuses=_refused_by_wgmma_short,
        ),
    )
}  # fmt: skip

PREFERENCE = ("wgmma_short", "wgmma", "mma", "register_tiled", "plain")  # the fastest first
SHORT_HEAD = 16  # where inputs have outliers, dK of fewer numbers shows the halves


def check_name(name: str | None) -> None:
    """UsageError for a name that no kernel has."""
    if name is not None and name not in KERNELS:
        raise UsageError(f"there is no kernel {name!r} for gradients.", f"choose one of {', '.join(KERNELS)}.")


def choose(capability: tuple[int, int], problem: Problem, sizes: Sizes, name: str | None = None) -> Kernel:
    """The kernel of that name, or the fastest for the problem on a GPU of this compute capability.

    BackendUnavailable says why it cannot be. Heads shorter than `SHORT_HEAD` are left to FFMA.
    """
    check_name(name)
    if name is None:
        able = (KERNELS[each] for each in PREFERENCE if KERNELS[each].runs_on(capability))
        wanted = (x for x in able if x.pays(sizes) and not (x.halves and problem.d < SHORT_HEAD))
        fits = (x for x in wanted if not x.refuses(x.fitted(problem, sizes)))
        return next(fits, KERNELS[PREFERENCE[-1]])
    kernel = KERNELS[name]
    check_able(kernel, capability, kernel.fitted(problem, sizes), "see `flashcli kernels --operation backward`.")
    return kernel
