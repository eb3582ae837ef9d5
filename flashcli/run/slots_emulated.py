"""The file pipeline by a kernel for GPUs whose threads are emulated on the CPU: slow, and right where the kernel is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import numpy as np

from flashcli.asked.shape import Shape, ceil_div
from flashcli.compiler import cache
from flashcli.compiler.architecture import architecture
from flashcli.cpu.workers import usable_cores
from flashcli.emulator.machine import Emulated
from flashcli.errors import UsageError
from flashcli.files.cut import Cut
from flashcli.files.summary import is_finite
from flashcli.kernels.choice import choose, exact
from flashcli.kernels.operation import Build, Launch
from flashcli.kernels.problem import Problem
from flashcli.process.pool import Pool
from flashcli.run.slots import OneByOne, Slot, argument, ignore
from flashcli.run.timeline import Timeline

CAPABILITY = (9, 0)  # Hopper's, which has every instruction of the ladder
SHARES = 4  # of a launch's blocks for each thread, about, as far as there are
LONG, TOO_LONG = 10, 3600  # seconds that are told of before, and that are not begun
KNOWN_AFTER = 2.0  # seconds, from which the others are estimated


class EmulatedBackend(OneByOne):
    """One kernel, compiled by the host's C++ compiler; BackendUnavailable where there is none that can.

    ``notice`` is told how long it will take, as soon as that can be estimated; UsageError where it is too long.
    """

    def __init__(
        self, kernel: str, problem: Problem, scale: float | None = None, threads: int | None = None,
        notice: Callable[[str], None] = ignore,
    ) -> None:  # fmt: skip
        self._build = Build(choose(CAPABILITY, problem, kernel, "the GPU that is emulated"), problem)
        self._scale = problem.d**-0.5 if scale is None else scale
        self._threads = threads or len(usable_cores())
        self._notice = notice
        self._finite = True  # K and V of a long batch
        self._programs: dict[Build, Emulated] = {}
        self._program(self._build)  # here, where a failure is told before anything is written
        self._pool = Pool(self._threads, thread_name_prefix="emulated")
        self._begun = 0.0
        self._done = 0  # pairs of a query and a key

    def __exit__(self, *exc: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def _program(self, build: Build) -> Emulated:
        if build not in self._programs:
            self._programs[build] = Emulated(build, cache.folder())
        return self._programs[build]

    @property
    def description(self) -> str:
        tiling = self._build.tiling
        return (
            f"emulated on the CPU as on {architecture(CAPABILITY)}, {self._threads} threads, kernel "
            f"{self._build.kernel.name} (Br={tiling.Br}, Bc={tiling.Bc}); its times say nothing about a GPU"
        )

    def details(self) -> dict[str, object]:
        tiling = self._build.tiling
        return {
            "backend": "emulated", "arch": architecture(CAPABILITY), "kernel": self._build.kernel.name,
            "precision": self._build.problem.precision, "threads": self._threads, "Br": tiling.Br, "Bc": tiling.Bc,
        }  # fmt: skip

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[Slot]]:
        self._pairs = shape.B * shape.N**2
        while smaller := by.smaller():  # of which each shows that the run goes on
            by = smaller
        return super().slots(shape, by, count)

    def wait(self, slot: Slot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        with timeline.measure("computation", f"compute {slot.chunk}"):
            slot.finite = is_finite(slot.input_of(slot.chunk))
            if slot.chunk.matrices == "KV":
                self._finite = slot.finite and (self._finite or slot.chunk.rows.start == 0)
                return
            finite = slot.finite and (self._finite or slot.chunk.matrices == "QKV")
            build = self._build if finite else Build(exact(self._build.kernel), self._build.problem)
            self._attend(build, slot, check)
            slot.finite_answer = is_finite(slot.output_of(slot.chunk))

    def _attend(self, build: Build, slot: Slot, check: Callable[[], None]) -> None:
        keys = (0, 0) if slot.chunk.matrices == "QKV" else (self._long[0].k.ctypes.data, self._long[0].v.ctypes.data)
        given = argument(slot, slot.input.ctypes.data, keys, slot.output.ctypes.data, self._scale)
        sizes = {"B": given.B, "M": given.M, "N": given.N}
        workspace = np.full(build.workspace(**sizes), 0xFF, np.uint8)
        given.workspace = workspace.ctypes.data
        launches = list(build.launches(**sizes))
        blocks, done = sum(launch.grid for launch in launches), 0
        self._begun = self._begun or time.monotonic()
        for launch in launches:
            given.tile_i, given.tile_j = launch.tile
            shares = self._shares(build, launch)
            run = functools.partial(self._program(build).launch, launch, given)
            for share, _ in zip(shares, self._pool.results(run, shares), strict=True):
                check()
                done += len(share)
                self._estimate(self._done + given.B * given.M * given.N * done / blocks)
        self._done += given.B * given.M * given.N

    def _shares(self, build: Build, launch: Launch) -> list[range]:
        """Blocks of a launch for one thread at a time; those of a cluster stay together."""
        cluster = build.macros().get("CLUSTER", 1)
        step = ceil_div(ceil_div(launch.grid, SHARES * self._threads), cluster) * cluster
        return [range(first, min(first + step, launch.grid)) for first in range(0, launch.grid, step)]

    def _estimate(self, done: float) -> None:
        """Tell how long all will take, once, from how long the pairs took that are done."""
        if not self._begun or time.monotonic() - self._begun < KNOWN_AFTER:
            return
        seconds = (time.monotonic() - self._begun) * self._pairs / done
        self._begun = float("inf")
        if seconds > TOO_LONG:
            raise UsageError(
                f"to emulate this would take about {seconds / 3600:.0f} hours here.",
                "take a smaller input, such as that of `flashcli generate small.in --shape 2,256,64`, or leave out "
                "--emulate.",
            )
        if seconds > LONG:
            self._notice(f"to emulate this takes about {seconds:.0f} seconds here.")
