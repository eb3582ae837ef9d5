"""A kernel on a device: its machine code loaded into the current context, and its launches."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from types import ModuleType
from typing import Any

from flashcli.compiler import compiler
from flashcli.errors import KernelFailure, OutOfMemory
from flashcli.gpu.memory import FREE_THE_GPU
from flashcli.kernels.arguments import Attention
from flashcli.kernels.types import STATIC_SHARED, Build, Launch


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

    def _function(self, driver: ModuleType, launch: Launch) -> Any:
        function = self._module.get_function(launch.function)
        function.prepare([f"{ctypes.sizeof(Attention)}s"])  # one struct, by value
        if launch.shared > STATIC_SHARED:  # more has to be asked for
            function.set_attribute(driver.function_attribute.MAX_DYNAMIC_SHARED_SIZE_BYTES, launch.shared)
        return function

    def look(self, given: Attention, stream: Any) -> None:
        """Queue a look for NaN and Inf in Q, K and V, as far as they are given: it sets ``nonfinite`` to 1."""
        rows = given.B * max(given.H * given.M if given.Q else 0, given.Hkv * given.N)
        self._call([self.build.look(rows)], given, stream)

    def prepare(self, given: Attention, stream: Any) -> None:
        """Queue what `attend` needs once for the same K and V, however many rows attend to them afterwards."""
        self._call(self.build.prepare(given.B * given.Hkv, given.N), given, stream)

    def attend(self, given: Attention, stream: Any) -> None:
        """Queue attention of Q to what was prepared of K and V, into O."""
        self._call(self.build.launches(given.B * given.H, given.M, given.N), given, stream)

    def _call(self, launches: Iterable[Launch], given: Attention, stream: Any) -> None:
        for launch in launches:
            given.tile_i, given.tile_j = launch.tile
            self._functions[launch.function].prepared_async_call(
                (launch.grid, 1), (launch.threads, 1, 1), stream, bytes(given), shared_size=launch.shared
            )
