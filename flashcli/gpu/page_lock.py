"""Page-locked host memory, which a GPU copies from and to by itself.

It is allocated as any other and locked afterwards: that takes a third of the time in which the driver allocates locked
memory, and leaves the interpreter lock free. (PyCUDA's ``register_host_memory`` does not work with NumPy 2.)
"""

from __future__ import annotations

import ctypes

import numpy as np

from flashcli.gpu.libcuda import libcuda


def lock(array: np.ndarray) -> bool:
    """Whether it could be, in the current context; copies of what could not be are right, too, only slower."""
    return _call("cuMemHostRegister_v2", array, ctypes.c_size_t(array.nbytes), 0)


def unlock(array: np.ndarray) -> None:
    """Before its memory is given back."""
    _call("cuMemHostUnregister", array)


def _call(function: str, array: np.ndarray, *arguments: object) -> bool:
    driver = libcuda()
    return driver is not None and getattr(driver, function)(ctypes.c_void_p(array.ctypes.data), *arguments) == 0
