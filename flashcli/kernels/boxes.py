"""Boxes of an array, which Hopper's copy engine finds by a map: what the map says, before the driver has written it."""

from __future__ import annotations

import ctypes


class Boxes(ctypes.Structure):
    """Boxes of an array of four axes of 16-bit numbers, the fastest axis first; the emulator reads it as it is.

    ``strides`` are those of the other axes, in bytes. A box has ``box`` numbers along each axis, and lies in shared
    memory without gaps, its rows of ``row`` bytes swizzled; not if that is 0. ``address`` is the array's, once known.
    """

    _fields_ = (
        ("address", ctypes.c_uint64),
        ("strides", ctypes.c_uint64 * 3),
        ("sizes", ctypes.c_uint32 * 4),
        ("box", ctypes.c_uint32 * 4),
        ("row", ctypes.c_uint32),
        ("unused", ctypes.c_uint32 * 15),
    )


def addressed(told: bytes, address: int) -> bytes:
    """Add an array's address to what is told of its boxes, as the emulator reads it."""
    boxes = Boxes.from_buffer_copy(told)
    boxes.address = address
    return bytes(boxes)
