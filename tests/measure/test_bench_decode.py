"""flashcli bench-decode: what is timed, what is refused, and the picture of its record."""

from __future__ import annotations

import json

import pytest
from support import can_draw, drawing, flashcli

from flashcli.errors import BadInput
from flashcli.measure import decode_times, plots, records
from flashcli.measure.rows import Decoded, Failure

ON_CPU = ("bench-decode", "--backend", "cpu", "--runs", 1, "--threads", 1)


def test_a_shape_is_timed_on_the_cpu(tmp_path):
    options = (
        "--lengths",
        "40,7",
        "--queries",
        "3,1",
        "--page",
        8,
        "--type",
        "bfloat16",
        "--cache",
        "e5m2",
        "--layout",
        "nhd",
    )
    done = flashcli(*ON_CPU, "--shape", "2,4,2,32", *options, "--json", "-", cwd=tmp_path)
    assert done.code == 0, done.err
    [row] = json.loads(done.out)["rows"]
    assert (row["case"], row["B"], row["N"], row["d"]) == ("2x(40,7) 4/2 D=32, queries 3,1", 2, 40, 32)
    assert (row["layout"], row["bytes"], row["contender"]) == ("nhd", 2 * 47 * 2 * 32, "flashcli cpu")
    assert 0 < row["relative_l2"] < 8e-3 and row["runs"] == 1


def test_a_file_is_timed_as_it_is(tmp_path):
    made = flashcli(
        "generate", "x.safetensors", "--decode", "3,4,2,32", "--lengths", "9,0,50", "--query-tokens", 2, "--alibi",
        "--window", 8, "--page", 4, cwd=tmp_path,
    )  # fmt: skip
    assert made.code == 0, made.err
    done = flashcli(*ON_CPU, "x.safetensors", "--markdown", "table.md", cwd=tmp_path)
    assert done.code == 0, done.err
    [head, _, line] = (tmp_path / "table.md").read_text().splitlines()
    assert head == "| batch | MB | flashcli cpu |" and line.startswith("| x.safetensors | 0.00 |")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["x", "--page", 4], "--page goes with a shape"),
        (["--lengths", "5"], "--lengths goes with a shape"),
        (["x", "--layout", "nhd"], "--layout has no meaning with FILE"),
        (["x", "--shape", "1,2,1,32"], "--shape has no meaning with FILE"),
        (["--plot", "x.png"], "--plot draws the ladder"),
        (["--ladder", "--backend", "cpu"], "--ladder is for GPUs"),
        (["--kernel", "split", "--backend", "cpu"], "--kernel split is for GPUs"),
        (["--against", "torch", "--backend", "cpu"], "--against torch is for GPUs"),
        (["--rule", "--backend", "cpu"], "--rule is for GPUs"),
        (["--rule", "--ladder"], "--rule times V1 and V2 alone"),
        (["--rule", "--plot", "x.png"], "--rule times V1 and V2 alone"),
        (["--threads", 2], "--threads is for the cpu backend"),
    ],
    ids=str,
)
def test_what_has_no_meaning_is_refused_in_words(tmp_path, arguments, words):
    flashcli("bench-decode", *arguments, cwd=tmp_path).assert_error(2, words)


def test_what_is_no_usage_is_told_with_it(tmp_path):
    for arguments, words in (
        (["--shape", "1,2,3"], "is not four numbers"),
        (["--layout", "qkv"], "'qkv' is not one of"),
        (["--kernel", "mma"], "'mma' is not one of"),
    ):
        done = flashcli("bench-decode", *arguments, cwd=tmp_path)
        assert done.code == 2 and words in done.err


def test_several_shapes_are_timed_one_after_the_other():
    done = flashcli(*ON_CPU, "--shape", "1,2,1,32", "--shape", "2,2,1,32", "--lengths", "9", "--json", "-")
    assert [row["case"] for row in json.loads(done.out)["rows"]] == ["1x(9) 2/1 D=32", "2x(9) 2/1 D=32"]


def test_files_that_are_none_are_refused(tmp_path):
    flashcli(*ON_CPU, "nonesuch", cwd=tmp_path).assert_error(65, "no such file")
    (tmp_path / "x").write_text("no tensors")
    flashcli(*ON_CPU, "x", cwd=tmp_path).assert_error(65, "not a whole .safetensors file")


def test_a_wrong_answer_is_told_and_not_timed(monkeypatch):
    from flashcli.files.decode.cases import Case, make

    asked = make(Case(1, 2, 1, 32, "9", query_type="float32"))
    monkeypatch.setattr(decode_times, "wanted_of", lambda asked, s: asked.query[s] * 0 + 1)
    row = decode_times.on_cpu("x", asked, 1, 1)
    assert isinstance(row, Failure) and row.is_wrong and "the answer is wrong: relative L2" in row.error


def test_the_rule_of_vllm_is_held_against_times():
    rows = [
        timed("short", "read", 1e-6, H=8, N=512), timed("short", "paged_v1", 2e-5, H=8, N=512),
        timed("short", "paged_v2", 3e-5, H=8, N=512), timed("long", "paged_v1", 2e-5, H=8, N=513),
        timed("long", "paged_v2", 3e-5, H=8, N=513), timed("too long", "paged_v2", 1e-5, H=8),
    ]  # fmt: skip
    [(_, lines)] = records.rule_tables(rows)
    assert lines[1:] == [
        ["short", "8", "20.0", "30.0", "paged_v1", "1.00"], ["long", "8", "20.0", "30.0", "paged_v2", "1.50"]
    ]  # fmt: skip


# the picture


def timed(case: str, contender: str, seconds: float, **more) -> Decoded:
    shape = {"B": 1, "N": 2, "d": 32} | more
    return Decoded(
        case=case, contender=contender, layout="hnd", bytes=1, seconds=seconds, min=1, max=1, runs=1, **shape
    )


@drawing
def test_the_picture_has_bars_over_the_floor_of_each_batch(tmp_path):
    rows = [
        timed("one", "read", 1e-5), timed("one", "paged_v1", 5e-5), timed("one", "tensor", 2e-5),
        timed("two", "tensor", 2e-5),
    ]  # fmt: skip
    record = records.Record({"gpu": "GPU 1"}, rows)
    plots.draw_decode(record, str(tmp_path / "x.svg"))
    text = (tmp_path / "x.svg").read_text()
    assert all(shown in text for shown in ("GPU 1", "one", "10 us", "paged_v1", "tensor")) and "two" not in text
    record.rows = rows[-1:]
    with pytest.raises(BadInput, match="nothing to draw"):
        plots.draw_decode(record, str(tmp_path / "y.svg"))


# on a GPU


@pytest.mark.gpu
def test_the_ladder_is_timed_on_a_gpu(gpu, tmp_path):
    torch = pytest.importorskip("torch", reason="PyTorch is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    options = ("--lengths", "300", "--ladder", "--runs", 2, "--against", "torch", "--json", "x.json")
    drawn = ("--plot", "x.svg") if can_draw() else ()
    done = flashcli("bench-decode", "--shape", "3,8,2,64", *options, *drawn, cwd=tmp_path)
    assert done.code == 0, done.err
    names = [row["contender"] for row in json.loads((tmp_path / "x.json").read_text())["rows"]]
    assert names[:6] == ["read", "paged_v1", "paged_v2", "grouped", "split", "tensor"] and "PyTorch flash" in names
    flashcli("generate", "x", "--decode", "3,8,2,64", "--lengths", "9,0,700", "--query-tokens", 3, "--alibi", "--fp8",
             "e4m3", cwd=tmp_path)  # fmt: skip
    done = flashcli("bench-decode", "x", "--kernel", "all", "--runs", 2, "--json", "-", cwd=tmp_path)
    assert done.code == 0, done.err
    unchecked = [row["contender"] for row in json.loads(done.out)["rows"][1:] if "relative_l2" not in row]
    assert unchecked == ["gather"]  # which takes ragged queries only
