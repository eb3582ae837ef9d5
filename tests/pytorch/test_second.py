"""Gradients of gradients: by kernels, emulated on tensors of the CPU, and where kernels are chosen."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from tolerances import FACTOR, FLOOR  # noqa: E402
from torch.autograd import forward_ad  # noqa: E402
from torch_oracle import oracle  # noqa: E402

import flashcli  # noqa: E402
from bench import second  # noqa: E402
from flashcli.measure.bench import Conditions  # noqa: E402
from flashcli.measure.tensors import Problem  # noqa: E402
from flashcli.torch import tangents  # noqa: E402
from flashcli.torch.sight import Sight  # noqa: E402

NAMES = "do", "q", "k", "v"


def inputs(M=20, N=37, d=8, device="cpu"):
    """dO, Q, K and V, and the gradients of a loss with respect to dQ, dK and dV."""
    torch.manual_seed(0)
    of_q, of_k = (2, 4, M, d), (2, 2, N, d)
    shapes = of_q, of_q, of_k, of_k, of_q, of_k, of_k
    found = [torch.randn(shape, device=device) for shape in shapes]
    return found[:4], found[4:]


def right(given, weights, dtype=torch.float64, **options):
    """The loss's gradients with respect to dO, Q, K and V, by PyTorch's operations."""
    do, q, k, v = wide = [x.detach().to(dtype).requires_grad_() for x in given]
    first = torch.autograd.grad((oracle(q, k, v, dtype=dtype, **options)[0] * do).sum(), (q, k, v), create_graph=True)
    return torch.autograd.grad(first, wide, [x.to(dtype) for x in weights])


def ours(given, weights, **options):
    do, q, k, v = mine = [x.detach().requires_grad_() for x in given]
    first = torch.autograd.grad(flashcli.attention(q, k, v, **options), (q, k, v), do, create_graph=True)
    return torch.autograd.grad(first, mine, weights)


def off(got, want):
    return [float((x.double() - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]


@pytest.fixture
def emulating(emulated_place, monkeypatch):
    """Kernels on an emulated GPU of Hopper's, which sees tensors of the CPU."""
    monkeypatch.setattr(tangents, "place_of_device", lambda device: emulated_place)
    monkeypatch.setattr(tangents.private, "current_stream", lambda device: 0)


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_give_them_with_a_bias_and_a_mask_too(emulating, masked):
    given, weights = inputs()
    bias = torch.randn(4, 1, 37) if masked else None
    mask = torch.rand(2, 1, 20, 37) < 0.7 if masked else None
    options = {"causal": True, "q_start": 30}
    do, q, k, v = given
    _, lse = flashcli.attention(q, k, v, bias=bias, mask=mask, return_lse=True, **options)
    with torch.no_grad():
        found = tangents.compute(weights, q, k, v, lse, do, None, bias, mask, True, None, 30, Sight())
    if masked:
        bias = bias.expand(2, 4, 20, 37).masked_fill(~mask, -torch.inf)
    want = right(given, weights, bias=bias, **options)
    for name, error in zip(NAMES, off([getattr(found, name) for name in NAMES], want), strict=True):
        assert error < 2e-6, name


@pytest.mark.parametrize("d", [8, 16])
def test_rows_that_see_a_far_number_are_as_accurate_as_naive_ones(emulating, d):
    """Means about the first keys, which most of the weight is far from, were off by 20 times that."""
    given, weights = ([x[:1] for x in some] for some in inputs(130, 130, d))
    for x in (*given, *weights):
        x[:, :, 64::9] *= 10  # none of the first tile of keys
    do, q, k, v = given
    _, lse = flashcli.attention(q, k, v, return_lse=True)
    with torch.no_grad():
        found = tangents.compute(weights, q, k, v, lse, do, None, None, None, False, None, 0, Sight())
    want = right(given, weights)
    mine, naive = off([getattr(found, name) for name in NAMES], want), off(right(given, weights, torch.float32), want)
    for name, one, other in zip(NAMES, mine, naive, strict=True):
        assert one <= FACTOR * other + FLOOR, name


def test_a_direction_that_is_not_there_is_zero(emulating):
    (do, q, k, v), (_, of_dk, _) = inputs()
    _, lse = flashcli.attention(q, k, v, return_lse=True)
    with torch.no_grad():
        found = tangents.compute((None, of_dk, None), q, k, v, lse, do, None, None, None, False, None, 0, Sight())
    want = right((do, q, k, v), [torch.zeros_like(q), of_dk, torch.zeros_like(v)])
    assert max(off([getattr(found, name) for name in NAMES], want)) < 2e-6


def test_autograd_and_forward_mode_call_kernels_where_tensors_fit(emulating, monkeypatch):
    given, weights = inputs()
    monkeypatch.setattr(tangents, "fit", lambda tensors, sight, transformed=False: True)
    called = []
    monkeypatch.setattr(tangents, "compute", lambda *them, to=tangents.compute: called.append(0) or to(*them))
    assert max(off(ours(given, weights, causal=True), right(given, weights, causal=True))) < 2e-6
    _, q, k, v = given
    with forward_ad.dual_level():
        pairs = zip((q, k, v), weights, strict=True)
        o, lse = flashcli.attention(*(forward_ad.make_dual(*pair) for pair in pairs), return_lse=True)
        got = forward_ad.unpack_dual(o).tangent, forward_ad.unpack_dual(lse).tangent
    wide = [tuple(x.double() for x in some) for some in ((q, k, v), weights)]
    _, want = torch.func.jvp(oracle, *wide)
    assert len(called) == 2 and max(off(got, want)) < 2e-6
    _, got = torch.func.jvp(lambda *x: flashcli.attention(*x, return_lse=True), (q, k, v), tuple(weights))
    assert len(called) == 3 and max(off(got, want)) < 2e-6


def test_the_cpu_has_them_by_pytorchs_operations():
    given, weights = inputs()
    assert not tangents.fit(given, Sight())
    assert max(off(ours(given, weights), right(given, weights))) < 2e-6


def test_gradients_that_nobody_has_a_gradient_of_pass_none_on():
    given = [x.requires_grad_() for x in inputs()[0]]
    do, q, k, v = given
    first = torch.autograd.grad(flashcli.attention(q, k, v), (q, k, v), do, create_graph=True)
    ended = [torch._C._functions.UndefinedGrad()(x).sum() for x in first]
    assert torch.autograd.grad(ended, given, allow_unused=True) == (None,) * 4


@pytest.mark.parametrize("causal", [False, True])
def test_the_benchmark_compares_ours_and_pytorchs_with_float64(causal):
    rows = [*second.race("short", Problem(1, 3, 3, 20, 20, 8, causal), Conditions(1, False, 0), "cpu")]
    assert [row.contender for row in rows] == ["flashcli", "PyTorch math"]
    assert all(0 < row.relative_l2 < 2e-6 for row in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("d", [1, 64, 128, 200])
@pytest.mark.parametrize("causal", [False, True])
def test_on_a_gpu_they_are_as_accurate_as_naive_ones_and_the_same_every_time(d, causal):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    given, weights = inputs(300, 300, d, "cuda")
    want = right(given, weights, causal=causal)
    first, second = (ours(given, weights, causal=causal) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))
    naive = off(right(given, weights, torch.float32, causal=causal), want)
    for name, mine, other in zip(NAMES, off(first, want), naive, strict=True):
        assert mine <= FACTOR * other + FLOOR, name


@pytest.mark.gpu
def test_memory_does_not_grow_with_scores():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    given, weights = inputs(2000, 2000, 64, "cuda")
    do, q, k, v = mine = [x.requires_grad_() for x in given]
    first = torch.autograd.grad(flashcli.attention(q, k, v), (q, k, v), do, create_graph=True)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    torch.autograd.grad(first, mine, weights)
    of_one_matrix = 2 * 4 * 2000 * 2000 * 4  # bytes of scores
    assert torch.cuda.max_memory_allocated() - before < of_one_matrix / 2
