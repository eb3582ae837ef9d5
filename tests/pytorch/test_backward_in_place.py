"""Gradients of tensors on a GPU, and of other arrays there, before kernels start: on a driver that is a fake, for which
the CPU's memory is a GPU's."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from fake_driver import OnGpu  # noqa: E402
from gradients_oracle import gradients as in_numpy  # noqa: E402
from oracle import Asked  # noqa: E402
from torch_oracle import gradients, oracle  # noqa: E402

import flashcli  # noqa: E402
from flashcli.gpu import place as launcher  # noqa: E402
from flashcli.torch import backward, in_place, operator, private  # noqa: E402

B, H, Hkv, M, N, d = 2, 4, 2, 7, 9, 32


@pytest.fixture(autouse=True)
def stream(monkeypatch, driver):
    monkeypatch.setattr(backward, "place_of_device", lambda device: launcher.place_of_device(0))
    monkeypatch.setattr(private, "current_stream", lambda device: 0)
    monkeypatch.setattr(backward, "_ready", {})
    monkeypatch.setattr(in_place, "_kept", type(in_place._kept)())
    torch.manual_seed(0)


def four(make=torch.randn):
    return make(B, H, M, d), make(B, H, M, d), make(B, Hkv, N, d), make(B, Hkv, N, d)


def compute(do, q, k, v, bias=None, dlse=None, rows_first=False, kernel=None, **options):
    o, lse = (x.float() for x in oracle(q, k, v, bias, **options))
    wanted = bias is not None and bias.dtype != torch.bool
    causal, q_start = options.get("causal", False), options.get("q_start", 0)
    found = backward.compute(
        do, dlse, q, k, v, bias, None, o, lse, causal, options.get("scale"), q_start, wanted, rows_first, kernel
    )
    assert found[3].numel() == (bias.numel() if wanted else 0)
    return found if wanted else found[:3]


def assert_right(got, right):
    for mine, other in zip(got, right, strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kernel", [None, "plain", "register_tiled", "mma"])
def test_gradients(kernel):
    biases = [None, (B, H, M, N), (B, 1, 1, N), (M, 1), (H, 1, N)]
    for shape in biases:
        bias = None if shape is None else torch.randn(shape)
        given = four()
        for _ in range(2):
            got = compute(*given, bias, causal=True, q_start=3, scale=0.3, kernel=kernel)
            assert_right(got, gradients(*given, bias, causal=True, q_start=3, scale=0.3))
        mask = torch.rand(M, N) > 0.3
        assert_right(compute(*given, mask, kernel=kernel), gradients(*given, mask))


def test_rows_first_is_a_layout_of_gradients_and_remembered_apart():
    given, dlse = four(), torch.randn(B, H, M)
    for rows_first in (True, False, True):
        got = compute(*given, None, dlse, rows_first=rows_first)
        assert_right(got, gradients(*given, dlse=dlse))
        assert all((x.transpose(1, 2) if rows_first else x).is_contiguous() for x in got)


@pytest.mark.parametrize("bias", [None, torch.randn(H, 1, N), torch.rand(M, N) > 0.3])
def test_gradients_of_a_call_without_the_operators_ways(monkeypatch, bias):
    monkeypatch.setattr(in_place, "place_of_device", lambda device: launcher.place_of_device(0))
    monkeypatch.setattr(backward, "is_for_gpu", lambda *given: not torch.is_grad_enabled())
    monkeypatch.setattr(backward, "operator", None)
    do, q, k, v = four()
    wanted = [q, k, v, bias] if bias is not None and bias.is_floating_point() else [q, k, v]
    for x in wanted:
        x.requires_grad_()
    o, lse = operator.in_place_with_gradients(q, k, v, bias, None, in_place.Options(True, q_start=2))
    dlse = torch.randn(B, H, M)
    got = torch.autograd.grad((o, lse), wanted, (do, dlse))
    given = [x if x is None else x.detach() for x in (do, q, k, v, bias)]
    assert_right(got, gradients(*given, dlse=dlse, causal=True, q_start=2))


def test_gradients_that_are_asked_for_need_no_operator(monkeypatch):
    monkeypatch.setattr(in_place, "place_of_device", lambda device: launcher.place_of_device(0))
    monkeypatch.setattr(backward, "is_for_gpu", lambda *tensors: True)
    monkeypatch.setattr(backward, "operator", None)
    do, q, k, v = four()
    bias = torch.randn(H, 1, N)
    o, lse = flashcli.attention(q, k, v, causal=True, bias=bias, return_lse=True)
    options = {"bias": bias, "causal": True, "o": o, "lse": lse}
    got = flashcli.attention_backward(do, q, k, v, return_dbias=True, **options)
    assert_right(got, gradients(do, q, k, v, bias, causal=True))
    assert len(flashcli.attention_backward(do, q, k, v, **options)) == 3


def test_layouts_are_told_apart(driver):
    def odd(*shape):
        return torch.randn(int(np.prod(shape)) + 1)[1:].view(shape)

    def rows_first(B, H, rows, d):
        return torch.randn(B, rows, H, d).transpose(1, 2)

    for make in (torch.randn, rows_first, odd, lambda B, H, rows, d: torch.randn(H, rows, d).expand(B, H, rows, d)):
        given = four(make)
        assert_right(compute(*given), gradients(*given))
    assert {macros["ALIGNED"] for macros in driver.loaded} == {"0", "1"}
    one = torch.ones(()).expand(B, H, M, d)
    assert_right(compute(one, *given[1:]), gradients(one, *given[1:]))


def test_biases_of_which_other_numbers_are_read_together_are_told_apart(driver):
    do, q, k, v = *torch.randn(2, B, H, M, d), *torch.randn(2, B, Hkv, 8, d)
    whole = torch.randn(M, 16)
    for first in (0, 1, 2, 3):
        bias = whole[:, first : first + 8]
        assert_right(compute(do, q, k, v, bias), gradients(do, q, k, v, bias))
    assert {macros["BIAS_COLUMN"] for macros in driver.loaded} == {"4", "1", "2"}


@pytest.mark.parametrize("where", range(4))
def test_heads_that_are_not_finite_are_computed_once_more(driver, where):
    given = four()
    given[where][1, 1, 3, 5] = torch.nan
    got, exact = (compute(*given, kernel=kernel) for kernel in ("mma", "register_tiled"))
    for mine, other in zip(got, exact, strict=True):
        torch.testing.assert_close(mine, other, equal_nan=True)
    assert [name for name, *_ in driver.launches][:6] == ["delta", "prepare", "dq", "dk_dv", "dq", "dk_dv"]


def test_what_is_asked_again_is_remembered_and_not_without_end(monkeypatch):
    monkeypatch.setattr(backward.in_place, "SHAPES", 3)
    for rows in (1, 2, 3, 4, 5, 5):
        q = torch.randn(B, H, rows, d)
        assert_right(compute(q, q, q, q), gradients(q, q, q, q))
    assert len(backward._ready) == 3


def test_nothing_to_compute_gives_zeros(driver):
    q, k = torch.randn(B, H, M, d), torch.randn(B, H, 0, d)
    found = backward.compute(q, None, q, k, k, None, None, q, q[..., 0].contiguous())
    assert not found[0].any() and found[1].shape == k.shape and not driver.launches


@pytest.mark.parametrize("kernel", [None, "plain"])
def test_anybodys_arrays(driver, kernel):
    rng = np.random.default_rng(0)
    do, q, k, v = (rng.normal(size=shape).astype(np.float32) for shape in ((B, H, M, d),) * 2 + ((B, Hkv, N, d),) * 2)
    bias = rng.normal(size=(M, N)).astype(np.float32)
    given = [OnGpu(driver, x) for x in (do, q, k, v)]
    got = flashcli.attention_backward(
        *given, bias=OnGpu(driver, bias), causal=True, q_start=2, return_dbias=True, kernel=kernel
    )
    right = in_numpy(Asked(q, k, v, True, None, bias, 2), do)
    for mine, other in zip(got, right, strict=True):
        there = mine.__cuda_array_interface__
        found = np.ctypeslib.as_array((np.ctypeslib.ctypes.c_float * other.size).from_address(there["data"][0]))
        np.testing.assert_allclose(found.reshape(there["shape"]), other, rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="backend must be 'auto' or 'cuda' for arrays on a GPU"):
        flashcli.attention_backward(*given, backend="cpu")
    empty = OnGpu(driver, np.empty((B, Hkv, 0, d), np.float32))
    dq, *_ = flashcli.attention_backward(given[0], given[1], empty, empty)
    assert dq.shape == q.shape
