"""Addresses and outlines of arrays of any library, by ``__cuda_array_interface__`` or DLPack.

The one is described in Numba's documentation ("CUDA Array Interface (Version 3)"), the other in that of the Python
array API ("Python specification for DLPack") and in ``dlpack.h``.
"""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple

import numpy as np

from flashcli.asked.attention import Operand, contiguous

LEGACY_STREAM = 1  # how both protocols, and the driver, call the default stream
TELLS_STREAM = 3  # the first version of ``__cuda_array_interface__`` that says when numbers are ready
CPU, CUDA, CUDA_MANAGED = 1, 2, 13  # kinds of devices, in DLPack
KINDS = {0: "int", 1: "uint", 2: "float", 4: "bfloat"}  # of numbers, in DLPack, before their bits
WHOLE_KINDS = {6: "bool", 10: "float8_e4m3fn", 12: "float8_e5m2"}  # whose bits are known
REFUSALS = (BufferError, RuntimeError, TypeError, ValueError)  # what arrays raise that are not to be shared


class Found(NamedTuple):
    """An array on a GPU: its outline and its address.

    ``stream`` is the stream on which its numbers are ready, None where there is nothing to wait for. ``keep`` is an
    object that has to live until they have been read, None where the owner sees to that.
    """

    operand: Operand
    address: int
    stream: int | None = None
    keep: object = None


class Device(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_int32), ("number", ctypes.c_int32))


class DataType(ctypes.Structure):
    _fields_ = (("kind", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16))


class Tensor(ctypes.Structure):
    """The struct ``DLTensor`` of dlpack.h."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", Device),
        ("ndim", ctypes.c_int32),
        ("dtype", DataType),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


def speaks(array: object) -> bool:
    """Whether an array has one of the protocols, even if it then says that it is not to be shared."""
    try:
        return hasattr(array, "__cuda_array_interface__") or hasattr(array, "__dlpack__")
    except REFUSALS:
        return True


def find(name: str, array: Any, stream: int = LEGACY_STREAM) -> Found:
    """The address and outline of an argument, by its name; by DLPack, ``stream`` waits until it is filled.

    By the other protocol, `Found` has the stream to wait for. DLPack is used where that says nothing to wait for, as
    JAX's does not. Raises TypeError for an argument that has no protocol, refuses to be shared, or is not on a GPU.
    """
    interface = _interface(name, array)
    has_dlpack = hasattr(array, "__dlpack__") and hasattr(array, "__dlpack_device__")
    if interface is not None:
        if name == "out":
            refuse_read_only(name, array)
        if interface.get("version", 0) >= TELLS_STREAM or not has_dlpack:
            return _by_cuda_array_interface(name, interface)
    _refuse_other_devices(name, array)
    if has_dlpack:
        return _by_dlpack(name, array, stream)
    kind = type(array).__name__
    raise TypeError(f"{name} must be an array on a GPU, as q is, with __cuda_array_interface__ or DLPack, not {kind}")


def refuse_host(name: str, array: Any) -> None:
    """Raise TypeError for an array that refuses to be shared, or says by DLPack that it is not on a GPU."""
    if _interface(name, array) is None:
        _refuse_other_devices(name, array)


def refuse_read_only(name: str, array: Any) -> None:
    """Raise ValueError for an array that says it must not be written, as JAX's do."""
    interface = _interface(name, array)
    if interface is not None and interface["data"][1]:
        raise ValueError(f"{name} must be writeable")


def _refuse_other_devices(name: str, array: Any) -> None:
    if not hasattr(array, "__dlpack_device__"):
        return
    kind, _ = array.__dlpack_device__()
    if int(kind) not in (CUDA, CUDA_MANAGED):
        where = "on the CPU: give a NumPy array of it" if int(kind) == CPU else f"on a device of DLPack's kind {kind}"
        raise TypeError(f"{name} must be an array on a GPU, but it is {where}")


def _interface(name: str, array: Any) -> dict[str, Any] | None:
    try:
        return getattr(array, "__cuda_array_interface__", None)
    except REFUSALS as error:
        raise _refused(name, array, error) from error


def _refused(name: str, array: object, error: Exception) -> TypeError:
    """The TypeError for an array that refuses to be shared, as PyTorch's do where gradients are wanted."""
    return TypeError(f"{name} must be an array that can be shared, which this {type(array).__name__} refuses: {error}")


def _by_cuda_array_interface(name: str, interface: dict[str, Any]) -> Found:
    dtype, shape = np.dtype(interface["typestr"]), tuple(interface["shape"])
    if interface.get("mask") is not None:
        raise TypeError(f"{name} must not be a masked array")
    if dtype.byteorder == ">":
        raise TypeError(f"{name} must be of the GPU's byte order, not {dtype.str}")
    size = dtype.itemsize or 1  # numbers of type V0 have no bytes
    operand = contiguous(shape, dtype.name)
    if in_bytes := interface.get("strides"):
        if any(stride % size for stride in in_bytes):
            raise ValueError(f"{name} must have strides of whole elements, not {list(in_bytes)} bytes")
        operand = operand._replace(strides=tuple(stride // size for stride in in_bytes))
    return Found(operand, int(interface["data"][0] or 0), interface.get("stream"))


def _by_dlpack(name: str, array: Any, stream: int) -> Found:
    try:
        capsule = array.__dlpack__(stream=stream)
    except REFUSALS as error:
        raise _refused(name, array, error) from error
    tensor = Tensor.from_address(_pointer(capsule, b"dltensor"))
    shape = tuple(tensor.shape[: tensor.ndim])
    number = tensor.dtype
    dtype = WHOLE_KINDS.get(number.kind) or KINDS.get(number.kind, "unknown") + str(number.bits)
    if number.lanes != 1:
        dtype += f"x{number.lanes}"
    operand = contiguous(shape, dtype)
    if tensor.strides:
        operand = operand._replace(strides=tuple(tensor.strides[: tensor.ndim]))
    return Found(operand, (tensor.data or 0) + tensor.byte_offset, None, capsule)


_pointer = ctypes.pythonapi.PyCapsule_GetPointer
_pointer.restype, _pointer.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
