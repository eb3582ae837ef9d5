"""The CUDA backend. Without a GPU: what it says where something is missing, and what it does with a PyCUDA that
computes in NumPy and has little memory. With one: what only a device can show. The kernels: see test_attention.py."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import time
from collections.abc import Callable

import numpy as np
import pytest
from support import (
    GPU_KERNELS,
    IN_USE,
    flashcli,
    forward,
    leftovers,
    pass_over_if_refused,
    random_qkv,
    read_floats,
    sparse_input,
)
from tolerances import assert_accurate

from flashcli.asked.shape import Shape
from flashcli.compiler import compiler, quick
from flashcli.errors import BackendUnavailable, KernelFailure, OutOfMemory
from flashcli.files.cut import TILE, Cut
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu import memory, warm_up
from flashcli.gpu.memory import allocate
from flashcli.gpu.pycuda import devices
from flashcli.kernels.arguments import of_batches
from flashcli.kernels.attention import KERNELS
from flashcli.run.arrays import Arrays
from flashcli.run.request import Request, open_backend
from flashcli.run.slots import ignore
from flashcli.run.slots_cuda import NOTE, CudaBackend
from flashcli.run.stream import Watch, stream
from flashcli.run.timeline import ENGINES, Timeline

QKV = random_qkv(20, 60, 32)  # several to a slot


# What is missing. Each is a source of pycuda/__init__.py and of pycuda/driver.py, and what is said about it.

INIT_FAILS = """
class Error(Exception): pass
def init(): raise Error("cuInit failed: no CUDA-capable device is detected")
"""
NO_DEVICES = """
class Error(Exception): pass
def init(): pass
class Device:
    count = staticmethod(lambda: 0)
"""
MISSING = {
    "no driver": (
        "", "raise ImportError('libcuda.so.1: cannot open shared object file: No such file or directory')",
        "there is no NVIDIA driver here (libcuda was not found).",
    ),
    "other toolkit": (
        "", "raise ImportError('libcudart.so.12: cannot open shared object file: No such file or directory')",
        "PyCUDA does not fit this machine's CUDA: libcudart.so.12: cannot open shared object file",
    ),
    "not linked": (
        "", "raise ImportError('_driver.so: undefined symbol: cuMemAdvise_v2')",
        "PyCUDA does not fit this machine's CUDA: _driver.so: undefined symbol: cuMemAdvise_v2.",
    ),
    "no GPU for the driver": (
        "", INIT_FAILS, "the CUDA driver does not start: cuInit failed: no CUDA-capable device is detected.",
    ),
    "no GPU": ("", NO_DEVICES, "GPU 0 does not exist: there is no GPU."),
}  # fmt: skip
missing = pytest.mark.parametrize(("init", "driver", "reason"), MISSING.values(), ids=MISSING)


@missing
def test_backend_cuda_never_falls_back(pycuda_stub, given, out, init, driver, reason):
    pycuda_stub(init, driver)
    flashcli("run", given, out, "--backend", "cuda").assert_error(69, reason)
    assert not list(out.parent.iterdir())


@missing
def test_backend_auto_falls_back_with_one_notice(pycuda_stub, given, out, init, driver, reason):
    pycuda_stub(init, driver)
    done = flashcli("run", given, out)
    assert done.code == 0
    [line] = done.err.splitlines()
    assert line.startswith(f"Notice: no usable GPU, computing on the CPU: {reason}")
    assert "\nbackend: cpu, " in done.out
    assert_accurate(read_floats(out, QKV[:, 0].shape), QKV)


@pytest.mark.parametrize(
    "problem",
    [
        "there is no NVIDIA driver here (libcuda was not found)",
        "the CUDA driver finds no GPU",
        "the CUDA driver does not start: initialization error",
    ],
)
def test_without_a_gpu_nobody_is_told_to_install_pycuda(pycuda_stub, given, out, problem):
    pycuda_stub("raise ModuleNotFoundError(\"No module named 'pycuda'\", name='pycuda')", problem=problem)
    assert flashcli("run", given, out).err == f"Notice: no usable GPU, computing on the CPU: {problem}.\n"
    done = flashcli("run", given, out, "--backend", "cuda")
    done.assert_error(69, f"{problem}.")
    assert "pycuda" not in done.err.lower()


@pytest.mark.parametrize(
    ("init", "count", "problem"),
    [
        (0, 2, ""),
        (0, 0, "the CUDA driver finds no GPU"),
        (100, 0, "the CUDA driver finds no GPU"),
        (803, 0, "the CUDA driver does not start: words for 803"),
    ],
)
def test_what_the_driver_says_of_its_gpus(monkeypatch, init, count, problem):
    class Driver:
        def cuInit(self, flags):
            return init

        def cuDeviceGetCount(self, where):
            where._obj.value = count
            return 0

        def cuGetErrorString(self, code, where):
            where._obj.value = b"words for %d" % code
            return 0

    monkeypatch.setattr(cuda_driver, "libcuda", Driver)
    assert cuda_driver.problem.__wrapped__() == problem


def test_a_machine_without_a_driver(monkeypatch):
    monkeypatch.setattr(cuda_driver, "libcuda", lambda: None)
    assert cuda_driver.problem.__wrapped__() == "there is no NVIDIA driver here (libcuda was not found)"


@pytest.mark.parametrize("option", [["--kernel", "q_in_registers"], ["--device", "0"], ["--precision", "fp16"]])
def test_auto_does_not_fall_back_once_something_of_a_gpu_is_asked_for(no_pycuda, given, out, option):
    flashcli("run", given, out, *option).assert_error(69)


def test_a_device_that_is_not_there(fake_gpu, given, out):
    flashcli("run", given, out, "--device", "3").assert_error(69, "GPU 3 does not exist: the last of 1 is number 0.")


def test_no_compiler_and_nothing_cached(fake_gpu, monkeypatch, given, out):
    monkeypatch.setenv("NVCC", "")
    flashcli("run", given, out, "--backend", "cuda").assert_error(69, "there is no nvcc")
    assert flashcli("run", given, out).err.startswith("Notice: no usable GPU, computing on the CPU: there is no nvcc")


@pytest.mark.parametrize(
    ("step", "code", "message"),
    [
        ("init", 69, "the CUDA driver does not start: fake failure of init."),
        ("context", 69, "Fake GPU cannot be used: fake failure of context."),
        ("load", 70, "the GPU does not load kernel q_in_registers: fake failure of load."),
        ("launch", 70, "kernel q_in_registers failed on Fake GPU: fake failure of launch."),
    ],
)
def test_a_step_that_fails(fake_gpu, monkeypatch, given, out, step, code, message):
    monkeypatch.setenv("FAKE_GPU_FAILS", step)
    out.write_text("old")
    flashcli("run", given, out, "--backend", "cuda", "--kernel", "q_in_registers").assert_error(code, message)
    assert out.read_text() == "old" and not leftovers(out.parent)


@pytest.mark.parametrize("step", ["context", "load"])
def test_a_backend_that_does_not_open_leaves_no_context(fake_gpu, monkeypatch, step):
    monkeypatch.setenv("FAKE_GPU_FAILS", step)
    with pytest.raises((BackendUnavailable, KernelFailure)):
        CudaBackend(32)
    assert not fake_gpu.open_contexts


def test_a_kernel_for_another_architecture_is_refused(fake_gpu, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_CAPABILITY", "3.5")
    with pytest.raises(BackendUnavailable, match="kernel q_in_registers needs sm_50, Fake GPU is sm_35"):
        CudaBackend(32, kernel="q_in_registers")


# With a GPU that computes in NumPy: what surrounds the kernels


@pytest.mark.parametrize(("causal", "scale"), [(False, None), (True, 0.3), (False, 0.0)])
def test_arguments_reach_the_kernel(fake_gpu, causal, scale):
    with CudaBackend(32, causal, scale) as backend:
        assert_accurate(forward(backend, QKV), QKV, causal, scale)
    assert not fake_gpu.open_contexts


def test_a_quick_build_computes_until_the_full_one_is_there(fake_gpu, monkeypatch):
    monkeypatch.setattr(quick, "first_cubin", lambda build, arch: (compiler.cubin(build, arch), True))
    monkeypatch.setattr(quick, "is_under_way", lambda build, arch: len(fake_gpu.launches) < 3)
    with CudaBackend(32) as backend:
        assert not backend._program.is_quick  # there is little memory
    monkeypatch.setattr(fake_gpu, "_TOTAL", 2 * quick.ROOM)
    fake_gpu.launches.clear()
    with CudaBackend(32) as backend:
        assert backend._program.is_quick
        assert_accurate(forward(backend, QKV), QKV)
        assert len(fake_gpu.launches) >= 3 and not backend._program.is_quick
        assert_accurate(forward(backend, QKV), QKV)


def in_ranges(backend: CudaBackend, qkv: np.ndarray, ends: list[int]) -> np.ndarray:
    """The answer put together from ranges of query rows, each a launch of its own, after K and V were prepared once."""
    driver, program, stream = backend._driver, backend._program, backend._driver.Stream()
    (B, _, N, d), out = qkv.shape, np.full(qkv[:, 0].shape, np.nan, np.float32)
    inputs, output = driver.mem_alloc(qkv.nbytes), driver.mem_alloc(out.nbytes)
    driver.memcpy_htod_async(inputs, qkv, stream)
    workspace = allocate(driver, backend._build.workspace(B=B, M=N, N=N))
    for index, (first, end) in enumerate(itertools.pairwise([0, *ends, N])):
        q, k, v = (int(inputs) + 4 * n * N * d for n in range(3))
        rows = np.empty((B, end - first, d), np.float32)
        given = of_batches(
            (q + 4 * first * d, k, v, output), d, apart=(*[3 * N * d] * 3, (end - first) * d),
            B=B, M=end - first, N=N, scale=d**-0.5, q_start=first, workspace=int(workspace),
        )  # fmt: skip
        if index == 0:
            program.prepare(given, stream)
        program.attend(given, stream)
        driver.memcpy_dtoh_async(rows, output, stream)
        stream.synchronize()
        out[:, first:end] = rows
    return out


LONG = random_qkv(3, 1000, 32)


def by_rows(backend: CudaBackend, qkv: np.ndarray, warnings: list[str] | None = None) -> np.ndarray:
    """The answer where batches go through the pipeline a tile's rows at a time."""
    out = np.full(qkv[:, 0].shape, np.nan, np.float32)
    arrays = Arrays(*qkv.transpose(1, 0, 2, 3), out)
    watch = Watch(Timeline(), warn=ignore if warnings is None else warnings.append)
    stream(arrays, backend, arrays, Cut(whole=False, batches=1, rows=TILE), watch=watch)
    return out


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["q_in_registers", "mma"])
def test_rows_of_long_batches_pass_while_k_and_v_stay(fake_gpu, kernel, causal):
    with CudaBackend(32, causal, kernel=kernel, sizes=(1, TILE, 1000)) as backend:
        assert_accurate(by_rows(backend, LONG), LONG, causal)
    launched = [(name, N) for name, _, N in fake_gpu.launches]
    assert launched == 3 * ([("prepare", 1000)] * (kernel == "mma") + [("attention", 1000)] * 3)


def test_a_long_batch_takes_the_memory_that_there_is(fake_gpu):
    least = LONG[0, 1:].nbytes + 2 * 4 * TILE * 32 + 4 * NOTE
    with CudaBackend(32, kernel="q_in_registers", max_device_bytes=least) as backend:
        assert_accurate(by_rows(backend, LONG), LONG)
        assert sum(map(len, fake_gpu._allocations.values())) <= least
    with CudaBackend(32, kernel="q_in_registers", max_device_bytes=least - 1) as backend, pytest.raises(OutOfMemory):
        by_rows(backend, LONG)


@pytest.mark.parametrize("kernel", ["q_in_registers", "mma"])
@pytest.mark.parametrize("long", [1, 2])
@pytest.mark.parametrize("pattern", range(8))
def test_streams_wait_for_what_they_need_of_each_other(fake_gpu, monkeypatch, kernel, long, pattern):
    """Whichever of them are late, as a GPU may have it; with memory for K and V of one batch, or of two."""
    late = np.random.default_rng(pattern).integers(2, size=1000)
    monkeypatch.setattr(fake_gpu, "laziness", lambda number: late[number])
    qkv = random_qkv(5, 1000, 32)
    shape, by = Shape(5, 1000, 32), Cut(False, 1, TILE)
    with CudaBackend(32, kernel=kernel, sizes=(1, TILE, 1000)) as backend:
        backend._max_device_bytes = sum(backend.overlap) * backend._slot_bytes(shape, by) + long * backend._long_bytes(
            shape
        )
        assert_accurate(by_rows(backend, qkv), qkv)
        assert len(backend._long) == long
        assert_accurate(forward(backend, QKV), QKV)


def test_memory_of_an_earlier_input_is_free_for_the_next(fake_gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu, "_TOTAL", 1_600_000)
    with CudaBackend(32, kernel="q_in_registers") as backend:
        for _ in range(2):
            assert_accurate(by_rows(backend, LONG), LONG)
            assert len(backend._long) == 2


@pytest.mark.parametrize("matrix", [0, 1, 2])
def test_what_is_not_finite_in_a_long_batch_goes_to_a_kernel_that_does_not_split(fake_gpu, matrix):
    spoilt = LONG.copy()
    spoilt[1, matrix, 500, 3] = np.inf
    warnings = []
    with CudaBackend(32, kernel="mma", sizes=(1, TILE, 1000)) as backend:
        out, used = by_rows(backend, spoilt, warnings), [build.kernel.name for build in backend._session._programs]
    assert used == ["mma", "register_tiled"]
    assert warnings == [f"inf in {'QKV'[matrix]} at (batch, row, column) = (1, 500, 3)"]
    assert_accurate(out[::2], LONG[::2])


def test_a_batch_after_one_that_is_not_finite_goes_to_the_kernel_that_was_chosen(fake_gpu):
    qkv = random_qkv(5, 1000, 32)
    qkv[0, 1, 500, 3] = np.inf  # batches 2 and 4 take its place on the device
    with CudaBackend(32, kernel="mma", sizes=(1, TILE, 1000)) as backend:
        assert_accurate(by_rows(backend, qkv)[1:], qkv[1:])
        assert all(batch.finite for batch in backend._long)


@pytest.mark.parametrize("causal", [False, True])
def test_ranges_of_rows_attend_to_keys_prepared_once(fake_gpu, causal):
    with CudaBackend(32, causal, kernel="mma") as backend:
        assert_accurate(in_ranges(backend, QKV, [1, 40]), QKV, causal)
    assert [name for name, _, _ in fake_gpu.launches] == ["prepare", "attention", "attention", "attention"]


def test_a_kernel_of_many_launches(fake_gpu):
    with CudaBackend(32, causal=True, kernel="baseline") as backend:
        assert_accurate(in_ranges(backend, QKV, [40]), QKV, causal=True)
    steps = ["scores", "row_max", "minus_max_and_exp", "row_sum", "update"]
    assert [name for name, _, _ in fake_gpu.launches] == 6 * steps  # 2 x 2 tiles, then 1 x 2


def test_run_says_what_it_ran_on(fake_gpu, given, out):
    done = flashcli("run", given, out, "--kernel", "q_in_registers")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[5] == "backend: cuda, Fake GPU (sm_80), kernel q_in_registers (Br=128, Bc=64)"
    assert re.fullmatch(r"kernel: \d+\.\d{3} ms, \d+\.\d TFLOP/s", lines[6])
    assert_accurate(read_floats(out, QKV[:, 0].shape), QKV)


@pytest.mark.parametrize("batches", [1, 4, 13])
def test_too_little_memory_splits_the_batches_and_goes_on(fake_gpu, monkeypatch, batches):
    one = 4 * QKV[0, 0].nbytes
    monkeypatch.setattr(fake_gpu, "_TOTAL", batches * one + one // 2)
    with CudaBackend(32, kernel="q_in_registers") as backend:
        assert_accurate(forward(backend, QKV), QKV)
    launched = [B for _, B, _ in fake_gpu.launches]
    assert sum(launched) == 20 and max(launched) <= batches


def test_a_limit_on_memory_is_kept(fake_gpu):
    limit = 2 * 4 * QKV[0, 0].nbytes
    with CudaBackend(32, kernel="q_in_registers", max_device_bytes=limit) as backend:
        assert_accurate(forward(backend, QKV), QKV)
        assert sum(map(len, fake_gpu._allocations.values())) <= limit


def test_memory_is_given_back(fake_gpu):
    with CudaBackend(32, kernel="q_in_registers") as backend:
        forward(backend, QKV)
    del backend
    assert not fake_gpu._allocations


@pytest.mark.parametrize("traced", [False, True])
def test_events_of_copies_are_recorded_only_where_they_are_wanted(fake_gpu, monkeypatch, traced):
    """For a trace, or for another stream: in a single queue to the GPU they hold up what is behind them."""
    record, recorded, timeline = fake_gpu.Event.record, [], Timeline(keeps=traced)
    with CudaBackend(32) as backend:
        monkeypatch.setattr(fake_gpu.Event, "record", lambda *event: recorded.append(event) or record(*event))
        for qkv, by in ((QKV, Cut(True, 4, 60)), (LONG, Cut(False, 1, TILE))):
            arrays = Arrays(*qkv.transpose(1, 0, 2, 3), np.empty_like(qkv[:, 0]))
            stream(arrays, backend, arrays, by, watch=Watch(timeline))
    whole, of_q, of_kv = 20 // 4, 3 * 3, 3 * 6  # chunks; one event more for each long batch that is ready
    assert len(recorded) == (5 * (whole + of_q + of_kv) if traced else 2 * (whole + of_q) + 3 * of_kv) + 3
    assert {span.phase for span in timeline.spans} & set(ENGINES) == (set(ENGINES) if traced else set())
    assert timeline.active("kernel") > 0


@pytest.fixture
def locked(monkeypatch) -> list[int]:
    """The addresses of page-locked memory; such memory is locked once, and unlocked while it is still there."""
    addresses: list[int] = []

    def lock(array: np.ndarray, context: int) -> bool:
        assert array.ctypes.data not in addresses
        addresses.append(array.ctypes.data)
        return True

    monkeypatch.setattr(memory, "lock", lock)
    monkeypatch.setattr(memory, "unlock", lambda array: addresses.remove(array.ctypes.data))
    return addresses


def test_host_memory_is_locked_for_as_long_as_it_is_used(fake_gpu, locked):
    with CudaBackend(32) as backend:
        for qkv in (QKV, QKV[:2], LONG):
            assert_accurate(forward(backend, qkv), qkv)
            assert len(locked) == len(backend._slots) > 0
    assert locked == []


def test_host_memory_is_unlocked_after_a_failure(fake_gpu, monkeypatch, locked):
    """Once nothing is under way to it any more."""
    monkeypatch.setattr(fake_gpu, "laziness", lambda number: True)
    with CudaBackend(32) as backend:
        monkeypatch.setenv("FAKE_GPU_FAILS", "synchronize")
        with pytest.raises(KernelFailure):
            forward(backend, QKV)
        monkeypatch.delenv("FAKE_GPU_FAILS")
        slots, unlock = list(backend._slots), memory.unlock
        assert any(slot.stream.work for slot in slots)

        def unlock_idle(array: np.ndarray) -> None:
            assert not any(slot.stream.work for slot in slots if slot.memory is array)
            unlock(array)

        monkeypatch.setattr(memory, "unlock", unlock_idle)
    assert locked == []


def test_memory_counts_as_locked_while_it_is_being_locked(fake_gpu, monkeypatch):
    """By threads that read, some of which may have locked theirs when another one fails."""
    locked, unlocked = [], []
    monkeypatch.setattr(memory, "unlock", lambda array: unlocked.append(array.ctypes.data))

    def lock_and_stop(array: np.ndarray, context: int) -> None:
        locked.append(array.ctypes.data)
        raise KeyboardInterrupt

    monkeypatch.setattr(memory, "lock", lock_and_stop)
    with CudaBackend(32) as backend, pytest.raises(KeyboardInterrupt):
        forward(backend, QKV)
    assert locked and sorted(unlocked) == sorted(locked)


def test_what_the_program_has_begun_is_waited_for(fake_gpu, monkeypatch):
    done = []

    def begun(name: str, then: Callable[[], None] = ignore) -> None:
        time.sleep(0.02)
        then()
        done.append(name)

    monkeypatch.setattr(warm_up, "_threads", [])
    monkeypatch.setattr(fake_gpu, "init", lambda: done.append("PyCUDA"))
    warm_up._begin(begun, "driver", lambda: warm_up._begin(begun, "context"))
    devices()
    assert sorted(done[:2]) == ["context", "driver"] and done[2:] == ["PyCUDA"]


def test_a_batch_too_large_for_the_gpu_is_code_71_with_the_figure(fake_gpu, monkeypatch, tmp_path, out):
    monkeypatch.setenv("FAKE_GPU_BYTES", str(2**26))
    given = sparse_input(tmp_path / "large.in", 1, 2**17, 64)
    done = flashcli("run", given, out, "--kernel", "q_in_registers")
    done.assert_error(71, "one batch of N = 131072, d = 64 needs 64.2 MiB on Fake GPU, 64.0 MiB are free.")
    assert not list(out.parent.iterdir())


def test_a_batch_above_the_users_limit_is_code_71(fake_gpu, given, out):
    done = flashcli("run", given, out, "--kernel", "q_in_registers", "--max-device-memory", "1K")
    done.assert_error(71, "one batch of N = 60, d = 32 needs")


def test_the_api_raises_the_same_errors(fake_gpu, monkeypatch):
    monkeypatch.setattr(fake_gpu, "_TOTAL", 1000)
    with open_backend(Request("cuda"), Shape(20, 60, 32)) as backend, pytest.raises(OutOfMemory):
        forward(backend, QKV)


def test_doctor_runs_a_kernel(fake_gpu):
    done = flashcli("doctor")
    assert (done.code, done.err) == (0, "")
    assert "[ok] GPU 0: Fake GPU, sm_80, 1 GiB; kernel mma ran and its answer is right\n" in done.out


# With a GPU


@pytest.mark.gpu
def test_a_warm_start_runs_no_process(gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path))
    with open_backend(Request("cuda"), Shape(20, 60, 32)) as backend:
        assert_accurate(forward(backend, QKV), QKV)
    assert len(list(tmp_path.glob("*.cubin"))) == 1

    def start(*args, **options):
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "Popen", start)
    with open_backend(Request("cuda"), Shape(20, 60, 32)) as backend:
        assert_accurate(forward(backend, QKV), QKV)


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_KERNELS)
def test_run_with_each_kernel(gpu, given, out, name):
    if not KERNELS[name].runs_on(gpu):
        pytest.skip(f"{name} does not run on compute capability {gpu}")
    done = flashcli("run", given, out, "--kernel", name, "--json", "-")
    assert (done.code, done.err) == (0, "")
    record = json.loads(done.out)
    assert (record["backend"], record["kernel"]) == ("cuda", name)
    assert 0 < record["kernel_seconds"] <= record["computation"] < record["total"]
    assert_accurate(read_floats(out, QKV[:, 0].shape), QKV)


@pytest.mark.gpu
def test_the_kernel_chosen_by_default_is_right(gpu, given, out):
    done = flashcli("run", given, out)
    assert (done.code, done.err) == (0, "")
    assert "\nbackend: cuda, " in done.out
    assert_accurate(read_floats(out, QKV[:, 0].shape), QKV)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(
    ("name", "d"), [(name, d) for name in GPU_KERNELS for d in (40 if name in IN_USE else 33, 64, 256)]
)
def test_ranges_of_rows_on_the_real_gpu(gpu, name, d, causal):
    if not KERNELS[name].runs_on(gpu):
        pytest.skip(f"{name} does not run on compute capability {gpu}")
    pass_over_if_refused(name, d, 333)
    qkv = random_qkv(3, 333, d)
    for N in (2048, 128):  # tiles for long and for short sequences
        with CudaBackend(d, causal, kernel=name, sizes=(3, N, N)) as backend:
            assert_accurate(in_ranges(backend, qkv, [1, 100, 292]), qkv, causal)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("N", [250, 1000])
@pytest.mark.parametrize("name", KERNELS)
def test_long_batches_give_the_same_bits_by_rows(gpu, name, N, causal):
    if not KERNELS[name].runs_on(gpu):
        pytest.skip(f"{name} does not run on compute capability {gpu}")
    pass_over_if_refused(name, 32, N)
    qkv = LONG[:, :, :N].copy()
    with CudaBackend(32, causal, kernel=name, sizes=(3, N, N)) as backend:
        whole = forward(backend, qkv)
        assert_accurate(whole, qkv, causal)
        np.testing.assert_array_equal(by_rows(backend, qkv), whole)
        qkv[1, 1, 50, 3] = np.inf
        by_rows(backend, qkv)
        np.testing.assert_array_equal(by_rows(backend, qkv)[::2], whole[::2])


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 1000, 3 * 2**20])
def test_any_array_can_be_locked(gpu, count):
    with CudaBackend(32):
        array = np.empty(count, np.float32)
        for _ in range(2):
            assert memory.lock(array)
            assert not memory.lock(array)
            memory.unlock(array)


@pytest.mark.gpu
@pytest.mark.parametrize("qkv", [QKV, LONG], ids=["batches", "rows"])
def test_memory_that_cannot_be_locked_is_as_good(gpu, monkeypatch, qkv):
    compute = by_rows if qkv is LONG else forward
    with CudaBackend(32, kernel="register_tiled") as backend:
        expected = compute(backend, qkv)
        monkeypatch.setattr(memory, "lock", lambda array, context: False)
        found = compute(backend, qkv)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.gpu
def test_a_batch_too_large_for_the_real_gpu(gpu, tmp_path, out):
    given = sparse_input(tmp_path / "large.in", 1, 2**20, 64)
    done = flashcli("run", given, out, "--backend", "cuda", "--max-device-memory", "512M")
    done.assert_error(71, "one batch of N = 1048576, d = 64 needs")


@pytest.mark.gpu
@pytest.mark.parametrize("limit", [1, 3])
def test_a_limit_on_the_real_gpu_splits_the_batches(gpu, given, out, limit):
    one = 4 * QKV[0, 0].nbytes + 4 * NOTE
    done = flashcli("run", given, out, "--kernel", "q_in_registers", "--max-device-memory", limit * one, "--json", "-")
    assert done.code == 0
    assert_accurate(read_floats(out, QKV[:, 0].shape), QKV)


@pytest.mark.gpu
def test_devices_are_described(gpu):
    for name, capability, size in devices():
        assert name and capability >= (5, 0) and size > 2**30
