"""What a call on tensors on a GPU does before kernels start: on a driver that is a fake, for which the CPU's memory is
a GPU's."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_oracle import oracle  # noqa: E402

from flashcli.gpu import place as launcher  # noqa: E402
from flashcli.torch import in_place, private  # noqa: E402

B, H, Hkv, M, N, d = 2, 4, 2, 7, 9, 32


def compute(q, k, v, bias=None, mask=None, return_lse=False, out=None, backend="auto", **options):
    return in_place.compute(q, k, v, bias, mask, in_place.Options(**options), return_lse, out, backend)


@pytest.fixture
def stream(monkeypatch, driver):
    """PyTorch's current stream: a list of its one number."""
    current = [0]
    monkeypatch.setattr(in_place, "place_of_device", lambda device: launcher.place_of_device(0))
    monkeypatch.setattr(private, "current_stream", lambda device: current[0])
    monkeypatch.setattr(in_place, "_ready", {})
    monkeypatch.setattr(in_place, "_kept", type(in_place._kept)())
    torch.manual_seed(0)
    return current


@pytest.fixture
def qkv(stream):
    return torch.randn(B, H, M, d), torch.randn(B, Hkv, N, d), torch.randn(B, Hkv, N, d)


@pytest.mark.parametrize("kernel", [None, "register_tiled", "mma"])
@pytest.mark.parametrize("options", [{}, {"causal": True, "q_start": 2}, {"bias": (B, 1, 1, N)}], ids=str)
def test_the_answer(qkv, options, kernel):
    options = {name: torch.randn(x) if name == "bias" else x for name, x in options.items()}
    for _ in range(2):
        o, lse = compute(*qkv, return_lse=True, kernel_name=kernel, **options)
        right, right_lse = oracle(*qkv, **options)
        torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
        assert o.is_contiguous() and lse.is_contiguous()


def test_layouts_are_told_apart(qkv, driver):
    q, k, v = qkv
    lies = {
        "contiguous": q,
        "rows first": torch.randn(B, M, H, d).transpose(1, 2),
        "odd": torch.randn(B * H * M * d + 1)[1:].view(B, H, M, d),
        "broadcast": torch.randn(H, M, d).expand(B, H, M, d),
    }
    for _ in range(2):
        for x in lies.values():
            o, _ = compute(x, k, v, kernel_name="register_tiled")
            torch.testing.assert_close(o.double(), oracle(x, k, v)[0], rtol=1e-5, atol=1e-5)
    found = [(macros["DENSE"], macros["ALIGNED"]) for macros in driver.loaded]
    assert found == [("1", "1"), ("0", "1"), ("1", "0")]


@pytest.mark.parametrize("name", ["bias", "mask"])
def test_biases_and_masks_of_which_other_numbers_are_read_together_are_told_apart(stream, driver, name):
    q, k, v = torch.randn(B, H, M, d), *torch.randn(2, B, Hkv, 8, d)
    whole = torch.randn(M, 16) if name == "bias" else torch.randn(M, 16) < 1
    for first in (0, 1, 2, 3):
        changes = {name: whole[:, first : first + 8]}
        o, _ = compute(q, k, v, kernel_name="register_tiled", **changes)
        right = oracle(
            q, k, v, bias=torch.where(whole[:, first : first + 8], 0, -torch.inf) if name == "mask" else changes[name]
        )
        torch.testing.assert_close(o.double(), right[0], rtol=1e-5, atol=1e-5)
    assert [macros["BIAS_COLUMN"] for macros in driver.loaded] == ["4", "1", "2"]


def test_a_window_may_be_any_two_numbers(qkv):
    for window in ((-1, -1), [-1, -1], np.array([-1, -1]), (1, 0), np.array([1, 0])):
        o, _ = compute(*qkv, window=window)
        torch.testing.assert_close(o, compute(*qkv, window=tuple(map(int, window)))[0], rtol=0, atol=0)


def test_starts_on_another_device_are_refused_after_those_that_fit(stream, driver):
    q, starts = torch.randn(7, 2, d), torch.tensor([0, 3, 7], dtype=torch.int32)
    compute(q, q, q, cu_seqlens_q=starts)
    with pytest.raises(ValueError, match="cu_seqlens_q must be on cpu, as q is, not on meta"):
        compute(q, q, q, cu_seqlens_q=starts.to("meta"))


def test_rows_first_is_a_layout_of_the_answer_and_remembered_apart(qkv):
    for rows_first in (True, False, True):
        o, _ = compute(*qkv, rows_first=rows_first)
        assert (o.transpose(1, 2) if rows_first else o).is_contiguous()
        torch.testing.assert_close(o.double(), oracle(*qkv)[0], rtol=1e-5, atol=1e-5)


def test_what_is_asked_again_is_remembered_and_not_without_end(qkv, monkeypatch):
    monkeypatch.setattr(in_place, "SHAPES", 4)
    for rows in [*range(1, 8), 7, 7]:
        q = torch.randn(B, H, rows, d)
        torch.testing.assert_close(compute(q, q, q)[0].double(), oracle(q, q, q)[0], rtol=1e-5, atol=1e-5)
    assert len(in_place._ready) == 4


def test_scratch_is_kept_for_the_default_stream_alone(qkv, stream, monkeypatch):
    made = []
    new_empty = torch.Tensor.new_empty
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda self, *a, **o: made.append(a) or new_empty(self, *a, **o))
    for number in (0, 0, 5, 5, 0):
        stream[0] = number
        compute(*qkv, kernel_name="mma")
    assert len(made) == 3  # one that is kept, and one for each call on the other stream
    monkeypatch.setattr(in_place, "KEPT", 0)
    compute(*qkv, kernel_name="mma")
    assert len(made) == 4


def test_kernels_are_queued_on_the_current_stream(qkv, stream, driver):
    for number in (0, 7):
        stream[0] = number
        compute(*qkv, kernel_name="register_tiled")
    assert [number for _, number, _ in driver.launches] == [0, 7]


def test_no_keys_and_no_rows(qkv, driver):
    q, k, v = qkv
    o, lse = compute(q, k[:, :, :0], v[:, :, :0], return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    o, _ = compute(q[:, :, :0], k, v)
    assert o.shape == (B, H, 0, d) and not driver.launches


def test_out_may_lie_between_the_inputs_but_not_on_them(stream, driver):
    fused = torch.randn(B, M, 4, H, d)
    q, k, v, out = (fused[:, :, i].transpose(1, 2) for i in range(4))
    right = oracle(q, k, v)[0]
    assert compute(q, k, v, out=out)[0] is out
    torch.testing.assert_close(out.double(), right, rtol=1e-5, atol=1e-5)
    launched = len(driver.launches)
    for other in (fused[:, :, 1].transpose(1, 2), torch.as_strided(fused, q.shape, q.stride(), 16)):
        for _ in range(2):  # also when the layout is known
            with pytest.raises(ValueError, match="out must not share memory with"):
                compute(q, k, v, out=other)
    assert len(driver.launches) == launched


def test_an_out_that_shares_memory_by_another_storage_is_refused(qkv, driver):
    q, k, v = qkv
    shared = torch.zeros(2 * q.numel()).numpy()
    q, overlapping, beside = (torch.from_numpy(shared[i:][: q.numel()]).view(q.shape) for i in (0, d, q.numel()))
    with pytest.raises(ValueError, match="out must not share memory with q"):
        compute(q, k, v, out=overlapping)
    assert not driver.launches
    compute(q, k, v, out=beside)
    assert beside.any()


BAD = [
    ({"k": None}, TypeError, "k must be a PyTorch tensor"),
    ({"bias": [1.0]}, TypeError, "bias must be a PyTorch tensor"),
    ({"scale": "x"}, TypeError, "scale must be a number"),
    ({"scale": []}, TypeError, "scale must be a number"),
    ({"kernel_name": "float4"}, Exception, "there is no kernel 'float4' for arrays on a GPU"),
    ({"backend": "cpu"}, ValueError, "backend must be"),
    ({"out": "x"}, TypeError, "out must be a PyTorch tensor"),
    ({"alibi_slopes": np.ones(H)}, TypeError, "alibi_slopes must be a PyTorch tensor"),
]


@pytest.mark.parametrize(("wrong", "kind", "message"), BAD, ids=lambda x: str(x) if isinstance(x, dict) else "")
def test_bad_arguments_are_told_each_time_and_nothing_is_queued(qkv, driver, wrong, kind, message):
    given = dict(zip("qkv", qkv, strict=True)) | wrong
    for _ in range(2):
        with pytest.raises(kind, match=message):
            compute(**given)
    assert not driver.launches and not in_place._ready


def test_with_gradients(qkv):
    from flashcli.torch import operator

    inputs = [x.requires_grad_() for x in qkv]
    o, lse = operator.in_place_with_gradients(*qkv, None, None, in_place.Options(True, None, 2, True, "mma"))
    right, right_lse = oracle(*qkv, causal=True, q_start=2)
    weights = torch.randn(B, H, M, d)
    got = torch.autograd.grad((o * weights).sum() + lse.sum(), inputs)
    wanted = torch.autograd.grad((right * weights).sum() + right_lse.sum(), inputs)
    for mine, other in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)
