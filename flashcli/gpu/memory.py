"""Memory for a GPU: its own, and page-locked memory of the host, which it copies from and to by itself.

Host memory is allocated as any other and locked afterwards: that takes a third of the time in which the driver
allocates locked memory, and leaves the interpreter lock free. (PyCUDA's ``register_host_memory`` does not
work with NumPy 2.)
"""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import SupportsInt

import numpy as np

from flashcli.gpu.driver import libcuda

FREE_THE_GPU = "free the GPU, use a larger one, or --backend cpu."


def allocate(driver: ModuleType, size: int) -> SupportsInt:
    """Allocate ``size`` bytes on the GPU, zeroed, as kernels move padding that nobody writes; null for no bytes."""
    if size == 0:
        return 0
    memory = driver.mem_alloc(size)
    driver.memset_d8(memory, 0, size)
    return memory


def current_context() -> int:
    """This thread's context, by its address; 0 without one."""
    driver, context = libcuda(), ctypes.c_void_p()
    if driver is not None:
        driver.cuCtxGetCurrent(ctypes.byref(context))
    return context.value or 0


def lock(array: np.ndarray, context: int = 0) -> bool:
    """Pin an array and return whether that worked; copies of unpinned arrays are slower.

    That is done in this thread's context, or in the one given, which becomes this thread's.
    """
    driver = libcuda()
    if driver is not None and context:
        driver.cuCtxSetCurrent(ctypes.c_void_p(context))
    return _call("cuMemHostRegister_v2", array, ctypes.c_size_t(array.nbytes), 0)


def unlock(array: np.ndarray) -> None:
    """Unpin an array that `lock` pinned; must happen before its memory is freed."""
    _call("cuMemHostUnregister", array)


def _call(function: str, array: np.ndarray, *arguments: object) -> bool:
    driver = libcuda()
    return driver is not None and getattr(driver, function)(ctypes.c_void_p(array.ctypes.data), *arguments) == 0
