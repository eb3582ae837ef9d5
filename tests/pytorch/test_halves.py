"""Halves answered in fp32: float16 and bfloat16 tensors, their gradients, and the place of PyTorch's attention."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.nn import functional  # noqa: E402
from torch_oracle import oracle  # noqa: E402

import flashcli  # noqa: E402
from flashcli import torch as ours  # noqa: E402
from flashcli.torch import replacing, sdpa  # noqa: E402

B, H, Hkv, M, N, d = 2, 4, 2, 70, 90, 64
KINDS = [torch.float16, torch.bfloat16]
ROUNDING = {torch.float16: 2**-11, torch.bfloat16: 2**-8}  # relative, of one number


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request):
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    torch.manual_seed(0)
    return request.param


def tensors(device, kind, *, grad=False):
    shapes = (B, H, M, d), (B, Hkv, N, d), (B, Hkv, N, d)
    return [torch.randn(shape, device=device).to(kind).requires_grad_(grad) for shape in shapes]


def error(got, right) -> float:
    return float((got.double() - right).norm() / right.norm())


@pytest.mark.parametrize("kind", KINDS)
def test_an_answer_is_that_of_float32_rounded_once(device, kind):
    q, k, v = tensors(device, kind)
    exact, lse = flashcli.attention(q, k, v, return_lse=True, out_dtype=torch.float32)
    right, right_lse = oracle(q.float(), k.float(), v.float())
    assert exact.dtype == lse.dtype == torch.float32 and error(exact, right) < 1e-6
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    assert torch.equal(flashcli.attention(q, k, v), exact.to(kind))
    out = torch.empty(B, M, H, d, device=device, dtype=kind).transpose(1, 2)
    assert flashcli.attention(q, k, v, out=out) is out and torch.equal(out, exact.to(kind))


@pytest.mark.parametrize("options", [{}, {"causal": True, "q_start": 20}, {"bias": (B, 1, M, N)}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_of_the_inputs_type_and_right(device, kind, options):
    q, k, v = tensors(device, kind, grad=True)
    options = {name: torch.rand(x, device=device) < 0.9 if name == "bias" else x for name, x in options.items()}
    o, lse = flashcli.attention(q, k, v, return_lse=True, **options)
    weights = torch.randn_like(o)
    got = torch.autograd.grad((o * weights).sum(), (q, k, v))
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = torch.autograd.grad((oracle(*wide, **options)[0] * weights.double()).sum(), wide)
    exact = flashcli.attention_backward(
        weights, *(x.detach() for x in (q, k, v)), o=o.detach(), lse=lse.detach(), out_dtype=torch.float32, **options
    )
    for rounded, mine, other in zip(got, exact, right, strict=True):
        assert rounded.dtype == kind and torch.equal(rounded, mine.to(kind))
        assert mine.dtype == torch.float32 and error(mine, other) < 1.5e-6


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_gradients_have_their_types(kind):
    q, k, v = (x[:1, :, :9] for x in tensors("cpu", kind, grad=True))
    o = flashcli.attention(q, k, v)
    first = torch.autograd.grad(o.float().square().sum(), q, create_graph=True)[0]
    second = torch.autograd.grad(first.float().square().sum(), k)[0]
    assert first.dtype == second.dtype == kind and second.isfinite().all()


def test_a_type_may_be_told_by_its_name(device):
    q, k, v = tensors(device, torch.float16, grad=True)
    o = flashcli.attention(q, k, v, out_dtype="float32")
    gradients = flashcli.attention_backward(o, q, k, v, out_dtype="float32")
    assert {x.dtype for x in (o, *gradients)} == {torch.float32}
    with pytest.raises(TypeError, match="out_dtype must be float16 or float32 for a q of float16, not float8"):
        flashcli.attention(q, k, v, out_dtype="float8")


def test_the_operators_keep_to_pytorchs_rules():
    q, k, _ = (x[:1] for x in tensors("cpu", torch.bfloat16, grad=True))
    for options in ({}, {"out_dtype": torch.float32, "rows_first": True}):
        torch.library.opcheck(torch.ops.flashcli.attention.default, (q, k, k), options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out_dtype": torch.bfloat16}, "out_dtype must be float16 or float32 for a q of float16, not bfloat16"),
        ({"v": torch.bfloat16}, "v must be a float16 array, not bfloat16"),
        ({"out": torch.bfloat16}, "out must be a float16 or float32 array, not bfloat16"),
    ],
    ids=str,
)
def test_types_that_do_not_go_together_are_told(device, change, message):
    q, k, v = tensors(device, torch.float16)
    given = {"v": v.to(change.get("v", torch.float16))}
    given |= {name: q.to(x) if name == "out" else x for name, x in change.items() if name != "v"}
    with pytest.raises(TypeError, match=message):
        flashcli.attention(q, k, **given)


# In the place of PyTorch's: only where it is asked for


def test_halves_are_pytorchs_unless_they_are_asked_for(monkeypatch):
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    def on_gpu(kind, *shape):
        return FakeTensor(FakeTensorMode(), torch.empty(shape, dtype=kind, device="meta"), torch.device("cuda", 0))

    for kind in KINDS:
        given = [on_gpu(kind, B, H, M, d)] * 3
        assert not sdpa.supported(*given) and sdpa.supported(*given, halves=True)
        assert sdpa.supported(*given, on_gpu(kind, M, M), halves=True)
        monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: True)
        assert sdpa.supported(*given, halves=True)  # which autocast leaves as they are
        monkeypatch.undo()


def test_pytorchs_other_kernels_are_allowed_again_by_the_last(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)
    cuda = torch.backends.cuda

    def allowed():
        return cuda.flash_sdp_enabled(), cuda.cudnn_sdp_enabled()

    before = allowed()
    with ours.replacing_sdpa():
        assert allowed() == before
        with ours.replacing_sdpa(halves=True):
            inner = ours.replacing_sdpa(halves=True)
            inner.remove()
            inner.remove()
            assert allowed() == (False, False)
        assert allowed() == before
    assert replacing._of_halves == 0


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("masked", [False, True])
def test_replacing_sdpa_of_halves(kind, masked):
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    q, k, v = (torch.randn(B, H, n, d, device="cuda").to(kind).requires_grad_() for n in (M, N, N))
    mask = torch.randn(B, 1, M, N, device="cuda").to(kind) if masked else None
    wide = [x.detach().double().requires_grad_() for x in (q, k, v)]
    right = functional.scaled_dot_product_attention(*wide, None if mask is None else mask.double())
    weights = torch.randn_like(q)
    theirs = functional.scaled_dot_product_attention(q, k, v, mask)
    with ours.replacing_sdpa(halves=True):
        got = functional.scaled_dot_product_attention(q, k, v, mask)
        mine = torch.autograd.grad((got * weights).sum(), (q, k, v))
    rounded = error(right.to(kind), right)
    assert got.dtype == kind and error(got, right) < 1.001 * rounded < error(theirs, right)
    for one, other in zip(mine, torch.autograd.grad((right * weights).sum(), wide), strict=True):
        assert one.dtype == kind and error(one, other) < 1.01 * error(other.to(kind), other)


@pytest.mark.gpu
@pytest.mark.parametrize("which", ["gpt2", "llama"])
def test_models_in_half_precision(which):
    """The same rounding everywhere else: what attention adds to it is less than with PyTorch's."""
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    ours.register_transformers("fp32_of_halves", halves=True)
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=100),
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=2, intermediate_size=256),
    }[which]()
    tokens = torch.randint(0, 100, (2, 80), device="cuda")
    answers = {}
    for name, kind in (("eager", torch.float64), ("sdpa", torch.bfloat16), ("fp32_of_halves", torch.bfloat16)):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=name).eval().cuda().to(kind)
        with torch.no_grad():
            answers[name] = model(tokens).last_hidden_state
    assert answers["fp32_of_halves"].dtype == torch.bfloat16
    assert error(answers["fp32_of_halves"], answers["eager"]) < 1.1 * error(answers["sdpa"], answers["eager"]) < 0.1
