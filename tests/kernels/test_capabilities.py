"""Each GPU from Maxwell to Blackwell has a kernel for all that can be asked, and older ones convert fp8 by hand."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
from emulator.decode import DecodeEmulated
from support import sampled

from bench.compile_all import PROBLEMS, chosen
from flashcli.emulator.machine import Emulated
from flashcli.errors import BackendUnavailable
from flashcli.files.decode.cases import Case, make
from flashcli.kernels import decode, write_kv
from flashcli.kernels.occupancy import most_shared
from flashcli.kernels.operation import Build, Gpu, Launch
from flashcli.kernels.registry import OPERATIONS

CAPABILITIES = [(5, 0), (5, 2), (6, 0), (6, 1), (7, 0), (7, 5), (8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)]


def on(capability, problem):
    """The problem as a GPU of this compute capability is asked it."""
    return problem._replace(gpu=Gpu(capability, 20)) if hasattr(problem, "gpu") else problem


@pytest.mark.parametrize("capability", CAPABILITIES)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_gpu_has_a_kernel_for_every_problem_and_room_for_its_blocks(operation, capability):
    kernels = OPERATIONS[operation].kernels
    problems = {on(capability, problem) for kernel in kernels.values() for problem in PROBLEMS[operation](kernel)}
    for problem in problems:
        if getattr(problem, "precision", "fp32") == "fp16" and capability < (8, 0):
            continue  # which needs tensor cores
        if operation == "tangents" and capability < (8, 0):
            continue  # gradients of gradients are left to PyTorch's operations
        kernel = kernels[chosen(operation, capability, problem)]
        assert not kernel.refusal(capability, problem)
        build = Build(kernel, kernel.fitted(problem))
        assert all(launch.shared <= most_shared(capability) for launch in build.launches())


def test_a_decode_kernel_that_needs_another_gpu_is_refused_with_its_name():
    asked = make(Case(1, 2, 1, 64, "5", query_type="float16")).outline
    gtx = Gpu((6, 1), 20, "GPU 0")
    assert decode.choose(decode.problem_of(asked, gtx)).kernel.name == "grouped"
    with pytest.raises(BackendUnavailable, match="kernel tensor needs sm_80, GPU 0 is sm_61"):
        decode.choose(decode.problem_of(asked, gtx), "tensor")


@pytest.mark.parametrize(("capability", "tokens"), [((6, 1), 9000), ((8, 0), 32000), ((9, 0), 46000)])
def test_v1_knows_how_much_shared_memory_a_gpu_has(capability, tokens):
    problem = decode.Problem(64, 16, "float16", "float16", False, gpu=Gpu(capability, 20))
    v1 = Build(decode.KERNELS["paged_v1"], problem)
    assert v1.launches(table_width=tokens // 16)[0].shared <= most_shared(capability)
    with pytest.raises(decode.UsageError, match="too many"):
        v1.launches(table_width=2 * tokens // 16)


def by_hand(build: Build, arch: int) -> Build:
    """The build as for an architecture whose code is another one."""
    macros = build.kernel.macros
    older = dataclasses.replace(build.kernel, macros=lambda *of: {**macros(*of), "__CUDA_ARCH__": arch})
    return dataclasses.replace(build, kernel=older)


class Older(DecodeEmulated):
    """The emulated kernels of a GPU of compute capability 6.1, or 8.0."""

    def __init__(self, folder, capability):
        super().__init__(folder)
        self._session = SimpleNamespace(multiprocessors=20, capability=capability)

    def launch(self, build, *arrays):
        major, minor = self._session.capability
        super().launch(by_hand(build, 100 * major + 10 * minor), *arrays)


@pytest.mark.parametrize(
    ("kind", "capability"),
    sampled([(kind, at) for at in ((6, 1), (8, 0)) for kind in ("float8_e4m3fn", "float8_e5m2")], 3),
)
def test_fp8_is_read_by_hand_as_the_instruction_reads_it(emulated, kind, capability):
    asked = make(Case(2, 4, 2, 64, "20,7", page=16, cache_type=kind, query_type="bfloat16", layout="nhd"))
    every = np.resize(np.arange(256, dtype=np.uint8), asked.key_cache.size).reshape(asked.key_cache.shape)
    finite = every.view(asked.key_cache.dtype).astype(np.float32)
    every = np.where(np.isfinite(finite), every, 0x81).view(asked.key_cache.dtype)  # 0x81 is subnormal
    asked = dataclasses.replace(asked, key_cache=every, value_cache=every, k_scale=1e-3)
    found, _ = Older(emulated, capability).decode(asked, range(2))
    kernel = decode.choose(decode.problem_of(asked.outline, Gpu(capability, 20))).kernel.name
    wanted, _ = DecodeEmulated(emulated, kernel).decode(asked, range(2))  # where the instruction is there
    np.testing.assert_array_equal(found, wanted)


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2"])
def test_fp8_is_written_by_hand_as_the_instruction_writes_it(emulated, kind):
    halves = np.arange(2**16, dtype=np.uint16).view(np.float16)
    halves = np.where(np.isfinite(halves), halves, np.float16(0)).reshape(-1, 1, 64)
    build = Build(write_kv.KERNEL, decode.Problem(64, 16, "float16", kind, False, total=1))
    found = []
    for this in (build, by_hand(build, 800)):
        caches = [np.zeros((64, 1, 16, 64), np.uint8) for _ in range(2)]
        slots = np.arange(1024)
        argument = write_kv.Argument(
            key=halves.ctypes.data, value=halves.ctypes.data, key_cache=caches[0].ctypes.data,
            value_cache=caches[1].ctypes.data, slot_mapping=slots.ctypes.data, new_key_token=64, new_key_head=64,
            new_value_token=64, new_value_head=64, key_page=1024, key_head=1024, key_slot=64, key_chunk=16,
            value_page=1024, value_head=1024, value_slot=64, tokens=1024, kv_heads=1, pages=64, k_factor=1,
            v_factor=0.37,
        )  # fmt: skip
        Emulated(this, emulated).launch(Launch("write_kv", 16, 256), argument)
        found.append(caches)
    np.testing.assert_array_equal(*found)
    assert len(np.unique(found[0])) > 200
