"""How attention on arrays is computed where they lie: the launches, in order, and the scratch that they share."""

from __future__ import annotations

from typing import NamedTuple

from flashcli.kernels.choice import choose, named
from flashcli.kernels.types import Build, Launch, Problem


class Step(NamedTuple):
    """A launch, and the build whose function it is."""

    build: Build
    launch: Launch


class Plan(NamedTuple):
    """The launches of one call, all given the same arguments, and the bytes of scratch that they need.

    ``chunk`` is the argument of that name.
    """

    steps: tuple[Step, ...]
    workspace: int
    chunk: int

    @property
    def kernel(self) -> str:
        return self.steps[-1].build.kernel.name


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
    workspace = build.workspace(B * Hkv, M, N) + build.partial(B * H, M, N)
    return Plan(tuple(Step(build, launch) for launch in steps), workspace, build.chunk(M, N))
