"""Start the CUDA driver and the first device's primary context on another thread, while Python is still importing.

Both take a tenth of a second each on a large machine. ctypes lets go of the interpreter lock meanwhile, PyCUDA not.
The context that `flashcli.backends.cuda` retains later is this one.
"""

from __future__ import annotations

import ctypes
import threading


def warm_up() -> None:
    threading.Thread(target=_retain_primary_context, daemon=True).start()


def _retain_primary_context() -> None:
    """Failures are left for those who really need the context: they report them."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    if driver.cuInit(0) == 0 and driver.cuDeviceGet(ctypes.byref(handle), 0) == 0:
        driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle)
