"""Maps by which Hopper's copy engine finds boxes of an array, in the driver's own form."""

from __future__ import annotations

import ctypes
import functools

from flashcli.errors import KernelFailure
from flashcli.gpu import driver as cuda_driver
from flashcli.kernels.boxes import Boxes

UINT16, WHOLE_LINES = 1, 2  # CU_TENSOR_MAP_DATA_TYPE_UINT16, CU_TENSOR_MAP_L2_PROMOTION_L2_128B
SWIZZLES = {0: 0, 32: 1, 64: 2, 128: 3}  # by the bytes of a row, as CUtensorMapSwizzle has them
MAPS = 4096  # that are remembered: those of each layer's cache


@functools.lru_cache(maxsize=MAPS)
def encoded(told: bytes, address: int) -> bytes:
    """The map of boxes, as `Boxes` tells them, of an array at an address."""
    boxes, driver = Boxes.from_buffer_copy(told), cuda_driver.libcuda()
    assert driver is not None
    room = (ctypes.c_ubyte * (2 * ctypes.sizeof(Boxes)))()
    at = -(-ctypes.addressof(room) // 64) * 64  # where the driver wants a map
    sizes = (ctypes.c_uint64 * 4)(*boxes.sizes)
    apart = (ctypes.c_uint32 * 4)(1, 1, 1, 1)
    code = driver.cuTensorMapEncodeTiled(
        ctypes.c_void_p(at), UINT16, 4, ctypes.c_void_p(address), sizes, boxes.strides, boxes.box, apart, 0,
        SWIZZLES[boxes.row], WHOLE_LINES, 0,
    )  # fmt: skip
    if code:
        told_by = cuda_driver.words(driver, code)
        raise KernelFailure(f"the CUDA driver makes no map of a cache's pages: {told_by}.", "report it.")
    return ctypes.string_at(at, ctypes.sizeof(Boxes))
