"""What is launched, as plain data, in one form for every operation: a kernel, a build of it, launches, a plan.

Names are the paper's (FlashAttention-2, arXiv 2307.08691, section 3.1): tiles of Br query rows and Bc key rows; Tr and
Tc tiles of them. What an operation's kernels are built for is its *problem*, a hashable record of its own: shapes,
types, and what else decides the machine code, the launches and the scratch.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from flashcli.asked.how import PRECISIONS, How
from flashcli.compiler.architecture import architecture
from flashcli.errors import BackendUnavailable

STATIC_SHARED = 48 * 1024  # bytes of shared memory that a block has without asking for more


class Gpu(NamedTuple):
    """What launches depend on of a GPU: its compute capability, and how many multiprocessors it has."""

    capability: tuple[int, int]
    multiprocessors: int
    name: str = "this GPU"


class Tiling(NamedTuple):
    """How one block is cut: Br query rows, Bc key rows a step, its threads, its dynamic shared memory in bytes.

    ``macros`` are a kernel's own, beyond those that all of its operation have.
    """

    Br: int
    Bc: int
    threads: int
    shared: int = 0
    macros: tuple[tuple[str, int], ...] = ()


class Launch(NamedTuple):
    """One launch: the function in the .cu file, its number of blocks and of threads a block, dynamic shared bytes.

    ``tile`` is the pair (i, j) of tiles that it is for, where it is not for all. One that is ``early`` may begin before
    the launch before it has ended: it waits itself, before it needs anything of it. One that is ``once`` depends on K
    and V alone: it need not be repeated for further rows of Q.
    """

    function: str
    grid: int
    threads: int
    shared: int = 0
    tile: tuple[int, int] = (0, 0)
    early: bool = False
    once: bool = False


def takes_all(problem: Any) -> str:
    """Return "": there is no problem that the kernel cannot be built for."""
    return ""


def zero(tiling: Tiling, problem: Any) -> int:
    """Return 0: the kernel needs none, whatever the problem."""
    return 0


def nothing(problem: Any) -> tuple[Launch, ...]:
    """Return (): the file has no functions but those that are launched."""
    return ()


def itself(problem: Any) -> Any:
    """Return the problem: the kernel chooses nothing in it."""
    return problem


@dataclass(frozen=True)
class Kernel:
    """A kernel of any operation: one file of ``cuda/``, the GPUs it needs, how it cuts and launches a problem.

    ``tiling(problem)`` gives the tiles, ``launches(tiling, problem)`` the launches in order, ``workspace(tiling,
    problem)`` the bytes of scratch they share, of which the first ``counters(tiling, problem)`` ints are 0 before.
    ``macros(tiling, problem)`` are those that all kernels of the operation are compiled with, and ``smallest(problem)``
    is the smallest problem for which every function of the file is launched, but for those ``beside(problem)``.
    ``fitted(problem)`` is the problem with what the kernel chooses in it. ``refuses(problem)`` says why it cannot be
    built for a problem; empty if it can.

    ``needs`` is the lowest compute capability; ``arch_only`` says that only that very architecture runs it;
    ``on_host``, that no GPU does. A kernel that ``splits`` numbers into fp16 halves turns an infinity into NaN. One
    that is ``strided`` takes arrays as they lie.
    """

    name: str
    file: str
    summary: str
    tiling: Callable[[Any], Tiling]
    launches: Callable[[Tiling, Any], Iterable[Launch]]
    macros: Callable[[Tiling, Any], dict[str, int]]
    smallest: Callable[[Any], Any] = itself
    beside: Callable[[Any], tuple[Launch, ...]] = nothing
    workspace: Callable[[Tiling, Any], int] = zero
    counters: Callable[[Tiling, Any], int] = zero
    fitted: Callable[[Any], Any] = itself
    refuses: Callable[[Any], str] = takes_all
    needs: tuple[int, int] = (5, 0)
    arch_only: bool = False
    on_host: bool = False
    splits: bool = False
    strided: bool = False

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs it."""
        if self.on_host:
            return False
        return capability == self.needs if self.arch_only else capability >= self.needs

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that it computes attention in."""
        return tuple(PRECISIONS) if self.splits else ("fp32",)

    def check(self, capability: tuple[int, int], problem: Any, hint: str, device: str = "this GPU") -> None:
        """Raise BackendUnavailable if it cannot compute an attention problem on a GPU of this compute capability."""
        if not self.runs_on(capability):
            needed, found = architecture(self.needs), architecture(capability)
            raise BackendUnavailable(f"kernel {self.name} needs {needed}, {device} is {found}.", hint)
        if reason := self.refuses(problem):
            raise BackendUnavailable(f"kernel {self.name} cannot compute d = {problem.d}: {reason}.", hint)


@dataclass(frozen=True)
class Build:
    """A kernel built for a problem: what is compiled, cached and launched. It is right for other sizes, too."""

    kernel: Kernel
    problem: Any

    @property
    def tiling(self) -> Tiling:
        return self.kernel.tiling(self.problem)

    def macros(self) -> dict[str, int]:
        """What the source is compiled with; the kernels assert what they can of it."""
        tiling = self.tiling
        return self.kernel.macros(tiling, self.problem) | dict(tiling.macros)

    def launches(self, **sizes: Any) -> Iterable[Launch]:
        """The launches in order, for a problem with other ``sizes`` than the one it was built for."""
        return self.kernel.launches(self.tiling, self.problem._replace(**sizes))

    def workspace(self, **sizes: Any) -> int:
        """Bytes of scratch that the launches share, for a problem with these sizes."""
        return self.kernel.workspace(self.tiling, self.problem._replace(**sizes))

    def counters(self) -> int:
        """How many ints at the beginning of the scratch are to be 0 before the launches."""
        return self.kernel.counters(self.tiling, self.problem)

    def functions(self) -> tuple[Launch, ...]:
        """Every function of the kernel's file, once, launched as for the smallest input."""
        launched = self.kernel.launches(self.tiling, self.kernel.smallest(self.problem))
        return *launched, *self.kernel.beside(self.problem)

    @property
    def prepares(self) -> bool:
        """Whether its workspace is for K and V, once for all that depends on Q; else it is for one launch."""
        return any(launch.once for launch in self.functions())


class Step(NamedTuple):
    """A launch, and the build whose function it is."""

    build: Build
    launch: Launch


class Plan(NamedTuple):
    """All that a call needs but the addresses: launches, the struct that all of them are given, and scratch.

    ``clear`` says what is set in the scratch before the launches, each by offset in bytes, 32-bit word, and how many of
    it; ``inside`` which addresses are in the scratch where the caller gives none, each by its place in the struct and
    its offset in bytes; ``unread`` which addresses kernels are not given. The scratch starts on a multiple of 16 bytes.
    """

    steps: tuple[Step, ...]
    argument: ctypes.Structure
    workspace: int = 0
    clear: tuple[tuple[int, int, int], ...] = ()
    inside: tuple[tuple[int, int], ...] = ()
    unread: tuple[int, ...] = ()

    @property
    def kernel(self) -> str:
        """The name of the kernel that computes, or nearly always does."""
        return self.steps[0].build.kernel.name if self.steps else ""


@dataclass(frozen=True, eq=False)
class Operation:
    """What is computed: its ladder of kernels, and how a call becomes a plan.

    ``pointers`` are the addresses with which the kernels' struct begins, in order. ``plan(asked, gpu, how)`` chooses a
    kernel for what is asked, one of `flashcli.asked`, or takes the one that `How` names.
    """

    name: str
    pointers: tuple[str, ...]
    kernels: Mapping[str, Kernel]
    plan: Callable[[Any, Gpu, How], Plan]
