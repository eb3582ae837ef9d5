"""Attention kernels timed on this GPU, for the choice among them: as multiples of what the model expects of an H200.

Each kernel takes arrays of one shape for each class of heads, large enough to keep the GPU busy. What the model counts
beside the tiles is small then. The best of some tries counts: a GPU may do something else in between.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from flashcli.api import attention
from flashcli.asked.shape import ceil_div
from flashcli.compiler import compiler
from flashcli.files.outputs import write_whole
from flashcli.gpu.place import Place, ask, bindings
from flashcli.kernels import choice, speed
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.kernels.tuning import cost
from flashcli.measure.builds import compile_for

N, TILES = 1024, 8  # keys and queries; tiles of 128 rows for each multiprocessor, about
RUNS, TRIES = 10, 3  # calls one after the other, and how often that is timed
MILLION = np.random.default_rng(0).normal(size=10**6).astype(np.float32)  # numbers, repeated


class Array:
    """Random numbers on a GPU, with the protocol by which libraries pass arrays on; ``free`` gives the memory back."""

    def __init__(self, shape: tuple[int, ...]) -> None:
        numbers = np.resize(MILLION, shape)
        self._address = int(ask(bindings().cuMemAlloc, numbers.nbytes, doing="the GPU gives no memory"))
        ask(bindings().cuMemcpyHtoD, self._address, numbers.ctypes.data, numbers.nbytes)
        self.__cuda_array_interface__ = {
            "shape": shape, "typestr": "<f4", "data": (self._address, False), "version": 3, "stream": None,
        }  # fmt: skip

    def free(self) -> None:
        ask(bindings().cuMemFree, self._address)


def problems(place: Place) -> Iterator[tuple[str, Problem]]:
    """The kernels that may be chosen on a GPU, each with a problem for each class of heads, of the GPU's own speed."""
    gpu = place.gpu
    for d in cost.HEADS:
        problem = Problem(
            ceil_div(TILES * gpu.multiprocessors, N // 128), N, N, d, sms=gpu.multiprocessors, in_place=True,
            batch_invariant=True, speed=gpu.speed,
        )  # fmt: skip
        for one in choice.candidates(gpu.capability, problem):
            if one.microseconds is not None:
                yield one.name, problem


def tune(place: Place) -> Iterator[tuple[str, int, float, float]]:
    """For each kernel and class of heads: name, longest head, seconds, and the factor on an H200's time for tiles."""
    todo = list(problems(place))
    compile_for(compiler.architecture(place.gpu.capability), [Build(KERNELS[name], problem) for name, problem in todo])
    with place.current():
        for name, problem in todo:
            took = _seconds(name, problem)
            found = cost.parts(KERNELS[name], problem)
            assert found is not None, "the candidates have figures"
            fixed, pairs, pair = found
            yield (
                name,
                problem.d,
                took,
                max(took * 1e6 - fixed, took * 1e5) / (pairs * pair),
            )  # the tiles are most of it


def _seconds(kernel: str, problem: Problem) -> float:
    """The seconds of a call in the best of some tries, by the GPU's own clock."""
    with contextlib.ExitStack() as last:
        arrays: list[Any] = []
        for _ in range(4):
            arrays.append(Array((problem.B, problem.N, problem.d)))
            last.callback(arrays[-1].free)
        q, k, v, o = arrays
        call = functools.partial(attention, q, k, v, out=o, kernel=kernel)
        return min(_timed(call) for _ in range(TRIES))


def _timed(call: Any) -> float:
    """The seconds of one of `RUNS` calls, behind one for which the driver finds scratch, while the host goes ahead."""
    driver = bindings()
    call()
    start, end = ask(driver.cuEventCreate, 0), ask(driver.cuEventCreate, 0)
    ask(driver.cuEventRecord, start, 0)
    for _ in range(RUNS):
        call()
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
