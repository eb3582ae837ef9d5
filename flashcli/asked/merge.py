"""Calls of merge: the outlines of answers to parts of the keys, and of their LSE, and their checks."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from flashcli.asked.attention import Operand
from flashcli.asked.decode import MAX_HEAD, QUERY_TYPES

MOST_PARTS = 16  # that a call may have
VECTOR = 16  # bytes that kernels move at a time, on multiples of which answers start


@dataclass(frozen=True)
class Merge:
    """Answers [.., H, D] and LSE [.., H] of parts of the keys, as outlines of arrays; hashable."""

    outs: tuple[Operand, ...]
    lses: tuple[Operand, ...]

    @property
    def D(self) -> int:
        return self.outs[0].shape[-1]

    @property
    def rows(self) -> int:
        """The number of heads of all query tokens."""
        return math.prod(self.outs[0].shape[:-1])

    @property
    def type(self) -> str:
        return self.outs[0].dtype

    def at(self, addresses: int) -> Merge:
        """The call itself; ValueError if an answer at one of these addresses, or'ed, is not on `VECTOR` bytes."""
        if addresses % VECTOR:
            raise ValueError(f"outs must start on multiples of {VECTOR} bytes")
        return self


@functools.lru_cache(maxsize=256)
def ask(outs: tuple[Operand, ...], lses: tuple[Operand, ...]) -> Merge:
    """The `Merge` of a call of `flashcli.merge` with arrays of these outlines; ValueError says why it cannot be."""
    if wrong := _problem(outs, lses):
        raise ValueError(f"cannot merge: {wrong}")
    return Merge(outs, lses)


def _problem(outs: tuple[Operand, ...], lses: tuple[Operand, ...]) -> str:
    if not 1 <= len(outs) <= MOST_PARTS or len(outs) != len(lses):
        return f"there are {len(outs)} outs and {len(lses)} lses, not as many of both, from 1 to {MOST_PARTS}"
    (shape, _, kind) = outs[0]
    if len(shape) < 2 or shape[-1] % 8 or not 8 <= shape[-1] <= MAX_HEAD:
        return f"outs[0] has shape {list(shape)}, where [.., H, D] is wanted, D a multiple of 8 up to {MAX_HEAD}"
    if kind not in QUERY_TYPES:
        return f"outs[0] is {kind}, not {', '.join(QUERY_TYPES)}"
    for name, arrays, wanted in (("outs", outs, (shape, kind)), ("lses", lses, (shape[:-1], "float32"))):
        for i, array in enumerate(arrays):
            if (array.shape, array.dtype) != wanted:
                return (
                    f"{name}[{i}] is {array.dtype} {list(array.shape)}, where {wanted[1]} {list(wanted[0])} is wanted"
                )
    return ""
