"""``flashcli streams`` on a PyCUDA that computes in NumPy: each way, its row, its trace; and what is refused."""

from __future__ import annotations

import json

import pytest
from click.testing import CliRunner
from support import Finished, drawing, flashcli, random_qkv, write_input

from flashcli.commands.streams import command
from flashcli.errors import OutOfMemory
from flashcli.gpu import memory
from flashcli.measure import streams
from flashcli.measure.plots import draw_streams
from flashcli.measure.records import Record, streams_tables
from flashcli.measure.rows import Failure, Streamed
from flashcli.measure.streams import CONNECTIONS, Queued, Way, ways
from flashcli.run.timeline import ENGINES

pytestmark = pytest.mark.usefixtures("fake_gpu")


@pytest.fixture
def path(monkeypatch, tmp_path) -> str:
    """A file of six chunks, of which the last is smaller."""
    monkeypatch.setattr(streams, "CHUNK_BYTES", 2 * 3 * 20 * 8 * 4)
    monkeypatch.setenv(CONNECTIONS, "8")
    return str(write_input(tmp_path / "x.in", random_qkv(11, 20, 8)))


@pytest.fixture
def pinnable(monkeypatch) -> list[bool]:
    """Memory that can be pinned; what is pinned and unpinned is noted."""
    noted: list[bool] = []
    monkeypatch.setattr(memory, "lock", lambda array: noted.append(True) or True)
    monkeypatch.setattr(memory, "unlock", lambda array: noted.append(False))
    return noted


def measured(path: str, *some: Way) -> list:
    return list(streams.measured("x", path, list(some), None, runs=2))


def test_each_way_comes_once_and_pinned_ones_last():
    assert [str(way) for way in ways((0, 1, 2), ("pinned", "pageable"), ("depth", "breadth"))] == [
        *("default stream, pageable", "1 stream, pageable"),
        *("2 streams, pageable, depth first", "2 streams, pageable, breadth first"),
        *("default stream, pinned", "1 stream, pinned"),
        *("2 streams, pinned, depth first", "2 streams, pinned, breadth first"),
    ]


@pytest.mark.parametrize("lazy", [False, True])
def test_a_row_for_each_way(path, pinnable, fake_gpu, monkeypatch, lazy):
    monkeypatch.setattr(fake_gpu, "laziness", lambda number: lazy)
    some = ways((0, 1, 4), ("pageable", "pinned"), ("depth", "breadth"))
    found = measured(path, *some)
    assert [type(row) for row, _ in found] == [Streamed] * 8
    assert [row.contender for row, _ in found] == [f"{way}, 8 connections" for way in some]
    assert {(row.chunks, row.runs, row.connections) for row, _ in found} == {(6, 2, 8)}
    for row, timeline in found:
        assert 0 < row.min <= row.seconds <= row.max and row.queued <= row.max
        assert [len([span for span in timeline.spans if span.phase == engine]) for engine in ENGINES] == [6, 6, 6]
        assert all(timeline.active(engine) > 0 for engine in ENGINES)
        assert [row.copies_in, row.kernels, row.copies_out] == pytest.approx([*map(timeline.active, ENGINES)])
    assert pinnable == [True, True, False, False]  # the input and the answer, once


def test_the_order_in_which_things_are_queued(path, fake_gpu):
    def order(way: Way) -> str:
        """The operations of the first three chunks, each a letter and the number of its chunk."""
        with streams.InputFile(path) as source, streams.Session() as session:
            experiment = streams.Experiment(session, None, source.read(range(11)), 2)
            queued = experiment._queue(way, lambda stream: stream)
            assert [stream for *_, stream in queued] == [experiment._stream(way, chunk) for _, chunk, *_ in queued]
        return " ".join(f"{'iko'[ENGINES.index(engine)]}{chunk}" for engine, chunk, *_ in queued[:9])

    assert order(Way(2, "pageable", "depth")) == "i0 k0 o0 i1 k1 o1 i2 k2 o2"
    assert order(Way(2, "pageable", "breadth")) == "i0 i1 k0 k1 o0 o1 i2 i3 k2"
    assert order(Way(0, "pageable", "depth")) == "i0 k0 o0 i1 k1 o1 i2 k2 o2"


def test_an_operation_begins_when_it_is_queued_and_its_stream_and_its_engine_are_free():
    copy_in, kernel, copy_out = ENGINES
    operations = [
        Queued(copy_in, 0, 0, 0.0, 2.0),
        Queued(copy_in, 1, 1, 0.1, 4.0),  # waits for the engine
        Queued(kernel, 0, 0, 0.2, 3.0),  # for its stream
        Queued(kernel, 1, 1, 6.0, 6.5),  # for the host
        Queued(copy_out, 0, 0, 0.3, 5.0),
    ]
    spans = streams.under_way(operations, ["one", "two"]).spans
    assert [(span.phase, span.start, span.end, span.about) for span in spans] == [
        (copy_in, 0.0, 2.0, "one"),
        (kernel, 2.0, 3.0, "one"),
        (copy_in, 2.0, 4.0, "two"),
        (copy_out, 3.0, 5.0, "one"),
        (kernel, 6.0, 6.5, "two"),
    ]


def test_a_way_that_mixes_chunks_up_is_not_timed(path, monkeypatch):
    right = streams.Experiment._copy_out

    def wrong(self, batches, stream, workspace):
        right(self, range(0, len(batches)) if stream and batches.start == 4 else batches, stream, workspace)

    monkeypatch.setattr(streams.Experiment, "_copy_out", wrong)
    (good, _), (bad, timeline) = measured(path, Way(0, "pageable", "depth"), Way(2, "pageable", "depth"))
    assert isinstance(good, Streamed) and isinstance(bad, Failure) and timeline is None
    assert bad.error == "wrong: another answer than that of the default stream"
    [(_, lines)] = streams_tables([good, bad])
    assert lines[2][:2] == [bad.contender, bad.error]


def test_what_overlapped_is_the_time_saved_of_what_could_be():
    figures = {"copies_in": 6.0, "kernels": 1.0, "copies_out": 3.0, "copies_in_beside": 3.0, "kernels_beside": 1.0}
    figures |= {"copies_out_beside": 1.5, "hidden": 0.625, "traced": 8.0, "queued": 2.0, "min": 1.0, "max": 9.0}

    def row(way: Way, seconds: float) -> Streamed:
        about = {"case": "x", "B": 1, "N": 1, "d": 1, "contender": str(way), "connections": 1, "chunks": 9, "runs": 2}
        return Streamed(**about, **way._asdict(), **figures, seconds=seconds)

    rows = [
        row(Way(0, "pinned", "depth"), 10.0),
        row(Way(2, "pinned", "breadth"), 7.0),
        row(Way(1, "pageable", "depth"), 9.0),
    ]
    [(_, [_, *lines])] = streams_tables(rows)
    assert [line[6] for line in lines] == ["", "75%", ""]
    assert lines[1] == [
        *("2", "pinned", "breadth first", "1", "7000.0", "2000.0", "75%", "8000.0"),
        *("6000.0 / 1000.0 / 3000.0", "50% / 100% / 50%", "62%"),
    ]


def test_memory_that_cannot_be_pinned(path):
    with pytest.raises(OutOfMemory, match="of the host's memory cannot be pinned"):
        measured(path, Way(1, "pinned", "depth"))


# The command


def run(path: str, *options: object) -> Finished:
    return flashcli("streams", path, "--memory", "pageable", "--streams", 0, "--streams", 2, "--runs", 1, *options)


def test_each_number_of_connections_has_a_process_and_the_trace_has_all(path, tmp_path):
    done = run(path, "--json", "-", "--trace", tmp_path / "trace.json", "--connections", 1, "--connections", 4)
    rows = json.loads(done.out)["rows"]
    assert done.code == 0 and [(row["streams"], row["order"], row["connections"]) for row in rows] == [
        *((0, "depth", 1), (2, "depth", 1), (2, "breadth", 1)),
        *((0, "depth", 4), (2, "depth", 4), (2, "breadth", 4)),
    ]
    assert "2 streams, pageable, breadth first, 4 connections: " in done.err
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {row["contender"] for row in rows}
    assert {event["cat"] for event in events} == set(ENGINES)


def test_the_table(path):
    done = run(path, "--connections", 8)
    head, *lines = done.out.splitlines()[1:]
    assert head.split()[:4] == ["streams", "memory", "order", "connections"]
    assert [line.split()[:4] for line in lines] == [
        ["default", "pageable", "8", lines[0].split()[3]], ["2", "pageable", "depth", "first"],
        ["2", "pageable", "breadth", "first"],
    ]  # fmt: skip


def test_a_process_that_fails_has_told_why(path, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_FAILS", "launch")
    done = run(path, "--connections", 4)
    assert done.code == 70 and done.err.startswith("Error: kernel mma failed on Fake GPU: fake failure of launch.\n")
    assert done.err.count("Error: ") == 1


def test_without_a_gpu(path, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_COUNT", "0")
    run(path).assert_error(69, "the driver finds no GPU.")


def test_what_is_no_input(tmp_path):
    flashcli("streams", tmp_path / "none.in").assert_error(65, "cannot read")


def test_a_wrong_answer_is_an_exit_code(path, monkeypatch):
    failure = Failure(case="x", B=1, N=1, d=1, contender="2 streams", error="wrong: ..")
    monkeypatch.setattr(streams, "measured", lambda *rest: iter([(failure, None)]))
    done = CliRunner().invoke(command, [path, "--connections", "8"])
    assert done.exit_code == 1 and "2 streams" in done.output


@drawing
def test_the_picture_has_a_line_for_each_order_and_number_of_connections(path, pinnable, monkeypatch, tmp_path):
    drawn = []
    monkeypatch.setattr("flashcli.measure.plots.save_picture", lambda figure, path: drawn.append(figure))
    rows = [row for row, _ in measured(path, *ways((0, 2, 3), ("pageable", "pinned"), ("depth", "breadth")))]
    draw_streams(Record({"gpu": "GPU 1"}, rows), "x.png")
    [figure] = drawn
    assert [ax.get_title() for ax in figure.axes] == ["pinned memory", "pageable memory"]
    for ax in figure.axes:
        assert [label.get_text() for label in ax.get_xticklabels()] == ["default", "2", "3"]
        depth, breadth, busiest = ax.get_lines()
        assert [line.get_label() for line in (depth, breadth)] == [
            "depth first, 8 connections",
            "breadth first, 8 connections",
        ][::-1]
        assert len(depth.get_ydata()) == len(breadth.get_ydata()) == 3 and busiest.get_label() == "the busiest engine"
