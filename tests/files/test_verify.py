"""The checks themselves: the reference against plain Python, and a comparison that must refuse wrong outputs."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from support import random_qkv, write_input, write_output
from tolerances import float64, naive_fp32

from flashcli.asked.shape import Shape
from flashcli.files import verify
from flashcli.files.fileformat import read_output
from flashcli.files.testcases import Case
from flashcli.files.tolerance import TOLERANCE
from flashcli.files.verify import Comparison, compare_files, reference
from flashcli.judge import answers

SHAPE = Shape(3, 64, 32)


def by_hand(Q, K, V, causal, scale) -> list[list[float]]:
    """softmax(scale Q Kᵀ) V in plain Python with exactly rounded sums."""
    out = []
    for i, q in enumerate(Q):
        seen = range(i + 1) if causal else range(len(K))
        scores = [scale * math.fsum(x * y for x, y in zip(q, K[j], strict=True)) for j in seen]
        weights = [math.exp(score - max(scores)) for score in scores]
        columns = range(len(V[0]))
        out.append(
            [math.fsum(w * V[j][c] for w, j in zip(weights, seen, strict=True)) / math.fsum(weights) for c in columns]
        )
    return out


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("causal", [False, True])
def test_the_reference_against_plain_python(causal, scale):
    qkv = random_qkv(1, 9, 5)[0]
    want = by_hand(*qkv.astype(float).tolist(), causal, 5**-0.5 if scale is None else scale)
    np.testing.assert_allclose(reference(qkv, causal, scale), want, rtol=1e-13)


@pytest.mark.parametrize("causal", [False, True])
def test_chosen_rows_are_those_rows_of_the_whole(causal):
    qkv, rows = random_qkv(1, 700, 8)[0], np.array([0, 5, 300, 699])
    np.testing.assert_allclose(reference(qkv, causal, rows=rows), reference(qkv, causal)[rows], rtol=1e-12)


# Each of these is an output that some program has produced. The first is the only one that may pass.


@pytest.fixture(scope="module")
def qkv() -> np.ndarray:
    return random_qkv(SHAPE.B, SHAPE.N, SHAPE.d)


def half_precision(qkv: np.ndarray) -> np.ndarray:
    return naive_fp32(qkv.astype(np.float16).astype(np.float32))


def other_batch_missing(qkv: np.ndarray) -> np.ndarray:
    out = float64(qkv)
    out[2] = 0
    return out


def one_element_off(qkv: np.ndarray) -> np.ndarray:
    out = float64(qkv)
    out[2, 63, 31] += 0.001
    return out


def one_nan(qkv: np.ndarray) -> np.ndarray:
    out = float64(qkv)
    out[1, 2, 3] = np.nan
    return out


def interleaving_ignored(qkv: np.ndarray) -> np.ndarray:
    """All Q, then all K, then all V: right only at B = 1."""
    return float64(qkv.reshape(3, *qkv.shape[:1], *qkv.shape[2:]).swapaxes(0, 1))


OUTPUTS = {
    "float64": (float64, True),
    "naive fp32": (naive_fp32, True),
    "all zero": (lambda qkv: np.zeros_like(qkv[:, 0]), False),
    "mean of V": (lambda qkv: np.broadcast_to(qkv[:, 2].mean(axis=1, keepdims=True), qkv[:, 2].shape), False),
    "batches swapped": (lambda qkv: float64(qkv)[::-1], False),
    "batch missing": (other_batch_missing, False),
    "interleaving ignored": (interleaving_ignored, False),
    "scale forgotten": (lambda qkv: float64(qkv, scale=1.0), False),
    "causal": (lambda qkv: float64(qkv, causal=True), False),
    "half precision": (half_precision, False),
    "one element off": (one_element_off, False),
    "one NaN": (one_nan, False),
    "all NaN": (lambda qkv: np.full_like(qkv[:, 0], np.nan), False),
}


@pytest.mark.parametrize(("make", "right"), OUTPUTS.values(), ids=OUTPUTS)
def test_a_full_comparison_passes_right_outputs_only(tmp_path, qkv, make, right):
    got, want = write_output(tmp_path / "got", make(qkv)), write_output(tmp_path / "want", float64(qkv))
    assert compare_files(str(got), str(want), SHAPE).matches is right


@pytest.mark.parametrize("shape", [(3, 64, 32), (100, 2, 3), (1, 6144, 1), (2, 1000, 3)])
def test_files_are_compared_piece_by_piece(tmp_path, monkeypatch, shape):
    want = np.random.default_rng(0).standard_normal(shape, dtype=np.float32)
    wrong = want.copy()
    places = [(0, 0, 0), (shape[0] // 2, shape[1] // 2, shape[2] - 1), tuple(size - 1 for size in shape)]
    for place in places:
        wrong[place] += 1
    pieces = []
    monkeypatch.setattr(verify, "ELEMENTS_AT_ONCE", 256)
    monkeypatch.setattr(verify, "read_output", lambda *what: pieces.append(read_output(*what)) or pieces[-1])
    got = write_output(tmp_path / "got", wrong)
    comparison = compare_files(str(got), str(write_output(tmp_path / "want", want)), Shape(*shape))
    assert [tuple(place[name] for name in ("batch", "row", "column")) for place in comparison.places] == places
    assert comparison.count == want.size == sum(piece.size for piece in pieces) / 2
    assert max(piece.size for piece in pieces) <= 256


def sampled(got: Path, given: Path, shape: Shape, monkeypatch, rows: int = answers.SAMPLED_ROWS) -> Comparison:
    """How the judge compares where there are too many rows to check all."""
    monkeypatch.setattr(answers, "ALL_ROWS", 0)
    monkeypatch.setattr(answers, "SAMPLED_ROWS", rows)
    return answers.answer(Case("case", shape, None, given, None, 1.0), secret=1)(str(got), TOLERANCE)


@pytest.mark.parametrize(("make", "right"), OUTPUTS.values(), ids=OUTPUTS)
def test_a_sample_passes_right_outputs_only(tmp_path, qkv, make, right, monkeypatch):
    got = write_output(tmp_path / "got", make(qkv))
    assert sampled(got, write_input(tmp_path / "in", qkv), SHAPE, monkeypatch).matches is right


def test_a_sample_has_rows_of_every_batch(tmp_path, monkeypatch):
    qkv = random_qkv(40, 16, 4)
    out = float64(qkv)
    out[17] = 0
    got, given = write_output(tmp_path / "got", out), write_input(tmp_path / "in", qkv)
    comparison = sampled(got, given, Shape(40, 16, 4), monkeypatch, rows=10)
    assert {place["batch"] for place in comparison.places} == {17}
    assert comparison.count == 40 * 4


# Single numbers


def compared(got: float, want: float) -> Comparison:
    comparison = Comparison()
    comparison.add(np.array([[got]], np.float32), np.array([[want]], np.float32), 0, range(1))
    return comparison


@pytest.mark.parametrize(
    ("got", "want", "match"),
    [
        (1.0, 1.0, True),
        (1.00015, 1.0, True),  # 1e-4 absolute and 1e-4 relative
        (1.00025, 1.0, False),
        (0.00009, 0.0, True),
        (0.00011, 0.0, False),
        (100.009, 100.0, True),
        (100.02, 100.0, False),
        (np.nan, np.nan, True),
        (np.inf, np.inf, True),
        (-np.inf, np.inf, False),
        (0.0, np.inf, False),
        (np.inf, 0.0, False),
        (np.nan, np.inf, False),
        (np.nan, 0.0, False),
        (0.0, np.nan, False),
    ],
)
def test_what_matches(got, want, match):
    assert compared(got, want).matches is match


def test_nothing_compared_is_no_match():
    assert not Comparison().matches


def test_what_a_comparison_counts():
    got = np.array([[1, 2, np.nan], [4.5, 0, np.inf]], np.float32)
    want = np.array([[1, 1, 3], [4, 0, np.inf]], np.float32)
    comparison = Comparison()
    comparison.add(got, want, batch=7, rows=[10, 20])
    record = comparison.record()
    places, worst = record.pop("places"), record.pop("worst")
    assert record == {
        "matches": False,
        "count": 6,
        "mismatches": 3,
        "max_abs": 1.0,
        "max_rel": 0.5,
        "relative_l2": pytest.approx((1.25 / 18) ** 0.5),
        "got_nonfinite": 2,
        "want_nonfinite": 1,
        "tolerance": 1e-4,
        "unit": 0.0,
    }
    assert [(place["batch"], place["row"], place["column"]) for place in places] == [(7, 10, 1), (7, 10, 2), (7, 20, 0)]
    assert (worst["batch"], worst["row"], worst["column"]) == (7, 10, 2)  # a NaN is worse than any number
    assert comparison.first_place() == "(batch, row, column) = (7, 10, 1): got 2, want 1"


def test_the_worst_place_of_all_pieces_is_kept():
    comparison, want = Comparison(), np.array([[100.0, 1e-5]], np.float32)
    for batch, errors in enumerate([[0, 2e-5], [0.004, 0], [0, 1e-5]]):
        comparison.add(want + np.array([errors], np.float32), want, batch, range(1))
    worst = comparison.worst
    assert comparison.matches and (worst["batch"], worst["row"], worst["column"]) == (1, 0, 0)
    assert comparison.max_rel == pytest.approx(0.004 / 101, rel=1e-2)


def test_only_the_first_five_places_are_kept():
    comparison = Comparison()
    for batch in range(4):
        comparison.add(np.ones((2, 1), np.float32), np.zeros((2, 1), np.float32), batch, range(2))
    assert [(place["batch"], place["row"]) for place in comparison.places] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert comparison.mismatches == 8
