"""Time kernels and their peers on the same inputs in one run, correctness first."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import astuple
from typing import Any, NamedTuple

import numpy as np

from flashcli.asked.shape import Shape, ceil_div, tflops
from flashcli.files.distributions import draw
from flashcli.files.verify import Comparison, reference
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem
from flashcli.measure import peers
from flashcli.measure.rows import Decoded, Failure, Row, Timed, over_all
from flashcli.run import arrays
from flashcli.run.request import Request, open_backend
from flashcli.run.timeline import wall_seconds

L2_BYTES = 256 * 2**20  # several inputs, more than any second-level cache holds, take turns
CHECKED_ROWS = 512
# Relative L2 against float64 above which a contender is refused, not timed: fp32 arithmetic is below 1e-5 on uniform
# inputs whatever its order of summation, half precision near 7e-4; a wrong kernel is near 1.
REFUSED_ABOVE = {"float32": 1e-5, "float16": 5e-3, "bfloat16": 5e-3}

Measure = Callable[[list[np.ndarray], np.ndarray, int], list[float]]  # of inputs, the place for the answer, runs


class Conditions(NamedTuple):
    """The conditions under which all contenders are timed.

    ``ceilings`` are the rates that `peers.ceilings` measured, if it did.
    """

    runs: int
    causal: bool
    seed: int
    ceilings: dict[str, float] = {}  # noqa: RUF012 (never changed)


class Contender(NamedTuple):
    """``measure(inputs, out, runs)`` gives the seconds of each run, and the first input's answer in ``out``."""

    name: str
    dtype: str
    unit: str | None  # which of the measured ceilings bounds it: fp32, fp16, fp16/3
    measure: Measure


def inputs_for(shape: Shape, seed: int) -> list[np.ndarray]:
    count = min(8, max(2, ceil_div(L2_BYTES, shape.input_bytes)))
    return [draw(shape, range(shape.B), seed + index) for index in range(count)]


def sampled(qkv: np.ndarray, out: np.ndarray, causal: bool, seed: int) -> Comparison:
    """How a seeded sample of rows of the answer compares with float64."""
    B, _, N, _ = qkv.shape
    rng, comparison = np.random.default_rng(seed), Comparison()
    per_batch = max(1, min(N, CHECKED_ROWS // min(B, 64)))
    for batch in rng.choice(B, min(B, 64), replace=False):
        rows = np.sort(rng.choice(N, per_batch, replace=False))
        comparison.add(out[batch][rows], reference(qkv[batch], causal, rows=rows), int(batch), rows)
    return comparison


def bench(shapes: dict[str, Shape], contenders: list[Contender], conditions: Conditions) -> Iterator[Row]:
    """A row for each shape and contender."""
    for case, shape in shapes.items():
        inputs = inputs_for(shape, conditions.seed)
        for contender in contenders:
            about = Row.about(case, shape, contender.name, conditions.causal)
            yield measured(about, contender, inputs, conditions)
            peers.release()


def measured(about: Row, contender: Contender, inputs: list[np.ndarray], conditions: Conditions) -> Timed | Failure:
    """The row of a contender on the inputs: its times, or why there are none."""
    runs, causal, seed, ceilings = conditions
    shape = about.shape
    out = np.full(astuple(shape), np.nan, np.float32)
    try:
        seconds = contender.measure(inputs, out, runs)
    except Exception as error:  # a peer may fail in any way: the other rows shall survive
        return Failure.of(about, error)
    accuracy = judged(about, sampled(inputs[0], out, causal, seed), contender.dtype)
    if isinstance(accuracy, Failure):
        return accuracy
    times, floors = over_all(seconds), dict[str, Any]()
    operations = tflops(**vars(shape), seconds=1.0, causal=causal) * 1e12
    if ceilings:
        floors["floor_bytes"] = 16 * shape.B * shape.N * shape.d / ceilings["bytes"]  # Q, K, V once in, O once out
    if ceilings and contender.unit:
        rate = ceilings["fp16"] / 3 if contender.unit == "fp16/3" else ceilings[contender.unit]
        floors["floor_operations"] = operations / rate
    return Timed(**vars(about), **accuracy, **times, **floors, tflops=operations / times["seconds"] / 1e12)


def judged(about: Row, result: Comparison, dtype: str) -> dict[str, Any] | Failure:
    """How right an answer is, in the fields of a row; or the row of a contender whose answer is wrong."""
    accuracy: dict[str, Any] = {"relative_l2": result.relative_l2, "max_abs": result.max_abs}
    if result.got_nonfinite or not result.relative_l2 <= REFUSED_ABOVE[dtype]:
        wrong = f"wrong: relative L2 {result.relative_l2:.1e}, {result.got_nonfinite} not finite"
        return Failure(**vars(about), **accuracy, error=wrong)
    return accuracy


def failed(rows: Iterable[Row]) -> bool:
    """Whether any contender was wrong, or none could be timed."""
    rows = list(rows)
    wrong = any(isinstance(row, Failure) and row.is_wrong for row in rows)
    return wrong or not any(isinstance(row, Timed | Decoded) for row in rows)


def versions(kernels: Collection[str], precisions: Collection[str]) -> list[tuple[str, str]]:
    """Each kernel in each of the precisions that it has."""
    pairs = itertools.product(precisions, kernels)
    return [(kernel, precision) for precision, kernel in pairs if precision in KERNELS[kernel].precisions]


def gpu_contenders(kernels: Collection[str], precisions: Collection[str], causal: bool) -> list[Contender]:
    return [kernel_contender(*version, causal) for version in versions(kernels, precisions)]


def kernel_contender(kernel: str, precision: str, causal: bool) -> Contender:
    """A rung: on a GPU its kernel alone is timed, on the host all that its backend does."""
    request = Request(causal=causal, kernel=kernel, precision=precision)
    measure = _measure_backend(request) if KERNELS[kernel].on_host else _measure_kernel(request)
    return Contender(*_named(kernel, precision), measure)


def _measure_kernel(request: Request) -> Measure:
    def measure(inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        from flashcli.gpu.pycuda import Session, kernel_seconds

        B, N, d = out.shape
        with Session() as session:
            build = session.build(request.kernel, Problem(B, N, N, d, request.causal, request.precision))
            return kernel_seconds(session, build, inputs, out, runs)

    return measure


def _measure_backend(request: Request) -> Measure:
    def measure(inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        with open_backend(request, Shape(*out.shape)) as backend:
            return wall_seconds(lambda qkv: arrays.forward(backend, qkv, out), inputs, runs)

    return measure


def _named(kernel: str, precision: str) -> tuple[str, str, str | None]:
    if precision == "fp16":
        return f"{kernel} fp16", "float16", "fp16"
    if KERNELS[kernel].on_host:
        return kernel, "float32", None
    return kernel, "float32", "fp16/3" if KERNELS[kernel].splits else "fp32"


def cpu_contenders(kernels: Collection[str], threads: int, causal: bool) -> list[Contender]:
    """The kernels, which run on the host, or else the CPU backend."""
    own = Contender("flashcli cpu", "float32", None, _measure_backend(Request("cpu", causal, threads=threads)))
    return [kernel_contender(name, "fp32", causal) for name in kernels] or [own]
