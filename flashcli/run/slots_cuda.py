"""The file pipeline on a GPU: slots with room on the device, each with a stream of its own.

The context lives as long as the ``with`` block of the backend.
"""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Callable

import numpy as np

from flashcli.asked.shape import FLOAT_BYTES, Chunk, Shape, ceil_div
from flashcli.compiler.quick import ROOM
from flashcli.files.cut import Cut
from flashcli.gpu import memory
from flashcli.gpu.pycuda import Program, Session, failure, out_of_memory
from flashcli.kernels.arguments import Attention, of_batches
from flashcli.kernels.choice import exact
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.run.slots import Backend, Overlap, Slot, argument, ignore
from flashcli.run.timeline import ENGINES, Timeline

# Before an answer stand words of the device's: whether something of the input, and of the answer, is not finite. They
# take 128 bytes, so that the answer starts a line of the cache.
NOTE = 32
EVENTS = dict(zip(ENGINES, ((0, 1), (2, 3), (3, 4)), strict=True))  # of a slot, between which each engine was at work


class CudaSlot(Slot):
    """A slot with counterparts of its memory on the device, and a stream of its own.

    ``events`` are: the copy to the device begins, ends; the kernel begins, ends; the copy of the answer ends. Those of
    copies are recorded only where they are wanted, for a trace or for another stream. In a single queue to the GPU, the
    copies of all slots would wait for each other's events: docs/streams.md tells of it.
    """

    def __init__(self, session: Session, shape: Shape, by: Cut, workspace_bytes: int) -> None:
        super().__init__(shape, by, spare=NOTE)
        driver = self._driver = session.driver
        self.locked = False  # or tried to
        self.traced = False  # whether the times of copies are wanted, too
        self.settled = False  # whether what was submitted last has been waited for
        self.device_input = driver.mem_alloc(by.input_floats(shape) * FLOAT_BYTES)
        self.note = driver.mem_alloc((NOTE + by.output_floats(shape)) * FLOAT_BYTES)
        self._clear_note()
        self.device_output = int(self.note) + NOTE * FLOAT_BYTES
        self.workspace = memory.allocate(driver, workspace_bytes)
        self.stream = driver.Stream()
        self.events = [driver.Event() for _ in range(5)]

    def lock(self, context: int) -> None:
        """Lock the host's memory, when it is used for the first time: other slots are in use meanwhile."""
        if not self.locked:
            self.locked = True
            memory.lock(self.memory, context)

    def mark(self, event: int, needed: bool) -> None:
        """Record one of the events, if it is ``needed`` or there is a trace."""
        if needed or self.traced:
            self.events[event].record(self.stream)

    def fetch(self) -> None:
        """Queue the copy of the note and, if there is one, of the answer after it."""
        end = self.input.size + NOTE + self.output_of(self.chunk).size
        self._driver.memcpy_dtoh_async(self.memory[self.input.size : end], self.note, self.stream)

    def heed_note(self) -> None:
        """``finite`` and ``finite_answer`` from what the device has noted, which is taken back."""
        self.finite, self.finite_answer = (word == 0 for word in self.spare[:2].view(np.int32))
        if not (self.finite and self.finite_answer):
            self._clear_note()

    def _clear_note(self) -> None:
        self._driver.memset_d8(self.note, 0, NOTE * FLOAT_BYTES)

    def close(self) -> None:
        """Wait for the GPU and unpin the host's memory: called before it is freed, even after an error."""
        if self.locked:
            with contextlib.suppress(self._driver.Error):
                self.stream.synchronize()
            memory.unlock(self.memory)


class CudaLongBatch:
    """K and V of one batch on the device, copied there and prepared chunk by chunk, for rows of its Q to come."""

    def __init__(self, session: Session, shape: Shape, workspace_bytes: int) -> None:
        self.rows = session.driver.mem_alloc(2 * shape.output_batch_bytes)
        self.workspace = memory.allocate(session.driver, workspace_bytes)
        self.finite = True  # as far as its chunks have been waited for
        self.ready = session.driver.Event()  # after preparing
        self.filling: list[CudaSlot] = []  # whose rows are on their way to it
        self.users: list[CudaSlot] = []  # whose rows of Q attend to it

    def forget(self, slot: CudaSlot) -> None:
        """Forget a slot that is done with this long batch."""
        for slots in (self.filling, self.users):
            if slot in slots:
                slots.remove(slot)


class CudaBackend(Backend[CudaSlot]):
    """One kernel, compiled for head size ``d``, on one device; to be closed on the thread that opened it.

    Without a ``kernel`` the best for the device is chosen; its tiles are chosen for ``sizes``, the B, M (rows of Q)
    and N to come, and right for any others too. Without a ``device``, processes that have different ``turn``s get
    different ones, as far as there are. ``max_device_bytes`` bounds the memory taken on the device.

    Splitting a number into fp16 halves turns Inf into NaN. So every chunk is looked through on the device, and one in
    which something is not finite is computed once more, by a kernel that does not split, before its answer is given.
    """

    # A thread copies some 7 GB/s out of the page cache and 3 GB/s into it. One chunk computes while the result of
    # another travels back.
    overlap = Overlap(reading=4, computing=2, writing=2)

    def __init__(
        self,
        d: int,
        causal: bool = False,
        scale: float | None = None,
        kernel: str | None = None,
        precision: str = "fp32",
        device: int | None = None,
        turn: int = 0,
        sizes: tuple[int, int, int] = (1, 2048, 2048),
        max_device_bytes: int | None = None,
    ) -> None:
        self._scale = d**-0.5 if scale is None else scale
        self._max_device_bytes = max_device_bytes or sys.maxsize
        self._session = Session(device, turn)
        self._build = self._session.build(kernel, Problem(*sizes, d, causal, precision))
        self._slots: list[CudaSlot] = []
        self._long: list[CudaLongBatch] = []
        self._taken = 0  # bytes of the device's memory
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._session)
            self._driver = self._session.driver
            self._may_be_quick = max_device_bytes is None and self._session.free_bytes() >= ROOM
            self._session.program(self._build, self._may_be_quick)  # compiled and loaded
            self._start_clock()
            self._context = memory.current_context()
            self._close = stack.pop_all().close

    def __enter__(self) -> CudaBackend:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close_slots()
        del self._clock, self._long
        self._close()

    def _close_slots(self) -> None:
        for slot in self._slots:
            slot.close()
        self._slots = []

    @property
    def _program(self) -> Program:
        """The kernel's functions: of a quick build while the full one is being made, from chunk to chunk."""
        return self._session.program(self._build, self._may_be_quick)

    def _start_clock(self) -> None:
        """Tie the device's clock to the host's."""
        self._clock = self._driver.Event()
        self._clock.record()
        self._clock.synchronize()
        self._clock_start = time.perf_counter()

    @property
    def description(self) -> str:
        tiling = self._build.tiling
        products = f", {self._build.problem.products}xfp16" if self._build.kernel.splits else ""
        warning = ", relative L2 error about 7e-4" if self._build.problem.precision == "fp16" else ""
        return (
            f"cuda, {self._session.name} ({self._session.architecture}), kernel {self._build.kernel.name} "
            f"(Br={tiling.Br}, Bc={tiling.Bc}){products}{warning}"
        )

    def details(self) -> dict[str, object]:
        tiling = self._build.tiling
        return {
            "backend": "cuda",
            "device": self._session.name,
            "bus": self._session.device.pci_bus_id(),
            "arch": self._session.architecture,
            "kernel": self._build.kernel.name,
            "precision": self._build.problem.precision,
            "Br": tiling.Br,
            "Bc": tiling.Bc,
            "device_mib": self._taken / 2**20,
        }

    def slots(self, shape: Shape, by: Cut, count: int) -> tuple[Cut, list[CudaSlot]]:
        """Allocate slots, smaller and fewer ones where memory is short; OutOfMemory if not even one batch fits."""
        self._close_slots()  # those of an earlier input
        long = 0 if by.whole else min(2, shape.B)  # two, so that one fills while the other is used
        while (slots := self._take(shape, by, count, long)) is None:
            if long == 2:
                long = 1
            elif smaller := by.smaller():
                by = smaller
            elif count > 1:
                count = ceil_div(count, 2)
            else:
                what = f"one batch of N = {shape.N}, d = {shape.d}"
                raise out_of_memory(self._session, what, self._taken, self._max_device_bytes)
        self._slots = slots
        return by, slots

    def _take(self, shape: Shape, by: Cut, count: int, long: int) -> list[CudaSlot] | None:
        """Allocate ``count`` slots and ``long`` long batches; returns the slots, or None if there is no room."""
        self._long = []  # frees those of an earlier input
        self._taken = self._slot_bytes(shape, by) * count + self._long_bytes(shape) * long
        if self._taken > self._max_device_bytes:
            return None
        try:
            workspace = self._workspace(shape, by)
            slots = [CudaSlot(self._session, shape, by, workspace) for _ in range(count)]
            self._long = [CudaLongBatch(self._session, shape, self._long_workspace(shape)) for _ in range(long)]
            return slots
        except self._driver.MemoryError:
            return None
        except self._driver.Error as error:
            raise failure(self._session, self._build, error) from error

    def filled(self, slot: CudaSlot) -> None:
        slot.lock(self._context)

    def submit(self, slot: CudaSlot, chunk: Chunk, timeline: Timeline) -> None:
        slot.chunk, slot.submitted, slot.settled = chunk, time.perf_counter(), False
        slot.traced = timeline.keeps
        try:
            if chunk.matrices == "KV":
                self._keep(slot)
            else:
                self._compute(slot)
        except self._driver.Error as error:
            raise failure(self._session, self._build, error) from error

    def _compute(self, slot: CudaSlot) -> None:
        """Queue the copy of Q, and perhaps K and V, to the device, the kernel, and the copy of O back."""
        given = self._arguments(slot)
        self._copy(slot, slot.device_input)
        if slot.chunk.matrices == "QKV":
            self._program.look(given, slot.stream)
        else:
            self._look_at_rows(slot, slot.device_input, len(slot.chunk.rows))
            batch = self._long_of(slot)
            batch.users.append(slot)
            slot.stream.wait_for_event(batch.ready)
        slot.mark(2, needed=True)
        if slot.chunk.matrices == "QKV":
            self._program.prepare(given, slot.stream)
        self._program.attend(given, slot.stream)
        self._give_back(slot)

    def _compute_exactly(self, slot: CudaSlot) -> None:
        """Compute once more, and wait for it, by a kernel that treats Inf and NaN as IEEE arithmetic does."""
        program = self._session.program(Build(exact(self._build.kernel), self._build.problem))
        finite = slot.finite
        slot.mark(2, needed=True)
        program.attend(self._arguments(slot), slot.stream)
        self._give_back(slot)
        slot.stream.synchronize()
        slot.heed_note()
        slot.finite = finite

    def _give_back(self, slot: CudaSlot) -> None:
        slot.mark(3, needed=True)
        if rows := len(slot.shape.output_rows(slot.chunk)):
            self._look_at_rows(slot, slot.device_output, rows, word=1)
        slot.fetch()
        slot.mark(4, needed=False)

    def _arguments(self, slot: CudaSlot) -> Attention:
        """The kernel's argument for a chunk's rows of Q."""
        keys, workspace = (0, 0), slot.workspace
        if slot.chunk.matrices != "QKV":
            batch = self._long_of(slot)
            keys = int(batch.rows), int(batch.rows) + slot.shape.output_batch_bytes
            workspace = batch.workspace if self._build.prepares else workspace
        noted = {"workspace": int(workspace), "nonfinite": int(slot.note)}
        return argument(slot, int(slot.device_input), keys, slot.device_output, self._scale, **noted)

    def _look_at_rows(self, slot: CudaSlot, where: int, rows: int, word: int = 0) -> None:
        """Queue a look for NaN and Inf in some rows on the device, whichever matrix they are of."""
        given = of_batches((where, 0, 0, 0), slot.shape.d, M=rows, nonfinite=int(slot.note) + 4 * word)
        self._program.look(given, slot.stream)

    def _keep(self, slot: CudaSlot) -> None:
        """Queue the copy of rows of K and V to the device, and, after the last of them, what prepares them."""
        batch, stream, rows, shape = self._long_of(slot), slot.stream, slot.chunk.rows, slot.shape
        if rows.start == 0:
            for other in [*batch.filling, *batch.users]:  # of the batch that was in its place
                self._settle(other)  # they may still want it
            batch.finite = True
        where = int(batch.rows) + rows.start * shape.row_bytes
        self._copy(slot, where)
        self._look_at_rows(slot, where, len(rows))
        batch.filling.append(slot)
        last = rows.stop == 2 * shape.N
        if last:
            for other in batch.filling:
                stream.wait_for_event(other.events[1])
        slot.mark(2, needed=True)
        if last:
            k, v = (int(batch.rows) + n * shape.output_batch_bytes for n in range(2))
            given = of_batches((0, k, v, 0), shape.d, N=shape.N, workspace=int(batch.workspace))
            self._program.prepare(given, stream)
            batch.ready.record(stream)
        self._give_back(slot)

    def _copy(self, slot: CudaSlot, target: object) -> None:
        slot.mark(0, needed=False)
        self._driver.memcpy_htod_async(target, slot.input_of(slot.chunk), slot.stream)
        slot.mark(1, needed=slot.chunk.matrices == "KV")

    def _long_of(self, slot: CudaSlot) -> CudaLongBatch:
        return self._long[slot.chunk.batches.start % len(self._long)]

    def wait(self, slot: CudaSlot, timeline: Timeline, check: Callable[[], None] = ignore) -> None:
        try:
            self._settle(slot)
            spans = {
                phase: self._times(slot, *ends) for phase, ends in EVENTS.items() if slot.traced or phase == "kernel"
            }
        except self._driver.Error as error:
            raise failure(self._session, self._build, error) from error
        timeline.add("computation", slot.submitted, time.perf_counter(), f"compute {slot.chunk}")
        for phase, (start, end) in spans.items():
            if end > start:
                timeline.add(phase, start, end, f"{phase}, {slot.chunk}")

    def _times(self, slot: CudaSlot, *ends: int) -> list[float]:
        """When a slot's events came, in seconds of time.perf_counter."""
        return [self._clock_start + self._clock.time_till(slot.events[end]) / 1e3 for end in ends]

    def is_done(self, slot: CudaSlot) -> bool:
        try:
            return slot.stream.is_done()
        except self._driver.Error:
            return True  # `wait` will tell

    def _settle(self, slot: CudaSlot) -> None:
        """Wait for a slot's answer, and see to it that it is right where the input was not finite."""
        if slot.settled:
            return
        slot.stream.synchronize()
        slot.heed_note()
        finite = slot.finite
        if slot.chunk.matrices != "QKV":
            batch = self._long_of(slot)
            batch.finite &= slot.finite or slot.chunk.matrices == "Q"
            finite &= batch.finite
        if not finite and self._build.kernel.splits and slot.chunk.matrices != "KV":
            self._compute_exactly(slot)
        for batch in self._long:
            batch.forget(slot)
        slot.settled = True

    def _slot_bytes(self, shape: Shape, by: Cut) -> int:
        """Device memory of a slot."""
        floats = by.input_floats(shape) + NOTE + by.output_floats(shape)
        return floats * FLOAT_BYTES + self._workspace(shape, by)

    def _workspace(self, shape: Shape, by: Cut) -> int:
        """Scratch of a slot, in bytes."""
        if not by.whole and self._build.prepares:
            return 0
        return self._build.workspace(B=by.batches, M=by.rows, N=shape.N)

    def _long_bytes(self, shape: Shape) -> int:
        """Device memory of a long batch."""
        return 2 * shape.output_batch_bytes + self._long_workspace(shape)

    def _long_workspace(self, shape: Shape) -> int:
        """The bytes of workspace that the kernel prepares from a long batch's K and V."""
        return self._build.workspace(B=1, M=0, N=shape.N) if self._build.prepares else 0
