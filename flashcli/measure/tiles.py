"""The search for tiles: every Br and Bc with which a kernel fits a block, timed on the same inputs.

The course report chose its tiles "after experiment"; this is the experiment. A pair fits if shared memory holds its
tiles, and if the compiler needs no more registers than a thread can have.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from flashcli.asked.shape import Shape
from flashcli.gpu.pycuda import Session, kernel_seconds
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.occupancy import multiprocessor, occupancy
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.measure import bench, builds
from flashcli.measure.bench import Conditions, Contender
from flashcli.measure.rows import Row, Skipped, Tiled, Timed


def search(shapes: dict[str, Shape], names: list[str], conditions: Conditions) -> Iterator[Row]:
    """A row for each shape, kernel and pair (Br, Bc); one that says why where there are no times."""
    with Session() as session:
        for case, shape in shapes.items():
            problem = Problem(shape.B, shape.N, shape.N, shape.d, conditions.causal, sms=session.multiprocessors)
            inputs = bench.inputs_for(shape, conditions.seed)
            for name in names:
                tried = _builds(name, problem)
                builds.compile_all(tried)
                for build in tried:
                    contender = "{}, {} x {}".format(name, *build.tiling)
                    about = Row.about(case, shape, contender, conditions.causal)
                    yield _timed(session, about, build, inputs, conditions)


def _builds(name: str, problem: Problem) -> list[Build]:
    """A build for each tiling that the kernel can have."""
    kernel = KERNELS[name]
    always = [functools.partial(lambda tiling, _: tiling, tiling) for tiling in kernel.tilings(problem)]
    return [Build(replace(kernel, tiling=tiling), problem) for tiling in always]


def _timed(session: Session, about: Row, build: Build, inputs: list, conditions: Conditions) -> Row:
    found, tiling, name = session.program(build).resources("attention"), build.tiling, build.kernel.name
    if found.spilled:
        return Skipped(**vars(about), skipped=f"registers do not suffice: {found.spilled} bytes spill")
    contender = Contender(name, "float32", "fp32", functools.partial(kernel_seconds, session, build))
    row = bench.measured(about, contender, inputs, conditions)
    if not isinstance(row, Timed):
        return row
    fits = occupancy(multiprocessor(session.driver), tiling.threads, found.registers, found.shared)
    return Tiled(
        **vars(row), kernel=name, Br=tiling.Br, Bc=tiling.Bc, own=tiling == KERNELS[name].tiling(build.problem),
        threads=tiling.threads, registers=found.registers, shared=found.shared, occupancy=fits.percent,
        limited_by=fits.limited_by,
    )  # fmt: skip
