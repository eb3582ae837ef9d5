"""Occupancy: the number of a kernel's blocks that a multiprocessor holds at a time, and the resource that limits it."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType
from typing import NamedTuple

from flashcli.asked.shape import ceil_div, round_up

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


# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability", 9.0.
OF_AN_H200 = Multiprocessor(threads=2048, blocks=32, registers=65536, shared=228 * 1024, reserved=1024)


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
