"""Launches that can be repeated, made from a call on arrays of any library on a GPU.

Nothing here waits for the GPU, and nothing is allocated: so a launch can be captured in a CUDA graph. Nothing reads an
array, either. So kernels cut a length to its row of the table, and touch no page or slot that the cache has not.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from flashcli.asked.how import How
from flashcli.errors import OutOfMemory
from flashcli.gpu import boxes
from flashcli.gpu.place import Place, allowed_while_capturing, ask, bindings, failure
from flashcli.kernels.operation import Launch, Operation, Plan

SHAPES = 1024  # that are remembered: a growing cache of keys asks for another one with each token
FIRST_TO_BEGIN_EARLY = (9, 0)  # compute capability: on those before, nothing in kernels waits


@functools.lru_cache(maxsize=SHAPES)
def prepare(place: Place, operation: Operation, asked: Any, how: How = How()) -> Prepared:  # noqa: B008  never changed
    """Compile and load the kernels of a call that is not empty, and pack their argument without addresses.

    ``asked`` is a record of `flashcli.asked`, after ``at``. Errors are those of the operation's plan.
    """
    return Prepared(place, operation, operation.plan(asked, place.gpu, how), quick=True)


class Prepared:
    """A plan in one place, to be launched with any addresses, any number of times, from any thread.

    ``workspace`` is the number of bytes of scratch that a launch needs for itself, with any content, on a multiple of
    16 bytes. With ``quick``, quick builds may answer while the full ones are being made.
    """

    def __init__(self, place: Place, operation: Operation, plan: Plan, quick: bool = False) -> None:
        self.place, self.kernel, self.workspace = place, plan.kernel, plan.workspace
        self._plan, self._given, self._lock = plan, plan.argument, threading.Lock()
        self._packs = [
            (struct.Struct(f"{count}Q").pack_into, offset, slice(first, first + count))
            for offset, first, count in _runs(plan.argument, operation.pointers)
        ]
        self._others: Sequence[int] | None = None  # addresses that are packed already, of those behind the first run
        self._boxes = [
            (memoryview(getattr(plan.argument, field)).cast("B"), bytes(getattr(plan.argument, field)), pointer)
            for field, pointer in plan.boxes
        ]
        self._scratch = operation.pointers.index("workspace") if plan.workspace else None
        self._changes = bool(plan.clear or plan.inside or plan.unread)
        if plan.parts:
            place.functions([*plan.builds()])  # side by side, each once
        self._parts = [(part, Prepared(place, part.operation, part.plan)) for part in plan.parts]
        pointer = self._pointer = (ctypes.c_void_p * 1)(ctypes.addressof(plan.argument))
        self._parameters = ctypes.addressof(pointer)
        self._launch = bindings().cuLaunchKernelEx
        self._stream = 0  # of all configurations
        self._builds = [step.build for step in plan.steps]
        functions = place.functions(self._builds, quick and not plan.parts)
        self._steps, self._quick = self._configured(functions), place.are_quick(functions)

    def _configured(self, functions: Sequence[dict[str, int]]) -> list[tuple[Any, int]]:
        """The driver's record and the function of each launch, which has its shared memory from then on."""
        place, found = self.place, []
        for (_, launch), handles in zip(self._plan.steps, functions, strict=True):
            function, size = handles[launch.function], launch.shared
            place.give_shared(function, size, f"kernel {self.kernel} gets no {size} bytes of shared memory")
            early = launch.early and place.gpu.capability >= FIRST_TO_BEGIN_EARLY
            found.append((_configuration(launch._replace(early=early)), function))
        return found

    def launch(self, stream: int, *addresses: int) -> None:
        """Queue the launches on a stream; addresses are in the order of the operation's pointers, 0 for no array."""
        if self._quick:
            return self._launch_quick(stream, addresses)
        if self.place.is_current():
            return self._queue(stream, addresses)
        with self.place.current():
            return self._queue(stream, addresses)

    def _launch_quick(self, stream: int, addresses: Sequence[int]) -> None:
        """Launch quick builds and wait for the answer; but take the full ones where they are there, or for a graph."""
        if self.place.are_under_way(self._builds) and not _is_captured(stream):
            with self.place.current(), contextlib.suppress(OutOfMemory):  # of which threads' stacks take much
                self._queue(stream, addresses)
                with allowed_while_capturing(bindings()):  # by another thread
                    ask(bindings().cuStreamSynchronize, stream, doing=f"kernel {self.kernel} failed")
                return
        steps = self._configured(self.place.functions(self._builds))
        with self._lock:
            self._steps, self._stream, self._quick = steps, 0, False
        self.launch(stream, *addresses)

    def _queue(self, stream: int, addresses: Sequence[int]) -> None:
        if self._changes:
            addresses = self._with_scratch(stream, addresses)
        with self._lock:  # the driver copies the arguments before it lets go of them
            pack, offset, which = self._packs[0]
            pack(self._given, offset, *addresses[which])
            if addresses[which.stop :] != self._others:  # mostly there are none
                self._others = addresses[which.stop :]
                for pack, offset, which in self._packs[1:]:
                    pack(self._given, offset, *addresses[which])
            for place, told, pointer in self._boxes:
                place[:] = boxes.encoded(told, addresses[pointer])
            if stream != self._stream:
                for configuration, _ in self._steps:
                    configuration.hStream = stream
                self._stream = stream
            self._launch_all()
            for part, prepared in self._parts:
                prepared._queue(stream, part.addresses(addresses))

    def _launch_all(self) -> None:
        """Queue the launches; not in the lock's own block, which Ctrl-C in a loop might leave with the lock taken."""
        launch, parameters = self._launch, self._parameters
        for configuration, function in self._steps:
            [code] = launch(configuration, function, parameters, 0)
            if code:
                raise failure(code, f"kernel {self.kernel} failed on GPU {self.place.device}")

    def _with_scratch(self, stream: int, addresses: Sequence[int]) -> list[int]:
        """Queue the clearing of the scratch, and return the addresses that kernels get, those in the scratch too."""
        start = 0 if self._scratch is None else addresses[self._scratch]
        for offset, word, count in self._plan.clear:
            ask(bindings().cuMemsetD32Async, start + offset, word, count, stream)
        return self._plan.placed(addresses, start)


def _is_captured(stream: int) -> bool:
    """Whether what is queued on a stream goes into a graph, or a capture forbids to ask."""
    code, status = bindings().cuStreamIsCapturing(stream)
    return bool(code or status)


def _runs(argument: ctypes.Structure, pointers: Sequence[str]) -> list[tuple[int, int, int]]:
    """Cut pointers into runs that are neighbours in the struct: the offset there, the number of the first, how many."""
    found: list[tuple[int, int, int]] = []
    for number, name in enumerate(pointers):
        at = getattr(type(argument), name).offset
        if found and found[-1][0] + 8 * found[-1][2] == at:
            found[-1] = (*found[-1][:2], found[-1][2] + 1)
        else:
            found.append((at, number, 1))
    return found


def _configuration(launch: Launch) -> Any:
    """The driver's record of a launch, without the stream."""
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
