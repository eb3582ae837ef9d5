"""The picture of a trace: well-formed, with a row for each track, and everything in its place."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from xml.etree import ElementTree

import pytest
from support import ROOT, environment

from flashcli.measure.trace_picture import COLOURS, DARK, LEFT, RIGHT, WIDTH, picture
from flashcli.run.report import write_trace
from flashcli.timeline import Timeline

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def events(tmp_path):
    """Three chunks of 10 ms each: read one after another, computed together, the last one written."""
    timeline = Timeline()
    for index in range(3):
        name = f"batches {index * 5} to {index * 5 + 4}"
        timeline.add("input", 0.010 * index, 0.010 * index + 0.010, f"read {name}")
        timeline.add("kernel", 0.030 + index / 1e3, 0.040 + index / 1e3, f"kernel, {name}")
    timeline.add("output", 0.050, 0.060, "commit <now>")
    write_trace(str(tmp_path / "trace.json"), {1: timeline})
    return json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def bars(svg: str, colour: str) -> list[tuple[float, float]]:
    """Left edges and widths."""
    paths = [path.get("d") for path in ElementTree.fromstring(svg).iter(f"{SVG}path") if path.get("fill") == colour]
    return [(float(left), float(width)) for left, width in re.findall(r"M([\d.]+) \d+h([\d.]+)", "".join(paths))]


def texts(svg: str) -> list[str]:
    return [text.text for text in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def test_a_row_for_each_track_and_a_title(events):
    found = texts(picture(events, 0, 60, "three <chunks>"))
    assert found[0] == "three <chunks>"
    assert [text for text in found if re.fullmatch(r"[a-z ]+ \d", text)] == [
        "input 1", "kernel 1", "kernel 2", "kernel 3", "output 1"
    ]  # fmt: skip
    assert {"0 ms", "30 ms", "60 ms", "0–4", "10–14", "commit <now>"} <= set(found)


def test_one_chunk_is_dark_in_every_row(events):
    svg = picture(events, 0, 60, "")
    assert "batches 0 to 4" in texts(svg)[1]
    assert len(bars(svg, DARK)) == 2
    assert len(bars(svg, COLOURS["input"])) == len(bars(svg, COLOURS["kernel"])) == 2


def test_places_are_times(events):
    scale = (WIDTH - LEFT - RIGHT) / 60
    svg = picture(events, 0, 60, "")
    assert bars(svg, COLOURS["output"]) == [pytest.approx((LEFT + 50 * scale, 10 * scale), abs=0.1)]


def test_a_window_shows_what_is_in_it_and_cuts_the_rest(events):
    svg = picture(events, 15, 25, "")
    assert len(bars(svg, COLOURS["input"])) + len(bars(svg, DARK)) == 2
    assert sum(width for _, width in bars(svg, COLOURS["input"]) + bars(svg, DARK)) == pytest.approx(
        WIDTH - LEFT - RIGHT, abs=0.2
    )
    assert not bars(svg, COLOURS["kernel"])


def test_the_command(events, tmp_path):
    svg = tmp_path / "out.svg"
    arguments = [tmp_path / "trace.json", svg, "--from", "5", "--to", "60"]
    subprocess.run([sys.executable, "-m", "flashcli.measure.trace_picture", *arguments], env=environment(), check=True)
    assert svg.read_text() == picture(events, 5, 60, "flashcli run")


def test_the_picture_in_the_readme_is_small_and_well_formed():
    svg = ROOT / "testcases" / "timeline.svg"
    assert ElementTree.parse(svg).getroot().tag == f"{SVG}svg"
    assert svg.stat().st_size < 60_000
