"""Attention kernels timed on this GPU, for the choice among them: as multiples of what the model expects of an H200.

Each kernel takes arrays of one shape for each class of heads, large enough to keep the GPU busy. What the model counts
beside the tiles is small then. The best of some tries counts: a GPU may do something else in between.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import numpy as np

from flashcli.asked.attention import Operand, call
from flashcli.asked.how import How
from flashcli.asked.shape import ceil_div
from flashcli.compiler import compiler
from flashcli.files.outputs import write_whole
from flashcli.gpu.place import Place, ask, bindings
from flashcli.gpu.prepared import prepare
from flashcli.kernels import choice, speed
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.plan import ATTENTION
from flashcli.kernels.problem import Problem
from flashcli.kernels.tuning import cost
from flashcli.measure.builds import compile_for

LENGTHS = (1024, 96)  # keys, and queries: the latter for kernels that take no more
ROWS = 1024  # of each multiprocessor, about
RUNS, TRIES = 10, 3  # launches one after the other, and how often that is timed
MILLION = 10**6  # random numbers, which are repeated


def problems(place: Place) -> Iterator[tuple[str, Problem]]:
    """The kernels that may be chosen on a GPU, each with a problem for each class of heads, of the GPU's own speed."""
    gpu = place.gpu
    found: set[tuple[str, int]] = set()
    for N, d in itertools.product(LENGTHS, cost.HEADS):
        problem = Problem(
            ceil_div(ROWS * gpu.multiprocessors, N), N, N, d, sms=gpu.multiprocessors, in_place=True,
            batch_invariant=True, speed=gpu.speed,
        )  # fmt: skip
        for one in choice.candidates(gpu.capability, problem):
            if one.microseconds is not None and (one.name, d) not in found:
                found.add((one.name, d))
                yield one.name, problem


def tune(place: Place) -> Iterator[tuple[str, int, float, float]]:
    """For each kernel and class of heads: name, longest head, seconds, and the factor on an H200's time for tiles."""
    todo = list(problems(place))
    compile_for(compiler.architecture(place.gpu.capability), [Build(KERNELS[name], problem) for name, problem in todo])
    with place.current():
        for name, problem in todo:
            took = _seconds(place, name, problem)
            found = cost.parts(KERNELS[name], problem)
            assert found is not None, "the candidates have figures"
            fixed, pairs, pair = found
            of_tiles = max(took * 1e6 - fixed, took * 1e5)  # microseconds: most of all
            yield name, problem.d, took, of_tiles / (pairs * pair)


def _seconds(place: Place, kernel: str, problem: Problem) -> float:
    """The seconds of a call in the best of some tries, by the GPU's own clock."""
    operand = Operand((problem.B, problem.N, problem.d), (problem.N * problem.d, problem.d, 1), "float32")
    prepared = prepare(place, ATTENTION, call(operand, operand, operand).at(0), How(kernel))
    numbers = np.resize(np.random.default_rng(0).normal(size=MILLION).astype(np.float32), operand.shape)
    with contextlib.ExitStack() as last:

        def allocate(size: int) -> int:
            address = int(ask(bindings().cuMemAlloc, size, doing="the GPU gives no memory"))
            last.callback(ask, bindings().cuMemFree, address)
            return address

        at = {name: allocate(numbers.nbytes) for name in "QKVO"}
        for name in "QKV":
            ask(bindings().cuMemcpyHtoD, at[name], numbers.ctypes.data, numbers.nbytes)
        if prepared.workspace:
            at["workspace"] = allocate(prepared.workspace)
        launch = functools.partial(prepared.launch, 0, *(at.get(name, 0) for name in ATTENTION.pointers))
        return min(_timed(launch) for _ in range(TRIES))


def _timed(launch: Callable[[], None]) -> float:
    """The seconds of one of `RUNS` launches, behind one that gives the host time to go ahead."""
    driver = bindings()
    launch()
    start, end = ask(driver.cuEventCreate, 0), ask(driver.cuEventCreate, 0)
    ask(driver.cuEventRecord, start, 0)
    for _ in range(RUNS):
        launch()
    ask(driver.cuEventRecord, end, 0)
    ask(driver.cuEventSynchronize, end)
    milliseconds = ask(driver.cuEventElapsedTime, start, end)
    for event in (start, end):
        ask(driver.cuEventDestroy, event)
    return milliseconds / 1e3 / RUNS


def keep(name: str, factors: Mapping[str, Mapping[int, float]]) -> Path:
    """Keep the factors of a GPU of this name, in place of earlier ones, or forget these if there are none."""
    path, kept = speed.path(), {}
    with contextlib.suppress(OSError, ValueError, TypeError):
        kept = dict(json.loads(path.read_text()))
    kept.pop(name, None)
    kept |= {name: factors} if factors else {}
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(kept, indent=2) + "\n")
    return path
