"""The properties and limits of a GPU, asked of the CUDA driver itself: no package beside it is needed.

They are those of the CUDA samples' deviceQuery that decide how a kernel is written and how fast it can be.
"""

from __future__ import annotations

from flashcli.gpu import driver, plain
from flashcli.kernels.speed import lanes
from flashcli.terminal import sizes, tables

# Properties that the driver is asked for, by the number that cuda.h gives to each CU_DEVICE_ATTRIBUTE.
ATTRIBUTES = {
    "capability_major": 75,
    "capability_minor": 76,
    "multiprocessors": 16,
    "clock_khz": 13,
    "memory_clock_khz": 36,
    "bus_bits": 37,
    "l2_bytes": 38,
    "constant_bytes": 9,
    "block_shared_bytes": 8,
    "block_shared_bytes_on_request": 97,
    "multiprocessor_shared_bytes": 81,
    "block_registers": 12,
    "multiprocessor_registers": 82,
    "warp_threads": 10,
    "block_threads": 1,
    "multiprocessor_threads": 39,
    "multiprocessor_blocks": 106,
    "block_x": 2,
    "block_y": 3,
    "block_z": 4,
    "grid_x": 5,
    "grid_y": 6,
    "grid_z": 7,
    "copy_engines": 40,
}

Properties = dict[str, int]


def gpus() -> list[tuple[str, Properties]]:
    """The GPUs' names and properties; none where there is no driver, or it does not start."""
    return [] if driver.problem() else [_query(plain.Device(index)) for index in range(plain.Device.count())]


def _query(gpu: plain.Device) -> tuple[str, Properties]:
    """The name of a GPU and its properties; 0 for one that a driver before CUDA 11 does not know."""
    found = {"memory_bytes": gpu.total_memory()}
    for attribute, number in ATTRIBUTES.items():
        try:
            found[attribute] = gpu.get_attribute(number)
        except plain.Error:
            found[attribute] = 0
    found["multiprocessor_fp32_lanes"] = lanes(gpu.compute_capability())
    return gpu.name(), found


def memory_rate(of: Properties) -> float:
    """Bytes a second that the memory could move at most: two transfers a clock, as wide as its bus."""
    return 2 * of["memory_clock_khz"] * 1e3 * of["bus_bits"] / 8


def fp32_rate(of: Properties) -> float:
    """Operations a second in fp32 without tensor cores at most: a multiplication and an addition a lane and clock."""
    return 2 * of["multiprocessors"] * of["multiprocessor_fp32_lanes"] * of["clock_khz"] * 1e3


def text(of: Properties) -> str:
    """A table of properties, a line for each."""
    lanes, bus = of["multiprocessors"] * of["multiprocessor_fp32_lanes"], f"{of['bus_bits']} bits"
    shared, more = (sizes.text(of[name]) for name in ("block_shared_bytes", "block_shared_bytes_on_request"))
    lines = {
        "compute capability": f"{of['capability_major']}.{of['capability_minor']}",
        "multiprocessors": f"{of['multiprocessors']}, {of['multiprocessor_fp32_lanes']} fp32 lanes each: {lanes}",
        "clock": f"at most {of['clock_khz'] / 1e3:.0f} MHz, so {fp32_rate(of) / 1e12:.1f} TFLOP/s in fp32",
        "memory": f"{sizes.text(of['memory_bytes'])}, clock {of['memory_clock_khz'] / 1e3:.0f} MHz, bus {bus}",
        "memory bandwidth": f"at most {memory_rate(of) / 1e9:.0f} GB/s",
        "L2 cache": sizes.text(of["l2_bytes"]),
        "constant memory": sizes.text(of["constant_bytes"]),
        "shared memory a block": f"{shared}; {more} on request",
        "shared memory a multiprocessor": sizes.text(of["multiprocessor_shared_bytes"]),
        "registers": f"{of['block_registers']} a block, {of['multiprocessor_registers']} a multiprocessor",
        "threads": f"{of['warp_threads']} a warp, {of['block_threads']} a block, "
        f"{of['multiprocessor_threads']} a multiprocessor",
        "blocks": f"{of['multiprocessor_blocks']} a multiprocessor",
        "largest block (x, y, z)": str(tuple(of[f"block_{axis}"] for axis in "xyz")),
        "largest grid (x, y, z)": str(tuple(of[f"grid_{axis}"] for axis in "xyz")),
        "copy engines": str(of["copy_engines"]),
    }
    return tables.text([*lines.items()])
