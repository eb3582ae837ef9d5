"""Contexts on GPUs, through NVIDIA's own ``cuda-bindings``: the GPU's properties, memory's place, loaded code.

PyCUDA is not used here: it wraps no stream that another library has made, and keeps a stack of contexts for each
thread. Code can be loaded while a graph is being captured, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType
from typing import Any

from flashcli.compiler import compiler, quick
from flashcli.errors import BackendUnavailable, FlashError, KernelFailure, OutOfMemory
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu.memory import FREE_THE_GPU
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.speed import speed

NO_MEMORY, INVALID_CONTEXT = 2, 201  # CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_CONTEXT


@functools.cache
def bindings() -> ModuleType:
    """The module ``cuda.bindings.driver``, with the driver started; BackendUnavailable says what is missing."""
    if missing := cuda_driver.problem():
        raise BackendUnavailable(f"{missing}.", "go to a machine with a GPU and its driver.")
    try:
        from cuda.bindings import driver
    except ImportError as error:
        raise BackendUnavailable(
            f"arrays on a GPU are computed through cuda-bindings, which cannot be loaded: {error}.",
            "pip install cuda-bindings.",
        ) from error
    ask(driver.cuInit, 0)
    return driver


def ask(function: Any, *arguments: object, doing: str = "the CUDA driver refuses") -> Any:
    """Call a function of the driver and return its result without the code; OutOfMemory or KernelFailure if not 0."""
    code, *found = function(*arguments)
    if code:
        raise failure(code, doing)
    return found[0] if found else None


def failure(code: Any, doing: str) -> FlashError:
    """The error to raise for an error code of the driver, with the driver's own words."""
    if code == NO_MEMORY:
        return OutOfMemory(f"{doing}: the GPU has no memory left.", FREE_THE_GPU)
    _, words = bindings().cuGetErrorString(code)
    text = words.decode() if words else f"error {int(code)}"
    return KernelFailure(f"{doing}: {text}.", "errors of earlier kernels show late: try CUDA_LAUNCH_BLOCKING=1.")


def described(device: int, name: str, attribute: Callable[[str], int]) -> Gpu:
    """A GPU as kernels are chosen for it, of that number and name, by its attributes, which the driver has by name."""
    capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
    sms, mhz = attribute("MULTIPROCESSOR_COUNT"), attribute("CLOCK_RATE") / 1e3
    bytes_a_second = 2 * attribute("MEMORY_CLOCK_RATE") * 1e3 * attribute("GLOBAL_MEMORY_BUS_WIDTH") / 8
    return Gpu(capability, sms, f"GPU {device}", speed(capability, name, sms, mhz, bytes_a_second))


class Place:
    """A context on a GPU, with the GPU's properties and the functions loaded there."""

    def __init__(self, device: int, context: int) -> None:
        driver = bindings()
        attributes, handle = driver.CUdevice_attribute, ask(driver.cuDeviceGet, device)

        def attribute(name: str) -> int:
            found = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
            return ask(driver.cuDeviceGetAttribute, found, handle)

        self.device, self.context = device, context
        self.name = ask(driver.cuDeviceGetName, 256, handle).partition(b"\0")[0].decode()
        self.gpu = described(device, self.name, attribute)
        self.arch = compiler.architecture(self.gpu.capability)
        self._functions: dict[tuple, dict[str, int]] = {}
        self._quick: dict[tuple, dict[str, int]] = {}  # of quick builds
        self._shared: dict[int, int] = {}  # bytes that a function may have
        self._lock = threading.Lock()
        self._get_current = driver.cuCtxGetCurrent

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make the context this thread's during a ``with`` block; it stays so if the thread had none before."""
        driver = bindings()
        if self.is_current():
            yield
            return
        ask(driver.cuCtxPushCurrent, self.context)
        try:
            yield
        finally:
            ask(driver.cuCtxPopCurrent)

    def is_current(self) -> bool:
        """Return whether the context is this thread's; it becomes so if the thread has none."""
        code, context = self._get_current()  # not by `ask`, whose time counts in each call
        if code:
            raise failure(code, "the CUDA driver refuses")
        if found := int(context):
            return found == self.context
        ask(bindings().cuCtxSetCurrent, self.context)
        return True

    def functions(self, builds: Sequence[Build], first: bool = False) -> list[dict[str, int]]:
        """The handles of each build's functions, compiled side by side and loaded when they are first asked for.

        With ``first``, quick builds may answer while the full ones are under way; `are_quick` says whether they do.
        """
        keys = [(build.kernel.name, *build.macros().items()) for build in builds]  # shapes of the same tiles share them
        with self._lock:
            return self._loaded(keys, builds, first)

    def are_quick(self, functions: Sequence[dict[str, int]]) -> bool:
        """Whether some of those functions, as `functions` has given them, are quick builds'."""
        return any(some is others for some in functions for others in self._quick.values())

    def are_under_way(self, builds: Sequence[Build]) -> bool:
        """Whether another process, which this one has begun, still makes the full build of some of those builds."""
        return any(quick.is_under_way(build, self.arch) for build in builds)

    def give_shared(self, function: int, size: int, doing: str) -> None:
        """Let a function have ``size`` bytes of dynamic shared memory.

        Beside static shared memory, even few bytes may be more than a block has without asking.
        """
        driver = bindings()
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._lock:
            if size > self._shared.get(function, 0):
                with self.current(), allowed_while_capturing(driver):
                    ask(driver.cuFuncSetAttribute, function, most, size, doing=doing)
                self._shared[function] = size

    def _loaded(self, keys: Sequence[tuple], builds: Sequence[Build], first: bool) -> list[dict[str, int]]:
        """The handles; not found in the lock's own block, which Ctrl-C in a loop might leave with the lock taken."""
        known = {**self._quick, **self._functions} if first else self._functions
        missing = {key: build for key, build in zip(keys, builds, strict=True) if key not in known}
        for key, (code, is_quick) in zip(missing, self._compiled([*missing.values()], first), strict=True):
            known[key] = self._load(missing[key], code)
            (self._quick if is_quick else self._functions)[key] = known[key]
        return [known[key] for key in keys]

    def _compiled(self, builds: Sequence[Build], first: bool) -> Iterable[tuple[bytes, bool]]:
        """Machine code of each build, and whether it is quick."""

        def compiled(build: Build) -> tuple[bytes, bool]:
            return quick.first_cubin(build, self.arch) if first else (compiler.cubin(build, self.arch), False)

        if len(builds) < 2:  # without a thread
            return map(compiled, builds)
        with ThreadPoolExecutor(len(builds)) as pool:
            return list(pool.map(compiled, builds))

    def _load(self, build: Build, code: bytes) -> dict[str, int]:
        driver, doing = bindings(), f"the GPU does not load kernel {build.kernel.name}"
        found = {}
        with self.current(), allowed_while_capturing(driver):
            module = ask(driver.cuModuleLoadData, code, doing=doing)
            for launch in build.functions():
                function = ask(driver.cuModuleGetFunction, module, launch.function.encode(), doing=doing)
                ask(driver.cuFuncLoad, function, doing=doing)  # else the driver might put it off to the first launch
                found[launch.function] = int(function)
        return found


@contextlib.contextmanager
def allowed_while_capturing(driver: ModuleType) -> Iterator[None]:
    """Allow calls that are no part of a graph, such as loading code, while it is captured, in a ``with`` block."""
    relaxed = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
    before = ask(driver.cuThreadExchangeStreamCaptureMode, relaxed)
    try:
        yield
    finally:
        ask(driver.cuThreadExchangeStreamCaptureMode, before)


_primary: dict[int, Place] = {}  # by the number of the GPU
_places: dict[int, Place] = {}  # by the number of the context
_making = threading.Lock()


def place_of_device(device: int) -> Place:
    """The place of a GPU's primary context, which PyTorch, CuPy and JAX use."""
    driver = bindings()
    with _making:
        if device not in _primary:
            handle = ask(driver.cuDeviceGet, device)
            context = ask(driver.cuDevicePrimaryCtxRetain, handle, doing=f"GPU {device} gives no context")
            _primary[device] = Place(device, int(context))
        return _primary[device]


def place_of_memory(address: int) -> Place | None:
    """The place that memory belongs to, by its address; None if it is not a GPU's."""
    driver = bindings()
    attributes = driver.CUpointer_attribute
    code, context = driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_CONTEXT, address)
    if code == INVALID_CONTEXT and place_of_device(0).is_current():  # now it is: the thread had none
        code, context = driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_CONTEXT, address)
    if code:
        return None
    _, kind = driver.cuPointerGetAttribute(attributes.CU_POINTER_ATTRIBUTE_MEMORY_TYPE, address)
    if int(kind) == int(driver.CUmemorytype.CU_MEMORYTYPE_HOST):
        return None
    return _place_of_context(int(context)) if context and int(context) else place_of_device(_device_of_pool(address))


def _device_of_pool(address: int) -> int:
    """The number of the GPU that memory of a pool is on; such memory belongs to no context.

    The driver is asked through ctypes: many versions of the bindings answer 0 for every GPU (NVIDIA/cuda-python, issue
    2928).
    """
    driver = cuda_driver.libcuda()
    assert driver is not None, "the bindings are its"
    device, ordinal = ctypes.c_int(-1), int(bindings().CUpointer_attribute.CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)
    code = driver.cuPointerGetAttribute(ctypes.byref(device), ordinal, ctypes.c_uint64(address))
    if code:
        raise failure(bindings().CUresult(code), "the driver does not say where the memory is")
    return device.value


def _place_of_context(context: int) -> Place:
    driver = bindings()
    number = int(ask(driver.cuCtxGetId, context))  # unlike its address, never given to another one
    if number not in _places:
        ask(driver.cuCtxPushCurrent, context)
        try:
            device = int(ask(driver.cuCtxGetDevice))
        finally:
            ask(driver.cuCtxPopCurrent)
        primary = place_of_device(device)
        _places.setdefault(number, primary if primary.context == context else Place(device, context))
    return _places[number]
