"""The CUDA driver itself, through ctypes: for what PyCUDA does not do, or does with the interpreter lock held."""

from __future__ import annotations

import ctypes
import functools


@functools.cache
def libcuda() -> ctypes.CDLL | None:
    """None where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
