from __future__ import annotations

import numpy as np
import pytest

from flashcli.api import attention
from flashcli.asked.shape import Shape
from flashcli.commands import generate as command
from flashcli.files.distributions import DISTRIBUTIONS, draw, generate
from flashcli.files.verify import Comparison, reference

SHAPE = Shape(3, 50, 32)


def test_the_command_offers_every_distribution():
    assert list(DISTRIBUTIONS) == list(command.DISTRIBUTIONS)


@pytest.mark.parametrize("name", DISTRIBUTIONS)
@pytest.mark.parametrize("shape", [Shape(4, 8, 64), Shape(2, 300, 256), Shape(3, 500, 64), Shape(2, 700, 1)], ids=str)
def test_a_right_program_passes_with_a_margin(name, shape):
    """Inputs on which float32 cannot be within the tolerance would accuse everybody.

    The margin is for other orders of adding up, of which BLAS has one for each kind of processor.
    """
    qkv = draw(shape, range(shape.B), 0, name)
    out = attention(*np.ascontiguousarray(qkv.swapaxes(0, 1)), backend="cpu")
    comparison = Comparison()
    for batch in range(shape.B):
        comparison.add(out[batch], reference(qkv[batch]).astype(np.float32), batch, range(shape.N))
    assert comparison.matches and comparison.max_rel < comparison.tolerance * 3 / 4


def test_scores_of_large_values_are_exact():
    Q, K, _ = draw(Shape(1, 100, 256), range(1), 0, "large")[0]
    np.testing.assert_array_equal(Q @ K.T, Q.astype(np.float64) @ K.T.astype(np.float64))


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_a_batch_is_the_same_in_whatever_range_it_is_drawn(name):
    together = draw(SHAPE, range(3), 9, name)
    for b in range(3):
        np.testing.assert_array_equal(draw(SHAPE, range(b, b + 1), 9, name)[0], together[b])


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_another_seed_or_batch_gives_other_values(name):
    first = draw(SHAPE, range(2), 1, name)
    assert (first[0] != first[1]).any()
    assert (first != draw(SHAPE, range(2), 2, name)).any()


@pytest.mark.parametrize(("name", "limit"), [("uniform", 3), ("tiny", 1e-6), ("large", 1e4)])
def test_uniform_values_fill_their_interval(name, limit):
    qkv = draw(SHAPE, range(3), 0, name)
    assert qkv.min() >= -np.float32(limit) and qkv.max() <= np.float32(limit)
    for matrix in qkv.swapaxes(0, 1):
        assert matrix.min() < -0.99 * limit and matrix.max() > 0.99 * limit
        assert abs(matrix.mean()) < 0.05 * limit


def test_the_outlier_is_one_in_each_matrix():
    qkv = draw(SHAPE, range(3), 0, "outlier")
    assert ((qkv == 100).sum(axis=(2, 3)) == 1).all()
    assert ((np.abs(qkv) <= 3).sum(axis=(2, 3)) == 50 * 32 - 1).all()


def test_equal_rows_are_equal():
    qkv = draw(SHAPE, range(3), 0, "equal")
    assert (qkv == qkv[:, :, :1]).all()


@pytest.mark.parametrize("d", [1, 32, 256])
def test_every_score_is_below_minus_120(d):
    Q, K, _ = draw(Shape(1, 50, d), range(1), 0, "negative")[0]
    assert (Q @ K.T / np.sqrt(d)).max() < -120


def test_generation_that_is_stopped_leaves_nothing(tmp_path):
    steps = generate(str(tmp_path / "x.in"), Shape(30, 512, 256), 0, "uniform", str(tmp_path / "x.ref"))
    assert next(steps) < 30
    steps.close()
    assert not list(tmp_path.iterdir())
