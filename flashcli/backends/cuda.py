"""Attention on a GPU, through PyCUDA: context, memory, stream, launches.

Nothing here runs at import. The context lives as long as the ``with`` block of its backend.
"""

from __future__ import annotations

import contextlib
from types import ModuleType

import numpy as np

from flashcli import compiler
from flashcli.errors import BackendUnavailable, KernelFailure, OutOfMemory
from flashcli.kernels import KERNELS, Build, Kernel, Launch, choose

ARGUMENTS = "PPPPPqiif"  # Q, K, V, O, workspace, batch_stride, B, N, scale: see ATTENTION_ARGUMENTS in cuda/common.cuh
GIB = 2**30


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
        if "libcuda" in str(error):
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


class CudaBackend:
    """One kernel, compiled for head size ``d``, on one device; to be closed on the thread that opened it.

    Without a ``kernel``, the best for ``sizes``, the B and N to come, is chosen; it is right for any others too.
    """

    def __init__(
        self,
        d: int,
        causal: bool = False,
        scale: float | None = None,
        kernel: str | None = None,
        precision: str = "fp32",
        device: int = 0,
        sizes: tuple[int, int] = (1, 2048),
    ) -> None:
        self._scale = d**-0.5 if scale is None else scale
        self._max_batches: int | None = None  # learnt when memory runs out
        self._kernel_seconds = 0.0
        self._driver = load_driver()
        self._device = self._find_device(device)
        self._capability = self._device.compute_capability()
        self._build = Build(self._find_kernel(kernel, (*sizes, d), precision), d, causal, precision)
        code = compiler.cubin(self._build, compiler.architecture(self._capability))
        with contextlib.ExitStack() as stack:
            self._open_context(stack)
            self._load(code)
            self._close = stack.pop_all().close

    def __enter__(self) -> CudaBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self._buffers = {}
        del self._functions, self._stream
        self._close()

    def _find_device(self, index: int):
        count = self._driver.Device.count()
        if index >= count:
            found = "there is no GPU" if count == 0 else f"the last of {count} is number {count - 1}"
            raise BackendUnavailable(f"GPU {index} does not exist: {found}.", "see `flashcli doctor`.")
        return self._driver.Device(index)

    def _find_kernel(self, name: str | None, shape: tuple[int, int, int], precision: str) -> Kernel:
        if name is None:
            return choose(self._capability, shape, precision)
        kernel = KERNELS[name]
        if not kernel.runs_on(self._capability):
            arch, needed = compiler.architecture(self._capability), compiler.architecture(kernel.needs)
            raise BackendUnavailable(
                f"kernel {kernel.name} needs {needed}, {self._device.name()} is {arch}.", "see `flashcli kernels`."
            )
        return kernel

    def _open_context(self, stack: contextlib.ExitStack) -> None:
        try:
            context = self._device.make_context()
        except self._driver.Error as error:
            raise BackendUnavailable(
                f"{self._device.name()} cannot be used: {error}.", "is it in use by others, in exclusive mode?"
            ) from error

        def close() -> None:
            context.pop()
            context.detach()

        stack.callback(close)

    def _load(self, code: bytes) -> None:
        driver = self._driver
        self._stream = driver.Stream()
        self._buffers: dict[str, tuple[int, object]] = {}
        try:
            module = driver.module_from_buffer(code)
        except driver.Error as error:
            raise KernelFailure(f"the GPU does not load kernel {self._build.kernel.name}: {error}.") from error
        self._functions = {}
        for launch in self._launches(1, 1):
            function = module.get_function(launch.function)
            function.prepare(ARGUMENTS)
            if launch.shared:
                function.set_attribute(driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared)
            self._functions[launch.function] = function

    def _launches(self, B: int, N: int) -> list[Launch]:
        sms = self._device.get_attribute(self._driver.device_attribute.MULTIPROCESSOR_COUNT)
        return self._build.launches(B, N, sms)

    @property
    def description(self) -> str:
        tiling = self._build.tiling
        arch = compiler.architecture(self._capability)
        return (
            f"cuda, {self._device.name()} ({arch}), kernel {self._build.kernel.name} (Br={tiling.Br}, Bc={tiling.Bc})"
        )

    def details(self) -> dict[str, object]:
        tiling = self._build.tiling
        return {
            "backend": "cuda",
            "device": self._device.name(),
            "arch": compiler.architecture(self._capability),
            "kernel": self._build.kernel.name,
            "precision": self._build.precision,
            "Br": tiling.Br,
            "Bc": tiling.Bc,
            "kernel_seconds": self._kernel_seconds,
        }

    def forward(self, qkv: np.ndarray, out: np.ndarray) -> None:
        """As many batches at a time as fit the device's memory."""
        start = 0
        while start < len(qkv):
            count = min(len(qkv) - start, self._max_batches or len(qkv))
            try:
                self._forward(qkv[start : start + count], out[start : start + count])
                start += count
            except self._driver.MemoryError:
                self._buffers = {}
                if count == 1:
                    raise self._out_of_memory(qkv.shape[2]) from None
                self._max_batches = (count + 1) // 2
            except self._driver.Error as error:
                raise KernelFailure(
                    f"kernel {self._build.kernel.name} failed on {self._device.name()}: {error}.",
                    "try another --kernel.",
                ) from error

    def _forward(self, qkv: np.ndarray, out: np.ndarray) -> None:
        inputs, output = self._buffer("inputs", qkv.nbytes), self._buffer("output", out.nbytes)
        self._driver.memcpy_htod_async(inputs, qkv, self._stream)
        self._kernel_seconds += self._launch(inputs, output, qkv.shape)
        self._driver.memcpy_dtoh_async(out, output, self._stream)
        self._stream.synchronize()

    def _launch(self, inputs, output, shape: tuple[int, ...]) -> float:
        """Run the kernel on device memory holding [B, 3, N, d]; returns the seconds it took on the device."""
        B, _, N, d = shape
        workspace = self._buffer("workspace", self._build.workspace(B, N))
        q, k, v = (int(inputs) + index * N * d * 4 for index in range(3))
        start, end = self._driver.Event(), self._driver.Event()
        start.record(self._stream)
        for function, grid, threads, shared in self._launches(B, N):
            self._functions[function].prepared_async_call(
                (grid, 1), (threads, 1, 1), self._stream,
                q, k, v, output, workspace, 3 * N * d, B, N, self._scale, shared_size=shared,
            )  # fmt: skip
        end.record(self._stream)
        end.synchronize()
        return end.time_since(start) / 1e3

    def measure(self, inputs: list[np.ndarray], out: np.ndarray, runs: int, warm_up: int = 3) -> list[float]:
        """Seconds of the kernel alone in each of ``runs`` runs, taking turns among inputs; the first one's answer in
        ``out``. Shapes are those of `forward`."""
        on_device = [self._driver.to_device(qkv) for qkv in inputs]
        output = self._buffer("output", out.nbytes)
        for index in range(warm_up):
            self._launch(on_device[index % len(inputs)], output, inputs[0].shape)
        seconds = [self._launch(on_device[i % len(inputs)], output, inputs[0].shape) for i in range(runs)]
        self._driver.memcpy_dtod(output, self._driver.to_device(np.full_like(out, np.nan)), out.nbytes)
        self._launch(on_device[0], output, inputs[0].shape)
        self._driver.memcpy_dtoh(out, output)
        return seconds

    def _buffer(self, name: str, size: int):
        """Device memory that is kept from call to call; 0 (null) for no bytes."""
        if size == 0:
            return 0
        if name not in self._buffers or self._buffers[name][0] < size:
            self._buffers.pop(name, None)  # free first: both may not fit
            self._buffers[name] = (size, self._driver.mem_alloc(size))
        return self._buffers[name][1]

    def _out_of_memory(self, N: int) -> OutOfMemory:
        needed = 4 * N * self._build.d * 4 + self._build.workspace(1, N)
        free, _ = self._driver.mem_get_info()
        return OutOfMemory(
            f"one batch of N = {N}, d = {self._build.d} needs {needed / GIB:.2f} GiB on {self._device.name()}, "
            f"{free / GIB:.2f} GiB are free.",
            "free the GPU, use a larger one, or --backend cpu.",
        )
