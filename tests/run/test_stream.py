"""From source to sink in chunks: everything arrives in its place, once, whatever the speed of each stage."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from concurrent.futures import Future

import numpy as np
import pytest
from support import random_qkv
from tolerances import assert_accurate

from flashcli.asked.shape import Chunk, Shape
from flashcli.files.cut import TILE, Cut
from flashcli.files.summary import first_nonfinite
from flashcli.run.arrays import Arrays
from flashcli.run.slots import Overlap
from flashcli.run.slots_cpu import CpuBackend
from flashcli.run.stream import Watch, stream
from flashcli.run.timeline import Span, Timeline

ONE = Cut(whole=True, batches=1, rows=20)  # 40 chunks go through 6 slots
QKV = random_qkv(40, 20, 8)
LONG = random_qkv(3, 1000, 8)
ROWS = Cut(whole=False, batches=1, rows=TILE)  # of each batch: 6 chunks of K and V, 3 of Q


class Source:
    def __init__(self, qkv: np.ndarray) -> None:
        self.qkv = qkv.reshape(-1, qkv.shape[3])
        self.shape = Shape(*qkv[:, 0].shape)

    def read_into(self, chunk: Chunk, floats: np.ndarray) -> None:
        rows = self.shape.input_rows(chunk)
        floats[:] = self.qkv[rows.start : rows.stop].ravel()


class Sink:
    def __init__(self, shape: Shape, in_order: bool = False) -> None:
        self.shape, self.in_order = shape, in_order
        self.out = np.full((shape.B * shape.N, shape.d), np.nan, np.float32)
        self.written: list[int] = []
        self._lock = threading.Lock()

    def write(self, chunk: Chunk, floats: np.ndarray) -> None:
        rows = self.shape.output_rows(chunk)
        time.sleep(0.002 if rows.start // 20 % 2 else 0)  # so that a second writer would overtake
        with self._lock:
            self.written += rows
            self.out[rows.start : rows.stop] = floats.reshape(len(rows), -1)


def run(
    qkv: np.ndarray = QKV,
    by: Cut = ONE,
    source: Source | None = None,
    sink: Sink | None = None,
    causal=False,
    rows: range | None = None,
    serial: bool = False,
    **watch,
) -> Sink:
    source = source or Source(qkv)
    sink = sink or Sink(source.shape)
    with CpuBackend(causal, threads=1) as backend:
        backend.overlap = Overlap(reading=3, computing=1, writing=2)
        stream(source, backend, sink, by, rows, serial, Watch(**{"timeline": Timeline()} | watch))
    return sink


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
@pytest.mark.parametrize(("qkv", "by"), [(QKV, ONE), (LONG, ROWS)], ids=["batches", "rows"])
def test_every_row_arrives_in_its_place_once(qkv, by, in_order, serial):
    sink = run(qkv, by, sink=Sink(Shape(*qkv[:, 0].shape), in_order), serial=serial)
    assert sorted(sink.written) == list(range(len(sink.out)))
    assert not in_order or sink.written == sorted(sink.written)
    assert_accurate(sink.out.reshape(qkv[:, 0].shape), qkv)


@pytest.mark.parametrize("serial", [False, True])
def test_serial_does_one_thing_after_another(serial):
    timeline = Timeline()
    run(timeline=timeline, serial=serial)
    spans = sorted(timeline.spans, key=lambda span: span.start)
    assert all(span.end <= following.start for span, following in itertools.pairwise(spans)) is serial


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("rows", [range(TILE), range(TILE, 2 * TILE), range(2 * TILE, 1000 + TILE), range(2000, 3000)])
def test_a_part_of_the_rows_is_computed_to_the_same_bits(causal, rows):
    part, whole = run(LONG, ROWS, rows=rows, causal=causal), run(LONG, ROWS._replace(rows=1000), causal=causal)
    assert sorted(part.written) == list(rows)
    np.testing.assert_array_equal(part.out[rows.start : rows.stop], whole.out[rows.start : rows.stop])


def test_a_range_of_whole_batches():
    assert sorted(run(by=ONE._replace(batches=3), rows=range(7 * 20, 18 * 20)).written) == list(range(7 * 20, 18 * 20))


@pytest.mark.parametrize(("qkv", "by"), [(QKV, ONE), (LONG, ROWS)], ids=["batches", "rows"])
def test_progress_counts_every_byte_once(qkv, by):
    told: list[int] = []
    run(qkv, by, progress=told.append)
    assert sum(told) == qkv.nbytes


@pytest.mark.parametrize("by", [ONE, Cut(False, 1, TILE)], ids=["batches", "rows"])
def test_arrays_are_a_source_and_a_sink(by):
    for qkv in (QKV, LONG):
        out = np.full(qkv[:, 0].shape, np.nan, np.float32)
        arrays = Arrays(*qkv.transpose(1, 0, 2, 3), out)
        run(source=arrays, sink=arrays, by=by._replace(rows=qkv.shape[2]) if by.whole else by)
        assert_accurate(out, qkv)


@pytest.mark.parametrize("stage", ["read_into", "write"])
@pytest.mark.parametrize("batch", [0, 17, 39])
def test_an_error_in_a_thread_is_raised(stage, batch):
    source, sink = Source(QKV), Sink(Shape(40, 20, 8))
    broken = source if stage == "read_into" else sink
    whole = getattr(broken, stage)

    def fail(chunk: Chunk, array: np.ndarray) -> None:
        if batch in chunk.batches:
            raise OSError("broken")
        whole(chunk, array)

    setattr(broken, stage, fail)
    with pytest.raises(OSError, match="broken"):
        run(source=source, sink=sink)
    assert batch * 20 not in sink.written


def test_memory_does_not_grow_with_the_number_of_chunks():
    """Of chunks, of what waits for them and of what is told of them, only as many are alive as there are slots."""
    sink, alive = Sink(Shape(2000, 1, 1)), []

    def write(chunk: Chunk, floats: np.ndarray) -> None:
        if chunk.batches.start in (500, 1999):
            alive.append(sum(isinstance(thing, Chunk | Future | Span) for thing in gc.get_objects()))

    sink.write = write
    gc.collect()
    run(random_qkv(2000, 1, 1), Cut(whole=True, batches=1, rows=1), sink=sink, timeline=Timeline(keeps=False))
    assert max(alive) < 200 and alive[1] < alive[0] + 100


@pytest.mark.parametrize("done", [False, True])
def test_an_answer_is_written_as_soon_as_it_is_known_to_be_there(monkeypatch, done):
    """Not only when as many others have been submitted as may be in computing at a time."""
    steps = list[str]()
    for name in ("submit", "wait"):
        step = getattr(CpuBackend, name)
        monkeypatch.setattr(CpuBackend, name, lambda *rest, step=step, name=name: steps.append(name) or step(*rest))
    monkeypatch.setattr(CpuBackend, "is_done", lambda self, slot: done)
    run()
    assert ("".join(name[0] for name in steps).startswith("swswsw")) is done


def test_the_backend_hears_of_each_chunk_on_the_thread_that_has_read_it(monkeypatch):
    heard = list[tuple[Chunk, bool]]()
    here = threading.current_thread()
    monkeypatch.setattr(
        CpuBackend, "filled", lambda self, slot: heard.append((slot.chunk, threading.current_thread() is here))
    )
    run()
    assert sorted(chunk.batches.start for chunk, _ in heard) == list(range(40))
    assert not any(is_here for _, is_here in heard)


def test_only_the_first_place_is_warned_of():
    spoilt = QKV.copy()
    spoilt[7, 2, 3, 4], spoilt[30] = np.inf, np.nan
    warnings: list[str] = []
    run(spoilt, warn=warnings.append)
    assert warnings == ["inf in V at (batch, row, column) = (7, 3, 4)"]


@pytest.mark.parametrize(
    ("chunk", "place"),
    [
        (Chunk("Q", range(1, 2), range(1, 3)), "inf in Q at (batch, row, column) = (1, 2, 3)"),
        (Chunk("KV", range(1, 2), range(4, 7)), "inf in V at (batch, row, column) = (1, 1, 3)"),
    ],
)
def test_the_place_in_a_chunk_of_rows(chunk, place):
    floats = np.zeros((len(chunk.rows), 5), np.float32)
    floats[1, 3] = np.inf
    assert first_nonfinite(floats.ravel(), Shape(2, 4, 5), chunk) == place


@pytest.mark.parametrize(
    ("values", "place"),
    [
        ([1, 2, 3], ""),
        ([3e38, 3e38, 3e38], ""),  # finite, though their sum is not
        ([np.inf, 2, -np.inf], "inf in Q at (batch, row, column) = (5, 0, 0)"),
        ([1, np.nan, np.inf], "nan in K at (batch, row, column) = (5, 0, 0)"),
        ([1, 2, -np.inf], "-inf in V at (batch, row, column) = (5, 0, 0)"),
    ],
)
def test_the_first_place_that_is_not_finite(values, place):
    shape = Shape(6, 1, 1)
    assert first_nonfinite(np.array(values, np.float32), shape, shape.whole(range(5, 6))) == place
