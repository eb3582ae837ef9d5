"""What is launched, as plain data: a problem, the tiles it is cut into, the launches, a kernel, a build of one.

Names are the paper's (FlashAttention-2, arXiv 2307.08691, section 3.1): B batches of N rows of d numbers; tiles of Br
query rows and Bc key rows; Tr and Tc tiles of them. A launch has M query rows of each batch, usually all N.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from flashcli.asked.shape import ceil_div
from flashcli.kernels.arguments import Attention

PRECISIONS = {"fp32": 3, "fp16": 1}  # how many fp16 products make one of the inputs, where a kernel splits numbers
BIASES = {"": 0, "float32": 1, "bool": 2}  # what may be added to scores, and its macro: nothing, numbers, a mask
STATIC_SHARED = 48 * 1024  # bytes of shared memory that a block has without asking for more
PREPARE_THREADS = 256  # of a block of the pre-pass that splits K and V
LOOK_THREADS = 256  # of a block that looks for NaN and Inf, a warp a row


def check_precision(name: object) -> None:
    """Refuse, by ValueError, a precision that there is not, or what is no name."""
    if name not in tuple(PRECISIONS):  # which a list can be looked for in
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {name!r}")


class Problem(NamedTuple):
    """What a kernel is built for: Q of shape (B, M, d), K and V (B, N, d), masked or not, ``sms`` multiprocessors.

    B counts all heads of all batches. The build is right for any other B, M and N too; they only decide which tiles are
    fastest.

    ``in_place``: for arrays as they lie, with heads, right where numbers are not finite, and giving the ``lse``.
    ``dense``: whether the rows of each head follow one another; ``aligned``: whether all rows start on 16 bytes.
    ``bias`` is one of `BIASES`, ``bias_contiguous`` whether those of neighbouring keys are neighbours. Where it is to
    be ``batch_invariant``, Bc does not depend on B and ``sms``, so that a row's bytes follow from its own data and (M,
    N, d, causal, precision, bias) alone.
    """

    B: int
    M: int
    N: int
    d: int
    causal: bool = False
    precision: str = "fp32"
    sms: int = 132
    in_place: bool = False
    lse: bool = False
    dense: bool = True
    bias: str = ""
    bias_contiguous: bool = True
    aligned: bool = True
    batch_invariant: bool = False

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
    """One launch: the function in the .cu file, its number of blocks and of threads a block, dynamic shared bytes.

    ``tile`` is the pair (i, j) of tiles that it is for, where it is not for all. One that is ``early`` may begin before
    the launch before it has ended: it waits itself, before it needs anything of it.
    """

    function: str
    grid: int
    threads: int
    shared: int = 0
    tile: tuple[int, int] = (0, 0)
    early: bool = False


def takes_all(problem: Problem) -> str:
    """There is no problem that the kernel cannot be built for."""
    return ""


def nothing(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    return ()


def block_per_row_tile(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """One block for each of the B * Tr row tiles: what most kernels do."""
    return (Launch("attention", problem.B * ceil_div(problem.M, tiling.Br), tiling.threads, tiling.shared),)


def zero(tiling: Tiling, problem: Problem) -> int:
    return 0


@dataclass(frozen=True)
class Kernel:
    """One rung.

    ``tiling(problem)`` gives the tiles; ``prepare(tiling, problem)`` the launches that K and V alone need, once for
    however many rows attend to them; ``launches(tiling, problem)`` those for M query rows, in order;
    ``workspace(tiling, problem)`` the bytes of device scratch they all share. Where a row's keys are cut into
    chunks, ``chunk(tiling, problem)`` is how many tiles of keys each has, and ``partial(tiling, problem)`` the bytes
    that they take after the workspace; else both are 0. ``needs`` is the lowest compute
    capability; ``arch_only`` says that only that very architecture runs it; ``on_host``, that no GPU does.
    ``refuses(problem)`` says why the kernel cannot be built for a problem, empty if it can. A kernel that ``splits``
    numbers into fp16 halves turns an infinity into NaN, and has a choice of precision. One that is ``strided`` takes
    arrays as they lie: heads, strides, a bias; and gives the LSE. One that ``waits`` does so itself for the launch
    before it, on GPUs where launches may begin early.
    """

    name: str
    file: str
    summary: str
    tiling: Callable[[Problem], Tiling]
    needs: tuple[int, int] = (5, 0)
    arch_only: bool = False
    on_host: bool = False
    splits: bool = False
    strided: bool = False
    waits: bool = False
    refuses: Callable[[Problem], str] = takes_all
    prepare: Callable[[Tiling, Problem], Iterable[Launch]] = nothing
    launches: Callable[[Tiling, Problem], Iterable[Launch]] = block_per_row_tile
    workspace: Callable[[Tiling, Problem], int] = zero
    partial: Callable[[Tiling, Problem], int] = zero
    chunk: Callable[[Tiling, Problem], int] = zero

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs it."""
        if self.on_host:
            return False
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
        """What the source is compiled with; the kernels assert what they can of it."""
        tiling = self.tiling
        macros = {"HEAD_DIM": self.problem.d, "BR": tiling.Br, "BC": tiling.Bc, "THREADS": tiling.threads}
        macros |= {"SHARED": tiling.shared, "CAUSAL": int(self.problem.causal)}
        macros |= {"ARGUMENT_BYTES": ctypes.sizeof(Attention), **dict(tiling.macros)}
        if self.kernel.strided:
            aligned = self.problem.aligned and self.problem.d % 4 == 0
            macros |= {"IN_PLACE": int(self.problem.in_place), "DENSE": int(self.problem.dense)}
            macros |= {"ALIGNED": int(aligned), "LSE": int(self.problem.lse)}
            if self.problem.bias:
                macros |= {"BIAS": BIASES[self.problem.bias], "BIAS_COLUMN": int(self.problem.bias_contiguous)}
        if self.kernel.splits:
            macros |= {"PRODUCTS": self.problem.products, "PREPARE_THREADS": PREPARE_THREADS}
        return macros

    def functions(self) -> list[Launch]:
        """Every function of the kernel's file, once, launched as for the smallest input."""
        smallest = self.problem._replace(B=1, M=1, N=1)
        return [
            *self.kernel.prepare(self.tiling, smallest),
            *self.kernel.launches(self.tiling, smallest),
            self.look(rows=1),
        ]

    def look(self, rows: int) -> Launch:
        """The launch that looks for NaN and Inf among that many rows of Q, K and V."""
        enough = 8 * self.problem.sms  # blocks; each goes on to further rows
        return Launch("find_nonfinite", min(ceil_div(rows, LOOK_THREADS // 32), enough), LOOK_THREADS)

    def prepare(self, B: int, N: int) -> Iterable[Launch]:
        return self.kernel.prepare(self.tiling, self.problem._replace(B=B, N=N))

    def launches(self, B: int, M: int, N: int) -> Iterable[Launch]:
        return self.kernel.launches(self.tiling, self.problem._replace(B=B, M=M, N=N))

    def partial(self, B: int, M: int, N: int) -> int:
        return self.kernel.partial(self.tiling, self.problem._replace(B=B, M=M, N=N))

    def chunk(self, M: int, N: int) -> int:
        return self.kernel.chunk(self.tiling, self.problem._replace(M=M, N=N))

    @property
    def prepares(self) -> bool:
        """Whether its workspace is for K and V, once for all that depends on Q; else it is for one launch."""
        return any(self.prepare(1, 1))

    def workspace(self, B: int, M: int, N: int) -> int:
        return self.kernel.workspace(self.tiling, self.problem._replace(B=B, M=M, N=N))
