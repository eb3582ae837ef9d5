"""PyCUDA's ``driver`` module by the driver's own library, as far as sessions use it: where PyCUDA is not installed.

Names, arguments and errors are PyCUDA's. So all else is written once, as the homework wants it.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Sequence
from typing import Any, SupportsInt

import numpy as np

from flashcli.gpu.driver import libcuda, words

NO_MEMORY, NOT_READY = 2, 600  # CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_NOT_READY


class Error(Exception):
    """A call of the driver that failed."""


class MemoryError(Error):
    """A call for which the GPU, or the host, has no memory left."""


class device_attribute:
    """CUdevice_attribute."""

    CLOCK_RATE, MULTIPROCESSOR_COUNT = 13, 16
    MEMORY_CLOCK_RATE, GLOBAL_MEMORY_BUS_WIDTH = 36, 37
    MAX_THREADS_PER_MULTIPROCESSOR = 39
    COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76
    MAX_SHARED_MEMORY_PER_MULTIPROCESSOR, MAX_REGISTERS_PER_MULTIPROCESSOR = 81, 82
    MAX_BLOCKS_PER_MULTIPROCESSOR, RESERVED_SHARED_MEMORY_PER_BLOCK = 106, 111


class function_attribute:
    """CUfunction_attribute."""

    MAX_DYNAMIC_SHARED_SIZE_BYTES = 8


def _call(function: str, *arguments: Any) -> None:
    """Call a function of the driver's library; a refusal is an `Error` with the driver's words."""
    library = libcuda()
    assert library is not None, "init() comes first"
    if code := getattr(library, function)(*arguments):
        raise (MemoryError if code == NO_MEMORY else Error)(f"{function} failed: {words(library, code)}")


def init() -> None:
    """Start the driver."""
    if libcuda() is None:
        raise Error("libcuda was not found")
    _call("cuInit", 0)


def get_driver_version() -> int:
    """The version of CUDA that the driver is for, 13000 for 13.0."""
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    return version.value


class Context:
    """A GPU's primary context, retained once."""

    def __init__(self, device: int) -> None:
        self._device, self._handle = device, ctypes.c_void_p()
        _call("cuDevicePrimaryCtxRetain", ctypes.byref(self._handle), device)

    def push(self) -> None:
        """Make it this thread's."""
        _call("cuCtxPushCurrent_v2", self._handle)

    def pop(self) -> None:
        """Give the thread back the context that it had before."""
        _call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))

    @staticmethod
    def synchronize() -> None:
        """Wait for all that this thread's context has been given to do."""
        _call("cuCtxSynchronize")

    def detach(self) -> None:
        """Retain it no longer."""
        _call("cuDevicePrimaryCtxRelease_v2", self._device)


class Device:
    """A GPU, by its number."""

    def __init__(self, number: int) -> None:
        handle = ctypes.c_int()
        _call("cuDeviceGet", ctypes.byref(handle), number)
        self._handle = handle.value

    @staticmethod
    def count() -> int:
        """The number of GPUs."""
        count = ctypes.c_int()
        _call("cuDeviceGetCount", ctypes.byref(count))
        return count.value

    def name(self) -> str:
        return self._text("cuDeviceGetName")

    def pci_bus_id(self) -> str:
        return self._text("cuDeviceGetPCIBusId")

    def get_attribute(self, attribute: int) -> int:
        value = ctypes.c_int()
        _call("cuDeviceGetAttribute", ctypes.byref(value), attribute, self._handle)
        return value.value

    def compute_capability(self) -> tuple[int, int]:
        of = device_attribute
        return self.get_attribute(of.COMPUTE_CAPABILITY_MAJOR), self.get_attribute(of.COMPUTE_CAPABILITY_MINOR)

    def total_memory(self) -> int:
        """The size of its memory, in bytes."""
        size = ctypes.c_size_t()
        _call("cuDeviceTotalMem_v2", ctypes.byref(size), self._handle)
        return size.value

    def retain_primary_context(self) -> Context:
        return Context(self._handle)

    def _text(self, function: str) -> str:
        text = ctypes.create_string_buffer(256)
        _call(function, text, len(text), self._handle)
        return text.value.decode()


class _Owned:
    """Something of the driver's that ends with the object; if its context is gone, so is it."""

    _made_by, _ended_by = "", ""

    def __init__(self, *arguments: Any) -> None:
        self.handle = ctypes.c_void_p()
        _call(self._made_by, ctypes.byref(self.handle), *arguments)

    def __int__(self) -> int:
        return self.handle.value or 0

    def __del__(self) -> None:
        with contextlib.suppress(Error, AttributeError):
            if self.handle:
                _call(self._ended_by, self.handle)


class DeviceAllocation(_Owned):
    """Memory of a GPU, of so many bytes; int() is its address."""

    _made_by, _ended_by = "cuMemAlloc_v2", "cuMemFree_v2"


class Stream(_Owned):
    """A stream of the current context."""

    _made_by, _ended_by = "cuStreamCreate", "cuStreamDestroy_v2"

    def __init__(self, flags: int = 0) -> None:
        super().__init__(flags)

    def synchronize(self) -> None:
        _call("cuStreamSynchronize", self.handle)

    def is_done(self) -> bool:
        """Whether all that was queued has ended."""
        library = libcuda()
        assert library is not None, "it has made the stream"
        if (code := library.cuStreamQuery(self.handle)) not in (0, NOT_READY):
            raise Error(f"cuStreamQuery failed: {words(library, code)}")
        return code == 0

    def wait_for_event(self, event: Event) -> None:
        _call("cuStreamWaitEvent", self.handle, event.handle, 0)


class Event(_Owned):
    """A point in a stream, and its time."""

    _made_by, _ended_by = "cuEventCreate", "cuEventDestroy_v2"

    def __init__(self) -> None:
        super().__init__(0)

    def record(self, stream: Stream | None = None) -> None:
        _call("cuEventRecord", self.handle, _handle(stream))

    def synchronize(self) -> None:
        _call("cuEventSynchronize", self.handle)

    def time_till(self, later: Event) -> float:
        """Milliseconds from this event to a later one."""
        milliseconds = ctypes.c_float()
        _call("cuEventElapsedTime", ctypes.byref(milliseconds), self.handle, later.handle)
        return milliseconds.value


class Function:
    """A function of a module, whose one argument is a struct by value."""

    def __init__(self, module: Module, name: str) -> None:
        self._module, self._handle = module, ctypes.c_void_p()  # the module stays loaded
        _call("cuModuleGetFunction", ctypes.byref(self._handle), module.handle, name.encode())

    def prepare(self, types: Sequence[str]) -> None:
        """Do nothing: PyCUDA wants to know the types of arguments."""

    def set_attribute(self, attribute: int, value: int) -> None:
        _call("cuFuncSetAttribute", self._handle, attribute, value)

    def prepared_async_call(
        self,
        grid: tuple[int, int],
        block: tuple[int, int, int],
        stream: Stream | None,
        argument: bytes,
        shared_size: int = 0,
    ) -> None:
        """Queue a launch; the driver copies the argument."""
        struct = ctypes.create_string_buffer(argument, len(argument))
        parameters = (ctypes.c_void_p * 1)(ctypes.addressof(struct))
        _call("cuLaunchKernel", self._handle, *grid, 1, *block, shared_size, _handle(stream), parameters, None)


class Module(_Owned):
    """Machine code, loaded into the current context."""

    _made_by, _ended_by = "cuModuleLoadData", "cuModuleUnload"

    def get_function(self, name: str) -> Function:
        return Function(self, name)


module_from_buffer = Module


def mem_alloc(size: int) -> DeviceAllocation:
    """Allocate ``size`` bytes on the GPU."""
    return DeviceAllocation(ctypes.c_size_t(size))


def mem_get_info() -> tuple[int, int]:
    """The bytes of the GPU's memory that are free, and all of them."""
    free, total = ctypes.c_size_t(), ctypes.c_size_t()
    _call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
    return free.value, total.value


def memset_d8(to: SupportsInt, byte: int, count: int) -> None:
    _call("cuMemsetD8_v2", _address(to), byte, ctypes.c_size_t(count))


def memcpy_htod(to: SupportsInt, array: np.ndarray) -> None:
    _call("cuMemcpyHtoD_v2", _address(to), *_memory(array))


def memcpy_dtoh(array: np.ndarray, at: SupportsInt) -> None:
    place, size = _memory(array)
    _call("cuMemcpyDtoH_v2", place, _address(at), size)


def memcpy_htod_async(to: SupportsInt, array: np.ndarray, stream: Stream | None = None) -> None:
    _call("cuMemcpyHtoDAsync_v2", _address(to), *_memory(array), _handle(stream))


def memcpy_dtoh_async(array: np.ndarray, at: SupportsInt, stream: Stream | None = None) -> None:
    place, size = _memory(array)
    _call("cuMemcpyDtoHAsync_v2", place, _address(at), size, _handle(stream))


def to_device(array: np.ndarray) -> DeviceAllocation:
    """Copy an array to memory of its own on the GPU."""
    memory = mem_alloc(array.nbytes)
    memcpy_htod(memory, np.ascontiguousarray(array))
    return memory


def _address(of: SupportsInt) -> ctypes.c_void_p:
    return ctypes.c_void_p(int(of))


def _memory(array: np.ndarray) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    return ctypes.c_void_p(array.ctypes.data), ctypes.c_size_t(array.nbytes)


def _handle(stream: Stream | None) -> ctypes.c_void_p:
    return ctypes.c_void_p() if stream is None else stream.handle
