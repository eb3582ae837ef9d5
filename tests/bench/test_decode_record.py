"""The record of paged decode: its rows, and the table made of them."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from bench import decode, ragged, rows, views
from bench.decode_check import SMALL, Verdict, judged
from flashcli.errors import UsageError
from flashcli.files.decode.cases import lengths, outlined
from flashcli.kernels.decode import CEILING, build_of
from flashcli.measure.decode_shapes import SHAPES
from flashcli.measure.rows import Decoded, Skipped

ABOUT = {"case": "8x4096", "B": 8, "N": 4096, "d": 128}
TIMED = {"layout": "hnd", "bytes": 134217728, "min": 3.6e-5, "max": 4.2e-5, "runs": 20}
ROWS = [
    Decoded(**ABOUT, contender="read", seconds=3.7e-5, **TIMED),
    Skipped(**ABOUT, contender="paged_v1", skipped="too long"),
    Decoded(**ABOUT, contender="tensor", seconds=4.0e-5, relative_l2=2e-4, **TIMED),
]


def test_rows_are_read_as_they_were_written():
    assert [rows.read(row.written()) for row in ROWS] == ROWS


def test_the_table_has_a_column_for_each_that_was_timed():
    assert views.VIEWS["decode"](ROWS) == (
        "| batch | MB | read | tensor |\n| --- | --- | --- | --- |\n| 8x4096 | 134 | 37.0 | 40.0 |\n"
    )


def test_of_ragged_queries_the_table_has_the_rate_of_the_call():
    call = rows.Ragged(**ABOUT, contender="flashcli", seconds=4.0e-5, relative_l2=2e-4, operations=4.0e9, **TIMED)
    assert views.VIEWS["ragged"]([ROWS[0], call]) == (
        "| batch | MB | GFLOP | read | flashcli | TFLOP/s of flashcli |\n| --- | --- | --- | --- | --- | --- |\n"
        "| 8x4096 | 134 | 4.0 | 37.0 | 40.0 | 100 |\n"
    )


def test_the_operations_of_ragged_queries_are_those_of_the_pairs_that_meet():
    prompt, step = (
        SimpleNamespace(asked=outlined(ragged.SHAPES[name])) for name in ("prompt of 8192", "both together")
    )
    assert ragged.operations(prompt) == 4 * 32 * 128 * 8192 * 8193 / 2
    pairs = 128 * 2048 + 2 * (2048 * 2048 + 2048 * 2049 / 2)
    assert ragged.operations(step) == 4 * 32 * 128 * pairs
    assert step.asked.counts.tolist() == [1] * 128 + [2048] * 2
    equal = ragged.SHAPES["16 prompts of 1 to 4000"]
    assert equal.counts().tolist() == lengths(equal.lengths, equal.S, equal.seed).tolist()


def test_of_several_layouts_each_has_columns_of_its_own():
    other = Decoded(**ABOUT, contender="tensor", seconds=3.9e-5, **(TIMED | {"layout": "vllm"}))
    assert views.VIEWS["decode"]([*ROWS, other]) == (
        "| batch | MB | read, hnd | tensor, hnd | tensor, vllm |\n| --- | --- | --- | --- | --- |\n"
        "| 8x4096 | 134 | 37.0 | 40.0 | 39.0 |\n"
    )


def test_below_the_times_are_those_of_calls():
    called = [
        rows.Called(**ABOUT, contender=name, seconds=seconds, clock=clock, H=64, **TIMED)
        for clock, some in (("host", (1.5e-5, 1.2e-5)), ("graph", (6e-5, 5e-5)))
        for name, seconds in zip(("flashcli.decode", "PyTorch SDPA"), some, strict=True)
    ]
    text = views.VIEWS["decode"](ROWS + called)
    assert text.startswith(views.VIEWS["decode"](ROWS))
    assert "| 8x4096 | flashcli.decode | 15.0 | 60.0 | 1.25x |\n| 8x4096 | PyTorch SDPA | 12.0 | 50.0 | 1.00x |" in text
    assert "15.0 us, host" in decode.told(called[0])


def test_what_was_judged_is_a_line_for_each_pair_of_types():
    plain, fp8 = dataclasses.replace(SMALL, query_type="float32"), dataclasses.replace(SMALL, cache_type="float8_e5m2")
    hard = dataclasses.replace(plain, page=8)
    verdicts = [
        Verdict("split", plain, 0.25, 0), Verdict("split", hard, 1.5, 2), Verdict("split", fp8, 0.5, 0),
        Verdict("tensor", fp8, 0.75, 0),
    ]  # fmt: skip
    found = judged(verdicts)
    assert [rows.read(row.written()) for row in found] == found
    assert found[0].hardest == "page=8, query_type=float32" and (found[0].cases, found[0].wrong) == (2, 1)
    assert views.VIEWS["decode"](found) == (
        "| query, cache | split | tensor |\n| --- | --- | --- |\n| float32 | 2: 1.50, 1 wrong |  |\n"
        "| float16, float8_e5m2 | 1: 0.50 | 1: 0.75 |\n"
    )


def test_each_row_is_told_in_a_line():
    read, skipped, tensor = map(decode.told, ROWS)
    assert "37.0 us (least 36.0),  3628 GB/s,  86% of the memory's rate" in read and "relative" not in read
    assert "skipped: too long" in skipped and "relative L2 2.0e-04" in tensor


def test_a_variant_names_every_combination_of_its_numbers():
    tried = decode.variants("tensor:blocks=2/3,piece=65536")
    assert [*tried] == ["tensor blocks=2 piece=65536", "tensor blocks=3 piece=65536"]
    asked = outlined(dataclasses.replace(SHAPES["8x4096 64/8"], layout="hnd")).outline
    assert [(build(asked).macros()["BLOCKS"], build(asked).macros()["PIECE"]) for build in tried.values()] == [
        (2, 128), (3, 128)
    ]  # fmt: skip


def test_a_kernel_without_fields_is_a_variant_of_its_own_choices():
    [(name, build)] = decode.variants("read").items()
    asked = outlined(SMALL).outline
    assert name == "read" and build(asked) == build_of(CEILING, asked)


@pytest.mark.parametrize("text", ["tensor:speed=3", "tensor:blocks", "tensor:blocks=two", "fastest:blocks=2"])
def test_a_variant_that_is_none_is_refused_in_words(text):
    with pytest.raises(UsageError, match=r"blocks|speed|fastest"):
        decode.variants(text)
