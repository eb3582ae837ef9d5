"""Attention on a GPU, through PyCUDA: context, memory, stream, launches.

Nothing here runs at import. The context lives as long as the ``with`` block of its backend.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import numpy as np

from flashcli import compiler
from flashcli.backends.base import Backend, Slot
from flashcli.cut import Cut
from flashcli.errors import BackendUnavailable, KernelFailure, OutOfMemory
from flashcli.fileformat import FLOAT, Chunk, Shape
from flashcli.kernels import KERNELS, Build, Kernel, Launch, Problem, choose, exact
from flashcli.stream import Overlap, ignore
from flashcli.timing import Timeline

# Q, K, V, O, workspace, q_stride, kv_stride, B, M, N, first_row, scale, tile_i, tile_j: see cuda/common.cuh
ARGUMENTS = "PPPPPqqiiiifii"
GIB = 2**30
FREE_THE_GPU = "free the GPU, use a larger one, or --backend cpu."
FREE_THE_HOST = "free memory of this machine, or --backend cpu."
DEFAULT_SHARED = 48 * 1024  # more dynamic shared memory has to be asked for


def load_driver() -> ModuleType:
    """PyCUDA's driver module, initialised; BackendUnavailable says what is missing otherwise."""
    try:
        import pycuda.driver as driver
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            f"PyCUDA is not installed ({error.name} is missing).",
            "with a CUDA toolkit on the PATH: pip install 'flashcli[cuda]'.",
        ) from error
    except ImportError as error:
        if "libcuda.so" in str(error):  # not libcudart.so
            raise BackendUnavailable(
                "there is no NVIDIA driver here (libcuda was not found).", "install it."
            ) from error
        raise BackendUnavailable(
            f"PyCUDA does not fit this machine's CUDA: {error}.",
            "rebuild it: pip install --force-reinstall --no-cache-dir --no-binary pycuda pycuda.",
        ) from error
    try:
        driver.init()
    except driver.Error as error:
        raise BackendUnavailable(f"the CUDA driver does not start: {error}.", "does `nvidia-smi` work?") from error
    return driver


def devices() -> list[tuple[str, tuple[int, int], int]]:
    """Name, compute capability and bytes of memory of each GPU."""
    driver = load_driver()
    found = [driver.Device(index) for index in range(driver.Device.count())]
    return [(device.name(), device.compute_capability(), device.total_memory()) for device in found]


class CudaSlot(Slot):
    """A slot in page-locked host memory, with its counterparts on the device and a stream of its own."""

    def __init__(self, driver: ModuleType, shape: Shape, by: Cut, workspace_bytes: int) -> None:
        super().__init__(shape, by)
        self._driver = driver
        self.device_input = driver.mem_alloc(by.input_floats(shape) * FLOAT.itemsize)
        self.device_output = driver.mem_alloc(by.output_floats(shape) * FLOAT.itemsize)
        self.workspace = allocate(driver, workspace_bytes)
        self.stream = driver.Stream()
        self.events = [driver.Event() for _ in range(4)]

    def host_memory(self, floats: int) -> np.ndarray:
        try:
            return self._driver.pagelocked_empty(floats, np.float32)
        except self._driver.MemoryError as error:
            size = floats * FLOAT.itemsize / 2**20
            raise OutOfMemory(f"there is no page-locked host memory left ({size:.0f} MiB).", FREE_THE_HOST) from error


def allocate(driver: ModuleType, size: int):
    """Device memory, zeroed, for tiles whose padding is moved though never written; a null pointer for no bytes."""
    if size == 0:
        return 0
    memory = driver.mem_alloc(size)
    driver.memset_d8(memory, 0, size)
    return memory


class Keys(NamedTuple):
    """K and V on the device, B batches [N, d] that start ``stride`` floats apart, and scratch to prepare them in."""

    k: int
    v: int
    stride: int
    B: int
    N: int
    workspace: object


class LongBatch:
    """K and V of one batch on the device, copied there and prepared chunk by chunk, for rows of its Q to come."""

    def __init__(self, driver: ModuleType, shape: Shape, workspace_bytes: int) -> None:
        self.rows = driver.mem_alloc(2 * shape.output_batch_bytes)
        values = int(self.rows) + shape.output_batch_bytes
        self.keys = Keys(int(self.rows), values, 0, 1, shape.N, allocate(driver, workspace_bytes))
        self.finite = True
        self.copied: list = []  # an event after each copy
        self.ready = driver.Event()  # after preparing
        self.used: list = []  # an event after each use


class Program:
    """A kernel's functions, loaded into the current context."""

    def __init__(self, driver: ModuleType, build: Build, capability: tuple[int, int]) -> None:
        self.build = build
        code = compiler.cubin(build, compiler.architecture(capability))
        try:
            self._module = driver.module_from_buffer(code)
            self._functions = {launch.function: self._function(driver, launch) for launch in build.functions()}
        except driver.MemoryError as error:
            raise OutOfMemory(f"the GPU has no memory left for kernel {build.kernel.name}.", FREE_THE_GPU) from error
        except driver.Error as error:
            raise KernelFailure(
                f"the GPU does not load kernel {build.kernel.name}: {error}.", "is the driver too old for the toolkit?"
            ) from error

    def _function(self, driver: ModuleType, launch: Launch):
        function = self._module.get_function(launch.function)
        function.prepare(ARGUMENTS)
        if launch.shared > DEFAULT_SHARED:
            function.set_attribute(driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared)
        return function

    def launch(self, inputs, output, workspace, B: int, N: int, scale: float, stream) -> None:
        """Queue attention of device memory: ``inputs`` [B, 3, N, d] into ``output`` [B, N, d]."""
        matrix = N * self.build.problem.d
        q, k, v = (int(inputs) + 4 * index * matrix for index in range(3))
        keys = Keys(k, v, 3 * matrix, B, N, workspace)
        self.prepare(keys, stream)
        self.attend(keys, q, 3 * matrix, N, output, scale, stream)

    def prepare(self, keys: Keys, stream) -> None:
        """Queue what `attend` needs once for the same K and V, however many rows attend to them afterwards."""
        for launch in self.build.prepare(keys.B, keys.N):
            self._call(launch, keys, stream)

    def attend(self, keys: Keys, q: int, q_stride: int, M: int, output, scale: float, stream, first_row=0) -> None:
        """Queue attention of M query rows in each batch, batches ``q_stride`` floats apart, into ``output`` [B, M, d].

        ``first_row`` is the position of the first of them in its sequence, which only a causal mask asks for.
        """
        for launch in self.build.launches(keys.B, M, keys.N):
            self._call(launch, keys, stream, q, q_stride, M, first_row, output, scale)

    def _call(self, launch: Launch, keys: Keys, stream, q=0, q_stride=0, M=0, first_row=0, output=0, scale=0.0) -> None:
        k, v, kv_stride, B, N, workspace = keys
        self._functions[launch.function].prepared_async_call(
            (launch.grid, 1), (launch.threads, 1, 1), stream,
            q, k, v, output, workspace, q_stride, kv_stride, B, M, N, first_row, scale, *launch.tile,
            shared_size=launch.shared,
        )  # fmt: skip


class CudaBackend(Backend):
    """One kernel, compiled for head size ``d``, on one device; to be closed on the thread that opened it.

    Without a ``kernel`` the best for the device is chosen; its tiles are chosen for ``sizes``, the B, M (rows of Q)
    and N to come, and right for any others too. Without a ``device``, processes that have different ``turn``s get
    different ones, as far as there are. ``max_device_bytes`` bounds the memory taken on the device.
    """

    # A thread copies some 7 GB/s out of the page cache and 3 GB/s into it. One chunk computes while the result of
    # another travels back.
    overlap = Overlap(reading=4, computing=2, writing=2)

    def __init__(
        self,
        d: int,
        causal: bool = False,
        scale: float | None = None,
        kernel: str | None = None,
        precision: str = "fp32",
        device: int | None = None,
        turn: int = 0,
        sizes: tuple[int, int, int] = (1, 2048, 2048),
        max_device_bytes: int | None = None,
    ) -> None:
        self._scale = d**-0.5 if scale is None else scale
        self._max_device_bytes = max_device_bytes or sys.maxsize
        self._driver = load_driver()
        self._device = self._find_device(device, turn)
        self._capability = self._device.compute_capability()
        sms = self._device.get_attribute(self._driver.device_attribute.MULTIPROCESSOR_COUNT)
        problem = Problem(*sizes, d, causal, precision, sms)
        self._build = Build(self._find_kernel(kernel, d, precision), problem)
        self._long: list[LongBatch] = []
        self._taken = 0  # bytes of the device's memory
        with contextlib.ExitStack() as stack:
            self._open_context(stack)
            self._program = Program(self._driver, self._build, self._capability)
            self._exact: Program | None = None
            self._start_clock()
            self._close = stack.pop_all().close

    def __enter__(self) -> CudaBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        del self._program, self._exact, self._clock, self._long
        self._close()

    def _find_device(self, index: int | None, turn: int):
        count = self._driver.Device.count()
        if index is None:
            index = turn % max(count, 1)
        if index >= count:
            found = "there is no GPU" if count == 0 else f"the last of {count} is number {count - 1}"
            raise BackendUnavailable(f"GPU {index} does not exist: {found}.", "see `flashcli doctor`.")
        return self._driver.Device(index)

    def _find_kernel(self, name: str | None, d: int, precision: str) -> Kernel:
        if name is None:
            return choose(self._capability, d, precision)
        kernel = KERNELS[name]
        if not kernel.runs_on(self._capability):
            arch, needed = compiler.architecture(self._capability), compiler.architecture(kernel.needs)
            raise BackendUnavailable(
                f"kernel {kernel.name} needs {needed}, {self._device.name()} is {arch}.", "see `flashcli kernels`."
            )
        return kernel

    def _open_context(self, stack: contextlib.ExitStack) -> None:
        try:
            context = self._device.retain_primary_context()
            context.push()
        except self._driver.MemoryError as error:
            raise OutOfMemory(f"{self._device.name()} has no memory left for a context.", FREE_THE_GPU) from error
        except self._driver.Error as error:
            raise BackendUnavailable(
                f"{self._device.name()} cannot be used: {error}.", "is it in use by others, in exclusive mode?"
            ) from error

        def close() -> None:
            context.pop()
            context.detach()

        stack.callback(close)

    def _start_clock(self) -> None:
        """Tie the device's clock to the host's."""
        self._clock = self._driver.Event()
        self._clock.record()
        self._clock.synchronize()
        self._clock_start = time.perf_counter()

    def _program_for(self, finite: bool) -> Program:
        """Splitting a number into fp16 halves turns Inf into NaN: what is not finite goes to a kernel that does not."""
        if finite or not self._build.kernel.splits:
            return self._program
        if self._exact is None:
            build = Build(exact(self._build.kernel), self._build.problem)
            self._exact = Program(self._driver, build, self._capability)
        return self._exact

    @property
    def description(self) -> str:
        tiling, arch = self._build.tiling, compiler.architecture(self._capability)
        products = f", {self._build.problem.products}xfp16" if self._build.kernel.splits else ""
        warning = ", relative L2 error about 7e-4" if self._build.problem.precision == "fp16" else ""
        return (
            f"cuda, {self._device.name()} ({arch}), kernel {self._build.kernel.name} "
            f"(Br={tiling.Br}, Bc={tiling.Bc}){products}{warning}"
        )

    def details(self) -> dict[str, object]:
        tiling = self._build.tiling
        return {
            "backend": "cuda",
            "device": self._device.name(),
            "bus": self._device.pci_bus_id(),
            "arch": compiler.architecture(self._capability),
            "kernel": self._build.kernel.name,
            "precision": self._build.problem.precision,
            "Br": tiling.Br,
            "Bc": tiling.Bc,
            "device_mib": self._taken / 2**20,
        }

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[CudaSlot]]:
        """Smaller and fewer slots where memory is short; OutOfMemory if not even one batch fits."""
        long = 0 if by.whole else min(2, shape.B)  # two, so that one fills while the other is used
        while True:
            try:
                needed = self._device_bytes(shape, by) * count + self._long_bytes(shape) * long
                if needed > self._max_device_bytes:
                    raise self._driver.MemoryError("the limit set by the user")
                self._taken, workspace = needed, self._workspace(shape, by)
                self._long = [LongBatch(self._driver, shape, self._long_workspace(shape)) for _ in range(long)]
                return by, [CudaSlot(self._driver, shape, by, workspace) for _ in range(count)]
            except self._driver.MemoryError:
                self._long = []
                if long == 2:
                    long = 1
                elif smaller := by.smaller():
                    by = smaller
                elif count > 1:
                    count = -(-count // 2)
                else:
                    raise self._out_of_memory(needed, shape) from None
            except self._driver.Error as error:
                raise self._failure(error) from error

    def submit(self, slot: CudaSlot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk, slot.submitted = chunk, time.perf_counter()
        try:
            if chunk.matrices == "KV":
                self._keep(slot, chunk)
            else:
                self._compute(slot, chunk)
        except self._driver.Error as error:
            raise self._failure(error) from error

    def _compute(self, slot: CudaSlot, chunk: Chunk) -> None:
        stream, N = slot.stream, slot.shape.N
        slot.events[0].record(stream)
        self._driver.memcpy_htod_async(slot.device_input, slot.input_of(chunk), stream)
        slot.events[1].record(stream)
        if chunk.matrices == "QKV":
            self._program_for(slot.finite).launch(
                slot.device_input, slot.device_output, slot.workspace, len(chunk.batches), N, self._scale, stream
            )
        else:
            self._attend(slot, chunk)
        slot.events[2].record(stream)
        self._driver.memcpy_dtoh_async(slot.output_of(chunk), slot.device_output, stream)
        slot.events[3].record(stream)

    def _attend(self, slot: CudaSlot, chunk: Chunk) -> None:
        """Queue attention of rows of Q in a slot to the K and V of their batch."""
        batch = self._long_of(chunk)
        slot.stream.wait_for_event(batch.ready)
        program = self._program_for(slot.finite and batch.finite)
        keys = batch.keys if self._build.prepares else batch.keys._replace(workspace=slot.workspace)
        q, rows = int(slot.device_input), chunk.rows
        program.attend(keys, q, 0, len(rows), slot.device_output, self._scale, slot.stream, rows.start)
        batch.used.append(slot.events[2])

    def _keep(self, slot: CudaSlot, chunk: Chunk) -> None:
        """Queue the copy of rows of K and V to the device, and, after the last of them, what prepares them."""
        batch, stream, rows = self._long_of(chunk), slot.stream, chunk.rows
        if rows.start == 0:
            batch.finite = True
        batch.finite &= slot.finite
        for event in batch.used:  # in the place of an earlier batch
            stream.wait_for_event(event)
        slot.events[0].record(stream)
        target = int(batch.rows) + rows.start * slot.shape.row_bytes
        self._driver.memcpy_htod_async(target, slot.input_of(chunk), stream)
        slot.events[1].record(stream)
        batch.copied.append(slot.events[1])
        if rows.stop == 2 * slot.shape.N:
            for event in batch.copied:
                stream.wait_for_event(event)
            self._program.prepare(batch.keys, stream)
            batch.ready.record(stream)
            batch.copied, batch.used = [], []
        for event in slot.events[2:]:
            event.record(stream)

    def _long_of(self, chunk: Chunk) -> LongBatch:
        return self._long[chunk.batches.start % len(self._long)]

    def wait(self, slot: CudaSlot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        try:
            slot.events[3].synchronize()
            times = [self._clock_start + self._clock.time_till(event) / 1e3 for event in slot.events]
        except self._driver.Error as error:
            raise self._failure(error) from error
        timeline.add("computation", slot.submitted, time.perf_counter(), f"compute {slot.chunk}")
        for phase, start, end in zip(("host to device", "kernel", "device to host"), times, times[1:], strict=False):
            if end > start:
                timeline.add(phase, start, end, f"{phase}, {slot.chunk}")

    def measure(self, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        """Seconds of the kernel alone in each of ``runs`` runs, taking turns among inputs [B, 3, N, d].

        Each timed run follows an untimed one without a gap, so that launching is not in the time. The first input's
        answer is left in ``out`` [B, N, d].
        """
        driver, (B, _, N, d) = self._driver, inputs[0].shape
        try:
            on_device = [driver.to_device(qkv) for qkv in inputs]
            output = driver.to_device(np.full_like(out, np.nan))
            workspace = allocate(driver, self._build.workspace(B, N, N))
            stream, seconds = driver.Stream(), []
            for index in range(runs + 1, -1, -1):  # ends with the first input
                start, end = driver.Event(), driver.Event()
                for event, turn in ((start, index + 1), (end, index)):
                    self._program.launch(on_device[turn % len(inputs)], output, workspace, B, N, self._scale, stream)
                    event.record(stream)
                end.synchronize()
                seconds.append(end.time_since(start) / 1e3)
            driver.memcpy_dtoh(out, output)
        except driver.MemoryError:
            needed = sum(qkv.nbytes for qkv in inputs) + out.nbytes + self._build.workspace(B, N, N)
            raise self._out_of_memory(needed, Shape(B, N, d)) from None
        except driver.Error as error:
            raise self._failure(error) from error
        return seconds[2:]

    def _device_bytes(self, shape: Shape, by: Cut) -> int:
        """Device memory of a slot."""
        return (by.input_floats(shape) + by.output_floats(shape)) * FLOAT.itemsize + self._workspace(shape, by)

    def _workspace(self, shape: Shape, by: Cut) -> int:
        """Scratch of a slot, in bytes."""
        if not by.whole and self._build.prepares:
            return 0
        return self._build.workspace(by.batches, by.rows, shape.N)

    def _long_bytes(self, shape: Shape) -> int:
        """Device memory of a long batch."""
        return 2 * shape.output_batch_bytes + self._long_workspace(shape)

    def _long_workspace(self, shape: Shape) -> int:
        """What is prepared of its K and V, in bytes."""
        return self._build.workspace(1, 0, shape.N) if self._build.prepares else 0

    def _failure(self, error: Exception) -> KernelFailure:
        return KernelFailure(
            f"kernel {self._build.kernel.name} failed on {self._device.name()}: {error}.", "try another --kernel."
        )

    def _out_of_memory(self, needed: int, shape: Shape) -> OutOfMemory:
        free, _ = self._driver.mem_get_info()
        return OutOfMemory(
            f"one batch of N = {shape.N}, d = {shape.d} needs {needed / GIB:.2f} GiB on {self._device.name()}, "
            f"{min(free, self._max_device_bytes) / GIB:.2f} GiB are free.",
            FREE_THE_GPU,
        )
