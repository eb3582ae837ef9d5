"""Start the CUDA driver and the primary contexts on other threads, while Python is still importing.

Driver and context take a tenth of a second each on a large machine. ctypes lets go of the interpreter lock meanwhile,
PyCUDA not: with several devices, their contexts start side by side only here. The contexts that
`flashcli.gpu.pycuda` retains later are these.
"""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Sequence

from flashcli.gpu.driver import libcuda

steps: list[tuple[str, float, float]] = []  # what was done, from when to when in seconds of time.perf_counter
_threads: list[threading.Thread] = []


def warm_up(wanted: Callable[[int], Sequence[int]]) -> None:
    """Start the driver and contexts in the background; ``wanted(count)`` lists which of ``count`` devices to start."""
    _begin(_start, wanted)


def wait() -> None:
    """Wait until the driver and all contexts have started; PyCUDA would wait too, but hold the interpreter lock."""
    for thread in _threads:  # the first appends the others
        thread.join()


def _begin(function: Callable[..., None], *arguments: object) -> None:
    thread = threading.Thread(target=function, args=arguments, daemon=True)
    _threads.append(thread)
    thread.start()


def _start(wanted: Callable[[int], Sequence[int]]) -> None:
    """Start the driver, then a thread for each context; failures are reported later, by whoever needs the context."""
    driver, count = libcuda(), ctypes.c_int()
    if driver is None:
        return
    if _timed("start the driver", driver.cuInit, 0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0:
        for index in wanted(count.value):
            _begin(_retain_primary_context, driver, index)


def _retain_primary_context(driver: ctypes.CDLL, index: int) -> None:
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuDeviceGet(ctypes.byref(handle), index) == 0:
        _timed("create a context", driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), handle)


def _timed(name: str, function: Callable[..., int], *arguments: object) -> int:
    start = time.perf_counter()
    code = function(*arguments)
    steps.append((name, start, time.perf_counter()))
    return code
