"""torch.func's transformations and torch.vmap of attention, beside those of the formula in float64."""

import warnings
from functools import partial
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

import flashcli  # noqa: E402
from flashcli.torch import attention, private  # noqa: E402
from flashcli.torch.gradients import Scores  # noqa: E402
from flashcli.torch.gradients import attention as formula  # noqa: E402
from flashcli.torch.sight import Sight  # noqa: E402

B, H, Hkv, M, N, d = 2, 4, 2, 5, 7, 8


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    return request.param


def ours(q, k, v, bias):
    return attention(q, k, v, True, bias=bias, q_start=2)


def right(q, k, v, bias):
    return formula(q, k, v, Scores(bias, None, True, None, 2, Sight()))[0]


def loss(attend, *tensors):
    return attend(*tensors).sin().sum()


def tensors(device, shape=(H, M, N)):
    generator = torch.Generator().manual_seed(4)
    shapes = (B, H, M, d), (B, Hkv, N, d), (B, Hkv, N, d), shape
    return [torch.randn(x, generator=generator).to(device) for x in shapes]


def scaled(attend, given, factor):
    q, *others = given
    return loss(attend, q * factor, *others)


def forces(attend, given, factor):
    """Of an energy that is a function of all tensors, at once for each entry of Q."""
    return torch.func.grad(partial(loss, attend))(given[0] * factor, *given[1:])


WAYS = {
    "grad": lambda f, given: torch.func.grad(partial(loss, f), (0, 1, 2, 3))(*given),
    "vjp": lambda f, given: torch.func.vjp(f, *given)[1](given[0]),
    "jvp": lambda f, given: torch.func.jvp(partial(loss, f), tuple(given), tuple(given))[1],
    "jacrev": lambda f, given: torch.func.jacrev(partial(forces, f, given))(given[0].new_tensor(0.7)),
    "jacfwd of a gradient": lambda f, given: torch.func.jacfwd(partial(forces, f, given))(given[0].new_tensor(0.7)),
    "hessian": lambda f, given: torch.func.hessian(partial(scaled, f, given))(given[0].new_tensor(1.3)),
    "jacrev of jacrev": lambda f, given: torch.func.jacrev(torch.func.jacrev(partial(scaled, f, given)))(
        given[0].new_tensor(1.3)
    ),
    "jacrev three times": lambda f, given: torch.func.jacrev(
        torch.func.jacrev(torch.func.jacrev(partial(scaled, f, given)))
    )(given[0].new_tensor(1.3)),
    "gradient of a gradient": lambda f, given: torch.func.grad(
        lambda x: torch.func.grad(partial(scaled, f, given))(x).cos()
    )(given[0].new_tensor(1.3)),
    "vmap of gradients": lambda f, given: torch.vmap(torch.func.grad(partial(loss, f), (0, 1, 2, 3)))(
        *(torch.stack([x, -x]) for x in given)
    ),
    "gradients of vmap": lambda f, given: torch.func.grad(
        lambda *x: torch.vmap(f, (0, None, None, None))(*x).sin().sum(), (0, 1, 2, 3)
    )(torch.stack([given[0], -given[0]]), *given[1:]),
    "autograd of a gradient": lambda f, given: torch.autograd.grad(
        torch.func.grad(partial(loss, f))(given[0], leaf := given[1].clone().requires_grad_(), *given[2:]).sum(), leaf
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_transformations_are_those_of_the_formula(way, device):
    given = tensors(device)
    got = WAYS[way](ours, given)
    wanted = WAYS[way](right, [x.double() for x in given])
    for mine, other in zip(torch.utils._pytree.tree_leaves(got), torch.utils._pytree.tree_leaves(wanted), strict=True):
        assert mine.dtype == torch.float32
        assert (mine.double() - other).norm() <= 3e-6 * other.norm()


@pytest.mark.parametrize("part", sorted(private.__annotations__.keys() - {"current_stream"}))
def test_a_pytorch_without_a_private_part_computes_and_transforms_the_same(part, monkeypatch):
    monkeypatch.setattr(private, part, None)
    q, k, v, bias = (x.requires_grad_() for x in tensors("cpu"))
    out, wanted = ours(q, k, v, bias), right(*(x.double() for x in (q, k, v, bias)))
    got = torch.autograd.grad(out.sum(), (q, k, v, bias))
    for mine, other in zip(got, torch.autograd.grad(wanted.sum(), (q, k, v, bias)), strict=True):
        assert (mine - other).norm() <= 3e-6 * other.norm()
    for way in ("grad", "jacrev", "hessian", "vmap of gradients"):
        test_transformations_are_those_of_the_formula(way, "cpu")


def test_a_private_part_that_is_gone_is_none_and_the_public_stream_serves(monkeypatch):
    assert private.part("_C._no_such_part.of_it") is None
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=70 + device))
    assert private.stream_by_public_parts(3) == 73


@pytest.mark.parametrize("shape", [(B, H, M, N), (1, 1, 1, N), (M, 1), (H, M, N)], ids=str)
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (1, None, 2, None), (None, 0, None, 0), (0, None, None, 1)], ids=str)
def test_vmap_is_each_call_for_itself(in_dims, shape, device):
    calls = 3
    given = [
        x if at is None else torch.stack([x + i for i in range(calls)], at)
        for x, at in zip(tensors(device, shape), in_dims, strict=True)
    ]
    alone = [[x if at is None else x.select(at, i) for x, at in zip(given, in_dims, strict=True)] for i in range(calls)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # as PyTorch's is, where it has to call for each
        assert torch.equal(torch.vmap(ours, in_dims)(*given), torch.stack([ours(*x) for x in alone]))
        gradients = torch.func.grad(partial(loss, ours), (0, 1, 2, 3))
        got = torch.vmap(gradients, in_dims)(*given)
    for mine, other in zip(got, zip(*(gradients(*x) for x in alone), strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(other), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("shape", [(H, M, N), (1, N)], ids=str)
@pytest.mark.parametrize("in_dims", [(0, 0, 0, 0), (None, None, None, 0), (2, None, None, None)], ids=str)
def test_vmap_of_no_calls_has_shapes(in_dims, shape):
    given = tensors("cpu", shape)
    given = [x if at is None else torch.stack([x], at).narrow(at, 0, 0) for x, at in zip(given, in_dims, strict=True)]
    both = partial(flashcli.attention, causal=True, return_lse=True)
    o, lse = torch.vmap(lambda q, k, v, bias: both(q, k, v, bias=bias), in_dims)(*given)
    assert o.shape == (0, B, H, M, d) and lse.shape == (0, B, H, M)
    got = torch.vmap(torch.func.grad(partial(loss, ours), (0, 1, 2, 3)), in_dims)(*given)
    assert [x.shape for x in got] == [(0, *x.shape) for x in tensors("cpu", shape)]


def test_a_gradient_passes_through_what_is_not_attention(device):
    q, k, v, bias = tensors(device)
    got = torch.func.grad(lambda x: loss(ours, x.tanh(), k, v, bias))(q)
    leaf = q.clone().requires_grad_()
    [wanted] = torch.autograd.grad(loss(ours, leaf.tanh(), k, v, bias), leaf)
    assert torch.equal(got, wanted)  # the same kernels compute them


def test_bad_arguments_are_told_by_name_in_transformations():
    q, k, v, bias = tensors("cpu")
    with pytest.raises(ValueError, match="v must have the shape of k"):
        torch.func.grad(partial(loss, ours))(q, k, v[:, :, :3], bias)
    with pytest.raises(ValueError, match="v must have the shape of k"):
        torch.vmap(ours, (0, None, None, None))(torch.stack([q, q]), k, v[:, :, :3], bias)


def test_gradients_of_lse_in_transformations():
    q, k, v, bias = (x.double().float() for x in tensors("cpu"))
    both = partial(flashcli.attention, causal=True, bias=bias, q_start=2, return_lse=True)
    got = torch.func.grad(lambda x: both(x, k, v)[1].sin().sum())(q)
    wanted = torch.func.grad(lambda x: formula(x, k, v, Scores(bias, None, True, None, 2, Sight()))[1].sin().sum())(q)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-6)
