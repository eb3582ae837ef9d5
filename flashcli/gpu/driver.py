"""The CUDA driver through ctypes: for calls that PyCUDA lacks, or makes with the interpreter lock held."""

from __future__ import annotations

import contextlib
import ctypes
import functools

NO_DEVICE = 100  # CUDA_ERROR_NO_DEVICE


@functools.cache
def libcuda() -> ctypes.CDLL | None:
    """The CUDA driver's library, loaded; None where there is no driver."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


@functools.cache
def problem() -> str:
    """The reason why the driver has no GPU for this process, in words; empty if it has one."""
    driver, count = libcuda(), ctypes.c_int()
    if driver is None:
        return "there is no NVIDIA driver here (libcuda was not found)"
    code = driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count))
    if code not in (0, NO_DEVICE):
        return f"the CUDA driver does not start: {words(driver, code)}"
    return "" if count.value else "the CUDA driver finds no GPU"


def version() -> str:
    """The driver's version, where Linux tells, and that of its CUDA, such as "580.65, for CUDA 13.0"."""
    cuda, own = cuda_version(), ""
    with contextlib.suppress(OSError), open("/proc/driver/nvidia/version") as file:
        own = next((word + ", " for word in file.readline().split() if word[0].isdigit()), "")
    return f"{own}for CUDA {cuda // 1000}.{cuda % 1000 // 10}"


def cuda_version() -> int:
    """The version of CUDA that the driver is for, 13000 for 13.0; 0 where there is no driver."""
    cuda = ctypes.c_int()
    if (library := libcuda()) is not None:
        library.cuDriverGetVersion(ctypes.byref(cuda))
    return cuda.value


def words(driver: ctypes.CDLL, code: int) -> str:
    """An error code of the driver's in words."""
    text = ctypes.c_char_p()
    driver.cuGetErrorString(code, ctypes.byref(text))
    return text.value.decode() if text.value else f"error {code}"
