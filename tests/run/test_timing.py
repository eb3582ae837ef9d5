from __future__ import annotations

import json

import pytest

from flashcli.asked.shape import tflops
from flashcli.run.report import report, seconds_since_process_start, write_trace
from flashcli.run.timeline import WAITING, Timeline


def timeline(*spans: tuple[float, float]) -> Timeline:
    made = Timeline()
    for start, end in spans:
        made.add("input", start, end)
    return made


@pytest.mark.parametrize(
    ("spans", "seconds"),
    [
        ([], 0),
        ([(1, 3)], 2),
        ([(1, 3), (5, 6)], 3),
        ([(1, 3), (2, 4)], 3),
        ([(2, 4), (1, 9), (3, 5)], 8),
        ([(1, 2), (2, 3)], 2),
    ],
)
def test_a_phase_takes_as_long_as_it_was_active(spans, seconds):
    assert timeline(*spans).active("input") == seconds


@pytest.mark.parametrize("count", [1, 10 * WAITING])
def test_as_many_spans_as_there_may_be_are_summed_without_keeping_them(count):
    made = Timeline(keeps=False)
    for start in range(count):  # each overlaps the one before it, which ends after it
        made.add("input", start - 0.5, start + 0.25)
        made.add("input", start - 0.25, start)
    assert made.active("input") == 0.75 * count and made.extent() == count - 0.25
    assert not made.spans and len(made._activities["input"]._waiting) <= WAITING


def test_what_is_within_another_counts_in_both():
    whole = Timeline()
    for start in (1, 2):
        part = Timeline(within=whole)
        part.add("input", start, start + 2)
        assert part.active("input") == 2
    assert whole.active("input") == 3 and len(whole.spans) == 2


def test_phases_are_told_apart():
    made = timeline((1, 3))
    made.add("output", 2, 9)
    assert (made.active("input"), made.active("output"), made.active("kernel")) == (2, 7, 0)


def test_a_span_that_ends_in_an_error_counts():
    made = Timeline()
    with pytest.raises(KeyError), made.measure("input"):
        raise KeyError
    assert len(made.spans) == 1


def test_a_trace_shows_overlapping_spans_side_by_side(tmp_path):
    write_trace(str(tmp_path / "trace.json"), {1: timeline((1.0, 3.0), (2.0, 4.0), (3.0, 5.0))})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [(event["ts"], event["dur"], event["tid"]) for event in events] == [
        (0, 2e6, "input 1"),
        (1e6, 2e6, "input 2"),
        (2e6, 2e6, "input 1"),
    ]


def test_time_since_the_process_began_goes_on():
    first = seconds_since_process_start()
    assert 0 < first <= seconds_since_process_start()


def test_tflops_counts_two_matrix_products():
    assert tflops(10, 2048, 64, 1e-3) == pytest.approx(4 * 10 * 2048**2 * 64 / 1e9)


def test_the_report():
    record = {
        "B": 10, "N": 2048, "d": 64, "total": 0.0614, "input": 0.012, "computation": 0.043, "output": 0.0056,
        "description": "cuda, X", "kernel_seconds": 0.00375, "tflops": 28.63,
    }  # fmt: skip
    assert report(record) == (
        "(B, N, d): (10, 2048, 64)\nTotal Time: 0.061 seconds\nInput Time: 0.012 seconds\n"
        "Computation Time: 0.043 seconds\nOutput Time: 0.006 seconds\nbackend: cuda, X\n"
        "kernel: 3.750 ms, 28.6 TFLOP/s"
    )
