"""The pictures of the ladder: what is asked before the work, what is in them, and that names do not overlap."""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import pytest
from click.testing import CliRunner
from support import ROOT, Finished, drawing, flashcli, python

from bench import ladder_plot
from flashcli.commands.bench import command
from flashcli.errors import BackendUnavailable
from flashcli.kernels.attention import KERNELS
from flashcli.measure import machine, plots
from flashcli.measure.records import Record
from flashcli.measure.rows import Profiled, Row, Rung, Skipped

LADDER = ("bench", "--ladder", "--shape", "2,20,8", "--plot")
RECORDS = ROOT / "cuda" / "records"


def row(contender: str, tflops: float, case: str = "t10", B: int = 10, N: int = 2048, d: int = 64) -> Rung:
    seconds = 4 * B * N * N * d / tflops / 1e12
    times = {"seconds": seconds, "min": seconds, "max": seconds, "runs": 20, "tflops": tflops, "commands": 2}
    phases = {"total": 0.4 + seconds, "input": 0.01, "computation": 0.3 + seconds, "output": 0.02}
    accuracy = {"relative_l2": 1e-6, "max_abs": 1e-6}
    return Rung(case=case, B=B, N=N, d=d, causal=False, contender=contender, **accuracy, **times, **phases)


def record(*rows: Row) -> Record:
    return Record({"gpu": "GPU 1"}, list(rows), {"fp32": 51e12, "fp16": 769e12, "bytes": 4.25e12})


def counted(row: Row, launches: int, dram_bytes: float) -> Profiled:
    about = vars(Row.about(row.case, row.shape, row.contender))
    return Profiled(**about, function="attention", launches=launches, dram_bytes=dram_bytes)


ROWS = [row("register_tiled", 23.0), row("wgmma", 157.0), row("wgmma", 233.0, "t30", 2, 32768)]
SKIPPED = Skipped(case="t10", B=10, N=2048, d=64, contender="mma", skipped="it needs sm_80")


# Before the work


def test_a_plot_is_of_the_ladder():
    flashcli("bench", "--shape", "2,20,8", "--plot", "x.png").assert_error(2, "--plot draws the ladder.")


def test_without_matplotlib_nothing_is_timed(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    monkeypatch.setattr(machine, "gpu_circumstances", None)
    done = CliRunner().invoke(command, [*LADDER[1:], "x.png"])
    assert type(done.exception) is BackendUnavailable
    assert str(done.exception).startswith("Matplotlib, which draws, cannot be imported: ")
    assert done.exception.hint == "pip install matplotlib."


@drawing
def test_what_cannot_be_drawn_to_is_told_before_the_timing(no_pycuda, tmp_path):
    flashcli(*LADDER, tmp_path / "x.jpg").assert_error(2, "x.jpg' is not the name of a picture.")
    flashcli(*LADDER, tmp_path / "missing" / "x.png").assert_error(73, "missing")
    (tmp_path / "x-roofline.png").mkdir()
    flashcli(*LADDER, tmp_path / "x.png").assert_error(73, "x-roofline.png", "folder")


# The pictures


@drawing
def test_both_pictures_are_drawn(fake_gpu, tmp_path):
    done = flashcli(*LADDER, tmp_path / "x.png", "--kernel", "mma")
    assert done.code == 0, done.err
    assert [(tmp_path / name).read_bytes()[:4] for name in ("x.png", "x-roofline.png")] == [b"\x89PNG"] * 2


@drawing
def test_they_are_drawn_from_records(tmp_path):
    (tmp_path / "ladder.json").write_text(json.dumps(record(*ROWS, SKIPPED).written()))
    launches = Record({}, [counted(ROWS[0], 1, 1e8), counted(ROWS[0], 1, 2e8)])
    (tmp_path / "profile.json").write_text(json.dumps(launches.written()))
    done = python("-m", "bench.ladder_plot", "ladder.json", "x.svg", "--profile", "profile.json", cwd=tmp_path)
    assert (done.code, done.out + done.err) == (0, "")
    assert (tmp_path / "x.svg").stat().st_size > 10_000 < (tmp_path / "x-roofline.svg").stat().st_size


def draw(folder, *arguments) -> Finished:
    return python("-m", "bench.ladder_plot", arguments[0], folder / "x.png", *arguments[1:])


@pytest.mark.parametrize("text", ["", "\xff", "[]", "{}", '{"rows": []}', '{"rows": [1], "circumstances": {}}'])
@drawing
def test_what_is_no_record_is_refused(tmp_path, text):
    (tmp_path / "x.json").write_text(text, encoding="latin-1")
    draw(tmp_path, tmp_path / "x.json").assert_error(65, "is not a record of `flashcli bench --ladder`.")
    assert not (tmp_path / "x.png").exists()


@pytest.mark.parametrize("name", ["h200.json", "profile.json"])
@drawing
def test_records_of_other_commands_are_refused(tmp_path, name):
    draw(tmp_path, RECORDS / name).assert_error(65, f"{name}' is not a record of `flashcli bench --ladder`.")
    assert not (tmp_path / "x.png").exists()


@drawing
def test_the_bytes_are_only_in_a_profile(tmp_path):
    done = draw(tmp_path, RECORDS / "ladder.json", "--profile", RECORDS / "ladder.json")
    done.assert_error(65, "ladder.json' is not a record of `flashcli profile`.")


@drawing
def test_a_ladder_that_nobody_climbed_is_not_drawn(tmp_path):
    with pytest.raises(plots.BadInput, match="no rung was timed"):
        plots.draw_ladder(record(SKIPPED), str(tmp_path / "x.png"))


@drawing
def test_bars_are_those_of_the_record():
    figure = plots._bars([ROWS[:2], ROWS[2:]], "GPU 1")
    first, second = figure.axes
    assert [ax.get_title("left") for ax in figure.axes] == ["t10 (10, 2048, 64)", "t30 (2, 32768, 64)"]
    heights = {bars.get_label(): [bar.get_height() for bar in bars] for bars in first.containers}
    assert heights == {
        "total": [x.total for x in ROWS[:2]],
        "computing": [x.computation for x in ROWS[:2]],
        "input and output": pytest.approx([0.03] * 2),
    }
    assert [text.get_text() for text in second.get_xticklabels()] == ["wgmma"]
    assert second.lines[0].get_ydata().tolist() == [ROWS[2].seconds]


def points(figure) -> dict[str, list[tuple[float, float]]]:
    lines = [line for line in figure.axes[0].lines if line.get_label() in plots.UNITS]
    return {line.get_label(): list(zip(*line.get_data(), strict=True)) for line in lines}


@drawing
def test_every_rung_is_on_the_roofline_by_what_it_multiplies_with(monkeypatch):
    monkeypatch.setitem(KERNELS, "plain_c", replace(KERNELS["mma"], name="plain_c", on_host=True))
    figure = plots._roofline([[*ROWS[:2], row("plain_c", 0.01)]], "GPU 1", record().ceilings, {})
    intensity = pytest.approx(2048 / 4)
    host, ffma, tensor_cores = plots.UNITS
    assert points(figure) == {
        host: [(intensity, 0.01)], ffma: [(intensity, 23.0)], tensor_cores: [(intensity, 157.0)]
    }  # fmt: skip
    roofs = [max(line.get_ydata()) for line in figure.axes[0].lines if line.get_label() not in plots.UNITS]
    assert roofs == pytest.approx([51, 769 / 3])


@drawing
@pytest.mark.parametrize(("launches", "intensity"), [(1, 4 * 10 * 2048**2 * 64 / 3e8), (2, 2048 / 4)])
def test_bytes_are_those_that_were_counted_where_each_function_is_launched_once(launches, intensity):
    moved = ladder_plot.dram_bytes([counted(ROWS[0], launches, 1e8), counted(ROWS[0], 1, 2e8)])
    figure = plots._roofline([ROWS[:2]], "GPU 1", {}, moved)
    _, ffma, tensor_cores = plots.UNITS
    assert points(figure)[ffma] == [(pytest.approx(intensity), 23.0)]
    assert points(figure)[tensor_cores] == [(pytest.approx(512), 157.0)]


@drawing
def test_the_caption_says_which_bytes_and_whether_there_are_roofs():
    measured = [counted(row, 1, 1e8) for row in ROWS]
    many = [counted(row, 2, 1e8) for row in ROWS]
    once, dram = "once in and O once out", "a launch with empty caches moves through DRAM, as counted"
    for known, wanted in [([], {once}), (many, {once}), (measured[:1], {once, dram}), (measured, {dram})]:
        caption = ladder_plot.caption(ROWS, ladder_plot.dram_bytes(known))
        assert {part for part in (once, dram) if part in caption} == wanted
    without = plots._roofline([ROWS[:2]], "GPU 1", {}, {}, "such bytes")
    [below] = without.legends
    assert "over such bytes. No roofs" in below.get_title().get_text().replace("\n", " ")


@pytest.mark.parametrize("heights", [[], [0.5], [0.1, 0.11, 0.12], [0.95, 0.96, 0.97], [0.0, 0.5, 0.5, 1.0], [1.2]])
def test_names_are_apart_and_in_order(heights):
    moved = plots.spread(heights, 0.1)
    assert all(high - low > 0.0999 for low, high in itertools.pairwise(moved))
    assert all(0 <= height <= 1 for height in moved)
