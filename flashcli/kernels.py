"""The ladder of CUDA kernels as plain data: what each is, which tiles it uses, and how it is launched.

One kernel is one file in ``cuda/`` and one entry in `KERNELS`. The command line's choices, the tests, the benchmark and
the table of ``flashcli kernels`` all derive from it. Names are the paper's (FlashAttention-2, arXiv 2307.08691, section
3.1): B batches of N rows of d numbers; tiles of Br query rows and Bc key rows; Tr and Tc tiles of them. A launch has M
query rows of each batch, usually all N.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashcli.errors import BackendUnavailable

MAX_D = 256
PRECISIONS = {"fp32": 3, "fp16": 1}  # how many fp16 products make one of the inputs, where a kernel splits numbers


class Problem(NamedTuple):
    """What a kernel is built for: Q of shape (B, M, d), K and V (B, N, d), masked or not, ``sms`` multiprocessors.

    The build is right for any other B, M and N too; they only decide which tiles are fastest.
    """

    B: int
    M: int
    N: int
    d: int
    causal: bool = False
    precision: str = "fp32"
    sms: int = 132

    @property
    def products(self) -> int:
        return PRECISIONS[self.precision]


class Tiling(NamedTuple):
    """How one block is cut: Br query rows, Bc key rows a step, its threads, its dynamic shared memory in bytes.

    ``macros`` are a kernel's own, beyond those that all have.
    """

    Br: int
    Bc: int
    threads: int
    shared: int = 0
    macros: tuple[tuple[str, int], ...] = ()


class Launch(NamedTuple):
    """One launch: the function in the .cu file, its number of blocks and of threads a block, dynamic shared bytes."""

    function: str
    grid: int
    threads: int
    shared: int = 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def round_up(a: int, b: int) -> int:
    return ceil_div(a, b) * b


def block_per_row_tile(tiling: Tiling, problem: Problem) -> list[Launch]:
    """One block for each of the B * Tr row tiles: what most kernels do."""
    return [Launch("attention", problem.B * ceil_div(problem.M, tiling.Br), tiling.threads, tiling.shared)]


def no_workspace(tiling: Tiling, problem: Problem) -> int:
    return 0


@dataclass(frozen=True)
class Kernel:
    """One rung.

    ``tiling(problem)`` gives the tiles; ``launches(tiling, problem)`` the launches, in order, the last of them
    for all that depends on Q; ``workspace(tiling, problem)`` the bytes of device scratch they share. ``needs`` is the
    lowest compute capability; ``arch_only`` says that only that very architecture runs it. A kernel that ``splits``
    numbers into fp16 halves turns an infinity into NaN, and has a choice of precision.
    """

    name: str
    file: str
    summary: str
    tiling: Callable[[Problem], Tiling]
    needs: tuple[int, int] = (5, 0)
    arch_only: bool = False
    splits: bool = False
    launches: Callable[[Tiling, Problem], list[Launch]] = block_per_row_tile
    workspace: Callable[[Tiling, Problem], int] = no_workspace

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return capability == self.needs if self.arch_only else capability >= self.needs

    @property
    def precisions(self) -> tuple[str, ...]:
        return tuple(PRECISIONS) if self.splits else ("fp32",)


@dataclass(frozen=True)
class Build:
    """A kernel built for a problem: what is compiled, cached and launched."""

    kernel: Kernel
    problem: Problem

    @property
    def tiling(self) -> Tiling:
        return self.kernel.tiling(self.problem)

    def macros(self) -> dict[str, int]:
        tiling = self.tiling
        macros = {"HEAD_DIM": self.problem.d, "BR": tiling.Br, "BC": tiling.Bc, "THREADS": tiling.threads}
        macros |= {"CAUSAL": int(self.problem.causal), **dict(tiling.macros)}
        return macros | ({"PRODUCTS": self.problem.products} if self.kernel.splits else {})

    def launches(self, B: int, M: int, N: int) -> list[Launch]:
        return self.kernel.launches(self.tiling, self.problem._replace(B=B, M=M, N=N))

    @property
    def prepares(self) -> bool:
        """Whether its workspace is for K and V, once for all that depends on Q; else it is for one launch."""
        return len(self.launches(1, 1, 1)) > 1

    def workspace(self, B: int, N: int) -> int:
        return self.kernel.workspace(self.tiling, self.problem._replace(B=B, N=N))


# ---- q_in_registers


def _q_in_registers(problem: Problem) -> Tiling:
    lanes = 1
    while problem.d > 64 * lanes:  # Q and O of a longer head do not fit one thread's registers: lanes share the row
        lanes *= 2
    threads, Br = 128, 128 // lanes
    padded = round_up(problem.d, 4 * lanes)
    Bc = 64
    while Bc * (2 * padded + Br) * 4 > 48 * 1024:  # K, V and S tiles in static shared memory
        Bc //= 2
    return Tiling(Br, Bc, threads)


# ---- register_tiled


def _register_tiled(problem: Problem) -> Tiling:
    d = problem.d
    panel = 32 if d <= 32 else 64
    padded = round_up(d, panel)
    Br = 64 if d <= 64 else 32 if d <= 128 else 16
    Bc = 64 if d <= 32 else 32
    return Tiling(Br, Bc, 64, 4 * (Br * padded + 2 * Bc * panel + Br * Bc))  # Q, two panels of K or V, P


# ---- kernels on split tiles: see cuda/split.cuh for their layout

PREPARE_THREADS = 256


def _padded(d: int) -> int:
    return round_up(d, 32 if d <= 128 else 64)


def _split_bytes(rows: int, columns: int, products: int) -> int:
    """A tile of fp16 hi (and lo, beside it): panels of 64 columns, 128 bytes a row."""
    return ceil_div(2 * columns if products == 3 else columns, 64) * rows * 128


def _tile_bytes(Bc: int, problem: Problem) -> int:
    """One tile of K and one of V."""
    D = _padded(problem.d)
    return _split_bytes(Bc, D, problem.products) + _split_bytes(D, Bc, problem.products)


def _split_workspace(tiling: Tiling, problem: Problem) -> int:
    """All tiles of K and V, and the exponents of their scales."""
    return problem.B * ceil_div(problem.N, tiling.Bc) * (_tile_bytes(tiling.Bc, problem) + 8)


def _prepare(tiling: Tiling, problem: Problem) -> Launch:
    return Launch("prepare", 2 * problem.B * ceil_div(problem.N, tiling.Bc), PREPARE_THREADS)


def _prepare_and_attend(tiling: Tiling, problem: Problem) -> list[Launch]:
    return [_prepare(tiling, problem), *block_per_row_tile(tiling, problem)]


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
    fragments = 2 * (D // 16) * threads * 16 if D > 128 else 0  # of Q: shorter heads keep them in registers
    return Tiling(Br, Bc, threads, _tile_bytes(Bc, problem) + fragments)


# ---- wgmma

ALIGNMENT = 1024  # bytes to spare, so that tiles start where the swizzle repeats
SHORT = 256  # up to this N few blocks share a K and V tile: a pre-pass through memory costs more than it saves


def _wgmma(problem: Problem) -> Tiling:
    d = problem.d
    if problem.N <= SHORT and d <= 64 and d % 4 == 0:
        return _wgmma_splitting(problem)
    if d > 128:
        return _wgmma_tiling(problem, Br=64, Bc=32, stages=2)
    if d > 64:
        return _wgmma_tiling(problem, Br=128, Bc=64, stages=2, pingpong=1)
    if _rounds(192, problem) * 192 < _rounds(128, problem) * 128:  # few row tiles: fewer, larger ones end sooner
        return _wgmma_tiling(problem, Br=192, Bc=64 if d > 32 else 96, stages=3)
    if d > 32 and problem.precision == "fp16":  # the products are short: waiting for a turn at them is not worth it
        return _wgmma_tiling(problem, Br=128, Bc=128, stages=3)
    return _wgmma_tiling(problem, Br=128, Bc=128, stages=2 if d > 32 else 3, pingpong=1)


def _rounds(Br: int, problem: Problem) -> int:
    """How many row tiles the busiest multiprocessor gets."""
    return ceil_div(problem.B * ceil_div(problem.M, Br), problem.sms)


def _wgmma_tiling(problem: Problem, Br: int, Bc: int, stages: int, pingpong: int = 0) -> Tiling:
    Q = Br // 64 * _split_bytes(64, _padded(problem.d), problem.products)
    threads = 128 + 2 * Br  # a warpgroup that copies, and one for each 64 rows
    macros = (("STAGES", stages), ("PINGPONG", pingpong))
    return Tiling(Br, Bc, threads, Q + stages * _tile_bytes(Bc, problem) + ALIGNMENT, macros)


def _wgmma_splitting(problem: Problem) -> Tiling:
    """Two warpgroups split K and V in shared memory, where their fp32 tiles were copied before."""
    D, Bc, stages = _padded(problem.d), 128 if problem.d <= 32 else 64, 4 if problem.d <= 32 else 3
    Q = max(_split_bytes(64, D, problem.products), round_up(64 * problem.d * 4, 1024))
    tile = round_up(Bc * problem.d * 4, 1024)
    KV = max(_split_bytes(Bc, D, problem.products), tile) + max(_split_bytes(D, Bc, problem.products), tile)
    macros = (("STAGES", stages), ("SPLIT_IN_KERNEL", 1))
    return Tiling(128, Bc, 512, stages * (2 * Q + KV) + ALIGNMENT, macros)


def _splits_in_kernel(tiling: Tiling) -> bool:
    return ("SPLIT_IN_KERNEL", 1) in tiling.macros


def _wgmma_launches(tiling: Tiling, problem: Problem) -> list[Launch]:
    """As many blocks as run at once, each with many row tiles; causal: one each, so that the hardware balances them."""
    tiles = problem.B * ceil_div(problem.M, tiling.Br)
    blocks_per_sm = 2 if tiling.Br == 64 and problem.d <= 64 else 1
    grid = tiles if problem.causal and not _splits_in_kernel(tiling) else min(tiles, problem.sms * blocks_per_sm)
    attend = Launch("attention", grid, tiling.threads, tiling.shared)
    return [attend] if _splits_in_kernel(tiling) else [_prepare(tiling, problem), attend]


def _wgmma_workspace(tiling: Tiling, problem: Problem) -> int:
    return 0 if _splits_in_kernel(tiling) else _split_workspace(tiling, problem)


KERNELS = {
    kernel.name: kernel
    for kernel in [
        Kernel(
            name="q_in_registers",
            file="10_q_in_registers.cu",
            summary="one query row a thread; Q, O, m, l in registers; K, V, S in shared memory (the report's last)",
            tiling=_q_in_registers,
        ),
        Kernel(
            name="register_tiled",
            file="11_register_tiled.cu",
            summary="a register tile of S and of O a thread, so that shared memory feeds FFMA at full rate",
            tiling=_register_tiled,
        ),
        Kernel(
            name="mma",
            file="12_mma.cu",
            summary="tensor cores at fp32 accuracy: three fp16 products for one, mma.sync",
            tiling=_mma,
            needs=(8, 0),
            splits=True,
            launches=_prepare_and_attend,
            workspace=_split_workspace,
        ),
        Kernel(
            name="wgmma",
            file="13_wgmma.cu",
            summary="the same with Hopper's wgmma: warps that copy, warps that multiply, everything overlapped",
            tiling=_wgmma,
            needs=(9, 0),
            arch_only=True,
            splits=True,
            launches=_wgmma_launches,
            workspace=_wgmma_workspace,
        ),
    ]
}


SHORT_HEAD = 16  # tensor cores multiply 16 columns or more at a time: a shorter head would mostly multiply padding


def choose(capability: tuple[int, int], d: int, precision: str = "fp32") -> Kernel:
    """The fastest kernel for head size d on a device of this compute capability; its tiles then depend on the shape.

    Heads shorter than `SHORT_HEAD` are left to FFMA in fp32, which is also more accurate there: the 22 bits of a split
    number show where a score is a sum of only a few products.
    """
    fit = [
        kernel
        for kernel in KERNELS.values()
        if kernel.runs_on(capability)
        and precision in kernel.precisions
        and not (kernel.splits and precision == "fp32" and d < SHORT_HEAD)
    ]
    if not fit:
        raise BackendUnavailable(
            "no kernel computes in {} on sm_{}{}.".format(precision, *capability), "use --precision fp32."
        )
    return fit[-1]


def exact(kernel: Kernel) -> Kernel:
    """The kernel for inputs with NaN or Inf: itself, or one that does not split numbers."""
    return KERNELS["register_tiled"] if kernel.splits else kernel
