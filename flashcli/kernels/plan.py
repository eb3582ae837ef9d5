"""How attention on arrays is computed where they lie: the launches, in order, and the scratch that they share."""

from __future__ import annotations

from typing import NamedTuple

from flashcli.kernels.choice import choose, exact, named
from flashcli.kernels.types import Build, Launch, Problem
from flashcli.shape import round_up

HOPPER = (9, 0)  # the first whose launches may begin before the one before has ended
NOTE_BYTES = 4  # about a row: one of each of the four threads that own it


class Step(NamedTuple):
    """A launch, and the build whose function it is."""

    build: Build
    launch: Launch


class Plan(NamedTuple):
    """The launches of one call, all given the same arguments, and the bytes of scratch that they need.

    ``redo`` is where in the scratch the rows are noted whose answer is not finite; None if nothing is to be noted. The
    last step computes those rows once more, without splitting numbers, and returns at once where there are none: so the
    host need not wait for anything. ``chunk`` is the argument of that name.
    """

    steps: tuple[Step, ...]
    workspace: int
    redo: int | None
    chunk: int = 0

    @property
    def kernel(self) -> str:
        """The name of the kernel that computes, or nearly always does."""
        return self.steps[-1 if self.redo is None else -2].build.kernel.name


def plan(capability: tuple[int, int], problem: Problem, B: int, H: int, Hkv: int, kernel: str | None = None) -> Plan:
    """For B batches of H heads, Hkv of K and V, on a GPU of this compute capability.

    ``problem`` says what is compiled, its B being B * H. BackendUnavailable says why a ``kernel`` that was named does
    not do it.
    """
    problem = problem._replace(in_place=True)
    chosen = choose(capability, problem) if kernel is None else named(kernel, capability, problem)
    build, (M, N) = Build(chosen, problem), (problem.M, problem.N)
    before, launches = build.prepare(B * Hkv, N), build.launches(B * H, M, N)
    early = chosen.waits and build.prepares
    steps = [*before, *(launch._replace(early=early) for launch in launches)]
    found = [Step(build, launch) for launch in steps]
    scratch = build.workspace(B * Hkv, M, N) + build.partial(B * H, M, N)
    if not chosen.splits:
        return Plan(tuple(found), scratch, None)
    once_more = Build(exact(chosen), problem)
    few = 2 * problem.sms  # blocks; each looks through the notes of many row tiles
    early = once_more.kernel.waits and capability >= HOPPER
    for launch in once_more.launches(B * H, M, N):
        found.append(Step(once_more, launch._replace(grid=min(launch.grid, few), early=early)))
    redo = round_up(scratch, 16)
    return Plan(tuple(found), redo + NOTE_BYTES * B * H * M, redo, build.chunk(M, N))
