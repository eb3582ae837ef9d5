"""The ladder of CUDA kernels as plain data: what each is, which tiles it uses, and how it is launched.

One kernel is one file in ``cuda/`` and one entry in `KERNELS`. The command line's choices, the tests, the benchmark and
the table of ``flashcli kernels`` all derive from it. Names are the paper's (FlashAttention-2, arXiv 2307.08691, section
3.1): B batches of N rows of d numbers; tiles of Br query rows and Bc key rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from flashcli.errors import BackendUnavailable

MAX_D = 256


class Tiling(NamedTuple):
    """How one block is cut: Br query rows, Bc key rows a step, its threads, its dynamic shared memory in bytes."""

    Br: int
    Bc: int
    threads: int
    shared: int = 0


class Launch(NamedTuple):
    """One launch: the function in the .cu file, its number of blocks and of threads a block, dynamic shared bytes."""

    function: str
    grid: int
    threads: int
    shared: int = 0


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def block_per_row_tile(tiling: Tiling, B: int, N: int, d: int, sms: int) -> list[Launch]:
    """One block for each of the B * Tr row tiles: what most kernels do."""
    return [Launch("attention", B * ceil_div(N, tiling.Br), tiling.threads, tiling.shared)]


def no_workspace(tiling: Tiling, B: int, N: int, d: int) -> int:
    return 0


@dataclass(frozen=True)
class Kernel:
    """One rung.

    ``tiling(d)`` gives the tiles for a head size; ``launches(tiling, B, N, d, sms)`` the launches, in order, on a
    device of ``sms`` multiprocessors; ``workspace(tiling, B, N, d)`` the bytes of device scratch they share.
    ``needs`` is the lowest compute capability; ``arch_only`` says that only that very architecture runs it.
    """

    name: str
    file: str
    summary: str
    tiling: Callable[[int], Tiling]
    needs: tuple[int, int] = (5, 0)
    arch_only: bool = False
    precisions: tuple[str, ...] = ("fp32",)
    launches: Callable[[Tiling, int, int, int, int], list[Launch]] = block_per_row_tile
    workspace: Callable[[Tiling, int, int, int], int] = no_workspace

    def runs_on(self, capability: tuple[int, int]) -> bool:
        return capability == self.needs if self.arch_only else capability >= self.needs


@dataclass(frozen=True)
class Build:
    """A kernel for one head size, masked or not, in one precision: what is compiled, cached and launched."""

    kernel: Kernel
    d: int
    causal: bool = False
    precision: str = "fp32"

    @property
    def tiling(self) -> Tiling:
        return self.kernel.tiling(self.d)

    def macros(self) -> dict[str, int]:
        tiling = self.tiling
        macros = {"HEAD_DIM": self.d, "BR": tiling.Br, "BC": tiling.Bc, "THREADS": tiling.threads}
        products = {"fp32": 3, "fp16": 1}[self.precision]  # of the halves of a split number, where a kernel splits
        return (
            macros | {"CAUSAL": int(self.causal)} | ({"PRODUCTS": products} if len(self.kernel.precisions) > 1 else {})
        )

    def launches(self, B: int, N: int, sms: int) -> list[Launch]:
        return self.kernel.launches(self.tiling, B, N, self.d, sms)

    def workspace(self, B: int, N: int) -> int:
        return self.kernel.workspace(self.tiling, B, N, self.d)


def _q_in_registers(d: int) -> Tiling:
    lanes = 1
    while d > 64 * lanes:  # Q and O of a longer head do not fit one thread's registers: lanes share the row
        lanes *= 2
    threads, Br = 128, 128 // lanes
    padded = ceil_div(d, 4 * lanes) * 4 * lanes
    Bc = 64
    while Bc * (2 * padded + Br) * 4 > 48 * 1024:  # K, V and S tiles in static shared memory
        Bc //= 2
    return Tiling(Br, Bc, threads)


KERNELS = {
    kernel.name: kernel
    for kernel in [
        Kernel(
            name="q_in_registers",
            file="10_q_in_registers.cu",
            summary="one query row a thread; Q, O, m, l in registers; K, V, S in shared memory (the report's last)",
            tiling=_q_in_registers,
        ),
    ]
}


def choose(capability: tuple[int, int], shape: tuple[int, int, int], precision: str = "fp32") -> Kernel:
    """The fastest kernel for inputs of shape (B, N, d) on a device of this compute capability."""
    fit = [kernel for kernel in KERNELS.values() if kernel.runs_on(capability) and precision in kernel.precisions]
    if not fit:
        raise BackendUnavailable(
            f"no kernel computes in {precision} on sm_{capability[0]}{capability[1]}.", "use fp32."
        )
    return fit[-1]
