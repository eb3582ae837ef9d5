"""What goes to our kernels in the place of PyTorch's, and what stays PyTorch's own."""

from __future__ import annotations

import itertools
import warnings

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch.nn import functional  # noqa: E402

from flashcli import torch as ours  # noqa: E402
from flashcli.torch import in_place, replacing, sdpa  # noqa: E402
from flashcli.torch.models import attention_forward  # noqa: E402

B, H, M, N, d = 2, 4, 7, 9, 8


def on_gpu(*shape, dtype=torch.float32):
    """As much of a tensor on a GPU as can be had without one."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    return FakeTensor(FakeTensorMode(), torch.empty(shape, dtype=dtype, device="meta"), torch.device("cuda", 0))


RULE = {
    "heads": (True, lambda: [on_gpu(B, H, M, d), on_gpu(B, H, N, d), on_gpu(B, H, N, d)], {}),
    "no heads": (True, lambda: [on_gpu(B, M, d), on_gpu(B, N, d), on_gpu(B, N, d)], {"is_causal": True}),
    "grouped": (True, lambda: [on_gpu(B, H, M, d), on_gpu(B, 2, N, d), on_gpu(B, 2, N, d)], {"enable_gqa": True}),
    "a mask": (True, lambda: [on_gpu(B, H, M, d)] * 3 + [on_gpu(B, 1, M, M, dtype=torch.bool)], {}),
    "heads that differ": (False, lambda: [on_gpu(B, H, M, d), on_gpu(B, 2, N, d), on_gpu(B, 2, N, d)], {}),
    "half": (False, lambda: [on_gpu(B, H, M, d, dtype=torch.half)] * 3, {}),
    "dropout": (False, lambda: [on_gpu(B, H, M, d)] * 3, {"dropout_p": 0.1}),
    "a long head": (False, lambda: [on_gpu(B, H, M, 257)] * 3, {}),
    "values of another length": (False, lambda: [on_gpu(B, H, M, d)] * 2 + [on_gpu(B, H, M, 2 * d)], {}),
    "a half mask": (False, lambda: [on_gpu(B, H, M, d)] * 3 + [on_gpu(M, M, dtype=torch.half)], {}),
    "a mask and causal": (False, lambda: [on_gpu(B, H, M, d)] * 3 + [on_gpu(M, M)], {"is_causal": True}),
    "a mask of other shape": (False, lambda: [on_gpu(B, H, M, d)] * 3 + [on_gpu(M, M + 1)], {}),
    "no head": (False, lambda: [on_gpu(B, 0, M, d)] * 3, {"enable_gqa": True}),
    "no tensor": (False, lambda: [1.0] * 3, {}),
    "one axis": (False, lambda: [on_gpu(M, d)] * 3, {}),
    "the CPU": (False, lambda: [torch.zeros(B, H, M, d)] * 3, {}),
}


@pytest.mark.parametrize(("expected", "make", "options"), RULE.values(), ids=RULE)
def test_the_rule(expected, make, options):
    assert sdpa.supported(*make(), **options) is expected


def test_autocast_is_pytorchs(monkeypatch):
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    assert not sdpa.supported(*[on_gpu(B, H, M, d)] * 3)


def test_what_is_not_ours_is_pytorchs(monkeypatch):
    q, mask = torch.randn(B, H, M, d), torch.rand(M, M) > 0.3
    for given in ({"is_causal": True, "scale": 0.2}, {"attn_mask": mask}):
        right = functional.scaled_dot_product_attention(q, q, q, **given)
        assert torch.equal(ours.scaled_dot_product_attention(q, q, q, **given), right)


@pytest.fixture
def everywhere(monkeypatch):
    """Tensors on the CPU count as supported; gives the calls that came to us."""
    calls = []
    compute = in_place.compute

    def on_cpu(q, k, v, bias, mask, given, return_lse=False):
        calls.append(q.shape)
        out, lse = torch.ops.flashcli.attention(q, k, v, bias, mask, *given)
        return out, lse if return_lse else None

    monkeypatch.setattr(in_place, "compute", on_cpu)
    monkeypatch.setattr(sdpa, "supported", lambda *given: True)
    monkeypatch.setattr(replacing, "supported", lambda *given, halves: given[5] == 0)
    assert compute is not on_cpu
    return calls


@pytest.mark.parametrize(
    "options",
    [{}, {"is_causal": True}, {"scale": 0.1}, {"attn_mask": (M, N)}, {"attn_mask": (B, 1, 1, N)}],
    ids=str,
)
@pytest.mark.parametrize("grad", [False, True])
def test_ours_gives_what_pytorchs_gives(everywhere, options, grad):
    torch.manual_seed(1)
    q, k, v = (torch.randn(B, n, H, d).transpose(1, 2).requires_grad_(grad) for n in (M, N, N))
    options = {name: torch.randn(x) if isinstance(x, tuple) else x for name, x in options.items()}
    got = ours.scaled_dot_product_attention(q, k, v, **options)
    right = functional.scaled_dot_product_attention(q, k, v, **options)
    torch.testing.assert_close(got, right, rtol=1e-5, atol=1e-5)
    assert got.transpose(1, 2).is_contiguous()
    assert everywhere and got.requires_grad is grad
    if grad:
        weights = torch.randn(got.shape)
        mine, other = (torch.autograd.grad((x * weights).sum(), (q, k, v)) for x in (got, right))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


def test_columns_apart_are_copied(everywhere):
    q = torch.randn(B, H, d, M).mT
    right = functional.scaled_dot_product_attention(q, q, q)
    torch.testing.assert_close(ours.scaled_dot_product_attention(q, q, q), right, rtol=1e-5, atol=1e-5)


# In the place of PyTorch's


def test_what_replaces_pytorchs_keeps_its_promises(everywhere):
    q, k, v = (torch.randn(B, H, n, d) for n in (M, N, N))
    forward = replacing._forward_or(None)
    for with_lse, scale in itertools.product([True, False], [None, 0.3]):
        got = forward(None, q, k, v, None, with_lse, scale=scale)
        with torch.device("meta"):
            metas = [torch.empty_like(x, device="meta") for x in (q, k, v)]
            promised = torch.ops.aten._scaled_dot_product_efficient_attention(*metas, None, with_lse, scale=scale)
        for mine, theirs in zip(got, promised, strict=True):
            assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        right = functional.scaled_dot_product_attention(q, k, v, scale=scale)
        torch.testing.assert_close(got[0], right, rtol=1e-5, atol=1e-5)


def test_the_lse_is_as_pytorchs_gradients_want_it():
    lse = torch.tensor([[[1.0, -torch.inf, 3.0]]])
    theirs = replacing._as_theirs(lse)
    assert theirs.shape == (1, 1, 32)
    assert theirs[0, 0, :3].tolist() == [1, torch.inf, 3] and (theirs[0, 0, 3:] == torch.inf).all()


def test_what_we_do_not_do_goes_to_the_original(everywhere):
    class Original:
        def call_boxed(self, *given, **options):
            return given, options

    q = torch.randn(B, H, M, d)
    given, options = replacing._forward_or(Original())("keys", q, q, q, None, True, 0.5, True, scale=2.0)
    assert given == ("keys", q, q, q, None, True, 0.5, True) and options == {"scale": 2.0} and not everywhere


@pytest.fixture
def replaceable():
    try:
        torch.library.get_kernel(f"aten::{replacing.NAME}", "CUDA")
    except RuntimeError:
        pytest.skip("this PyTorch is for the CPU only")


def registered() -> str:
    return str(torch.library.get_kernel(f"aten::{replacing.NAME}", "CUDA"))


def test_it_is_taken_back_by_the_last_and_nothing_is_printed(replaceable, capfd):
    before = registered()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with ours.replacing_sdpa() as outer:
            assert registered() != before
            inner = ours.replacing_sdpa()
            inner.remove()
            inner.remove()
            assert registered() != before
        outer.remove()
        assert registered() == before
        with ours.replacing_sdpa():
            assert registered() != before
    assert registered() == before
    assert capfd.readouterr() == ("", "")


def test_pytorchs_kernels_are_allowed_again_whatever_was_taken_for_true():
    with ours.replacing_sdpa(halves="yes"):
        assert not torch.backends.cuda.flash_sdp_enabled()
    assert torch.backends.cuda.flash_sdp_enabled()


def test_a_build_without_cuda_has_nothing_to_replace(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: False)  # as is true of PyTorch's build for the CPU
    q = torch.randn(B, H, M, d)
    right = functional.scaled_dot_product_attention(q, q, q)
    with ours.replacing_sdpa():
        assert torch.equal(functional.scaled_dot_product_attention(q, q, q), right)
        ours.replacing_sdpa().remove()
        assert replacing._library is None


# transformers


class Module:
    is_causal = True


@pytest.mark.parametrize("masked", [False, True])
def test_what_transformers_calls(masked):
    q, k = torch.randn(B, H, M, d), torch.randn(B, 2, M, d)
    mask = torch.rand(B, 1, M, M) > 0.3 if masked else None
    got, weights = attention_forward(Module(), q, k, k, mask, scaling=0.3)
    right = functional.scaled_dot_product_attention(
        q, k, k, mask, is_causal=not masked, scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(got, right)
    assert weights is None and got.is_contiguous()


@pytest.mark.parametrize("masked", [False, True])
def test_a_bias_of_positions_is_added(masked):
    q, bias = torch.randn(B, H, M, d), torch.randn(1, H, M, M)
    mask = torch.ones(M, M, dtype=torch.bool).tril()
    got, _ = attention_forward(Module(), q, q, q, mask if masked else None, position_bias=bias)
    added = bias.masked_fill(~mask, -torch.inf).expand(B, H, M, M)
    torch.testing.assert_close(got, functional.scaled_dot_product_attention(q, q, q, added).transpose(1, 2))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "sinks"])
def test_what_would_change_scores_is_refused_and_not_left_out(name):
    q = torch.randn(B, H, M, d)
    with pytest.raises(ValueError, match=f"{name} must be None"):
        attention_forward(Module(), q, q, q, None, **{name: torch.ones(H)})


@pytest.mark.parametrize("which", ["gpt2", "llama", "bert"])
def test_models_give_the_same_as_with_pytorchs(which):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours.register_transformers()
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=50, n_positions=32),
        "llama": lambda: transformers.LlamaConfig(
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, hidden_size=32, intermediate_size=48,
            vocab_size=50,
        ),
        "bert": lambda: transformers.BertConfig(
            num_hidden_layers=2, num_attention_heads=4, hidden_size=32, intermediate_size=48, vocab_size=50
        ),
    }[which]()  # fmt: skip
    tokens = torch.randint(0, 50, (2, 12), generator=torch.Generator().manual_seed(3))
    padding = torch.ones(2, 12, dtype=torch.long)
    padding[1, 8:] = 0
    answers = []
    for implementation in ("sdpa", "fp32"):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval()
        with torch.no_grad():
            answers.append(model(tokens, attention_mask=padding).last_hidden_state)
    torch.testing.assert_close(*answers)
