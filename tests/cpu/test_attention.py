"""Every kernel and the CPU backend against the float64 reference: all shapes, all distributions, and what must hold for
any attention. On a machine without a GPU the kernels are skipped."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import GPU_KERNELS, THOROUGH, engines_in_use, first_rungs, forward, open_engine, random_qkv, refusal
from tolerances import (
    FACTOR,
    FLOOR,
    SPLIT_FACTOR,
    allowed_errors,
    assert_accurate,
    assert_all_accurate,
    float64,
    naive_fp32,
    sizes,
)

from flashcli.asked.shape import Shape
from flashcli.errors import UsageError
from flashcli.files.distributions import DISTRIBUTIONS, draw
from flashcli.files.tolerance import TOLERANCE
from flashcli.kernels.choice import SHORT_HEAD
from flashcli.run.request import Request, open_backend

LENGTHS = (1, 31, 127, 128, 129, 300, 1000)
SHAPES = [(B, N) for B in (1, 3) for N in LENGTHS]
HEAD_SIZES = (1, 8, 16, 32, 33, 40, 64, 80, 128, 192, 256)
FEW_HEAD_SIZES = (1, 33, 64, 256)  # for the first rungs: their tiles differ, their code hardly


@engines_in_use
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_every_shape(engine, d, causal):
    assert_every_length(engine, d, causal)


@first_rungs
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", FEW_HEAD_SIZES)
def test_every_shape_on_the_first_rungs(engine, d, causal):
    assert_every_length(engine, d, causal)


def assert_every_length(engine, d, causal):
    many = THOROUGH and engine.name in GPU_KERNELS  # what it may be off by takes longer to find than all others
    shapes = [(B, N) for B, N in SHAPES if (many or B * N <= 1000) and not refusal(engine.name, d, N)]
    inputs = [random_qkv(B, N, d, seed=N) for B, N in shapes]
    if not inputs:
        pytest.skip(f"{engine.name} does not take heads of {d} numbers")
    factor = SPLIT_FACTOR if d < SHORT_HEAD and engine.splits else FACTOR
    assert_all_accurate([(engine(qkv, causal), qkv) for qkv in inputs], causal, factor=factor)


def test_a_long_sequence(engine):
    qkv = random_qkv(1, 4096 + 77, 64)
    assert_accurate(engine(qkv), qkv)


def test_more_batches_than_multiprocessors(engine):
    qkv = random_qkv(300, 33, 32)
    assert_accurate(engine(qkv), qkv)


@engines_in_use
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("d", [32, 40, 64])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_every_distribution(engine, distribution, d, causal):
    # Of this seed no row's largest two scores are alike, of which a program that scales Q may take either.
    qkv = draw(Shape(8, 150, d), range(8), seed=7, distribution=distribution)
    assert_accurate(engine(qkv, causal), qkv, causal)


@pytest.mark.parametrize("scale", [1.0, 0.01, -0.125, 30.0])
def test_any_scale(engine, scale):
    qkv = random_qkv(8, 200, 32)
    assert_accurate(engine(qkv, scale=scale), qkv, scale=scale)


@engines_in_use
@pytest.mark.parametrize("built_for", [(1, 1), (3, 200), (2, 4096)])
def test_what_is_built_for_one_shape_is_right_for_all(engine, built_for):
    if refusal(engine.name, 32, 700):
        pytest.skip(f"{engine.name} is built for all keys at once, so for as many as there are")
    engine.close()
    with open_engine(engine.name, (*built_for, 32)) as backend:
        inputs = [random_qkv(B, N, 32) for B, N in [(3, 200), (1, 5), (7, 64), (1, 700), (2, 1)]]
        assert_all_accurate([(forward(backend, qkv), qkv) for qkv in inputs])


# The tolerance itself


def round_mantissa(values: np.ndarray, bits: int) -> np.ndarray:
    """Float32 with all but ``bits`` bits of the mantissa cleared: TF32 keeps 10, bfloat16 7."""
    return (values.view(np.uint32) & np.uint32(-(1 << (23 - bits)) & 0xFFFFFFFF)).view(np.float32)


@pytest.mark.parametrize("distribution", ["uniform", "normal", "tiny", "outlier", "equal", "negative"])
@pytest.mark.parametrize("bits", [7, 10, 16])
def test_less_than_fp32_is_refused(distribution, bits):
    qkv = draw(Shape(2, 150, 64), range(2), seed=5, distribution=distribution)
    out = naive_fp32(round_mantissa(qkv, bits))
    assert (sizes(out - float64(qkv)) > allowed_errors(qkv)).any()


# What holds for any attention

D = 40
arrays = st.builds(random_qkv, st.integers(1, 3), st.integers(1, 300), st.just(D), st.integers(0, 2**32))


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    """Two fp32 answers to the same question: far closer than any wrong one, not bit for bit."""
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE / 3)


@engines_in_use
@given(qkv=arrays, value=st.floats(-100, 100, width=32))
def test_constant_v_gives_that_constant(engine, qkv, value):
    qkv[:, 2] = value
    np.testing.assert_allclose(engine(qkv), value, rtol=16 * FLOOR, atol=1e-30)  # but for denormals


@engines_in_use
@given(qkv=arrays, seed=st.integers(0, 2**32))
def test_the_order_of_keys_changes_nothing(engine, qkv, seed):
    permuted = qkv.copy()
    permuted[:, 1:] = qkv[:, 1:, np.random.default_rng(seed).permutation(qkv.shape[2])]
    assert_close(engine(permuted), engine(qkv))


@engines_in_use
@given(qkv=arrays, shift=st.integers(-8, 8))
def test_shifted_scores_change_nothing(engine, qkv, shift):
    # Adding the same vector to every key adds the same number to all scores of a row. In eighths all sums are exact.
    qkv[:, :2] = np.round(qkv[:, :2] * 8) / 8
    shifted = qkv.copy()
    shifted[:, 1] += shift
    assert_close(engine(shifted), engine(qkv))


@engines_in_use
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@given(qkv=arrays)
def test_rows_lie_inside_the_range_of_v(engine, qkv, causal):
    out, V = engine(qkv, causal), qkv[:, 2]
    slack = 3 * 16 * FLOOR
    assert (out >= V.min(axis=1, keepdims=True) - slack).all()
    assert (out <= V.max(axis=1, keepdims=True) + slack).all()


@engines_in_use
@given(qkv=arrays)
def test_the_first_causal_row_is_the_first_row_of_v(engine, qkv):
    np.testing.assert_allclose(engine(qkv, causal=True)[:, 0], qkv[:, 2, 0], rtol=4 * FLOOR)


@engines_in_use
@given(qkv=arrays, data=st.data())
def test_a_causal_row_does_not_see_later_keys(engine, qkv, data):
    row = data.draw(st.integers(0, qkv.shape[2] - 1))
    changed = qkv.copy()
    changed[:, 1:, row + 1 :] = 7
    np.testing.assert_array_equal(engine(changed, causal=True)[:, : row + 1], engine(qkv, causal=True)[:, : row + 1])


@engines_in_use
@given(qkv=arrays)
def test_scale_zero_gives_the_mean_of_v(engine, qkv):
    mean = qkv[:, 2].astype(np.float64).mean(axis=1, keepdims=True)
    np.testing.assert_allclose(
        engine(qkv, scale=0.0), np.broadcast_to(mean, qkv[:, 2].shape), rtol=0, atol=3 * 16 * FLOOR
    )


@engines_in_use
@given(qkv=arrays)
def test_the_answer_of_a_batch_does_not_depend_on_the_others(engine, qkv):
    together, alone = engine(qkv)[-1:], engine(qkv[-1:])
    if engine.name == "cpu":
        assert together.tobytes() == alone.tobytes()
    else:  # files' kernels have the tiles that are fastest for the batch
        assert_close(together, alone)


# NaN and Inf in the data


def spoilt(matrix: str, value: float, row: int) -> np.ndarray:
    qkv = random_qkv(2, 150, 32)
    qkv[1, "QKV".index(matrix), row, 3] = value
    return qkv


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("matrix", "QKV")
def test_nan_and_inf_show_where_ieee_arithmetic_puts_them(engine, matrix, value):
    for row in (0, 77, 149):
        qkv = spoilt(matrix, value, row)
        out, want = engine(qkv), float64(qkv)
        np.testing.assert_array_equal(np.isfinite(out), np.isfinite(want))
        np.testing.assert_allclose(out[0], want[0], rtol=0, atol=TOLERANCE / 3)  # the other batch is as ever


@pytest.mark.parametrize("keys", [100, 150], ids=["at first", "all"])
def test_a_row_that_sees_minus_infinity_only(engine, keys):
    """At first: the row maximum is still -inf after a tile or more. All: 0 / 0."""
    qkv = random_qkv(1, 150, 32)
    qkv[0, 0, :, 3], qkv[0, 1, :keys] = 1, 0
    qkv[0, 1, :keys, 3] = -np.inf
    out = engine(qkv)
    if keys == 150:
        assert np.isnan(out).all()
    else:
        np.testing.assert_allclose(out, float64(qkv), rtol=0, atol=TOLERANCE / 3)


def test_nan_in_q_spoils_its_own_row_only(engine):
    out = engine(spoilt("Q", np.nan, 77))
    assert np.argwhere(np.isnan(out).all(axis=2)).tolist() == [[1, 77]]
    assert np.isnan(out).sum() == 32


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_nan_and_inf_in_v_spoil_their_own_column_only(engine, value):
    out = engine(spoilt("V", value, 77))
    assert np.argwhere(~np.isfinite(out).all(axis=1)).tolist() == [[1, 3]]


def test_a_nan_key_does_not_reach_earlier_causal_rows(engine):
    out = engine(spoilt("K", np.nan, 77), causal=True)
    assert np.argwhere(np.isnan(out).any(axis=2)).tolist() == [[1, row] for row in range(77, 150)]


@pytest.mark.parametrize(
    ("request_", "message", "hint"),
    [
        (Request(kernel="nonesuch"), "there is no kernel 'nonesuch'.", "choose one of"),
        (
            Request(threads=2, kernel="mma"),
            "threads is for the cpu backend, not for GPUs or kernels.",
            "leave out threads.",
        ),
        (Request("cpu", device=0), "kernel and device are for GPUs, not for the cpu backend.", "leave out backend="),
        (Request("cpu", precision="fp16"), "the cpu backend has no fp16.", "leave out precision."),
        (
            Request("cpu", max_device_bytes=1),
            "max_device_bytes is for GPUs, not for the cpu backend.",
            "leave out max_device_bytes.",
        ),
        (
            Request("cuda", kernel="sequential", device=0),
            "backend='cuda' and device: for GPUs, but kernel sequential runs on the CPU.",
            "leave out backend='cuda' and device, or kernel.",
        ),
    ],
)
def test_what_does_not_go_together_is_named_as_python_has_it(request_, message, hint):
    with pytest.raises(UsageError) as caught:
        open_backend(request_, Shape(1, 2, 3))
    assert str(caught.value) == message and caught.value.hint.startswith(hint)
