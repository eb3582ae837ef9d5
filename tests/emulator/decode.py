"""Paged decode by its kernels, emulated on the CPU: what DecodeCuda is on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from flashcli.asked.decode import ARRAYS
from flashcli.cpu.pages import DecodeArrays
from flashcli.emulator.machine import Emulated
from flashcli.kernels import decode
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.tuning.decode import HOPPER, Tuning
from flashcli.run.decode_cuda import contiguous


class DecodeEmulated:
    """Libraries are kept in ``folder``. What a kernel has to write before it reads it is NaN, or -1."""

    def __init__(
        self,
        folder: Path,
        kernel: str | None = None,
        retuned: Callable[[Tuning], Tuning] = lambda tuning: tuning,
        gpu: Gpu = HOPPER,
    ) -> None:
        self._folder, self._kernel, self._retuned = folder, kernel, retuned
        self._session = SimpleNamespace(multiprocessors=gpu.multiprocessors, capability=gpu.capability)

    def __enter__(self) -> DecodeEmulated:
        return self

    def __exit__(self, *exc: object) -> None:
        pass

    def decode(self, asked: DecodeArrays, sequences: range) -> tuple[np.ndarray, np.ndarray]:
        """The answer of some sequences in the query's type, as `DecodeArrays.shape_of` says, and their LSE, float32."""
        asked = asked.part(sequences)
        gpu = Gpu(self._session.capability, self._session.multiprocessors)
        build = decode.choose(decode.problem_of(asked.outline, gpu), self._kernel)
        build = Build(build.kernel, build.problem._replace(tuning=self._retuned(build.problem.tuning)))
        out = np.full(asked.shape_of(range(asked.S)), np.nan, asked.query.dtype)
        lse = np.full(out.shape[:-1], np.nan, np.float32)
        self.launch(build, asked, out, lse)
        return out, lse

    def launch(self, build: Build, asked: DecodeArrays, out: np.ndarray, lse: np.ndarray) -> None:
        asked = contiguous(asked)
        plan = decode.plan_of(build, asked.outline)
        workspace = np.full(plan.workspace, 0xFF, np.uint8)
        workspace[: 4 * build.counters()] = 0
        arrays = {name: getattr(asked, name) for name in ARRAYS}
        arrays |= {name: np.array([getattr(asked, name)], np.float32) for name in ("k_scale", "v_scale")}
        arrays = {name: array for name, array in arrays.items() if array is not None}
        arrays |= {"out": out, "lse": lse, "workspace": workspace}
        addresses = [arrays[name].ctypes.data if name in arrays else 0 for name in decode.POINTERS]
        for (its_build, launch), argument in decode.DECODE.launched(plan, addresses):
            Emulated(its_build, self._folder).launch(launch, argument)
