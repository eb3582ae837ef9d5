"""A check that an output shares no memory with an input, by addresses and strides alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from flashcli.asked.attention import Operand

CANNOT_TELL = 10**5  # steps after which two arrays count as overlapping


def refuse_overlap(out: int, of_out: Operand, inputs: Mapping[str, tuple[int, Operand]]) -> None:
    """Raise ValueError if ``out`` shares memory with an input; arrays are given by address and outline."""
    for name, (address, operand) in inputs.items():
        if _overlap(_there(out, of_out), _there(address, operand)):
            raise ValueError(f"out must not share memory with {name}")


def _there(address: int, operand: Operand) -> np.ndarray:
    """A NumPy array with an operand's address, shape and strides, for comparison only: it is never read."""
    kind = np.dtype({"bfloat16": "uint16"}.get(operand.dtype, operand.dtype))  # which NumPy alone does not know
    size = kind.itemsize
    there = {"shape": tuple(operand.shape), "strides": tuple(size * stride for stride in operand.strides)}
    lies: Any = type("Lies", (), {})()
    lies.__array_interface__ = {
        **there, "typestr": kind.str, "data": (address, False), "version": 3
    }  # fmt: skip
    return np.asarray(lies)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=CANNOT_TELL)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
