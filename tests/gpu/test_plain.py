"""PyCUDA's names by the driver's library alone: against a library that keeps a GPU's memory on the host."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
from support import flashcli, write_input

from flashcli.gpu import plain
from flashcli.gpu.memory import allocate
from flashcli.measure.streams import NON_BLOCKING


class Library:
    """Some of libcuda's functions; ``log`` has what was called, ``fails`` codes by function."""

    def __init__(self):
        self.log, self.fails, self._owned = [], {}, {}

    def __getattr__(self, name):
        def function(*arguments):
            self.log.append(name)
            return self.fails.get(name, 0) or getattr(type(self), f"_{name}", lambda *of: 0)(self, *arguments)

        return function

    def _cuMemAlloc_v2(self, to, size):
        memory = (ctypes.c_ubyte * size.value)(*[255] * size.value)
        to._obj.value = ctypes.addressof(memory)
        self._owned[to._obj.value] = memory
        return 0

    def _cuMemFree_v2(self, at):
        del self._owned[at.value]
        return 0

    def _cuMemsetD8_v2(self, at, byte, count):
        ctypes.memset(at, byte, count.value)
        return 0

    def _copy(self, to, at, size, stream=None):
        ctypes.memmove(to, at, size.value)
        return 0

    _cuMemcpyHtoD_v2 = _cuMemcpyDtoH_v2 = _cuMemcpyHtoDAsync_v2 = _cuMemcpyDtoHAsync_v2 = _copy

    def _cuStreamCreate(self, to, flags):
        self.flags = flags
        return 0

    def _cuEventCreate(self, to, flags):
        to._obj.value = 7
        return 0

    def _cuModuleLoadData(self, to, code):
        to._obj.value = 8 if code == b"code" else 0
        return 0

    def _cuLaunchKernel(self, function, *rest):
        *sizes, _stream, parameters, _extra = rest
        self.launched = sizes, ctypes.string_at(parameters[0], 5)
        return 0

    def _cuGetErrorString(self, code, to):
        to._obj.value = b"out of memory" if code == 2 else b"unspecified launch failure"
        return 0


@pytest.fixture
def library(monkeypatch):
    fake = Library()
    monkeypatch.setattr(plain, "libcuda", lambda: fake)
    return fake


def test_arrays_go_to_the_gpu_and_back_and_memory_is_freed_with_its_owner(library):
    numbers, found = np.arange(6, dtype=np.float32), np.zeros(6, np.float32)
    memory = plain.to_device(numbers)
    plain.memcpy_dtoh(found, memory)
    np.testing.assert_array_equal(found, numbers)
    plain.memcpy_htod_async(int(memory) + 4, numbers[:2], plain.Stream())
    plain.memcpy_dtoh_async(found[:3], int(memory))
    np.testing.assert_array_equal(found, [0, 0, 1, 3, 4, 5])
    zeros = allocate(plain, 24)
    plain.memcpy_dtoh(found, zeros)
    assert not found.any()
    del memory, zeros
    assert library.log.count("cuMemFree_v2") == 2 and not library._owned


def test_a_launch_has_one_struct_by_value_and_events_are_timed(library):
    function = plain.module_from_buffer(b"code").get_function("attention")
    function.prepare(["5s"])
    function.set_attribute(plain.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, 50000)
    function.prepared_async_call((3, 1), (128, 1, 1), None, b"bytes", shared_size=64)
    assert library.launched == ([3, 1, 1, 128, 1, 1, 64], b"bytes")
    event = plain.Event()
    event.record()
    event.synchronize()
    assert event.time_till(event) == 0
    assert {"cuFuncSetAttribute", "cuEventRecord", "cuEventSynchronize", "cuEventElapsedTime"} <= {*library.log}


def test_errors_have_the_drivers_words_and_lack_of_memory_is_one_of_its_own(library):
    library.fails |= {"cuMemAlloc_v2": 2, "cuStreamSynchronize": 719}
    with pytest.raises(plain.MemoryError, match=r"cuMemAlloc_v2 failed: out of memory"):
        plain.mem_alloc(8)
    with pytest.raises(plain.Error, match="unspecified launch failure") as caught:
        plain.Stream().synchronize()
    assert not isinstance(caught.value, plain.MemoryError) and issubclass(plain.MemoryError, plain.Error)


def test_a_stream_has_its_flags_and_tells_whether_it_is_done(library):
    stream = plain.Stream(NON_BLOCKING)
    assert library.flags == NON_BLOCKING
    assert stream.is_done()
    library.fails["cuStreamQuery"] = plain.NOT_READY
    assert not stream.is_done()
    library.fails["cuStreamQuery"] = 719
    with pytest.raises(plain.Error, match="unspecified launch failure"):
        stream.is_done()


def test_a_context_is_retained_pushed_popped_and_released(library):
    context = plain.Device(0).retain_primary_context()
    context.push()
    context.pop()
    context.detach()
    assert library.log[-4:] == [
        "cuDevicePrimaryCtxRetain", "cuCtxPushCurrent_v2", "cuCtxPopCurrent_v2", "cuDevicePrimaryCtxRelease_v2",
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("more", [(), ("--kernel", "baseline"), ("--causal",)], ids=str)
def test_an_answer_has_the_same_bytes_without_pycuda(gpu, pycuda_stub, tmp_path, more):
    given, *found = (tmp_path / name for name in ("x.in", "with", "without"))
    write_input(given, np.random.default_rng(0).normal(size=(50, 3, 512, 64)).astype(np.float32))  # several chunks
    for out in found:
        done = flashcli("run", given, out, "--backend", "cuda", *more)
        assert done.code == 0, done.err
        if out is found[0]:
            pycuda_stub("raise ModuleNotFoundError(\"No module named 'pycuda'\", name='pycuda')")
    assert found[0].read_bytes() == found[1].read_bytes()
