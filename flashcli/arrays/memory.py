"""A GPU array for libraries without a known allocator: it has both protocols, and frees its memory when it dies.

Memory is allocated and freed in the order of the stream on which the array is computed.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import math
from typing import Any

from flashcli.arrays import protocols
from flashcli.arrays.protocols import CUDA, LEGACY_STREAM
from flashcli.asked.attention import contiguous
from flashcli.gpu.place import Place, ask, bindings

# Bytes of a number; its type in __cuda_array_interface__, which knows no bfloat16; its kind in DLPack.
TYPES = {"float32": (4, "<f4", 2), "float16": (2, "<f2", 2), "bfloat16": (2, "", 4), "uint8": (1, "|u1", 1)}


class DeviceArray:
    """A contiguous array on a GPU, with ``__cuda_array_interface__`` and DLPack; its ``dtype`` is a key of `TYPES`.

    ``cupy.asarray``, ``torch.from_dlpack``, ``jax.dlpack.from_dlpack`` and others take it without a copy.
    """

    def __init__(self, place: Place, stream: int, shape: tuple[int, ...], dtype: str = "float32") -> None:
        self.shape, self.stream, self.dtype, self._place = shape, stream, dtype, place
        self._itemsize, self._typestr, self._kind = TYPES[dtype]
        self._size = self._itemsize * math.prod(shape)
        self._users: set[int] = set()  # streams on which others have been given it
        self.address = allocate(stream, self._size)

    def __del__(self) -> None:
        # An allocation that failed has left nothing, and where the interpreter ends, nobody is to be told.
        with contextlib.suppress(Exception), self._place.current():
            for user in self._users - {self.stream}:
                wait_for(self.stream, user)
            free(self.stream, self.address)

    def __repr__(self) -> str:
        return f"<{self.dtype} array of shape {list(self.shape)} on GPU {self._place.device}>"

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        if not self._typestr:
            raise AttributeError(f"__cuda_array_interface__ has no {self.dtype}: take the array by DLPack")
        return {
            "shape": self.shape, "typestr": self._typestr, "data": (self.address, False), "strides": None,
            "stream": self.stream or LEGACY_STREAM, "version": 3,
        }  # fmt: skip

    def __dlpack_device__(self) -> tuple[int, int]:
        return CUDA, self._place.device

    def __dlpack__(
        self,
        *,
        stream: int | None = None,
        max_version: tuple[int, int] | None = None,
        dl_device: tuple[int, int] | None = None,
        copy: bool | None = None,
    ) -> object:
        """A DLPack capsule; the consumer's ``stream`` then waits for the work queued on this array, unless it is -1.

        The capsule is of DLPack's first version, whatever a consumer may understand. BufferError says that only a copy
        would do.
        """
        if copy or dl_device not in (None, self.__dlpack_device__()):
            raise BufferError("a DeviceArray is given to others as it is, without a copy")
        if stream != -1:
            with self._place.current():
                wait_for(stream or LEGACY_STREAM, self.stream)
            self._users.add(stream or LEGACY_STREAM)
        kind = protocols.DataType(self._kind, 8 * self._itemsize, 1)
        return export(self, self.address, self.shape, self.__dlpack_device__(), kind)


def allocate(stream: int, size: int) -> int:
    """Allocate ``size`` bytes for work queued on the stream from now on, and return the address; 0 for no bytes."""
    doing = f"{size} bytes cannot be allocated"
    return int(ask(bindings().cuMemAllocAsync, size, stream, doing=doing)) if size else 0


def free(stream: int, address: int) -> None:
    """Free memory once all that is queued on the stream has run."""
    if address:
        ask(bindings().cuMemFreeAsync, address, stream)


def fill(stream: int, address: int, shape: tuple[int, ...], strides: tuple[int, ...], dtype: str, bits: int) -> None:
    """Queue a fill of an array of 2 or 4 bytes a number: each gets these bits; ``strides`` are in elements."""
    *outer, rows, columns = (1, 1, *shape)
    *apart, row, _ = (0, 0, *strides)
    item, driver = TYPES[dtype][0], bindings()
    fill_rows = driver.cuMemsetD2D32Async if item == 4 else driver.cuMemsetD2D16Async
    for index in itertools.product(*map(range, outer)):
        start = address + item * sum(i * stride for i, stride in zip(index, apart, strict=True))
        ask(fill_rows, start, item * max(row, columns), bits, columns, rows, stream)


def wait_for(stream: int, other: int) -> None:
    """Let work queued on a stream from now on wait for all that is queued on the other stream by now."""
    if (stream or LEGACY_STREAM) == (other or LEGACY_STREAM):
        return
    event = mark(other)
    ask(bindings().cuStreamWaitEvent, stream, event, 0)
    ask(bindings().cuEventDestroy, event)  # which the driver does when it has been waited for


def mark(stream: int) -> Any:
    """An event after all that is queued on the stream by now."""
    driver = bindings()
    event = ask(driver.cuEventCreate, int(driver.CUevent_flags.CU_EVENT_DISABLE_TIMING))
    ask(driver.cuEventRecord, event, stream)
    return event


# ---- DLPack, as a producer


class _Managed(ctypes.Structure):
    """The struct ``DLManagedTensor`` of dlpack.h."""


_Delete = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_Managed._fields_ = (
    ("tensor", protocols.Tensor),
    ("context", ctypes.c_void_p),
    ("delete", _Delete),
)  # fmt: skip
_exported: dict[int, object] = {}  # what is to live for a capsule's consumer, by the address of its struct
_new = ctypes.pythonapi.PyCapsule_New
_new.restype, _new.argtypes = ctypes.py_object, (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)
_is_valid = ctypes.pythonapi.PyCapsule_IsValid
_is_valid.restype, _is_valid.argtypes = ctypes.c_int, (ctypes.c_void_p, ctypes.c_char_p)
_get = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)(
    ctypes.cast(ctypes.pythonapi.PyCapsule_GetPointer, ctypes.c_void_p).value or 0
)
NAME = b"dltensor"  # for as long as nobody has taken the capsule


@_Delete
def _delete(address: int) -> None:
    _exported.pop(address, None)


@ctypes.PYFUNCTYPE(None, ctypes.c_void_p)
def _dropped(capsule: int) -> None:
    """Let go of a dropped capsule's array, if nobody took the capsule."""
    if _is_valid(capsule, NAME):
        _exported.pop(_get(capsule, NAME), None)


def export(
    owner: object, address: int, shape: tuple[int, ...], device: tuple[int, int], kind: protocols.DataType
) -> object:
    """A DLPack capsule of a contiguous array, which keeps its owner alive."""
    n = len(shape)
    sizes = (ctypes.c_int64 * n)(*shape)
    strides = (ctypes.c_int64 * n)(*contiguous(shape, "float32").strides)
    managed = _Managed(protocols.Tensor(address, protocols.Device(*device), n, kind, sizes, strides, 0))
    managed.delete = _delete
    at = ctypes.addressof(managed)
    _exported[at] = managed, sizes, strides, owner
    return _new(at, NAME, ctypes.cast(_dropped, ctypes.c_void_p))
