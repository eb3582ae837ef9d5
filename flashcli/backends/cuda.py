"""Attention on a GPU, through PyCUDA: context, memory, stream, launches.

Nothing here runs at import. The context lives as long as the ``with`` block of its backend.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np

from flashcli import sizes
from flashcli.backends.base import Backend, Overlap, Slot, ignore
from flashcli.errors import BackendUnavailable, KernelFailure, OutOfMemory
from flashcli.files.cut import Cut
from flashcli.files.fileformat import FLOAT
from flashcli.files.summary import is_finite
from flashcli.gpu import libcuda, page_lock, warm_up
from flashcli.gpu.program import FREE_THE_GPU, Keys, Program, allocate
from flashcli.kernels import compiler
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.choice import choose, exact
from flashcli.kernels.types import Build, Kernel, Problem
from flashcli.shape import Chunk, Shape, ceil_div
from flashcli.timeline import Timeline

WITHOUT_GPU = "go to a machine with a GPU and its driver, ask Slurm for one (--gres=gpu:1), or use --backend cpu."


def load_driver() -> ModuleType:
    """PyCUDA's driver module, initialised; BackendUnavailable says what is missing otherwise."""
    try:
        import pycuda.driver as driver
    except ModuleNotFoundError as error:
        if problem := libcuda.problem():  # first: PyCUDA would not help
            raise BackendUnavailable(f"{problem}.", WITHOUT_GPU) from error
        raise BackendUnavailable(
            f"PyCUDA is not installed ({error.name} is missing).",
            "with a CUDA toolkit on the PATH: pip install pycuda.",
        ) from error
    except ImportError as error:
        if "libcuda.so" in str(error):  # not libcudart.so
            raise BackendUnavailable("there is no NVIDIA driver here (libcuda was not found).", WITHOUT_GPU) from error
        raise BackendUnavailable(
            f"PyCUDA does not fit this machine's CUDA: {error}.",
            "rebuild it: pip install --force-reinstall --no-cache-dir --no-binary pycuda pycuda.",
        ) from error
    warm_up.wait()
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
    """A slot with counterparts of its memory on the device, and a stream of its own.

    ``events`` are: the copy to the device begins, ends; the kernel begins, ends; the copy of the answer ends.
    """

    def __init__(self, driver: ModuleType, shape: Shape, by: Cut, workspace_bytes: int) -> None:
        super().__init__(shape, by)
        self.locked = False  # or tried to
        self._driver = driver
        self.device_input = driver.mem_alloc(by.input_floats(shape) * FLOAT.itemsize)
        self.device_output = driver.mem_alloc(by.output_floats(shape) * FLOAT.itemsize)
        self.workspace = allocate(driver, workspace_bytes)
        self.stream = driver.Stream()
        self.events = [driver.Event() for _ in range(5)]

    def lock(self) -> None:
        """Lock the host's memory, when it is used for the first time: other slots are in use meanwhile."""
        if not self.locked:
            self.locked = True  # first: a signal may come as soon as it is
            page_lock.lock(self.memory)

    def close(self) -> None:
        """To be called before the host's memory may be given back, whatever has happened."""
        if self.locked:
            with contextlib.suppress(self._driver.Error):
                self.stream.synchronize()
            page_lock.unlock(self.memory)


class CudaLongBatch:
    """K and V of one batch on the device, copied there and prepared chunk by chunk, for rows of its Q to come."""

    def __init__(self, driver: ModuleType, shape: Shape, workspace_bytes: int) -> None:
        self.rows = driver.mem_alloc(2 * shape.output_batch_bytes)
        values = int(self.rows) + shape.output_batch_bytes
        self.keys = Keys(int(self.rows), values, 0, 1, shape.N, allocate(driver, workspace_bytes))
        self.finite = True
        self.ready = driver.Event()  # after preparing
        self.filling: list[CudaSlot] = []  # whose rows are on their way to it
        self.users: list[CudaSlot] = []  # whose rows of Q attend to it

    def forget(self, slot: CudaSlot) -> None:
        """What the slot had to do with it is done."""
        for slots in (self.filling, self.users):
            if slot in slots:
                slots.remove(slot)


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
        self._slots: list[CudaSlot] = []
        self._long: list[CudaLongBatch] = []
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
        self._close_slots()
        del self._program, self._exact, self._clock, self._long
        self._close()

    def _close_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []

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
        self._close_slots()  # those of an earlier input
        long = 0 if by.whole else min(2, shape.B)  # two, so that one fills while the other is used
        while (slots := self._take(shape, by, count, long)) is None:
            if long == 2:
                long = 1
            elif smaller := by.smaller():
                by = smaller
            elif count > 1:
                count = ceil_div(count, 2)
            else:
                raise self._out_of_memory(f"one batch of N = {shape.N}, d = {shape.d}", self._taken)
        self._slots = slots
        return by, slots

    def _take(self, shape: Shape, by: Cut, count: int, long: int) -> list[CudaSlot] | None:
        """That many slots and long batches; None if there is no room for them."""
        self._long = []  # frees those of an earlier input
        self._taken = self._slot_bytes(shape, by) * count + self._long_bytes(shape) * long
        if self._taken > self._max_device_bytes:
            return None
        try:
            workspace = self._workspace(shape, by)
            slots = [CudaSlot(self._driver, shape, by, workspace) for _ in range(count)]
            self._long = [CudaLongBatch(self._driver, shape, self._long_workspace(shape)) for _ in range(long)]
            return slots
        except self._driver.MemoryError:
            return None
        except self._driver.Error as error:
            raise self._failure(error) from error

    def submit(self, slot: CudaSlot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk, slot.submitted = chunk, time.perf_counter()
        slot.finite = is_finite(slot.input_of(chunk))
        slot.lock()
        try:
            if chunk.matrices == "KV":
                self._keep(slot)
            else:
                self._compute(slot)
        except self._driver.Error as error:
            raise self._failure(error) from error

    def _compute(self, slot: CudaSlot) -> None:
        """Queue the copy of Q, and perhaps K and V, to the device, the kernel, and the copy of O back."""
        chunk, stream = slot.chunk, slot.stream
        self._copy(slot, slot.device_input)
        if chunk.matrices == "QKV":
            slot.events[2].record(stream)
            self._program_for(slot.finite).launch(
                slot.device_input, slot.device_output, slot.workspace, len(chunk.batches), slot.shape.N, self._scale,
                stream,
            )  # fmt: skip
        else:
            batch = self._long_of(slot)
            batch.users.append(slot)
            stream.wait_for_event(batch.ready)
            slot.events[2].record(stream)
            self._attend(slot, batch)
        slot.events[3].record(stream)
        self._driver.memcpy_dtoh_async(slot.output_of(chunk), slot.device_output, stream)
        slot.events[4].record(stream)

    def _attend(self, slot: CudaSlot, batch: CudaLongBatch) -> None:
        """Queue attention of rows of Q in a slot to the K and V of their batch."""
        keys = batch.keys if self._build.prepares else batch.keys._replace(workspace=slot.workspace)
        q, rows = int(slot.device_input), slot.chunk.rows
        self._program_for(slot.finite and batch.finite).attend(
            keys, q, 0, len(rows), slot.device_output, self._scale, slot.stream, rows.start
        )

    def _keep(self, slot: CudaSlot) -> None:
        """Queue the copy of rows of K and V to the device, and, after the last of them, what prepares them."""
        batch, stream, rows = self._long_of(slot), slot.stream, slot.chunk.rows
        batch.finite = slot.finite and (batch.finite or rows.start == 0)
        for user in batch.users:  # of the batch that was in its place
            stream.wait_for_event(user.events[3])
        self._copy(slot, int(batch.rows) + rows.start * slot.shape.row_bytes)
        batch.filling.append(slot)
        last = rows.stop == 2 * slot.shape.N
        if last:
            for other in batch.filling:
                stream.wait_for_event(other.events[1])
        slot.events[2].record(stream)
        if last:
            self._program.prepare(batch.keys, stream)
            batch.ready.record(stream)
        for event in slot.events[3:]:
            event.record(stream)

    def _copy(self, slot: CudaSlot, target: object) -> None:
        slot.events[0].record(slot.stream)
        self._driver.memcpy_htod_async(target, slot.input_of(slot.chunk), slot.stream)
        slot.events[1].record(slot.stream)

    def _long_of(self, slot: CudaSlot) -> CudaLongBatch:
        return self._long[slot.chunk.batches.start % len(self._long)]

    def wait(self, slot: CudaSlot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        try:
            slot.events[4].synchronize()
            times = [self._clock_start + self._clock.time_till(event) / 1e3 for event in slot.events]
        except self._driver.Error as error:
            raise self._failure(error) from error
        for batch in self._long:
            batch.forget(slot)
        timeline.add("computation", slot.submitted, time.perf_counter(), f"compute {slot.chunk}")
        for phase, (start, end) in {"host to device": (0, 1), "kernel": (2, 3), "device to host": (3, 4)}.items():
            if times[end] > times[start]:
                timeline.add(phase, times[start], times[end], f"{phase}, {slot.chunk}")

    def measure(self, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        """Seconds of the kernel alone in each of ``runs`` runs, taking turns among inputs [B, 3, N, d].

        Each timed run follows an untimed one without a gap, so that its first launch is not in the time. The first
        input's answer is left in ``out`` [B, N, d].
        """
        try:
            return self._measure(inputs, out, runs)
        except self._driver.MemoryError:
            pass  # and what was taken is free again
        except self._driver.Error as error:
            raise self._failure(error) from error
        B, _, N, d = inputs[0].shape
        needed = sum(qkv.nbytes for qkv in inputs) + out.nbytes + self._build.workspace(B, N, N)
        raise self._out_of_memory(f"timing (B, N, d) = ({B}, {N}, {d})", needed)

    def _measure(self, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        driver, (B, _, N, _) = self._driver, inputs[0].shape
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
        return seconds[2:]

    def _slot_bytes(self, shape: Shape, by: Cut) -> int:
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

    def _out_of_memory(self, what: str, needed: int) -> OutOfMemory:
        free = min(self._driver.mem_get_info()[0], self._max_device_bytes)
        return OutOfMemory(
            f"{what} needs {sizes.text(needed)} on {self._device.name()}, {sizes.text(free)} are free.", FREE_THE_GPU
        )
