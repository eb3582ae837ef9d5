"""Kernels in a context of the caller's, on a stream of the caller's, on memory of the caller's, from any thread.

This goes through NVIDIA's own ``cuda-bindings``: PyCUDA wraps no stream that somebody else has made, and keeps a stack
of contexts for each thread. Nothing here waits for the GPU, and nothing is allocated: so a launch can be captured in a
CUDA graph. Where code has to be loaded first, that is allowed while a graph is being captured, too.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Protocol

from flashcli.asked.shape import round_up
from flashcli.compiler import compiler
from flashcli.errors import BackendUnavailable, FlashError, KernelFailure, OutOfMemory
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu.memory import FREE_THE_GPU
from flashcli.kernels import backward, decode, write_kv
from flashcli.kernels.arguments import Attention
from flashcli.kernels.plan import Plan
from flashcli.kernels.types import Launch

FIRST_TO_BEGIN_EARLY = (9, 0)  # compute capability: on those before, nothing in kernels waits
NO_MEMORY, INVALID_CONTEXT = 2, 201  # CUDA_ERROR_OUT_OF_MEMORY, CUDA_ERROR_INVALID_CONTEXT
POINTERS = struct.Struct("7Q")  # Q, K, V, O, lse, bias, workspace: how the arguments begin
BACKWARD_POINTERS = struct.Struct(f"{len(backward.POINTERS)}Q")
WRITE_POINTERS = struct.Struct(f"{len(write_kv.POINTERS)}Q")
DECODE_POINTERS = struct.Struct(f"{len(decode.POINTERS)}Q")


class Loadable(compiler.Compilable, Protocol):
    """A build of any operation's kernel that says which functions it has."""

    def functions(self) -> Iterable[Launch]: ...


@functools.cache
def bindings() -> ModuleType:
    """The driver's functions, started; BackendUnavailable says what is missing."""
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
    """What a function of the driver gives, beyond its code; OutOfMemory or KernelFailure with its words."""
    code, *found = function(*arguments)
    if code:
        raise failure(code, doing)
    return found[0] if found else None


def failure(code: Any, doing: str) -> FlashError:
    """The error for a code of the driver's."""
    if code == NO_MEMORY:
        return OutOfMemory(f"{doing}: the GPU has no memory left.", FREE_THE_GPU)
    _, words = bindings().cuGetErrorString(code)
    text = words.decode() if words else f"error {int(code)}"
    return KernelFailure(f"{doing}: {text}.", "errors of earlier kernels show late: try CUDA_LAUNCH_BLOCKING=1.")


class Place:
    """A context on a GPU, what the GPU is, and the functions that have been loaded there."""

    def __init__(self, device: int, context: int) -> None:
        driver = bindings()
        attributes, handle = driver.CUdevice_attribute, ask(driver.cuDeviceGet, device)

        def attribute(name: str) -> int:
            found = getattr(attributes, f"CU_DEVICE_ATTRIBUTE_{name}")
            return ask(driver.cuDeviceGetAttribute, found, handle)

        self.device, self.context = device, context
        self.capability = attribute("COMPUTE_CAPABILITY_MAJOR"), attribute("COMPUTE_CAPABILITY_MINOR")
        self.multiprocessors = attribute("MULTIPROCESSOR_COUNT")
        self._functions: dict[tuple, dict[str, int]] = {}
        self._shared: dict[int, int] = {}  # bytes that a function may have
        self._lock = threading.Lock()
        self._get_current = driver.cuCtxGetCurrent

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """The context is this thread's during a ``with`` block; and afterwards, if the thread had none."""
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
        """Whether the context is this thread's, which it becomes if the thread has none."""
        code, context = self._get_current()  # not by `ask`, whose time counts in each call
        if code:
            raise failure(code, "the CUDA driver refuses")
        if found := int(context):
            return found == self.context
        ask(bindings().cuCtxSetCurrent, self.context)
        return True

    def functions(self, build: Loadable) -> dict[str, int]:
        """The handles of a build's functions, compiled and loaded when they are first asked for."""
        key = build.kernel.name, *build.macros().items()  # shapes of the same tiles share them
        with self._lock:
            if key not in self._functions:
                self._functions[key] = self._load(build)
            return self._functions[key]

    def give_shared(self, function: int, size: int, doing: str) -> None:
        """Let a function have so many bytes of dynamic shared memory.

        With what is static, even few may be more than a block has without asking.
        """
        driver = bindings()
        most = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        with self._lock:
            if size > self._shared.get(function, 0):
                with self.current(), allowed_while_capturing(driver):
                    ask(driver.cuFuncSetAttribute, function, most, size, doing=doing)
                self._shared[function] = size

    def _load(self, build: Loadable) -> dict[str, int]:
        driver, doing = bindings(), f"the GPU does not load kernel {build.kernel.name}"
        code = compiler.cubin(build, compiler.architecture(self.capability))
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
    """What is not of the graph that is being captured, and so need not be, may be done during a ``with`` block."""
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
    """A GPU's primary context: where PyTorch, CuPy and JAX are."""
    driver = bindings()
    with _making:
        if device not in _primary:
            handle = ask(driver.cuDeviceGet, device)
            context = ask(driver.cuDevicePrimaryCtxRetain, handle, doing=f"GPU {device} gives no context")
            _primary[device] = Place(device, int(context))
        return _primary[device]


def place_of_memory(address: int) -> Place | None:
    """Where memory is, by its address; None if it is not a GPU's."""
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
    """On which GPU memory of a pool is, which is of no context.

    Asked past the bindings, whose answer is 0 for every GPU in many versions (NVIDIA/cuda-python, issue 2928).
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


class Launches:
    """Launches in one place with one struct of arguments, to be queued any number of times, from any thread.

    ``pointers`` says how the addresses, which come with each call, stand at the struct's beginning.
    """

    def __init__(
        self,
        place: Place,
        kernel: str,
        steps: Iterable[tuple[Loadable, Launch]],
        given: ctypes.Structure,
        pointers: struct.Struct,
    ) -> None:
        self.place, self.kernel = place, kernel
        self._given, self._pack, self._lock = given, pointers.pack_into, threading.Lock()
        pointer = self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(given))
        self._parameters = ctypes.addressof(pointer)
        self._launch = bindings().cuLaunchKernelEx
        self._stream = 0  # of all configurations
        self._steps: list[tuple[Any, int]] = []
        for build, launch in steps:
            function, size = place.functions(build)[launch.function], launch.shared
            place.give_shared(function, size, f"kernel {kernel} gets no {size} bytes of shared memory")
            early = launch.early and place.capability >= FIRST_TO_BEGIN_EARLY
            self._steps.append((_configuration(launch._replace(early=early)), function))

    def queue(self, stream: int, *addresses: int) -> None:
        """Queue them on a stream; the place's context is the thread's."""
        launch, parameters = self._launch, self._parameters
        with self._lock:  # the driver copies the arguments before it lets go of them
            self._pack(self._given, 0, *addresses)
            if stream != self._stream:
                for configuration, _ in self._steps:
                    configuration.hStream = stream
                self._stream = stream
            for configuration, function in self._steps:
                [code] = launch(configuration, function, parameters, 0)
                if code:
                    raise failure(code, f"kernel {self.kernel} failed on GPU {self.place.device}")


def _configuration(launch: Launch) -> Any:
    """How the driver is told of a launch, but for the stream."""
    driver = bindings()
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX, configuration.blockDimX = launch.grid, launch.threads
    configuration.gridDimY = configuration.gridDimZ = configuration.blockDimY = configuration.blockDimZ = 1
    configuration.sharedMemBytes = launch.shared
    if launch.early:
        early = driver.CUlaunchAttribute()
        early.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        early.value.programmaticStreamSerializationAllowed = 1
        configuration.attrs, configuration.numAttrs = [early], 1
    return configuration


class Prepared(Launches):
    """Attention of one shape in one place, to be launched with any addresses, any number of times, from any thread.

    ``workspace`` is how many bytes of scratch it needs; their address is to be divisible by 16.
    """

    def __init__(self, place: Place, plan: Plan, given: Attention) -> None:
        given.chunk = plan.chunk
        super().__init__(place, plan.kernel, plan.steps, given, POINTERS)
        self.workspace = plan.workspace

    def launch(self, stream: int, q: int, k: int, v: int, o: int, lse: int, bias: int, workspace: int) -> None:
        """Queue it on a stream, with arrays at these addresses; no LSE and no bias are at 0."""
        if self.place.is_current():
            return self.queue(stream, q, k, v, o, lse, bias, workspace)
        with self.place.current():
            return self.queue(stream, q, k, v, o, lse, bias, workspace)


class PreparedBackward(Launches):
    """Gradients of one shape in one place, to be launched with any addresses, any number of times, from any thread.

    ``workspace`` is how many bytes of scratch a launch needs, whatever they hold; their address is to be divisible by
    16.
    """

    def __init__(self, place: Place, plan: backward.Plan, given: backward.Argument) -> None:
        super().__init__(place, plan.kernel, plan.steps, given, BACKWARD_POINTERS)
        self.workspace, self._notes, self._zeros = plan.workspace, plan.notes, plan.zeros
        self._clear = bindings().cuMemsetD32Async

    def launch(self, stream: int, *addresses: int) -> None:
        """Queue it on a stream, with arrays at these addresses, in the order of `backward.POINTERS`, but for the notes.

        What there is not is at 0; the workspace is the last.
        """
        if self.place.is_current():
            return self._queue(stream, addresses)
        with self.place.current():
            return self._queue(stream, addresses)

    def _queue(self, stream: int, addresses: tuple[int, ...]) -> None:
        if self._notes is None:
            return self.queue(stream, *addresses, 0)
        notes = addresses[-1] + self._notes
        ask(self._clear, notes, 0, self._zeros, stream)
        return self.queue(stream, *addresses, notes)


class PreparedDecode(Launches):
    """Paged decode of one shape in one place, to be launched with any addresses, any number of times, from any thread.

    ``workspace`` is how many bytes of scratch a launch needs for itself, whatever they hold; their address is to be
    divisible by 16. At its end are ``scales``, the factors of an fp8 cache that are not 1, and an LSE nobody wants.
    """

    def __init__(
        self,
        place: Place,
        build: decode.Build,
        sizes: decode.Sizes,
        given: decode.Argument,
        scales: Mapping[str, float],
        unread: Iterable[str] = (),
    ) -> None:
        """``unread`` names arrays that kernels are not to read where there are any."""
        launches = build.kernel.launches(sizes, build.problem, decode.Gpu(place.multiprocessors, place.capability))
        super().__init__(place, build.kernel.name, [(build, launch) for launch in launches], given, DECODE_POINTERS)
        end = round_up(build.kernel.workspace(sizes, build.problem), 16)
        self._lse = end + 4 * len(scales)
        self.workspace = self._lse + 4 * sizes.places
        self._scales = {decode.POINTERS.index(name): end + 4 * i for i, name in enumerate(scales)}
        self._unread = [decode.POINTERS.index(name) for name in unread]
        counters = build.kernel.counters(sizes, build.problem) // 4
        self._sets = [(0, 0, counters)] if counters else []  # where, which word, how many of it
        self._sets += [(end + 4 * i, _bits(scale), 1) for i, scale in enumerate(scales.values())]

    def launch(self, stream: int, *addresses: int) -> None:
        """Queue it on a stream, with arrays at these addresses, which are in the order of `decode.POINTERS`.

        What there is not is at 0; so may be the LSE.
        """
        if self.place.is_current():
            return self._queue(stream, addresses)
        with self.place.current():
            return self._queue(stream, addresses)

    def _queue(self, stream: int, addresses: Sequence[int]) -> None:
        *arrays, lse, workspace = addresses
        for where, word, count in self._sets:
            ask(bindings().cuMemsetD32Async, workspace + where, word, count, stream)
        for which in self._unread:
            arrays[which] = 0
        for which, where in self._scales.items():
            arrays[which] = workspace + where
        self.queue(stream, *arrays, lse or workspace + self._lse, workspace)


class PreparedWrite(Launches):
    """Writing into a cache, of one shape in one place, with any addresses, any number of times, from any thread."""

    def __init__(self, place: Place, build: write_kv.Build, given: write_kv.Argument) -> None:
        launches = build.launches(given.tokens, given.kv_heads)
        super().__init__(place, build.kernel.name, [(build, launch) for launch in launches], given, WRITE_POINTERS)

    def launch(self, stream: int, *addresses: int) -> None:
        """Queue it on a stream, with arrays at these addresses, in the order of `write_kv.POINTERS`; 0 for none."""
        if self.place.is_current():
            return self.queue(stream, *addresses)
        with self.place.current():
            return self.queue(stream, *addresses)


def _bits(number: float) -> int:
    """Those of a number as float32."""
    return int.from_bytes(struct.pack("<f", number), "little")
