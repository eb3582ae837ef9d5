"""Start the CUDA driver and the first device's primary context on another thread, while Python is still importing.

Both take a tenth of a second each on a large machine. ctypes lets go of the interpreter lock meanwhile, PyCUDA not.
The context that `flashcli.backends.cuda` retains later is this one.
"""

from __future__ import annotations

import ctypes
import threading
import time

steps: list[tuple[str, float, float]] = []  # what was done, from when to when in seconds of time.perf_counter


def warm_up() -> None:
    threading.Thread(target=_retain_primary_context, daemon=True).start()


def _retain_primary_context() -> None:
    """Failures are left for those who really need the context: they report them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if _timed("start the driver", driver.cuInit, 0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), 0) == 0:
        _timed("create a context", driver.cuDevicePrimaryCtxRetain, ctypes.byref(context), handle)


def _timed(name: str, function, *arguments) -> int:
    start = time.perf_counter()
    code = function(*arguments)
    steps.append((name, start, time.perf_counter()))
    return code
