"""The properties of a GPU, of a driver that answers as the report's GTX 1080 does."""

from __future__ import annotations

import inspect

import pytest

from flashcli.commands import doctor
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu import plain
from flashcli.measure import device, diagnosis

GTX_1080 = {
    "capability_major": 6, "capability_minor": 1, "multiprocessors": 20, "clock_khz": 1_734_000,
    "memory_clock_khz": 5_005_000, "bus_bits": 256, "l2_bytes": 2_097_152, "constant_bytes": 65_536,
    "block_shared_bytes": 49_152, "block_shared_bytes_on_request": 49_152, "multiprocessor_shared_bytes": 98_304,
    "block_registers": 65_536, "multiprocessor_registers": 65_536, "warp_threads": 32, "block_threads": 1024,
    "multiprocessor_threads": 2048, "multiprocessor_blocks": 32, "block_x": 1024, "block_y": 1024, "block_z": 64,
    "grid_x": 2**31 - 1, "grid_y": 65_535, "grid_z": 65_535, "copy_engines": 2,
}  # fmt: skip


class Driver:
    """A driver of one GPU."""

    start = 0

    def cuInit(self, flags):
        return self.start

    def cuDeviceGetCount(self, where):
        where._obj.value = 1
        return 0

    def cuDeviceGet(self, where, index):
        where._obj.value = 70 + index
        return 0

    def cuDeviceGetName(self, where, size, handle):
        where.value = b"NVIDIA GeForce GTX 1080"
        return 0

    def cuDeviceTotalMem_v2(self, where, handle):
        where._obj.value = 8_500_871_168
        return 0

    def cuDeviceGetAttribute(self, where, number, handle):
        assert handle == 70
        [name] = [name for name, other in device.ATTRIBUTES.items() if other == number]
        where._obj.value = GTX_1080[name]
        return 0

    def cuGetErrorString(self, code, where):
        return code


@pytest.fixture(autouse=True)
def driver(monkeypatch) -> type[Driver]:
    use(monkeypatch, Driver)
    return Driver


def use(monkeypatch, library) -> None:
    for module in (cuda_driver, plain):
        monkeypatch.setattr(module, "libcuda", library)
    monkeypatch.setattr(cuda_driver, "problem", inspect.unwrap(cuda_driver.problem))  # which asks each time


def test_what_the_driver_says_and_what_follows_from_it():
    [(name, found)] = device.gpus()
    assert name == "NVIDIA GeForce GTX 1080"
    assert found == GTX_1080 | {"memory_bytes": 8_500_871_168, "multiprocessor_fp32_lanes": 128}
    assert device.memory_rate(found) == 320.32e9 and device.fp32_rate(found) == 2 * 2560 * 1.734e9


@pytest.mark.parametrize(("capability", "lanes"), [((7, 5), 64), ((8, 0), 64), ((8, 6), 128), ((9, 0), 128)])
def test_how_many_lanes_a_multiprocessor_has(monkeypatch, capability, lanes):
    monkeypatch.setitem(GTX_1080, "capability_major", capability[0])
    monkeypatch.setitem(GTX_1080, "capability_minor", capability[1])
    assert device.gpus()[0][1]["multiprocessor_fp32_lanes"] == lanes


def test_what_an_old_driver_does_not_know_is_0(monkeypatch):
    known = Driver.cuDeviceGetAttribute
    monkeypatch.setattr(
        Driver, "cuDeviceGetAttribute", lambda self, *asked: 1 if asked[1] == 106 else known(self, *asked)
    )
    assert device.gpus()[0][1]["multiprocessor_blocks"] == 0


def test_doctor_has_a_line_for_each():
    [finding] = diagnosis._devices()
    head, *lines = doctor._text(finding).splitlines()
    assert head == "[ok] device 0: NVIDIA GeForce GTX 1080"
    found = dict(line[5:].split("  ", 1) for line in lines)
    assert {name: text.strip() for name, text in found.items()} == {
        "compute capability": "6.1",
        "multiprocessors": "20, 128 fp32 lanes each: 2560",
        "clock": "at most 1734 MHz, so 8.9 TFLOP/s in fp32",
        "memory": "8107.1 MiB, clock 5005 MHz, bus 256 bits",
        "memory bandwidth": "at most 320 GB/s",
        "L2 cache": "2.0 MiB",
        "constant memory": "65536 bytes",
        "shared memory a block": "49152 bytes; 49152 bytes on request",
        "shared memory a multiprocessor": "98304 bytes",
        "registers": "65536 a block, 65536 a multiprocessor",
        "threads": "32 a warp, 1024 a block, 2048 a multiprocessor",
        "blocks": "32 a multiprocessor",
        "largest block (x, y, z)": "(1024, 1024, 64)",
        "largest grid (x, y, z)": "(2147483647, 65535, 65535)",
        "copy engines": "2",
    }


@pytest.mark.parametrize("missing", [lambda: None, type("Ill", (Driver,), {"start": 803})])
def test_without_a_driver_there_are_no_devices(monkeypatch, missing):
    use(monkeypatch, missing)
    assert device.gpus() == [] == diagnosis._devices()
