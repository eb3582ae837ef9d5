"""A kernel on a device: its machine code loaded into the current context, and its launches."""

from __future__ import annotations

from types import ModuleType
from typing import NamedTuple

from flashcli.errors import KernelFailure, OutOfMemory
from flashcli.kernels import compiler
from flashcli.kernels.types import STATIC_SHARED, Build, Launch

# Q, K, V, O, workspace, q_stride, kv_stride, B, M, N, first_row, scale, tile_i, tile_j: see cuda/common.cuh
ARGUMENTS = "PPPPPqqiiiifii"
FREE_THE_GPU = "free the GPU, use a larger one, or --backend cpu."


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
        if launch.shared > STATIC_SHARED:  # more has to be asked for
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
