"""Page-locked host memory, which a GPU copies from and to by itself.

It is allocated and filled as any other, perhaps before there is a context, and locked afterwards: that takes a third
of the time in which the driver allocates locked memory, and the interpreter lock is free meanwhile. Through ctypes,
since PyCUDA's ``register_host_memory`` does not work with NumPy 2.
"""

from __future__ import annotations

import ctypes
import functools

import numpy as np


def lock(array: np.ndarray) -> bool:
    """Whether it could be, in the current context; copies of what could not be are right, too, only slower."""
    return _call("cuMemHostRegister_v2", array, ctypes.c_size_t(array.nbytes), 0)


def unlock(array: np.ndarray) -> None:
    """Before its memory is given back."""
    _call("cuMemHostUnregister", array)


def _call(function: str, array: np.ndarray, *arguments: object) -> bool:
    driver = _driver()
    return driver is not None and getattr(driver, function)(ctypes.c_void_p(array.ctypes.data), *arguments) == 0


@functools.cache
def _driver() -> ctypes.CDLL | None:
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
