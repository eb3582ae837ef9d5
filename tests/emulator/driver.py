"""Enough of ``cuda.bindings.driver`` to launch kernels on arrays "on a GPU", emulated: what lies there is NumPy's.

Machine code is the path of a library that `flashcli.emulator` has made. Memory ends where nothing may be read: who does
so ends the process.
"""

from __future__ import annotations

import ctypes
import mmap
from pathlib import Path

from fake_driver import INVALID_VALUE, Driver

from flashcli.compiler.compiler import Compilable
from flashcli.emulator.machine import library_of

ALIGNED = 256  # bytes, as memory of a GPU is
NOTHING = 0  # PROT_NONE


def machine_code(build: Compilable, folder: Path) -> bytes:
    """What `compiler.cubin` gives on this machine."""
    return library_of(build, folder)._name.encode()


class EmulatedDriver(Driver):
    """One machine with one GPU of Hopper's."""

    def __init__(self) -> None:
        super().__init__(capability=(9, 0))
        self._libc = ctypes.CDLL(None)
        self._emulated: list[object] = [None]  # functions, by their handles

    def cuDeviceGetAttribute(self, attribute, device):
        return (0, 132) if attribute == "sms" else super().cuDeviceGetAttribute(attribute, device)

    def cuModuleLoadData(self, code):
        return 0, ctypes.CDLL(code.decode())

    def cuModuleGetFunction(self, module, name):
        self._emulated.append(getattr(module, f"launch_{name.decode()}"))
        return 0, len(self._emulated) - 1

    def cuMemAllocAsync(self, size, stream):
        whole = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = mmap.mmap(-1, whole + mmap.PAGESIZE)
        memory.write(b"\xff" * whole)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        if self._libc.mprotect(ctypes.c_void_p(start + whole), mmap.PAGESIZE, NOTHING):
            return 2, 0
        address = start + (whole - size) // ALIGNED * ALIGNED
        self.owned[address], self.allocated[address] = (size, 0), memory
        return 0, address

    def cuLaunchKernelEx(self, config, function, parameters, extra):
        if config.sharedMemBytes > self.shared.get(function, 0):
            return (INVALID_VALUE,)
        argument = ctypes.c_void_p.from_address(parameters)
        launch = self._emulated[function]
        shape = config.gridDimX, config.blockDimX, config.sharedMemBytes
        launch(argument, *shape, ctypes.c_long(0), ctypes.c_long(config.gridDimX), False)
        return (0,)
