"""The streams experiment: a file's chunks copied to a GPU, computed and copied back, handed over in one way or another.

All of the input lies in the host's memory, and all of it and of the answer has room on the GPU, so that chunks wait for
nothing but each other's engines and queues. (`flashcli run` has a ring of slots instead, and reads and writes files.)
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from flashcli.asked.shape import FLOAT_BYTES, Shape
from flashcli.errors import MISMATCH, KernelFailure, OutOfMemory
from flashcli.files.cut import CHUNK_BYTES
from flashcli.files.fileformat import InputFile
from flashcli.files.outputs import write_whole
from flashcli.gpu import memory
from flashcli.gpu.pycuda import Session, failure, out_of_memory
from flashcli.kernels.arguments import of_file
from flashcli.kernels.problem import Problem
from flashcli.measure.bench import REFUSED_ABOVE, sampled
from flashcli.measure.engines import engines, hidden
from flashcli.measure.race import FLASHCLI
from flashcli.measure.rows import MEMORIES, ORDERS, Failure, Row, Streamed, over_all
from flashcli.run.memory import require
from flashcli.run.slots import ignore
from flashcli.run.timeline import ENGINES, Timeline
from flashcli.terminal import sizes

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"  # the driver looks at it when it starts, and never again
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: a stream that does not wait for the default stream, nor that for it


class Way(NamedTuple):
    """A way to hand chunks to a GPU.

    streams : how many take chunks in turn; 0 is the default stream, which every program has
    memory : of the host, "pageable" or "pinned"
    order : "depth", all of a chunk before the next chunk; or "breadth", the copies in of as many chunks as there are
        streams, then their kernels, then their copies out
    """

    streams: int
    memory: str
    order: str

    def __str__(self) -> str:
        count = {0: "default stream", 1: "1 stream"}.get(self.streams, f"{self.streams} streams")
        return f"{count}, {self.memory}" + (f", {self.order} first" if self.streams > 1 else "")


def ways(streams: Iterable[int], memories: Iterable[str], orders: Iterable[str]) -> list[Way]:
    """Each way once: pageable ones first, because memory is pinned only once; a single stream has a single order."""
    some = sorted(memories, key=MEMORIES.index)
    return list(
        dict.fromkeys(
            Way(count, memory, order if count > 1 else ORDERS[0])
            for memory in some for count in streams for order in orders
        )
    )  # fmt: skip


class Queued(NamedTuple):
    """One copy or kernel of one ``chunk``: when the host ``queued`` it, and when it had its ``end``, in seconds."""

    engine: str
    chunk: int
    stream: int
    queued: float
    end: float


class Experiment:
    """A file's numbers in host memory, and room for them and the answer on a GPU; to be used within its session."""

    def __init__(self, session: Session, kernel: str | None, qkv: np.ndarray, streams: int) -> None:
        """Make the experiment for Q, K and V [B, 3, N, d] and up to so many ``streams``."""
        B, _, N, d = qkv.shape
        self.qkv, self.out = qkv, np.full((B, N, d), np.nan, np.float32)
        self.pinned = False
        self.chunks = list(Shape(B, N, d).batch_ranges(CHUNK_BYTES))
        size = len(self.chunks[0])
        self.build = session.build(kernel, Problem(size, N, N, d))
        self._driver, self._program = session.driver, session.program(self.build)
        scratch = self.build.workspace(B=size, M=N, N=N)
        try:
            self._memory = [self._driver.mem_alloc(array.nbytes) for array in (qkv, self.out)]
            self._input, self._output = map(int, self._memory)
            self._workspaces = [memory.allocate(self._driver, scratch) for _ in range(streams)]
            self._streams = [self._driver.Stream(NON_BLOCKING) for _ in range(streams)]
        except self._driver.MemoryError:
            what = f"all of (B, N, d) = ({B}, {N}, {d})"
            raise out_of_memory(session, what, qkv.nbytes + self.out.nbytes + scratch * streams) from None

    def timed(self, way: Way) -> tuple[float, float]:
        """Seconds until all is queued, and until all is done."""
        start = time.perf_counter()
        self._queue(way, ignore)
        queued = time.perf_counter()
        self._driver.Context.synchronize()
        return queued - start, time.perf_counter() - start

    def timeline(self, way: Way) -> Timeline:
        """When each operation was under way, by an event after it, in seconds from the beginning."""
        start = self._recorded(self._stream(way, 0))
        start.synchronize()
        zero, queued = time.perf_counter(), self._queue(way, self._recorded)
        self._driver.Context.synchronize()
        return under_way(
            [
                Queued(engine, chunk, chunk % max(1, way.streams), at - zero, start.time_till(event) / 1e3)
                for engine, chunk, at, event in queued
            ],
            [str(Shape(*self.out.shape).whole(batches)) for batches in self.chunks],
        )

    def _queue(self, way: Way, record: Callable[[Any], Any]) -> list[tuple[str, int, float, Any]]:
        """Queue everything; of each operation its engine and chunk, when it was, and what ``record`` makes after it."""
        together = max(1, way.streams) if way.order == "breadth" else 1
        work = dict(zip(ENGINES, (self._copy_in, self._compute, self._copy_out), strict=True))
        queued = []
        for first in range(0, len(self.chunks), together):
            for engine, queue in work.items():
                for chunk in range(first, min(first + together, len(self.chunks))):
                    stream, at = self._stream(way, chunk), time.perf_counter()
                    queue(self.chunks[chunk], stream, self._workspaces[chunk % max(1, way.streams)])
                    queued.append((engine, chunk, at, record(stream)))
        return queued

    def _stream(self, way: Way, chunk: int) -> Any:
        """The stream of a chunk; None is the default stream."""
        return self._streams[chunk % way.streams] if way.streams else None

    def _recorded(self, stream: Any) -> Any:
        event = self._driver.Event()
        event.record(stream)
        return event

    def _copy_in(self, batches: range, stream: Any, workspace: Any) -> None:
        some = self.qkv[batches.start : batches.stop]
        self._driver.memcpy_htod_async(self._input + self._at(3, batches), some, stream)

    def _compute(self, batches: range, stream: Any, workspace: Any) -> None:
        where = self._input + self._at(3, batches), self._output + self._at(1, batches)
        _, _, N, d = self.qkv.shape
        given = of_file(*where, (len(batches), N, d), scale=d**-0.5, workspace=int(workspace))
        self._program.prepare(given, stream)
        self._program.attend(given, stream)

    def _copy_out(self, batches: range, stream: Any, workspace: Any) -> None:
        some = self.out[batches.start : batches.stop]
        self._driver.memcpy_dtoh_async(some, self._output + self._at(1, batches), stream)

    def _at(self, matrices: int, batches: range) -> int:
        """Where some batches begin, of which each has so many matrices, in bytes."""
        _, _, N, d = self.qkv.shape
        return batches.start * matrices * N * d * FLOAT_BYTES


def under_way(operations: Iterable[Queued], names: Sequence[str]) -> Timeline:
    """When operations were under way on their engines, about the chunks of these ``names``.

    A stream does one thing after another, and so does an engine. So an operation begins when it has been queued and
    those before it, on its stream and on its engine, have ended. An event before each would tell the same, but in a
    single queue to the GPU it would keep the operation waiting for what is before it in the queue.
    """
    made, free = Timeline(), defaultdict[object, float](float)
    made.clock = 0.0  # one for all, so that a trace shows them one below the other
    for engine, chunk, stream, queued, end in sorted(operations, key=lambda one: one.end):
        made.add(engine, max(queued, free[stream], free[engine]), end, names[chunk])
        free[stream] = free[engine] = end
    return made


def measured(
    case: str, path: str, some: list[Way], kernel: str | None, runs: int
) -> Iterator[tuple[Row, Timeline | None]]:
    """Each way's row and its timeline; of one whose answer is another than that of the default stream, why it has none.

    That first answer is held against float64: KernelFailure if it is wrong.
    """
    connections = int(os.environ[CONNECTIONS])
    with InputFile(path) as source, Session() as session, contextlib.ExitStack() as stack:
        shape = source.shape
        require(shape.input_bytes + 2 * shape.output_bytes, "an input and two answers")
        experiment = Experiment(session, kernel, source.read(range(shape.B)), max(1, *(way.streams for way in some)))
        try:
            answer = _right_answer(experiment)
            for way in some:
                if way.memory == "pinned":
                    _pin(experiment, stack)
                about = vars(Row.about(case, shape, f"{way}, {connections} connection{'s' * (connections > 1)}"))
                timeline = experiment.timeline(way)
                times = [experiment.timed(way) for _ in range(runs)]
                if np.array_equal(answer.view(np.int32), experiment.out.view(np.int32)):
                    yield _row(about, way, connections, len(experiment.chunks), timeline, times), timeline
                else:
                    yield Failure(**about, error="wrong: another answer than that of the default stream"), None
                experiment.out.fill(np.nan)
        except session.driver.Error as error:
            raise failure(session, experiment.build, error) from error


def in_children(words: list[str], connections: Iterable[int], trace: str | None) -> list[Row]:
    """The rows of ``flashcli streams`` with these words, by a process for each number of connections.

    Their traces become one. Where a process fails, it has told why, and this one ends with its exit code.
    """
    rows, events = list[Row](), list[dict]()
    with tempfile.TemporaryDirectory() as folder:
        record, traced = Path(folder, "record.json"), Path(folder, "trace.json")
        for count in connections:
            command = [*FLASHCLI, "streams", *words, f"--connections={count}", f"--json={record}", f"--trace={traced}"]
            done = subprocess.run(command, env=os.environ | {CONNECTIONS: str(count)}, stdout=subprocess.DEVNULL)
            if done.returncode not in (0, MISMATCH):
                raise SystemExit(done.returncode)
            for row in json.loads(record.read_text())["rows"]:
                rows.append(Failure(**row) if "error" in row else Streamed(**row))
            events += json.loads(traced.read_text())["traceEvents"]
    if trace:
        write_whole(trace, json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return rows


def _right_answer(experiment: Experiment) -> np.ndarray:
    """The answer by the default stream, which cannot mix up chunks."""
    experiment.timed(Way(0, *MEMORIES[:1], *ORDERS[:1]))
    result = sampled(experiment.qkv, experiment.out, causal=False, seed=0)
    if result.got_nonfinite or not result.relative_l2 <= REFUSED_ABOVE["float32"]:
        name, error = experiment.build.kernel.name, result.relative_l2
        raise KernelFailure(f"kernel {name} is wrong: relative L2 {error:.1e}.", "does the input hold NaN or Inf?")
    return experiment.out.copy()


def _pin(experiment: Experiment, stack: contextlib.ExitStack) -> None:
    """Pin the input and the answer, if they are not yet, until ``stack`` is closed."""
    for array in () if experiment.pinned else (experiment.qkv, experiment.out):
        if not memory.lock(array):
            size = sizes.text(array.nbytes)
            raise OutOfMemory(
                f"{size} of the host's memory cannot be pinned.", "use a smaller file, or --memory pageable."
            )
        stack.callback(memory.unlock, array)
    experiment.pinned = True


def _row(
    about: dict[str, Any], way: Way, connections: int, chunks: int, timeline: Timeline, times: list[tuple[float, float]]
) -> Streamed:
    of = engines(timeline.spans)
    names = dict(zip(("copies_in", "kernels", "copies_out"), ENGINES, strict=True))
    figures: dict[str, Any] = {name: of[engine].busy for name, engine in names.items()}
    figures |= {f"{name}_beside": of[engine].beside for name, engine in names.items()}
    queued, walls = ([*some] for some in zip(*times, strict=True))
    return Streamed(
        **about, **way._asdict(), connections=connections, chunks=chunks, queued=statistics.median(queued),
        traced=timeline.extent(), hidden=hidden(timeline.spans), **figures, **over_all(walls),
    )  # fmt: skip
