"""The ladder's zero point: cuda/attention/00_sequential.c, compiled by the host's C compiler, on one core."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from flashcli.compiler import compiler
from flashcli.files.summary import is_finite
from flashcli.kernels.arguments import Attention, of_batches
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.run.slots import OneByOne, Slot, ignore
from flashcli.run.timeline import Timeline

KERNEL = KERNELS["sequential"]
ROWS = 256  # of Q in a call: Ctrl-C is heeded between calls only


class SequentialBackend(OneByOne):
    """The C program, compiled for head size ``d``; BackendUnavailable where there is no C compiler."""

    def __init__(self, d: int, causal: bool = False, scale: float | None = None) -> None:
        self._scale = d**-0.5 if scale is None else scale
        self._build = Build(KERNEL, Problem(1, ROWS, ROWS, d, causal))
        self._attention = compiler.library(self._build).attention
        self._attention.argtypes = [Attention]
        self._attention.restype = None

    @property
    def description(self) -> str:
        tiling = self._build.tiling
        return f"cpu, one core, kernel {KERNEL.name} (Br={tiling.Br}, Bc={tiling.Bc})"

    def details(self) -> dict[str, object]:
        tiling = self._build.tiling
        return {"backend": "cpu", "kernel": KERNEL.name, "threads": 1, "Br": tiling.Br, "Bc": tiling.Bc}

    def wait(self, slot: Slot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        with timeline.measure("computation", f"compute {slot.chunk}"):
            slot.finite = is_finite(slot.input_of(slot.chunk))
            for q, k, v, out, first in self._batches(slot):
                for row in range(0, len(q), ROWS):
                    check()
                    self.attend_rows(q[row : row + ROWS], k, v, out[row : row + ROWS], first + row)
            slot.finite_answer = is_finite(slot.output_of(slot.chunk))

    def _batches(self, slot: Slot) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]]:
        """Q, K, V, O and the position of the first row of Q, for each batch in a slot."""
        chunk, (_, N, d) = slot.chunk, vars(slot.shape).values()
        given, answer = slot.input_of(chunk), slot.output_of(chunk)
        if chunk.matrices == "Q":
            yield given.reshape(-1, d), self._long[0].k, self._long[0].v, answer.reshape(-1, d), chunk.rows.start
        if chunk.matrices == "QKV":
            for (q, k, v), o in zip(given.reshape(-1, 3, N, d), answer.reshape(-1, N, d), strict=True):
                yield q, k, v, o, 0

    def attend_rows(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray, first_row: int) -> None:
        """Rows [M, d] of Q, the first at position ``first_row``, to K and V [N, d] of one batch; all contiguous."""
        addresses = [x.ctypes.data for x in (q, k, v, out)]
        given = of_batches(addresses, q.shape[1], M=len(q), N=len(k), scale=self._scale, q_start=first_row)
        self._attention(given)
