"""Plain data to launch, in one form for every operation: a kernel, a build of it, launches, a plan.

Names are the paper's (FlashAttention-2, arXiv 2307.08691, section 3.1): tiles of Br query rows and Bc key rows; Tr and
Tc tiles of them. An operation's *problem* is a hashable record of its own, for which its kernels are built: shapes,
types, and all else that decides the machine code, the launches and the scratch.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from flashcli.asked.how import PRECISIONS, How
from flashcli.compiler.architecture import architecture
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.kernels.boxes import addressed
from flashcli.kernels.speed import H200, Speed

STATIC_SHARED = 48 * 1024  # bytes of shared memory that a block has without asking for more


class Gpu(NamedTuple):
    """A GPU as far as launches depend on it: compute capability, number of multiprocessors, and what is fast there."""

    capability: tuple[int, int]
    multiprocessors: int
    name: str = "this GPU"
    speed: Speed = H200


class Tiling(NamedTuple):
    """The work of one block: Br query rows, Bc key rows a step, its threads, its dynamic shared memory in bytes.

    ``macros`` are a kernel's own, beside those that all kernels of its operation have.
    """

    Br: int
    Bc: int
    threads: int
    shared: int = 0
    macros: tuple[tuple[str, int], ...] = ()


class Launch(NamedTuple):
    """A launch: the function in the .cu file, blocks in the grid, threads a block, dynamic shared bytes a block.

    ``tile`` is the pair (i, j) of tiles that a launch is for, where it is not for all. An ``early`` launch may begin
    before the launch before it has ended; the kernel itself waits before it reads that one's results. A launch that is
    ``once`` depends on K and V alone, and need not be repeated for further rows of Q.
    """

    function: str
    grid: int
    threads: int
    shared: int = 0
    tile: tuple[int, int] = (0, 0)
    early: bool = False
    once: bool = False


def takes_all(problem: Any) -> str:
    """Return "": the kernel refuses no problem."""
    return ""


def zero(tiling: Tiling, problem: Any) -> int:
    """Return 0: the kernel needs no scratch, or no counters, whatever the problem."""
    return 0


def nothing(problem: Any) -> tuple[()]:
    """Return (): no launches beside the others, or no tilings to choose from."""
    return ()


def itself(problem: Any) -> Any:
    """Return the problem unchanged: the kernel chooses nothing in it."""
    return problem


@dataclass(frozen=True)
class Kernel:
    """A kernel of any operation: its source in ``cuda/``, the GPUs it needs, how it tiles and launches a problem.

    ``tiling(problem)`` gives the tiles, ``tilings(problem)`` others that would do, where the kernel leaves a choice;
    ``launches(tiling, problem)`` gives the launches in order. ``workspace(tiling, problem)`` is the bytes of scratch
    that they share, of which the first ``counters(tiling, problem)`` ints are 0 before. ``macros(tiling, problem)`` are
    those of all kernels of the operation. ``smallest(problem)`` is the smallest problem for which every function of the
    file is launched, but for the launches of ``beside(problem)``. ``fitted(problem)`` is the problem with the kernel's
    own choices in it. ``refuses(problem)`` says why the kernel cannot be built for a problem; empty if it can.

    ``needs`` is the lowest compute capability. With ``arch_only``, only that very architecture runs the kernel; with
    ``on_host``, no GPU does. A kernel that ``splits`` numbers into fp16 halves turns an infinity into NaN. A kernel
    that is ``strided`` takes arrays with any strides. In the source of one that is ``explicit``, no product and sum are
    left that a compiler may join or not: every build gives the same bytes. The ``name`` is the file's, without what
    orders files there.
    """

    file: str
    summary: str
    tiling: Callable[[Any], Tiling]
    launches: Callable[[Tiling, Any], Iterable[Launch]]
    macros: Callable[[Tiling, Any], dict[str, int]]
    tilings: Callable[[Any], Iterable[Tiling]] = nothing
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
    explicit: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not self.name:
            object.__setattr__(self, "name", re.sub(r"^(\d+|tangents)_", "", Path(self.file).stem))

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability runs the kernel."""
        if self.on_host:
            return False
        return capability == self.needs if self.arch_only else capability >= self.needs

    def refusal(self, capability: tuple[int, int], problem: Any) -> str:
        """The reason why the kernel cannot compute the problem on a GPU of this capability; empty if it can."""
        return self.refuses(problem) if self.runs_on(capability) else f"it needs {architecture(self.needs)}"

    @property
    def precisions(self) -> tuple[str, ...]:
        """The precisions that the kernel computes attention in; see `PRECISIONS`."""
        return tuple(PRECISIONS) if self.splits else ("fp32",)

    def check(self, capability: tuple[int, int], problem: Any, hint: str, device: str = "this GPU") -> Kernel:
        """Return the kernel; BackendUnavailable if it cannot compute the problem on a GPU of this capability."""
        if not self.runs_on(capability):
            needed, found = architecture(self.needs), architecture(capability)
            raise BackendUnavailable(f"kernel {self.name} needs {needed}, {device} is {found}.", hint)
        if reason := self.refuses(problem):
            raise BackendUnavailable(f"kernel {self.name} cannot compute d = {problem.d}: {reason}.", hint)
        return self


def named(kernels: Mapping[str, Kernel], name: str, computes: str) -> Kernel:
    """The kernel of that name; UsageError if there is none among those for what ``computes`` says."""
    if name not in kernels:
        raise UsageError(f"there is no kernel {name!r} for {computes}.", f"choose one of {', '.join(kernels)}.")
    return kernels[name]


def ladder(*kernels: Kernel) -> dict[str, Kernel]:
    """Kernels by their names, in the order of the ladder."""
    return {kernel.name: kernel for kernel in kernels}


@dataclass(frozen=True)
class Build:
    """A kernel built for a problem, to be compiled, cached and launched; its code is right for other sizes, too."""

    kernel: Kernel
    problem: Any

    @property
    def tiling(self) -> Tiling:
        return self.kernel.tiling(self.problem)

    def macros(self) -> dict[str, int]:
        """The macros that the source is compiled with, by name; kernels assert what they can of them."""
        tiling = self.tiling
        return self.kernel.macros(tiling, self.problem) | dict(tiling.macros)

    def launches(self, **sizes: Any) -> Iterable[Launch]:
        """The launches in order, for a problem with other ``sizes`` than the one it was built for."""
        return self.kernel.launches(self.tiling, self.problem._replace(**sizes))

    def steps(self) -> tuple[Step, ...]:
        """The launches in order, each with this build."""
        return tuple(Step(self, launch) for launch in self.launches())

    def workspace(self, **sizes: Any) -> int:
        """Bytes of scratch that the launches share, for a problem with these sizes."""
        return self.kernel.workspace(self.tiling, self.problem._replace(**sizes))

    def counters(self) -> int:
        """The number of ints at the beginning of the scratch that must be 0 before the launches."""
        return self.kernel.counters(self.tiling, self.problem)

    def functions(self) -> tuple[Launch, ...]:
        """A launch of every function of the kernel's file, as for the smallest input."""
        launched = self.kernel.launches(self.tiling, self.kernel.smallest(self.problem))
        return *launched, *self.kernel.beside(self.problem)

    @property
    def prepares(self) -> bool:
        """Whether some launch prepares K and V once for all rows of Q; then the scratch outlives the launches on Q."""
        return any(launch.once for launch in self.functions())


class Step(NamedTuple):
    """A launch, and the build that has its function."""

    build: Build
    launch: Launch


class Plan(NamedTuple):
    """The launches of a call, the struct that all of them are given, and bytes of scratch; only addresses are missing.

    ``clear`` lists what is set in the scratch before the launches: offset in bytes, 32-bit word, number of words.
    ``inside`` lists pointers into the scratch for where the caller gives none: index in the struct, offset in bytes.
    ``unread`` lists the indices of pointers that kernels get as null. The scratch starts on a multiple of 16 bytes.
    ``parts`` are launched after the ``steps``. ``boxes`` has fields of the struct that tell of boxes of an array, and
    the index of its pointer: on a GPU the driver's map takes their place.
    """

    steps: tuple[Step, ...]
    argument: ctypes.Structure
    workspace: int = 0
    clear: tuple[tuple[int, int, int], ...] = ()
    inside: tuple[tuple[int, int], ...] = ()
    unread: tuple[int, ...] = ()
    parts: tuple[Part, ...] = ()
    boxes: tuple[tuple[str, int], ...] = ()

    @property
    def kernel(self) -> str:
        """The name of the kernel of the first launch, which computes all that is finite; empty without launches."""
        return self.steps[0].build.kernel.name if self.steps else ""

    def builds(self) -> Iterator[Build]:
        """The builds of all steps, those of parts too."""
        yield from (step.build for step in self.steps)
        for part in self.parts:
            yield from part.plan.builds()

    def placed(self, addresses: Sequence[int], start: int) -> list[int]:
        """The addresses that kernels get, those in the scratch, which begins at ``start``, among them."""
        placed = list(addresses)
        for which in self.unread:
            placed[which] = 0
        for which, offset in self.inside:
            placed[which] = placed[which] or start + offset
        return placed


class Part(NamedTuple):
    """A plan within another one: where each of its operation's pointers is.

    ``where`` has an index among the addresses of the whole plan, and an offset in bytes from there; None for null.
    """

    operation: Operation
    plan: Plan
    where: tuple[tuple[int, int] | None, ...]

    def addresses(self, of_all: Sequence[int]) -> list[int]:
        """The part's addresses from those of the whole plan."""
        return [0 if at is None or not of_all[at[0]] else of_all[at[0]] + at[1] for at in self.where]


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation, such as attention: its ladder of kernels, and the function that makes a call's plan.

    ``pointers`` are the names of the addresses in the kernels' struct, in order, most of them its beginning.
    ``plan(asked, gpu, how)`` chooses a kernel for ``asked``, a record of `flashcli.asked`, or takes the kernel that
    ``how`` names.
    """

    name: str
    pointers: tuple[str, ...]
    kernels: Mapping[str, Kernel]
    plan: Callable[[Any, Gpu, How], Plan]

    def launched(
        self, plan: Plan, addresses: Sequence[int], mapped: Callable[[bytes, int], bytes] = addressed
    ) -> Iterator[tuple[Step, ctypes.Structure]]:
        """Each step of a plan and of its parts, with its argument for these addresses; the next one changes it.

        ``mapped`` makes a map of the boxes of an array from what is told of them and the array's address.
        """
        addresses = plan.placed(addresses, addresses[self.pointers.index("workspace")] if plan.workspace else 0)
        for name, address in zip(self.pointers, addresses, strict=True):
            setattr(plan.argument, name, address or None)
        for field, pointer in plan.boxes:
            boxes = getattr(plan.argument, field)
            ctypes.memmove(ctypes.addressof(boxes), mapped(bytes(boxes), addresses[pointer]), ctypes.sizeof(boxes))
        yield from ((step, plan.argument) for step in plan.steps)
        for part in plan.parts:
            yield from part.operation.launched(part.plan, part.addresses(addresses), mapped)
