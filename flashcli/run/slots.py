"""The common frame of backends: slots of memory that chunks of an input pass through."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any, Generic, NamedTuple, Self, TypeVar

import numpy as np

from flashcli.asked.shape import Chunk, Shape
from flashcli.files.cut import Cut
from flashcli.kernels.arguments import Attention, of_batches, of_file
from flashcli.run import memory
from flashcli.run.timeline import Timeline


class Overlap(NamedTuple):
    """How many chunks may be in each stage at a time; each takes a slot, and a thread for reading or writing it.

    ``computing`` counts those submitted after the one whose result is waited for.
    """

    reading: int
    computing: int
    writing: int


def ignore(*values: object) -> None:
    """Do nothing: the callback where nobody wants to be told."""


class Slot:
    """Host memory for a chunk and for its answer, in which chunks may be smaller."""

    def __init__(self, shape: Shape, by: Cut, spare: int = 0) -> None:
        """``spare`` is a number of floats between the two for the backend's own use."""
        ends = by.input_floats(shape), by.input_floats(shape) + spare
        self.shape = shape
        self.memory = np.empty(ends[1] + by.output_floats(shape), np.float32)  # in one piece: page-locked sooner
        self.input, self.spare, self.output = np.split(self.memory, ends)
        self.chunk: Chunk  # what is in it
        self.finite = True  # whether its input is, and
        self.finite_answer = True  # whether its answer is, known once `Backend.wait` has returned
        self.submitted = 0.0  # when, in seconds of time.perf_counter

    def input_of(self, chunk: Chunk) -> np.ndarray:
        """The part of ``input`` that a chunk fills."""
        return self.input[: len(self.shape.input_rows(chunk)) * self.shape.d]

    def output_of(self, chunk: Chunk) -> np.ndarray:
        """The part of ``output`` that its answer fills."""
        return self.output[: len(self.shape.output_rows(chunk)) * self.shape.d]


def argument(slot: Slot, given: int, keys: tuple[int, int], answer: int, scale: float, **others: Any) -> Attention:
    """The kernels' argument for what is in a slot, by addresses: of its input, of K and V, of its answer.

    It has whole batches, or rows of one whose ``keys`` are elsewhere.
    """
    chunk, (_, N, d) = slot.chunk, vars(slot.shape).values()
    if chunk.matrices == "QKV":
        return of_file(given, answer, (len(chunk.batches), N, d), scale=scale, **others)
    rows = {"M": len(chunk.rows), "N": N, "q_start": chunk.rows.start}
    return of_batches((given, *keys, answer), d, scale=scale, **rows, **others)


S = TypeVar("S", bound=Slot)  # the slots of a backend


class LongBatch:
    """K and V of one batch in host memory, one below the other, which rows of its Q attend to chunk by chunk."""

    def __init__(self, shape: Shape) -> None:
        self.rows = np.empty((2 * shape.N, shape.d), np.float32)
        self.k, self.v = np.split(self.rows, 2)

    @classmethod
    def several(cls, count: int, shape: Shape) -> list[Self]:
        """Make a long batch for each batch, at most ``count``; OutOfMemory where there is no memory for them."""
        count = min(count, shape.B)
        memory.require(count * 2 * shape.output_batch_bytes, f"K and V of {count} batch{'es' if count > 1 else ''}")
        return [cls(shape) for _ in range(count)]

    def keep(self, chunk: Chunk, floats: np.ndarray) -> None:
        """Copy a chunk's rows of K and V to their places."""
        self.rows[chunk.rows.start : chunk.rows.stop] = floats.reshape(len(chunk.rows), -1)


class Backend(abc.ABC, Generic[S]):
    """A backend is opened by making it and closed by leaving its ``with`` block."""

    overlap: Overlap

    def __enter__(self) -> Self:
        return self

    @abc.abstractmethod
    def __exit__(self, *exc: object) -> None:
        """Give back all that was taken."""

    @abc.abstractmethod
    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[S]]:
        """Make up to ``count`` slots for chunks cut ``by``; where memory is short, smaller and fewer ones."""

    def filled(self, slot: S) -> None:
        """Hear that a chunk has been read into the slot, on the thread that has read it."""

    def is_done(self, slot: S) -> bool:
        """Whether `wait` would return at once, as far as that is known."""
        return False

    @abc.abstractmethod
    def submit(self, slot: S, chunk: Chunk, timeline: Timeline) -> None:
        """Start computing what is in the slot. K and V of a batch come before rows of its Q."""

    @abc.abstractmethod
    def wait(self, slot: S, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        """Return when the slot's output is there, and its input no longer needed.

        Then ``slot.finite`` is set, and ``slot.finite_answer`` by a backend that may have no room for large finite
        numbers. K and V of a long batch are looked at in the slots that they came in. Where it may take long, ``check``
        is called meanwhile, and may raise.
        """

    @property
    @abc.abstractmethod
    def description(self) -> str:
        """One line for people: the device, the kernel, its tiles."""

    @abc.abstractmethod
    def details(self) -> dict[str, object]:
        """The device, the kernel and its tiles as a flat dict, for programs."""


class OneByOne(Backend[Slot]):
    """A backend that computes one chunk after another, in `wait`, from the host's memory."""

    overlap = Overlap(reading=1, computing=0, writing=1)
    _long: list[LongBatch]

    def __exit__(self, *exc: object) -> None:
        """Do nothing: there is nothing to close."""

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[Slot]]:
        self._long = [] if by.whole else LongBatch.several(1, shape)
        return by, [Slot(shape, by) for _ in range(count)]

    def submit(self, slot: Slot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk = chunk
        if chunk.matrices == "KV":
            self._long[0].keep(chunk, slot.input_of(chunk))
