"""Windows, ALiBi's slopes and packed sequences on PyTorch's tensors on the CPU, with gradients and transformations."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from flashcli import attention  # noqa: E402
from flashcli.torch import attention_backward, gradients  # noqa: E402
from flashcli.torch.sight import Sight  # noqa: E402

LENGTHS = (5, 0, 30, 1, 12)
H, Hkv, d = 4, 2, 8
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (7, 3)},
    "slopes": {"alibi_slopes": (H,), "causal": True},
    "slopes of sequences": {"alibi_slopes": (len(LENGTHS), H), "window": (9, -1)},
}
every_call = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)


@pytest.fixture
def packed():
    torch.manual_seed(0)
    starts = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    q, k, v = (torch.randn(int(starts[-1]), heads, d, requires_grad=True) for heads in (H, Hkv, Hkv))
    return q, k, v, starts


def filled(options):
    return {name: torch.rand(x) if name == "alibi_slopes" else x for name, x in options.items()}


def spelled_out(q, k, v, starts, causal=False, window=(-1, -1), alibi_slopes=None):
    scores = gradients.Scores(None, None, causal, None, 0, Sight(window, alibi_slopes, starts))
    return gradients.attention(q, k, v, scores)


def losses(answer):
    o, lse = answer
    return o.sin().sum() + lse[lse.isfinite()].sum()


@every_call
def test_gradients_and_theirs_are_those_of_the_formulas(packed, options):
    q, k, v, starts = packed
    options = filled(options)
    answers = attention(q, k, v, cu_seqlens_q=starts, return_lse=True, **options), spelled_out(*packed, **options)
    slopes = [torch.autograd.grad(losses(answer), (q, k, v), create_graph=True) for answer in answers]
    second = [torch.autograd.grad(sum(x.square().sum() for x in of_first), (q, k, v)) for of_first in slopes]
    for got, want in zip(*((*a, *b, *c) for a, b, c in zip(answers, slopes, second, strict=True)), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


@every_call
def test_dense_tensors_take_windows_and_slopes(options):
    torch.manual_seed(0)
    options = filled(options)
    if "alibi_slopes" in options and options["alibi_slopes"].ndim == 2:
        options["alibi_slopes"] = options["alibi_slopes"][:2]
    causal, window, slopes = (options.get(name) for name in ("causal", "window", "alibi_slopes"))
    q, k, v = (torch.randn(2, heads, rows, d) for heads, rows in ((H, 20), (Hkv, 33), (Hkv, 33)))
    sight = Sight((-1, -1) if window is None else window, slopes)
    want = gradients.attention(q, k, v, gradients.Scores(None, None, bool(causal), None, 13, sight))
    torch.testing.assert_close(attention(q, k, v, q_start=13, return_lse=True, **options), want)


@every_call
def test_transformations_and_the_compiler_know_them(packed, options):
    q, k, v, starts = (x.detach() for x in packed)
    options = filled(options) | {"cu_seqlens_q": starts}

    def loss(q):
        return attention(q, k, v, **options).sin().sum()

    several = torch.stack([q, 2 * q])
    torch.testing.assert_close(torch.vmap(torch.func.grad(loss))(several)[1], torch.func.grad(loss)(2 * q))
    want = (torch.func.grad(loss)(q) * k.repeat_interleave(2, 1)).sum()
    torch.testing.assert_close(torch.func.jvp(loss, (q,), (k.repeat_interleave(2, 1),))[1], want, rtol=1e-3, atol=1e-4)
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q), loss(q))


def test_the_operators_keep_to_pytorchs_rules(packed):
    q, k, v, starts = packed
    named = {"window": [5, 3], "alibi_slopes": torch.rand(H), "cu_seqlens_q": starts}
    torch.library.opcheck(torch.ops.flashcli.attention.default, (q, k, v), named)
    o, lse = (x.detach() for x in attention(q, k, v, **named, return_lse=True))
    given = o, None, *(x.detach() for x in (q, k, v)), None, None, o, lse
    torch.library.opcheck(torch.ops.flashcli.attention_backward.default, given, named)
    found = attention_backward(o, q, k, v, **named)
    for got, want in zip(found, torch.autograd.grad(attention(q, k, v, **named), (q, k, v), o), strict=True):
        assert torch.equal(got, want)


def test_tensors_elsewhere_are_told_by_name(packed):
    q, k, v, starts = packed
    with pytest.raises(ValueError, match="cu_seqlens_q must be on cpu, as q is, not on meta"):
        attention(q, k, v, cu_seqlens_q=starts.to("meta"))
    with pytest.raises(TypeError, match="alibi_slopes must be a PyTorch tensor"):
        attention(q, k, v, cu_seqlens_q=starts, alibi_slopes=[1.0] * H)
