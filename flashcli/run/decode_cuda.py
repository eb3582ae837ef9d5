"""Paged decode on a GPU, for arrays in the host's memory: the cache goes there whole if it fits, else by groups."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from flashcli.asked.decode import ARRAYS, FACTORS
from flashcli.asked.shape import ceil_div
from flashcli.cpu.pages import DecodeArrays
from flashcli.errors import KernelFailure, OutOfMemory
from flashcli.gpu import boxes
from flashcli.gpu.pycuda import Session, queued_seconds
from flashcli.kernels import decode
from flashcli.kernels.operation import Build, Gpu, named
from flashcli.kernels.tuning.decode import Tuning

SPARE = 2**28  # bytes of the GPU's memory that are left for queries, answers and scratch


class DecodeCuda:
    """A backend for paged decode on the first GPU; use as a context manager.

    ``retuned`` gives another tuning for the kernel's own choice.
    """

    def __init__(self, kernel: str | None = None, retuned: Callable[[Tuning], Tuning] = lambda tuning: tuning) -> None:
        self._kernel, self._used = kernel, ""  # the kernel that was asked for, and what was used at last
        self._retuned = retuned
        if kernel is not None:
            named(decode.KERNELS, kernel, "paged decode")
        self._session = Session()
        self._driver = self._session.driver
        self._cache: dict[str, object] = {}  # device memory of the caches of `_of`
        self._of: DecodeArrays | None = None
        self._seconds = 0.0

    def __enter__(self) -> DecodeCuda:
        self._session.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._cache.clear()
        self._session.__exit__(*exc)

    @property
    def description(self) -> str:
        return f"cuda, {self._session.name}, kernel {self._used}"

    def details(self) -> dict[str, object]:
        return {
            "backend": "cuda", "device": self._session.name, "kernel": self._used, "kernel_seconds": self._seconds,
        }  # fmt: skip

    @property
    def at_once(self) -> int:
        """How many bytes of keys and values a group of sequences may use."""
        return max(1, self._session.free_bytes() - 2 * SPARE)

    def decode(self, asked: DecodeArrays, sequences: range) -> tuple[np.ndarray, np.ndarray]:
        """The answer of some sequences in the query's type, as `DecodeArrays.shape_of` says, and their LSE, float32."""
        try:
            return self._decode(asked, sequences)
        except self._driver.MemoryError as error:
            raise OutOfMemory(
                f"the pages of sequences {sequences.start} to {sequences.stop - 1} do not fit into the GPU's memory.",
                "free the GPU, use a larger one, or --backend cpu.",
            ) from error
        except self._driver.Error as error:
            raise KernelFailure(f"kernel {self._used} failed: {error}.", "report it.") from error

    def _decode(self, asked: DecodeArrays, sequences: range) -> tuple[np.ndarray, np.ndarray]:
        part = asked.part(sequences)
        if part.total == 0:
            shape = part.shape_of(range(part.S))
            return np.empty(shape, asked.query.dtype), np.empty(shape[:-1], np.float32)
        if asked.key_cache.nbytes + asked.value_cache.nbytes <= self.at_once or self._of is asked:
            self._keep(asked)
        else:
            part = only_used_pages(part)
            self._keep(part)
        return self._launch(part)

    def _keep(self, asked: DecodeArrays) -> None:
        """Have these caches on the device."""
        if self._of is asked:
            return
        self._cache.clear()
        self._of = None
        for name in ("key_cache", "value_cache"):
            self._cache[name] = self._to_device(getattr(asked, name))
        self._of = asked

    def _launch(self, part: DecodeArrays) -> tuple[np.ndarray, np.ndarray]:
        session = self._session
        gpu = Gpu(session.capability, session.multiprocessors, session.name)
        build = decode.choose(decode.problem_of(part.outline, gpu), self._kernel)
        build = Build(build.kernel, build.problem._replace(tuning=self._retuned(build.problem.tuning)))
        plan, self._used = decode.plan_of(build, contiguous(part).outline), build.kernel.name
        out = np.empty(part.shape_of(range(part.S)), part.query.dtype)
        lse = np.empty(out.shape[:-1], np.float32)
        scales = {name: np.array([getattr(part, name)], np.float32) for name in FACTORS}
        given = {name: getattr(part, name) for name in ARRAYS if name not in self._cache} | scales
        memory = {name: self._to_device(array) for name, array in given.items() if array is not None and array.size}
        memory |= {name: self._driver.mem_alloc(array.nbytes) for name, array in (("out", out), ("lse", lse))}
        memory["workspace"] = self._driver.mem_alloc(plan.workspace)
        self._driver.memset_d8(memory["workspace"], 0, plan.workspace)
        pointers = {name: int(where) for name, where in (memory | self._cache).items()}
        addresses = [pointers.get(name, 0) for name in decode.POINTERS]
        launches = [
            functools.partial(session.program(build, argument=type(argument)).queue, launch, bytes(argument))
            for (build, launch), argument in decode.DECODE.launched(plan, addresses, boxes.encoded)
        ]
        self._seconds += queued_seconds(self._driver, lambda: [launch() for launch in launches])
        for array, name in ((out, "out"), (lse, "lse")):
            self._driver.memcpy_dtoh(_bytes(array), memory[name])
        return out, lse

    def _to_device(self, array: np.ndarray) -> Any:
        array = np.ascontiguousarray(array)
        memory = self._driver.mem_alloc(array.nbytes)
        self._driver.memcpy_htod(memory, _bytes(array))
        return memory


def _bytes(array: np.ndarray) -> np.ndarray:
    """An array seen as bytes: PyCUDA knows no bfloat16 and no fp8."""
    return array.reshape(-1).view(np.uint8)


def contiguous(asked: DecodeArrays) -> DecodeArrays:
    """Arrays as they lie on the device, without gaps."""
    arrays = {name: x for name in ARRAYS if (x := getattr(asked, name)) is not None}
    dense: dict[str, Any] = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
    return dataclasses.replace(asked, **dense)


def only_used_pages(asked: DecodeArrays) -> DecodeArrays:
    """Copy a decode with a cache of only the used pages, each once, and block tables that point into that cache."""
    columns = np.arange(asked.block_tables.shape[1])
    first, last = asked.used()
    first, last = first // asked.page, ceil_div(last, asked.page)
    used = (columns >= first[:, None]) & (columns < last[:, None])
    pages, places = np.unique(asked.block_tables[used], return_inverse=True)
    tables = np.full_like(asked.block_tables, -1)
    tables[used] = places
    if len(pages) == 0:
        pages = np.array([0])  # all sequences are empty: some page there must be
    return dataclasses.replace(
        asked, key_cache=asked.key_cache[pages], value_cache=asked.value_cache[pages], block_tables=tables
    )
