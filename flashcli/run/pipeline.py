"""`flashcli run`: from an input file to an output file, and the record of how long it took.

The output's rows are divided among devices, or among the processes of a launcher, which all write into one file; one
device of one process is the case of one share. What was ordered is divided, the shares are computed, and the parts
that were done become a record.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from flashcli.asked.shape import Shape
from flashcli.errors import UsageError
from flashcli.files.cut import Cut, batches, cut
from flashcli.files.fileformat import ChunkWriter, InputFile, create_output
from flashcli.files.outputs import check_creatable, check_distinct
from flashcli.gpu import warm_up
from flashcli.process import signals
from flashcli.run.agreement import agree_on_backend, agree_on_order
from flashcli.run.ranks import ALONE, Alone
from flashcli.run.report import Part, phase_seconds, run_record, seconds_since_process_start, sharing, write_trace
from flashcli.run.request import Request, open_backend
from flashcli.run.shards import input_rows, shards
from flashcli.run.slots import ignore
from flashcli.run.stream import Watch, stream
from flashcli.run.threads import together
from flashcli.run.timeline import Timeline

Progress = Callable[[int], contextlib.AbstractContextManager[Callable[[int], None]]]


class Order(NamedTuple):
    """The options of `flashcli run`.

    input_path, output_path : from where to where
    request : what to compute, and with what
    devices : the numbers of the GPUs that are to share the work; it is the request's, or any, if none are named
    serial : read, compute and write one after another
    trace : where to write a timeline of every chunk, if anywhere
    """

    input_path: str
    output_path: str
    request: Request
    devices: tuple[int, ...] = ()
    serial: bool = False
    trace: str | None = None


class Audience(NamedTuple):
    """Who is told of a run while it goes on.

    notice, warn : are given a sentence
    progress : is called with the bytes of input to come; a context manager, which gives a function that is to be told
        how many of them are done with
    """

    notice: Callable[[str], None] = ignore
    warn: Callable[[str], None] = ignore
    progress: Progress = lambda total: contextlib.nullcontext(ignore)


NOBODY = Audience()


class Share(NamedTuple):
    """The rows of the output that one device, or one process, computes."""

    name: str  # of the device or process; empty if it is the only one
    who: dict[str, object]  # the same, for programs
    request: Request
    rows: range


@dataclass(frozen=True)
class Division:
    """The division of the work.

    by : the largest chunk
    shares : the shares of this process, in order
    count : the number of shares of all processes
    """

    shape: Shape
    by: Cut
    shares: list[Share]
    count: int

    @property
    def batches(self) -> range:
        """The batches that this process reads."""
        return batches(self.shape, range(self.shares[0].rows.start, self.shares[-1].rows.stop))

    @property
    def input_bytes(self) -> int:
        """The bytes of the input that this process reads."""
        return sum(input_rows(self.shape, share.rows) for share in self.shares) * self.shape.row_bytes


def run(order: Order, audience: Audience = NOBODY, ranks: Alone = ALONE) -> dict[str, object]:
    """Compute the output from the input; returns the record of what was done and how long it took.

    Where there are several ``ranks``, each does its share, and all but rank 0 return an empty record. Nothing is
    computed before it is sure that the output can be created.
    """
    start = _start_up()
    check_distinct(order.input_path, order.output_path, order.trace)
    if order.trace is not None and ranks.rank == 0:
        check_creatable(order.trace)
    with InputFile(order.input_path) as source:
        agree_on_order(ranks, source, order.output_path, order.request)
        division = divide(order, source.shape, ranks)
        source.will_read(division.batches)
        with _output(order.output_path, division, ranks) as sink:
            with audience.progress(division.input_bytes) as progress:
                execution = Execution(order, division, source, sink, ranks, audience, progress)
                parts = execution.parts()
            parts[0] = parts[0]._replace(timeline=Timeline.merged([start, parts[0].timeline]))
            if ranks.rank > 0:
                sink.commit()
                ranks.gather(parts[0])
                return {}
            parts += ranks.gather()
            with execution.timeline.measure("output", "commit"), signals.held():
                sink.commit()
                signals.complete.append(order.output_path)
    if division.count > 1:
        execution.warn_of(next((part.place for part in parts if part.place), ""))
        execution.warn_of_lost(next((part.lost for part in parts if part.lost), ""))
    if ranks.size > 1 and (crowd := sharing(parts)):
        audience.warn(crowd)
    if order.trace is not None:
        alone = {1: Timeline.merged([start, execution.timeline])}
        write_trace(order.trace, {part.name: part.timeline for part in parts} if division.count > 1 else alone)
    return run_record(division.shape, order.request.causal, parts, execution.timeline)


def _start_up() -> Timeline:
    """The timeline before the run: Python's start, and the driver's on other threads."""
    timeline, now = Timeline(), time.perf_counter()
    timeline.add("start", now - seconds_since_process_start(), now, "start Python")
    for about, begin, end in warm_up.steps:
        timeline.add("start", begin, end, about)
    return timeline


def divide(order: Order, shape: Shape, ranks: Alone) -> Division:
    """Divide the work: a share for each of the devices, or for each of the ranks."""
    count, request = max(ranks.size, len(order.devices)), order.request
    by, rows = shards(shape, count, request.causal)
    requests = [replace(request, device=device) for device in order.devices] or [request]
    if len(requests) == 1:
        return Division(shape, by, [Share(ranks.name, ranks.who, requests[0], rows[ranks.rank])], count)
    shares = [
        Share(f"GPU {request.device}", {"gpu": request.device}, request, some)
        for request, some in zip(requests, rows, strict=True)
    ]
    return Division(shape, by, shares, count)


def _output(path: str, division: Division, ranks: Alone) -> ChunkWriter:
    """The output, made by rank 0 and opened by all."""
    if ranks.rank > 0:
        return create_output(path, division.shape, shared=ranks.share())
    sink = create_output(path, division.shape)
    try:
        if division.count > 1 and sink.in_order:
            raise UsageError(
                f"{path!r} cannot be written by several GPUs or processes at a time: it cannot seek.",
                "write to a regular file, or use one GPU in one process.",
            )
        if ranks.size > 1:
            ranks.share(sink.share())
    except BaseException:
        sink.discard()
        raise
    return sink


class Execution:
    """The computation of the shares, between an open input and an open output."""

    def __init__(
        self, order: Order, division: Division, source: InputFile, sink: ChunkWriter, ranks: Alone, audience: Audience,
        progress: Callable[[int], None],
    ) -> None:  # fmt: skip
        """``progress`` is told of the bytes of input that are done with."""
        self._order, self._division, self._source, self._sink = order, division, source, sink
        self._ranks, self._audience, self._tell = ranks, audience, progress
        self._lock = threading.Lock()
        self.timeline = Timeline(keeps=order.trace is not None)  # of all shares of this process

    def parts(self) -> list[Part]:
        """Do each share, and tell how; several have a thread each, as PyCUDA's contexts want it."""
        shares = self._division.shares
        if len(shares) == 1:
            return [self._part(shares[0], self._ranks.check)]
        return together([functools.partial(self._part_of_several, share) for share in shares])

    def warn_of(self, place: str) -> None:
        if place:
            text = f"{self._order.input_path} holds a value that is not finite, first {place}; IEEE rules apply."
            self._audience.warn(text)

    def warn_of_lost(self, place: str) -> None:
        if place:
            text = f"the answer to {self._order.input_path} is not finite, first {place}, though all it holds is"
            self._audience.warn(f"{text}: float32 has no room for its scores or sums.")

    def _part_of_several(self, share: Share, check: Callable[[], None]) -> Part:
        try:
            return self._part(share, check)
        except Exception as error:
            error.add_note(f"Where: {share.name}.")
            raise

    def _part(self, share: Share, check: Callable[[], None]) -> Part:
        shape, places, lost = self._division.shape, list[str](), list[str]()
        timeline = Timeline(keeps=self._order.trace is not None, within=self.timeline)
        sizes = cut(shape)  # not the division's: the tiles are to be the same whatever the number of shares
        with timeline.measure("computation", "open the backend"):
            notice = self._audience.notice
            opened = open_backend(share.request, replace(shape, B=sizes.batches), sizes.rows, notice)
        with opened as backend:
            agree_on_backend(self._ranks, backend.details())
            watch = Watch(timeline, self._progress, self.warn_of, self.warn_of_lost, check)
            if self._division.count > 1:  # when all parts are there: of the first place
                watch = watch._replace(warn=places.append, lost=lost.append)
            stream(self._source, backend, self._sink, self._division.by, share.rows, self._order.serial, watch)
            details = {"description": backend.description, **backend.details()}
        seconds = phase_seconds(timeline, str(details["backend"]))
        trace, found = Timeline.merged([timeline]), ("".join(places), "".join(lost))
        return Part(share.name, share.who, details, share.rows, trace, seconds, *found)

    def _progress(self, count: int) -> None:
        with self._lock:
            self._tell(count)
