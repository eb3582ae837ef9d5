"""A GPU in use by this thread, through PyCUDA: its primary context, what it is, the programs loaded on it.

Nothing here runs at import, and nothing here knows of files: arrays are computed in a session as well as slots.
"""

from __future__ import annotations

import contextlib
import sys
from types import ModuleType
from typing import Any, NamedTuple

from flashcli.compiler import compiler
from flashcli.errors import BackendUnavailable, KernelFailure, OutOfMemory
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu import warm_up
from flashcli.gpu.memory import FREE_THE_GPU
from flashcli.gpu.program import Program
from flashcli.kernels.choice import choose, named
from flashcli.kernels.types import Build, Problem
from flashcli.terminal import sizes

WITHOUT_GPU = "go to a machine with a GPU and its driver, ask Slurm for one (--gres=gpu:1), or use --backend cpu."


def load_driver() -> ModuleType:
    """PyCUDA's driver module, initialised; BackendUnavailable says what is missing otherwise."""
    try:
        import pycuda.driver as driver
    except ModuleNotFoundError as error:
        if missing := cuda_driver.problem():  # first: PyCUDA would not help
            raise BackendUnavailable(f"{missing}.", WITHOUT_GPU) from error
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


class Gpu(NamedTuple):
    """One GPU, as the driver describes it."""

    name: str
    capability: tuple[int, int]  # its compute capability
    memory: int  # in bytes


def devices() -> list[Gpu]:
    """The GPUs that this process can use."""
    driver = load_driver()
    found = [driver.Device(index) for index in range(driver.Device.count())]
    return [Gpu(device.name(), device.compute_capability(), device.total_memory()) for device in found]


def out_of_memory(session: Session, what: str, needed: int, limit: int = sys.maxsize) -> OutOfMemory:
    """The error that ``what`` needs more bytes than are free, or more than the user's ``limit``."""
    free = min(session.free_bytes(), limit)
    return OutOfMemory(
        f"{what} needs {sizes.text(needed)} on {session.name}, {sizes.text(free)} are free.", FREE_THE_GPU
    )


def failure(session: Session, build: Build, error: Exception) -> KernelFailure:
    """The error that the driver reports one while a kernel was at work."""
    return KernelFailure(f"kernel {build.kernel.name} failed on {session.name}: {error}.", "try another --kernel.")


class Session:
    """A GPU from the beginning of a ``with`` block to its end, during which its primary context is this thread's.

    Without an ``index`` those that have different ``turn``s get different GPUs, as far as there are. BackendUnavailable
    says what is missing, OutOfMemory that the GPU has none left for a context.
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
        """What its maker calls the GPU."""
        return self.device.name()

    @property
    def architecture(self) -> str:
        """What nvcc calls it."""
        return compiler.architecture(self.capability)

    def free_bytes(self) -> int:
        """How much of the GPU's memory nobody has taken."""
        return self.driver.mem_get_info()[0]

    def build(self, kernel: str | None, problem: Problem) -> Build:
        """What is to be compiled for a problem: the kernel of that name, or, without one, the best for this GPU."""
        problem = problem._replace(sms=self.multiprocessors)
        if kernel is None:
            return Build(choose(self.capability, problem), problem)
        return Build(named(kernel, self.capability, problem, self.name), problem)

    def program(self, build: Build) -> Program:
        """The build's functions, compiled and loaded when they are first asked for."""
        if build not in self._programs:
            self._programs[build] = Program(self.driver, build, self.capability)
        return self._programs[build]

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
