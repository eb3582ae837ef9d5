"""Occupancy: the number of a kernel's blocks that a multiprocessor holds at a time, and the resource that limits it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from flashcli.asked.shape import ceil_div, round_up
from flashcli.kernels.operation import STATIC_SHARED

WARP = 32
# How the hardware hands registers and shared memory out: NVIDIA's occupancy calculator (CUDA C++ Best Practices Guide).
SCHEDULERS = 4  # each with its part of the registers, and warps of its own
REGISTERS_AT_ONCE = 256  # of a warp
SHARED_AT_ONCE = 128  # bytes


class Multiprocessor(NamedTuple):
    """A multiprocessor's limits: threads, blocks, registers, bytes of shared memory, and bytes reserved a block."""

    threads: int
    blocks: int
    registers: int
    shared: int
    reserved: int


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability": threads, blocks, KiB of shared memory.
MULTIPROCESSORS = {
    arch: Multiprocessor(threads, blocks, 65536, kib * 1024, reserved=1024 if int(arch[3:]) >= 80 else 0)
    for arch, (threads, blocks, kib) in {
        "sm_50": (2048, 32, 64), "sm_52": (2048, 32, 96), "sm_60": (2048, 32, 64), "sm_61": (2048, 32, 96),
        "sm_70": (2048, 32, 96), "sm_75": (1024, 16, 64), "sm_80": (2048, 32, 164), "sm_86": (1536, 16, 100),
        "sm_87": (1536, 16, 164), "sm_89": (1536, 24, 100), "sm_90": (2048, 32, 228), "sm_100": (2048, 32, 228),
        "sm_120": (1536, 24, 100),
    }.items()
}  # fmt: skip
OF_AN_H200 = MULTIPROCESSORS["sm_90"]
ALL_OF_IT = (7, 0)  # the first compute capability on which a block can have all shared memory, if it asks


def most_shared(capability: tuple[int, int]) -> int:
    """The bytes of shared memory, static and dynamic, that a block can have on a GPU of a compute capability."""
    has = MULTIPROCESSORS.get("sm_{}{}".format(*capability))
    return has.shared - has.reserved if has and capability >= ALL_OF_IT else STATIC_SHARED


class Occupancy(NamedTuple):
    """Blocks a multiprocessor, their warps in percent of those it could hold, and the resource that limits them."""

    blocks: int
    percent: float
    limited_by: str


def multiprocessor(driver: ModuleType) -> Multiprocessor:
    """The limits of a multiprocessor of GPU 0, as its driver (PyCUDA's module) gives them."""
    attributes = driver.device_attribute
    return Multiprocessor(
        *(
            driver.Device(0).get_attribute(attribute)
            for attribute in (
                attributes.MAX_THREADS_PER_MULTIPROCESSOR,
                attributes.MAX_BLOCKS_PER_MULTIPROCESSOR,
                attributes.MAX_REGISTERS_PER_MULTIPROCESSOR,
                attributes.MAX_SHARED_MEMORY_PER_MULTIPROCESSOR,
                attributes.RESERVED_SHARED_MEMORY_PER_BLOCK,
            )
        )
    )


def occupancy(has: Multiprocessor, threads: int, registers: int, shared: int) -> Occupancy:
    """The occupancy by blocks of ``threads``, ``registers`` a thread, ``shared`` bytes a block, static and dynamic."""
    warps = ceil_div(threads, WARP)
    of_a_warp = round_up(max(registers, 1) * WARP, REGISTERS_AT_ONCE)
    limits = {
        "registers": has.registers // SCHEDULERS // of_a_warp * SCHEDULERS // warps,
        "shared memory": has.shared // max(1, round_up(shared + has.reserved, SHARED_AT_ONCE)),
        "warps": has.threads // WARP // warps,
        "blocks": has.blocks,
    }
    blocks = min(limits.values())
    return Occupancy(blocks, 100 * blocks * warps * WARP / has.threads, tightest(limits))


def tightest(limits: Mapping[str, float]) -> str:
    """The resource that allows the fewest blocks; the names of several, if they allow as few."""
    return ", ".join(name for name, blocks in limits.items() if blocks == min(limits.values()))
