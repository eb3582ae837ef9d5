"""How long a kernel takes on a GPU, by the GPU's own clock."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, SupportsInt

import numpy as np

from flashcli.gpu.memory import allocate
from flashcli.gpu.session import Session, failure, out_of_memory
from flashcli.kernels.arguments import Attention, Matrix, attention
from flashcli.kernels.types import Build


def kernel_seconds(session: Session, build: Build, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
    """Seconds of a kernel, its pre-pass included, in each of ``runs`` runs, taking turns among inputs [B, 3, N, d].

    Each timed run follows an untimed one without a gap, so that its first launch is not in the time. The first input's
    answer is left in ``out`` [B, N, d]. The scale is 1/sqrt(d).
    """
    try:
        return _timed(session, build, inputs, out, runs)
    except session.driver.MemoryError:
        pass  # and what was taken is free again
    except session.driver.Error as error:
        raise failure(session, build, error) from error
    B, _, N, d = inputs[0].shape
    needed = sum(qkv.nbytes for qkv in inputs) + out.nbytes + build.workspace(B, N, N)
    raise out_of_memory(session, f"timing (B, N, d) = ({B}, {N}, {d})", needed)


def queued_seconds(driver: Any, work: Callable[[], object], stream: Any = None) -> float:
    """Seconds on the GPU of what ``work`` queues on a stream, waited for; ``driver`` is PyCUDA's."""
    start, end = driver.Event(), driver.Event()
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return end.time_since(start) / 1e3


def _timed(session: Session, build: Build, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
    driver, program, stream = session.driver, session.program(build), session.driver.Stream()
    B, _, N, _ = inputs[0].shape
    on_device = [driver.to_device(qkv) for qkv in inputs]
    output = driver.to_device(np.full_like(out, np.nan))
    workspace = allocate(driver, build.workspace(B, N, N))
    given = [_of_file(qkv, output, workspace, inputs[0].shape) for qkv in on_device]

    def compute(arguments: Attention) -> None:
        program.prepare(arguments, stream)
        program.attend(arguments, stream)

    seconds = []
    for turn in range(runs + 1, -1, -1):  # ends with the first input
        compute(given[(turn + 1) % len(given)])
        seconds.append(queued_seconds(driver, partial(compute, given[turn % len(given)]), stream))
    driver.memcpy_dtoh(out, output)
    return seconds[2:]


def _of_file(qkv: SupportsInt, output: SupportsInt, workspace: SupportsInt, shape: tuple[int, ...]) -> Attention:
    """The arguments for Q, K and V as files have them: batch for batch one after the other."""
    B, _, N, d = shape
    q, k, v = (Matrix.of_batches(int(qkv) + 4 * index * N * d, 3 * N * d, d) for index in range(3))
    o = Matrix.of_batches(int(output), N * d, d)
    return attention(q, k, v, o, B=B, M=N, N=N, scale=d**-0.5, workspace=workspace)
