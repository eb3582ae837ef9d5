"""From source to sink in chunks: everything arrives in its place, once, whatever the speed of each stage."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
from support import random_qkv
from tolerances import assert_accurate

from flashcli import stream as module
from flashcli.backends.cpu import CpuBackend
from flashcli.fileformat import Shape
from flashcli.stream import first_nonfinite, stream
from flashcli.timing import Timeline

QKV = random_qkv(40, 20, 8)


class Source:
    shape = Shape(40, 20, 8)

    def read_into(self, batches: range, qkv: np.ndarray) -> None:
        qkv[:] = QKV[batches.start : batches.stop]


class Sink:
    def __init__(self, in_order: bool = False) -> None:
        self.in_order = in_order
        self.out = np.full((40, 20, 8), np.nan, np.float32)
        self.written: list[int] = []
        self._lock = threading.Lock()

    def write(self, batches: range, values: np.ndarray) -> None:
        time.sleep(0.002 if batches.start % 2 else 0)  # so that a second writer would overtake
        with self._lock:
            self.written += batches
            self.out[batches.start : batches.stop] = values


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch):
    """Chunks of one batch: 40 of them go through 6 slots."""
    monkeypatch.setattr(module, "CHUNK_BYTES", QKV[0].nbytes)


def run(sink: Sink, source: Source | None = None, **options: object) -> None:
    with CpuBackend(threads=1) as backend:
        stream(source or Source(), backend, sink, Timeline(), **options)


@pytest.mark.parametrize("serial", [False, True])
@pytest.mark.parametrize("in_order", [False, True])
def test_every_batch_arrives_in_its_place_once(in_order, serial):
    sink = Sink(in_order)
    run(sink, serial=serial)
    assert sorted(sink.written) == list(range(40))
    assert_accurate(sink.out, QKV)


def test_a_sink_that_cannot_seek_gets_them_in_order():
    sink = Sink(in_order=True)
    run(sink)
    assert sink.written == list(range(40))


def test_progress_counts_every_batch_once():
    told: list[int] = []
    run(Sink(), progress=told.append)
    assert sum(told) == 40


@pytest.mark.parametrize("stage", ["read_into", "write"])
@pytest.mark.parametrize("batch", [0, 17, 39])
def test_an_error_in_a_thread_is_raised(stage, batch):
    source, sink = Source(), Sink()
    broken = source if stage == "read_into" else sink
    whole = getattr(broken, stage)

    def fail(batches: range, array: np.ndarray) -> None:
        if batch in batches:
            raise OSError("broken")
        whole(batches, array)

    setattr(broken, stage, fail)
    with pytest.raises(OSError, match="broken"):
        run(sink, source)
    assert batch not in sink.written


def test_only_the_first_place_is_warned_of(monkeypatch):
    spoilt = QKV.copy()
    spoilt[7, 2, 3, 4], spoilt[30] = np.inf, np.nan
    monkeypatch.setitem(globals(), "QKV", spoilt)
    warnings: list[str] = []
    run(Sink(), warn=warnings.append)
    assert warnings == ["inf in V at (batch, row, column) = (7, 3, 4)"]


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
    assert first_nonfinite(np.array(values, np.float32).reshape(1, 3, 1, 1), first_batch=5) == place
