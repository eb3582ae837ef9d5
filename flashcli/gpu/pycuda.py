"""A GPU used by this thread through PyCUDA, as the homework wants it, or like it: context, programs, times.

Nothing here runs at import, and nothing here knows of files.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Callable, Iterable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from flashcli.compiler import compiler, quick
from flashcli.errors import BackendUnavailable, KernelFailure, OutOfMemory
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu import warm_up
from flashcli.gpu.memory import FREE_THE_GPU, allocate
from flashcli.kernels.arguments import Attention, of_file
from flashcli.kernels.attention import look
from flashcli.kernels.choice import choose
from flashcli.kernels.operation import Build, Launch
from flashcli.kernels.problem import Problem
from flashcli.terminal import sizes

WITHOUT_GPU = "go to a machine with a GPU and its driver, or ask Slurm for one (--gres=gpu:1)."


def load_driver() -> ModuleType:
    """PyCUDA's driver module, or `plain` in its place where it is not installed; initialised.

    BackendUnavailable says what is missing otherwise.
    """
    try:
        import pycuda.driver as driver
    except ModuleNotFoundError as error:
        if missing := cuda_driver.problem():
            raise BackendUnavailable(f"{missing}.", WITHOUT_GPU) from error
        from flashcli.gpu import plain as driver
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


class Gpu(NamedTuple):
    """A GPU, as the driver describes it."""

    name: str
    capability: tuple[int, int]  # its compute capability
    memory: int  # in bytes


def devices() -> list[Gpu]:
    """The GPUs that this process can use."""
    driver = load_driver()
    found = [driver.Device(index) for index in range(driver.Device.count())]
    return [Gpu(device.name(), device.compute_capability(), device.total_memory()) for device in found]


def out_of_memory(session: Session, what: str, needed: int, limit: int = sys.maxsize) -> OutOfMemory:
    """The error for ``what`` that needs more bytes than are free, or than the user's ``limit``."""
    free = min(session.free_bytes(), limit)
    return OutOfMemory(
        f"{what} needs {sizes.text(needed)} on {session.name}, {sizes.text(free)} are free.", FREE_THE_GPU
    )


def failure(session: Session, build: Build, error: Exception) -> KernelFailure:
    """The error for a failure that the driver reports while a kernel is at work."""
    return KernelFailure(f"kernel {build.kernel.name} failed on {session.name}: {error}.", "try another --kernel.")


class Session:
    """A GPU from the beginning of a ``with`` block to its end, during which its primary context is this thread's.

    Without an ``index``, sessions with different ``turn``s get different GPUs, as far as there are. BackendUnavailable
    says what is missing, OutOfMemory that the GPU has no memory left for a context.
    """

    def __init__(self, index: int | None = None, turn: int = 0) -> None:
        self.driver = load_driver()
        self.device = self._find_device(index, turn)
        self.capability = self.device.compute_capability()
        self.multiprocessors = self.device.get_attribute(self.driver.device_attribute.MULTIPROCESSOR_COUNT)
        self._programs: dict[Build, Program] = {}

    def __enter__(self) -> Session:
        with contextlib.ExitStack() as stack:
            self._open_context(stack)
            self._close = stack.pop_all().close
        return self

    def __exit__(self, *exc: object) -> None:
        self._programs.clear()
        self._close()

    @property
    def name(self) -> str:
        """The GPU's name by its maker, such as "NVIDIA H200"."""
        return self.device.name()

    @property
    def architecture(self) -> str:
        """The GPU's architecture by nvcc, such as "sm_90a"."""
        return compiler.architecture(self.capability)

    def free_bytes(self) -> int:
        """The bytes of the GPU's memory that are free."""
        return self.driver.mem_get_info()[0]

    def build(self, kernel: str | None, problem: Problem) -> Build:
        """The build for a problem, of the kernel of that name or else of the best one on this GPU."""
        problem = problem._replace(sms=self.multiprocessors)
        return Build(choose(self.capability, problem, kernel, self.name), problem)

    def program(self, build: Build, first: bool = False, argument: type[ctypes.Structure] = Attention) -> Program:
        """The build's functions, which take such an argument, compiled and loaded when they are first asked for.

        With ``first``, a quick build may answer as long as the full one is being made.
        """
        found = self._programs.get(build)
        if found is None or (found.is_quick and not (first and quick.is_under_way(build, self.architecture))):
            made = Program(self, build, first and found is None, argument)
            made.before = found  # which may still be at work
            found = self._programs[build] = made
        return found

    def _find_device(self, index: int | None, turn: int) -> Any:
        count = self.driver.Device.count()
        if index is None:
            index = turn % max(count, 1)
        if index >= count:
            found = "there is no GPU" if count == 0 else f"the last of {count} is number {count - 1}"
            raise BackendUnavailable(f"GPU {index} does not exist: {found}.", "see `flashcli doctor`.")
        return self.driver.Device(index)

    def _open_context(self, stack: contextlib.ExitStack) -> None:
        try:
            context = self.device.retain_primary_context()
            context.push()
        except self.driver.MemoryError as error:
            raise OutOfMemory(f"{self.name} has no memory left for a context.", FREE_THE_GPU) from error
        except self.driver.Error as error:
            raise BackendUnavailable(
                f"{self.name} cannot be used: {error}.", "is it in use by others, in exclusive mode?"
            ) from error

        def close() -> None:
            context.pop()
            context.detach()

        stack.callback(close)


class Program:
    """A kernel's functions, loaded into the current context."""

    def __init__(self, session: Session, build: Build, first: bool, argument: type[ctypes.Structure]) -> None:
        self.build, self._driver, arch = build, session.driver, session.architecture
        self.before: Program | None = None
        code, self.is_quick = quick.first_cubin(build, arch) if first else (compiler.cubin(build, arch), False)
        try:
            self._module = self._driver.module_from_buffer(code)
            names = dict.fromkeys(launch.function for launch in build.functions())
            self._functions = {name: self._module.get_function(name) for name in names}
            for function in self._functions.values():
                function.prepare([f"{ctypes.sizeof(argument)}s"])  # one struct, by value
            self._shared = dict.fromkeys(names, 0)  # bytes that each may have
            for launch in build.functions():
                self._allow(launch)
        except self._driver.MemoryError as error:
            raise OutOfMemory(f"the GPU has no memory left for kernel {build.kernel.name}.", FREE_THE_GPU) from error
        except self._driver.Error as error:
            raise KernelFailure(
                f"the GPU does not load kernel {build.kernel.name}: {error}.", "is the driver too old for the toolkit?"
            ) from error

    def _allow(self, launch: Launch) -> None:
        """Let a launch have its shared memory.

        Beside static shared memory, even little may be more than a block has without asking.
        """
        if launch.shared > self._shared[launch.function]:
            self._shared[launch.function] = launch.shared
            most = self._driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES
            self._functions[launch.function].set_attribute(most, launch.shared)

    def resources(self, function: str) -> compiler.Resources:
        """Tell what a function takes of the GPU, by the driver: local memory is what its registers do not hold."""
        found = self._functions[function]
        return compiler.Resources(found.num_regs, found.local_size_bytes, found.shared_size_bytes, [])

    def look(self, given: Attention, stream: Any) -> None:
        """Queue a search for NaN and Inf in Q, K and V, as far as they are given: if found, ``nonfinite`` becomes 1."""
        rows = given.B * max(given.M if given.Q else 0, given.N)
        self._call([look(self.build.problem, rows)], given, stream)

    def prepare(self, given: Attention, stream: Any) -> None:
        """Queue the launches that `attend` needs once for the same K and V, for any number of rows of Q."""
        launches = self.build.launches(B=given.B, M=0, N=given.N)
        self._call((launch for launch in launches if launch.once), given, stream)

    def attend(self, given: Attention, stream: Any) -> None:
        """Queue attention of Q to the K and V that `prepare` has prepared, into O."""
        launches = self.build.launches(B=given.B, M=given.M, N=given.N)
        self._call((launch for launch in launches if not launch.once), given, stream)

    def _call(self, launches: Iterable[Launch], given: Attention, stream: Any) -> None:
        for launch in launches:
            given.tile_i, given.tile_j = launch.tile
            self.queue(launch, bytes(given), stream)

    def queue(self, launch: Launch, argument: bytes, stream: Any = None) -> None:
        """Queue a launch with its argument."""
        self._allow(launch)
        self._functions[launch.function].prepared_async_call(
            (launch.grid, 1), (launch.threads, 1, 1), stream, argument, shared_size=launch.shared
        )


# ---- times, by the GPU's own clock


SLOW = 10e-3  # seconds of a kernel beside which a launch, some microseconds, does not show


def kernel_seconds(session: Session, build: Build, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
    """Seconds of a kernel with its pre-pass, in each of ``runs`` runs, which take turns among inputs [B, 3, N, d].

    Each timed run follows an untimed one without a gap, so that its first launch is not in the time; but for a kernel
    that is slow beside a launch. The first input's answer is left in ``out`` [B, N, d]. The scale is 1/sqrt(d).
    """
    try:
        return _timed(session, build, inputs, out, runs)
    except session.driver.MemoryError:
        pass  # and what was taken is free again
    except session.driver.Error as error:
        raise failure(session, build, error) from error
    B, _, N, d = inputs[0].shape
    needed = sum(qkv.nbytes for qkv in inputs) + out.nbytes + build.workspace(B=B, M=N, N=N)
    raise out_of_memory(session, f"timing (B, N, d) = ({B}, {N}, {d})", needed)


def queued_seconds(driver: Any, work: Callable[[], object], stream: Any = None) -> float:
    """Seconds on the GPU of all that ``work`` queues on a stream, waited for; ``driver`` is PyCUDA's module."""
    start, end = driver.Event(), driver.Event()
    start.record(stream)
    work()
    end.record(stream)
    end.synchronize()
    return start.time_till(end) / 1e3


def _timed(session: Session, build: Build, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
    driver, program, stream = session.driver, session.program(build), session.driver.Stream()
    B, _, N, d = inputs[0].shape
    on_device = [driver.to_device(qkv) for qkv in inputs]
    output = driver.to_device(np.full_like(out, np.nan))
    workspace = allocate(driver, build.workspace(B=B, M=N, N=N))
    numbers = {"scale": d**-0.5, "workspace": int(workspace)}
    given = [of_file(int(qkv), int(output), (B, N, d), **numbers) for qkv in on_device]

    def compute(arguments: Attention) -> None:
        program.prepare(arguments, stream)
        program.attend(arguments, stream)

    seconds: list[float] = []
    for turn in range(runs + 1, -1, -1):  # ends with the first input
        if min(seconds, default=0) < SLOW:
            compute(given[(turn + 1) % len(given)])
        seconds.append(queued_seconds(driver, partial(compute, given[turn % len(given)]), stream))
    driver.memcpy_dtoh(out, output)
    return seconds[2:]
