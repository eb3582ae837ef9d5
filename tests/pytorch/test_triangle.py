"""Triangle attention, and the examples of docs/science.md."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

import flashcli  # noqa: E402
from flashcli.torch import triangle_attention  # noqa: E402

PAGE = Path(__file__).parents[2] / "docs" / "science.md"


def formula(q, k, v, bias, mask=None):
    scores = q.double() @ k.double().mT * q.shape[-1] ** -0.5 + bias.double()
    if mask is not None:
        scores = scores.masked_fill(~mask.bool(), -torch.inf)
    return torch.softmax(scores, -1).nan_to_num(0) @ v.double()


def tensors(*shape, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape).requires_grad_() for _ in range(3)]


@pytest.mark.parametrize("B", [None, 1, 2])
@pytest.mark.parametrize("masked", [False, True])
def test_the_answer_and_the_gradients_are_those_of_the_formula(B, masked):
    batches = () if B is None else (B,)
    N, H, Q, d = 5, 3, 6, 8
    q, k, v = tensors(*batches, N, H, Q, d)
    bias = torch.randn(*batches, 1, H, Q, Q, requires_grad=True)
    mask = torch.rand(*batches, N, 1, 1, Q) < 0.7 if masked else None
    do = torch.randn(q.shape)
    got, want = triangle_attention(q, k, v, bias, mask), formula(q, k, v, bias, mask)
    torch.testing.assert_close(got, want.float(), rtol=1e-5, atol=1e-5)
    slopes = (torch.autograd.grad((x * do).sum(), (q, k, v, bias)) for x in (got, want))
    for mine, right in zip(*slopes, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-4, atol=1e-5)


def test_a_small_model_learns_as_by_the_formula_and_twice_the_same():
    """Fifty steps of pairs that attend with a bias of their own: losses beside the formula's, and weights' bytes."""
    N, C, H, d = 6, 8, 2, 4

    def trained(attend):
        torch.manual_seed(0)
        to_qkv, to_bias, out = (torch.nn.Linear(C, n, bias=False) for n in (3 * H * d, H, C))
        out_of, pairs, wanted = torch.nn.Linear(H * d, C), *torch.randn(2, 2, N, N, C)
        mask = torch.rand(2, N, 1, 1, N) < 0.8
        layers = torch.nn.ModuleList([to_qkv, to_bias, out, out_of])
        optimizer, losses = torch.optim.Adam(layers.parameters(), 1e-2), []
        for _ in range(50):
            q, k, v = to_qkv(pairs).unflatten(-1, (3, H, d)).permute(3, 0, 1, 4, 2, 5)
            bias = to_bias(pairs).permute(0, 3, 1, 2)[:, None]
            o = attend(q, k, v, bias, mask).transpose(-3, -2).flatten(-2)
            loss = (out(pairs + out_of(o)) - wanted).square().mean()
            losses.append(loss.item())
            optimizer.zero_grad(), loss.backward(), optimizer.step()
        return losses, b"".join(weight.detach().numpy().tobytes() for weight in layers.parameters())

    ours, weights = trained(triangle_attention)
    theirs, _ = trained(lambda *given: formula(*given).float())
    assert ours[-1] < 0.8 * ours[0]
    assert max(abs(x - y) for x, y in zip(ours, theirs, strict=True)) < 1e-4
    assert trained(triangle_attention) == (ours, weights)


@pytest.mark.parametrize("kind", [torch.float16, torch.bfloat16])
def test_halves_are_right_until_they_are_rounded(kind):
    q, k, v = (x.detach().to(kind).requires_grad_() for x in tensors(5, 3, 6, 8))
    bias, mask = torch.randn(1, 3, 6, 6, dtype=kind, requires_grad=True), torch.rand(5, 1, 1, 6) < 0.7

    def computed(attend):
        o = attend(q, k, v, bias, mask)
        return o, *torch.autograd.grad(o.double().square().sum(), (q, k, v, bias))

    unit = torch.finfo(kind).eps
    for got, want in zip(computed(triangle_attention), computed(formula), strict=True):
        assert got.dtype == kind
        torch.testing.assert_close(
            got.double(), want.double(), rtol=2 * unit, atol=4 * unit * float(want.detach().abs().max())
        )


def test_a_mask_of_numbers_and_a_view_of_rows_first_are_taken():
    q, k, v = (x.detach().transpose(-3, -2) for x in tensors(1, 4, 6, 2, 8))
    bias, mask = torch.randn(1, 1, 2, 6, 6), (torch.rand(1, 4, 1, 1, 6) < 0.5).float()
    want = formula(q, k, v, bias, mask).float()
    torch.testing.assert_close(triangle_attention(q, k, v, bias, mask), want, rtol=1e-5, atol=1e-5)


def test_what_does_not_fit_is_refused():
    q, k, v = (x.detach() for x in tensors(2, 4, 2, 6, 8))
    with pytest.raises(ValueError, match=r"^q must have shape \[B, N, H, Q, d\] or \[N, H, Q, d\], not "):
        triangle_attention(q[0, 0], k, v, torch.randn(6, 6))
    with pytest.raises(ValueError, match=r"^k must have 5 axes, the first of 2, as q has, not "):
        triangle_attention(q, k[0], v, torch.randn(6, 6))
    with pytest.raises(ValueError, match=r"^v must have 5 axes, the first of 2, as q has, not "):
        triangle_attention(q, k, v[:1], torch.randn(6, 6))
    with pytest.raises(TypeError, match=r"^bias must be a PyTorch tensor, not NoneType$"):
        triangle_attention(q, k, v, None)
    with pytest.raises(TypeError, match=r"^mask must be a PyTorch tensor, not ndarray$"):
        triangle_attention(q, k, v, torch.randn(6, 6), torch.ones(6).numpy())
    with pytest.raises(ValueError, match=r"^bias must have a first axis of 1 or 2, not shape "):
        triangle_attention(q, k, v, torch.randn(3, 1, 2, 6, 6))


@pytest.mark.parametrize("number", range(5))
def test_the_examples_run(number):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    exec(compile(blocks[number], f"{PAGE.name}, example {number}", "exec"), {"__name__": "example"})


def test_a_mask_goes_through_transformations():
    calls, B, H, M, d = 2, 2, 2, 5, 8
    q, k, v = torch.randn(3, calls, B, H, M, d).unbind()
    bias, mask = torch.randn(H, M, M), torch.rand(calls, B, 1, 1, M) < 0.7

    def attend(q, k, v, mask):
        return flashcli.attention(q, k, v, bias=bias, mask=mask)

    want = torch.stack([attend(*one) for one in zip(q, k, v, mask, strict=True)])
    torch.testing.assert_close(torch.vmap(attend)(q, k, v, mask), want)
    slope = torch.func.grad(lambda q: attend(q, k[0], v[0], mask[0]).square().sum())
    for got, right in (
        (slope(q[0]), torch.func.grad(lambda q: formula(q, k[0], v[0], bias, mask[0]).square().sum())(q[0])),
        (torch.func.jvp(slope, (q[0],), (k[0],))[1], _second(q[0], k[0], v[0], bias, mask[0])),
    ):
        torch.testing.assert_close(got, right.float(), rtol=1e-4, atol=1e-4)


def _second(q, k, v, bias, mask):
    given = q.double().requires_grad_()
    [slope] = torch.autograd.grad(formula(given, k, v, bias, mask).square().sum(), given, create_graph=True)
    return torch.autograd.grad((slope * k.double()).sum(), given)[0]


def test_the_operators_keep_to_pytorchs_rules():
    q, k, v = tensors(2, 2, 5, 8)
    mask, bias = torch.rand(2, 1, 1, 5) < 0.7, torch.randn(1, 2, 5, 5, requires_grad=True)
    torch.library.opcheck(torch.ops.flashcli.attention.default, (q, k, v, bias, mask))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU")
@pytest.mark.parametrize("shape", [(256, 4, 256, 32), (40, 2, 200, 64), (20, 3, 131, 16), (9, 2, 300, 96)], ids=str)
def test_on_a_gpu_the_bytes_are_the_same_and_right(shape):
    N, H, Q, _ = shape
    torch.manual_seed(0)
    q, k, v = (torch.randn(shape, device="cuda", requires_grad=True) for _ in range(3))
    bias = torch.randn(1, H, Q, Q, device="cuda", requires_grad=True)
    mask = torch.rand(N, 1, 1, Q, device="cuda") < 0.8

    def computed(attend):
        o = attend(q, k, v, bias, mask)
        return o, *torch.autograd.grad(o.square().sum(), (q, k, v, bias))

    got, again = computed(triangle_attention), computed(triangle_attention)
    for mine, other, right in zip(got, again, computed(formula), strict=True):
        assert torch.equal(mine, other)
        assert (mine - right).norm() < 2e-6 * right.norm()
