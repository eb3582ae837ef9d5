"""The picture of a trace: a row for each track, everything in its place, and one chunk that can be followed."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest
from support import ROOT, Finished, drawing, python

from bench.trace_picture import COLOURS, engines_table, picture
from flashcli.measure.plots import BLACK
from flashcli.run.report import write_trace
from flashcli.run.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def trace(tmp_path) -> Path:
    """Three chunks of 10 ms each: read one after another, computed together, the last one written."""
    timeline = Timeline()
    for index in range(3):
        name = f"batches {index * 5} to {index * 5 + 4}"
        timeline.add("input", 0.010 * index, 0.010 * index + 0.010, f"read {name}")
        timeline.add("kernel", 0.030 + index / 1e3, 0.040 + index / 1e3, f"kernel, {name}")
    timeline.add("output", 0.050, 0.060, "commit <now>")
    write_trace(str(tmp_path / "trace.json"), {1: timeline})
    return tmp_path / "trace.json"


@pytest.fixture
def drawn(trace):
    """``drawn(start, end)`` is the picture's axes."""
    events = json.loads(trace.read_text())["traceEvents"]
    return lambda start, end: picture(events, start, end, "three <chunks>").axes[0]


def bars(ax, colour: str) -> list[tuple[str, float, float]]:
    """The track, the beginning and the end of each bar of a colour, in milliseconds."""
    from matplotlib.colors import to_rgba

    tracks = [label.get_text() for label in ax.get_yticklabels()]
    return [
        (tracks[round(bar.get_y() + bar.get_height() / 2)], bar.get_x(), bar.get_x() + bar.get_width())
        for bar in ax.patches
        if bar.get_facecolor() == to_rgba(colour)
    ]


@drawing
def test_a_row_for_each_track_from_top_to_bottom_and_a_title(drawn):
    ax = drawn(0, 60)
    tracks = [label.get_text() for label in ax.get_yticklabels()]
    assert tracks == ["input 1", "kernel 1", "kernel 2", "kernel 3", "output 1"]
    assert ax.get_ylim()[0] > ax.get_ylim()[1]  # the first is on top
    assert ax.get_title("left") == "three <chunks>"
    assert {text.get_text() for text in ax.texts} == {"0–4", "5–9", "10–14", "commit <now>"}


@drawing
def test_several_processes_have_their_names_above_their_rows(tmp_path):
    some, others = Timeline(), Timeline()
    for timeline in (some, others):
        timeline.clock = 0.0
        timeline.add("host to device", 0.0, 0.010, "batches 0 to 4")
        timeline.add("kernel", 0.004, 0.006, "batches 0 to 4")
    write_trace(str(tmp_path / "trace.json"), {"1 stream": some, "2 streams": others})
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    labels = picture(events, 0, 10, "").axes[0].get_yticklabels()
    assert [label.get_text() for label in labels] == [
        *("1 stream", "host to device 1", "kernel 1"), *("2 streams", "host to device 1", "kernel 1")
    ]  # fmt: skip
    assert [label.get_fontweight() for label in labels] == ["bold", "normal", "normal"] * 2
    assert engines_table(events).splitlines()[1].split()[2:] == [
        *("10.0", "ms", "2.0", "ms", "0.0", "ms"), *("20%", "100%", "0%", "100%", "100%")
    ]  # fmt: skip


@drawing
def test_one_chunk_is_dark_in_every_row(drawn):
    ax = drawn(0, 60)
    assert "batches 0 to 4" in ax.get_title("right")
    assert [track for track, *_ in bars(ax, BLACK)] == ["input 1", "kernel 1"]
    assert len(bars(ax, COLOURS["input"])) == len(bars(ax, COLOURS["kernel"])) == 2


@drawing
def test_places_are_times(drawn):
    [(track, start, end)] = bars(drawn(0, 60), COLOURS["output"])
    assert (track, start, end) == ("output 1", pytest.approx(50), pytest.approx(60))


@drawing
def test_a_window_shows_what_is_in_it_and_cuts_the_rest(drawn):
    ax = drawn(15, 25)
    shown = sorted(bars(ax, COLOURS["input"]) + bars(ax, BLACK), key=lambda bar: bar[1])
    assert [(start, end) for _, start, end in shown] == [pytest.approx((15, 20)), pytest.approx((20, 25))]
    assert ax.get_xlim() == (15, 25) and not bars(ax, COLOURS["kernel"])


@drawing
def test_what_has_no_room_for_its_name_has_none(drawn):
    assert not drawn(0, 6000).texts


def draw(*arguments: object) -> Finished:
    return python("-m", "bench.trace_picture", *arguments)


@drawing
def test_it_is_drawn_to_a_file(trace, tmp_path):
    done = draw(trace, tmp_path / "out.svg", "--from", 5, "--to", 60, "--title", "a & b")
    assert (done.code, done.err) == (0, "")
    head, line = done.out.splitlines()
    assert head.split("  ")[-1] == "or reading" and line.split() == [
        *("1", "0.0", "ms", "12.0", "ms", "0.0", "ms"), *("0%",) * 5
    ]  # fmt: skip
    texts = [text.text for text in ElementTree.parse(tmp_path / "out.svg").getroot().iter(f"{SVG}text")]
    assert {"a & b", "kernel 2", "10–14", "commit <now>"} <= set(texts)


@drawing
def test_one_of_several_processes_is_drawn_by_its_name(trace, tmp_path):
    draw(trace, tmp_path / "x.svg", "--process", "2 streams").assert_error(2, "stands under such a name.")
    assert not (tmp_path / "x.svg").exists()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"traceEvents": []}', '{"traceEvents": [{"cat": "other"}]}'])
@drawing
def test_what_is_no_trace_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    draw(tmp_path / "x.json", tmp_path / "x.svg").assert_error(65, "x.json' is not a trace of a run.")
    assert not (tmp_path / "x.svg").exists()


def test_the_picture_in_the_guide_is_small_and_well_formed():
    svg = ROOT / "testcases" / "timeline.svg"
    assert ElementTree.parse(svg).getroot().tag == f"{SVG}svg"
    assert svg.stat().st_size < 60_000
