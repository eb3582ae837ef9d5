"""What the backends have in common: slots of memory that chunks of batches pass through."""

from __future__ import annotations

import abc
from typing import Self

import numpy as np

from flashcli.fileformat import Shape
from flashcli.stream import Arrays, Overlap, stream
from flashcli.timing import Timeline, wall_seconds


class Slot:
    """Host memory for a chunk of at most ``capacity`` batches: input [capacity, 3, N, d], output [capacity, N, d]."""

    def __init__(self, input: np.ndarray, output: np.ndarray) -> None:
        self.input = input
        self.output = output
        self.finite = True  # whether the input is: NaN and Inf need care
        self.batches = range(0)  # those in it
        self.submitted = 0.0  # when, in seconds of time.perf_counter

    @classmethod
    def on_host(cls, shape: Shape, batches: int) -> Self:
        """A slot in ordinary memory."""
        sizes = (batches, 3, shape.N, shape.d), (batches, shape.N, shape.d)
        return cls(*(np.empty(size, np.float32) for size in sizes))

    @property
    def capacity(self) -> int:
        return len(self.input)


class Backend(abc.ABC):
    """A backend is opened by making it and closed by leaving its ``with`` block."""

    overlap: Overlap

    @abc.abstractmethod
    def slots(self, shape: Shape, batches: int, count: int) -> list[Slot]:
        """Up to ``count`` slots for ``batches`` batches each; a GPU short of memory gives smaller and fewer ones."""

    @abc.abstractmethod
    def submit(self, slot: Slot, batches: range, timeline: Timeline) -> None:
        """Start computing the first ``len(batches)`` batches of the slot."""

    @abc.abstractmethod
    def wait(self, slot: Slot, timeline: Timeline) -> None:
        """Return when the slot's output is there."""

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for people: the device, the kernel, its tiles."""

    @abc.abstractmethod
    def details(self) -> dict[str, object]:
        """The same as a flat dict, for programs."""

    def attend(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, out: np.ndarray) -> None:
        """Attention of arrays float32 [B, N, d] into ``out``."""
        arrays = Arrays(q, k, v, out)
        stream(arrays, self, arrays, Timeline())

    def forward(self, qkv: np.ndarray, out: np.ndarray) -> None:
        """The same for Q, K and V in one array [B, 3, N, d], as files have them."""
        self.attend(qkv[:, 0], qkv[:, 1], qkv[:, 2], out)

    def measure(self, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        """Seconds of each of ``runs`` runs, after one that is not timed, taking turns among inputs [B, 3, N, d].

        The first input's answer is left in ``out`` [B, N, d].
        """
        return wall_seconds(lambda qkv: self.forward(qkv, out), inputs, runs)
