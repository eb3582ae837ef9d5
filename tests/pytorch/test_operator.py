"""The operator, its gradients and PyTorch's compiler, on tensors on the CPU."""

from __future__ import annotations

from functools import partial

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from torch_oracle import oracle  # noqa: E402

import flashcli  # noqa: E402
from flashcli import torch as ours  # noqa: E402
from flashcli.errors import FlashError  # noqa: E402

B, H, Hkv, M, N, d = 2, 4, 2, 7, 9, 8


def tensor(*shape, grad=False):
    return torch.randn(*shape, requires_grad=grad)


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def qkv():
    return tensor(B, H, M, d), tensor(B, Hkv, N, d), tensor(B, Hkv, N, d)


CALLS = {
    "plain": {},
    "causal": {"causal": True, "q_start": 2},
    "rows that see nothing": {"causal": True, "q_start": -3},
    "bias": {"bias": (H, M, N)},
    "broadcast bias": {"bias": (B, 1, 1, N), "scale": 0.3},
    "mask": {"bias": (B, 1, M, N), "mask": True},
}
every_call = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)


def prepared(options, grad=False):
    """Options with their bias made."""
    options = dict(options)
    mask = options.pop("mask", False)
    if "bias" in options:
        options["bias"] = tensor(*options["bias"]) > -1 if mask else tensor(*options["bias"], grad=grad)
    return options


@every_call
def test_tensors_on_the_cpu(qkv, options):
    options = prepared(options)
    o, lse = flashcli.attention(*qkv, return_lse=True, **options)
    right, right_lse = oracle(*qkv, **options)
    torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=1e-5)
    assert o.is_contiguous() and o.shape == qkv[0].shape and lse.shape == (B, H, M)


@every_call
def test_gradients_and_theirs(qkv, options):
    options = prepared(options, grad=True)
    inputs = [x.requires_grad_() for x in qkv]
    if "bias" in options and options["bias"].requires_grad:
        inputs.append(options["bias"])
    weights = tensor(B, H, M, d), tensor(B, H, M)

    def loss(answer):
        o, lse = answer
        return (o * weights[0]).sum() + (lse.masked_fill(lse == -torch.inf, 0) * weights[1]).sum()

    got = torch.autograd.grad(loss(flashcli.attention(*qkv, return_lse=True, **options)), inputs, create_graph=True)
    right = torch.autograd.grad(loss(oracle(*qkv, **options)), inputs, create_graph=True)
    again, right_again = (torch.autograd.grad(sum((x**2).sum() for x in first), inputs) for first in (got, right))
    for mine, other in zip([*got, *again], [*right, *right_again], strict=True):
        assert mine.dtype == torch.float32 and mine.isfinite().all()
        torch.testing.assert_close(mine, other.float(), rtol=1e-4, atol=1e-4)


def test_gradients_of_one_head_and_of_what_is_not_contiguous():
    q, k, v = tensor(B, M, d, grad=True), tensor(B, N, d, grad=True), tensor(B, N, d, grad=True)
    flashcli.attention(q, k, v).mT.backward(tensor(B, M, d).mT.contiguous())  # which has other strides than O
    grads = [x.grad for x in (q, k, v)]
    torch.manual_seed(0)
    q, k, v = tensor(B, M, d, grad=True), tensor(B, N, d, grad=True), tensor(B, N, d, grad=True)
    oracle(q, k, v)[0].mT.backward(tensor(B, M, d).mT.double())
    for mine, other in zip(grads, (q, k, v), strict=True):
        torch.testing.assert_close(mine, other.grad, rtol=1e-4, atol=1e-5)


def test_a_gradient_that_is_expanded(qkv):
    inputs = [x.requires_grad_() for x in qkv]
    got = torch.autograd.grad(flashcli.attention(*qkv).sum(), inputs)
    right = torch.autograd.grad(oracle(*qkv)[0].sum(), inputs)
    for mine, other in zip(got, right, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


OPCHECKS = {
    "grouped heads": ((B, H, M, d), (B, Hkv, N, d), None, {"causal": True, "q_start": 2}),
    "one head and a bias": ((B, M, d), (B, N, d), (M, N), {"scale": 0.5}),
    "rows first": ((B, H, M, d), (B, H, N, d), (B, 1, 1, N), {"rows_first": True}),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("of_q", "of_k", "of_bias", "options"), OPCHECKS.values(), ids=OPCHECKS)
def test_the_operator_keeps_to_pytorchs_rules(of_q, of_k, of_bias, options, grad):
    q, k, v = tensor(*of_q, grad=grad), tensor(*of_k, grad=grad), tensor(*of_k, grad=grad)
    bias = None if of_bias is None else tensor(*of_bias, grad=grad)
    torch.library.opcheck(torch.ops.flashcli.attention.default, (q, k, v, bias), options)


def test_columns_may_lie_apart_on_the_cpu_where_there_are_no_numbers_and_with_tangents():
    q, k, v = (tensor(B, H, d, n).mT for n in (M, N, N))
    o, lse = flashcli.attention(q, k, v, return_lse=True)
    torch.library.opcheck(torch.ops.flashcli.attention.default, (q, k, v))
    torch.library.opcheck(torch.ops.flashcli.attention_backward.default, (o, None, q, k, v, None, None, o, lse))
    dense = tuple(x.contiguous() for x in (q, k, v))
    mine, other = (torch.func.jvp(flashcli.attention, given, given) for given in ((q, k, v), dense))
    torch.testing.assert_close(mine, other)


@pytest.mark.parametrize("function", [flashcli.attention, ours.attention])
def test_a_compiled_function_has_no_break_and_takes_any_length(function, monkeypatch):
    monkeypatch.setattr("flashcli.api._known", {})  # as in a process's first call
    compiled = torch.compile(
        lambda q, k, v: function(q * 2, k, v, causal=True, q_start=1) + 1, fullgraph=True, dynamic=True,
        backend="aot_eager",
    )  # fmt: skip
    for rows in (5, 6, 9):
        q, k, v = tensor(B, H, rows, d, grad=True), tensor(B, Hkv, rows, d), tensor(B, Hkv, rows, d)
        got, right = compiled(q, k, v), oracle(q * 2, k, v, causal=True, q_start=1)[0] + 1
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-5)
        [mine], [other] = (torch.autograd.grad(x.sum(), [q]) for x in (got, right))
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_a_trace_holds_the_operator_and_not_the_numbers_it_was_made_of(qkv):
    traced = torch.jit.trace(lambda q, k, v: flashcli.attention(q, k, v, causal=True), qkv)
    others = [2 * x for x in qkv]
    torch.testing.assert_close(traced(*others), flashcli.attention(*others, causal=True), rtol=0, atol=0)


# Where there are no numbers


def test_meta_tensors_have_the_shapes():
    with torch.device("meta"):
        q, k = torch.empty(B, H, M, d), torch.empty(B, Hkv, N, d)
    o, lse = flashcli.attention(q, k, k, return_lse=True)
    assert o.is_meta and o.shape == q.shape and lse.shape == q.shape[:-1]
    with pytest.raises(ValueError, match="v must have the shape of k"):
        flashcli.attention(q, k, q)


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"backend": "nope"}, "backend must be 'auto' or 'cuda' or 'cpu' for tensors on meta, not 'nope'"),
        ({"kernel": "nope"}, "there is no kernel 'nope' for arrays on a GPU"),
        ({"kernel": "register_tiled", "precision": "fp16"}, "kernel register_tiled has no fp16"),
        ({"precision": "nope"}, "precision must be one of fp32, fp16, not 'nope'"),
    ],
    ids=str,
)
def test_options_that_there_are_not_are_told_where_there_are_no_numbers(option, message):
    with torch.device("meta"):
        q = torch.empty(B, H, M, d)
    with pytest.raises((ValueError, FlashError), match=message):
        flashcli.attention(q, q, q, **option)
    assert flashcli.attention(q, q, q, backend="cpu", kernel="mma", precision="fp16").shape == q.shape


def test_meta_tensors_have_gradients():
    with torch.device("meta"):
        q, k, bias = (torch.empty(shape, requires_grad=True) for shape in ((B, H, M, d), (B, Hkv, N, d), (M, 1)))
    loss = flashcli.attention(q, k, k, bias=bias).square().sum()
    for x, slope in zip((q, k, bias), torch.autograd.grad(loss, (q, k, bias), create_graph=True), strict=True):
        assert slope.is_meta and slope.shape == x.shape
        [twice] = torch.autograd.grad(slope.square().sum(), x, retain_graph=True)
        assert twice.is_meta and twice.shape == x.shape


def test_fake_tensors_stay_fake(qkv):
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode() as mode:
        q, k, v = (mode.from_tensor(x) for x in qkv)
        assert type(flashcli.attention(q, k, v)) is type(q)


def test_empty_tensors():
    q, k = tensor(B, H, M, d, grad=True), tensor(B, H, 0, d)
    o, lse = flashcli.attention(q, k, k, return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    o.sum().backward()
    assert not q.grad.any()
    assert flashcli.attention(k, q, q).shape == k.shape


# Bad input

BAD = {
    "half": ("k", lambda x: x.half(), TypeError, "k must be a float32 array, not float16"),
    "NumPy's": ("v", lambda x: x.numpy(), TypeError, "v must be a PyTorch tensor, as q is, not ndarray"),
    "elsewhere": ("k", lambda x: x.to("meta"), ValueError, "k must be on cpu, as q is, not on meta"),
    "a shape": ("v", lambda x: x[:, :1], ValueError, "v must have the shape of k"),
    "no numbers of NumPy's": ("k", lambda x: x.bfloat16(), TypeError, "k must be a float32 tensor, not bfloat16"),
    "sparse": ("q", lambda x: x.to_sparse(), TypeError, "q must be a dense tensor, not sparse_coo"),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize(("name", "spoil", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_told_by_name(qkv, name, spoil, kind, message, grad):
    given = [*qkv]
    given["qkv".index(name)] = spoil(given["qkv".index(name)])
    given[0].requires_grad_(grad)
    with pytest.raises(kind, match=message):
        flashcli.attention(*given)


def test_out_is_filled_where_nobody_wants_gradients(qkv):
    out = torch.zeros(B, M, H, d).transpose(1, 2)
    assert flashcli.attention(*qkv, out=out) is out
    torch.testing.assert_close(out.double(), oracle(*qkv)[0], rtol=1e-5, atol=1e-5)
    qkv[0].requires_grad_()
    with pytest.raises(ValueError, match="out must not be given where gradients are wanted"):
        flashcli.attention(*qkv, out=out)
    with torch.no_grad():
        assert flashcli.attention(*qkv, out=out) is out


def test_an_out_with_gradients_of_its_own_is_refused(qkv):
    with pytest.raises(ValueError, match="out must not be given where gradients are wanted"):
        flashcli.attention(*qkv, out=torch.zeros(B, H, M, d, requires_grad=True))


def test_whoever_keeps_out_for_gradients_is_told_that_it_was_written(qkv):
    weight, out = tensor(B, H, M, d, grad=True), torch.ones(B, H, M, d)
    loss = (weight * out).sum()
    flashcli.attention(*qkv, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize(("name", "wrong"), [("scale", "x"), ("causal", "x"), ("q_start", 0.5)])
def test_bad_options_are_told_by_name_with_gradients_too(qkv, name, wrong):
    qkv[0].requires_grad_()
    with pytest.raises(TypeError, match=f"{name} must be"):
        flashcli.attention(*qkv, **{name: wrong})


def test_the_farthest_q_start_has_gradients(qkv):
    qkv[0].requires_grad_()
    torch.testing.assert_close(
        flashcli.attention(*qkv, causal=True, q_start=10**30), flashcli.attention(*qkv, causal=False)
    )


@pytest.mark.parametrize("at", range(4))
def test_numbers_that_are_in_memory_with_the_other_sign(qkv, at):
    given = [*qkv, tensor(M, N)]
    wanted = flashcli.attention(*given[:3], bias=given[3])
    given[at] = torch._neg_view(-given[at])
    torch.testing.assert_close(flashcli.attention(*given[:3], bias=given[3]), wanted)
    with pytest.raises(ValueError, match="out must not be a lazily negated view"):
        flashcli.attention(*qkv, out=torch._neg_view(torch.zeros(B, H, M, d)))


@every_call
def test_tangents_of_forward_mode(qkv, options):
    options = prepared(options)
    tangents = [torch.randn_like(x) for x in qkv]

    def both(attend):
        return lambda q, k, v: attend(q, k, v, **options)

    got, slopes = torch.func.jvp(both(partial(flashcli.attention, return_lse=True)), tuple(qkv), tuple(tangents))
    step, moved = 1e-6, []
    for sign in (1, -1):
        moved.append(
            oracle(*(x.double() + sign * step * t.double() for x, t in zip(qkv, tangents, strict=True)), **options)
        )
    right = oracle(*qkv, **options)
    for mine, other, slope, (above, below) in zip(got, right, slopes, zip(*moved, strict=True), strict=True):
        torch.testing.assert_close(mine.double(), other, rtol=1e-5, atol=1e-5)
        seen = other > -torch.inf
        torch.testing.assert_close(slope.double()[seen], ((above - below) / (2 * step))[seen], rtol=1e-4, atol=1e-4)
        assert not slope[~seen].any()


def test_bad_arguments_with_tangents_are_told_by_name(qkv):
    q, k, _ = qkv
    with pytest.raises(ValueError, match="v must have the shape of k"):
        torch.func.jvp(lambda x: flashcli.attention(x, k, k[:, :, :3]), (q,), (q,))


def test_gradients_do_not_lose_digits_to_autocast(qkv):
    q = qkv[0].requires_grad_()
    [wanted] = torch.autograd.grad(flashcli.attention(*qkv).sum(), q)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        [got] = torch.autograd.grad(flashcli.attention(*qkv).sum(), q)
    assert torch.equal(got, wanted)


def test_tangents_do_not_lose_digits_to_autocast(qkv):
    q, k, v = qkv
    wanted = torch.func.jvp(lambda x: flashcli.attention(x, k, v), (q,), (k.mean() + q,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = torch.func.jvp(lambda x: flashcli.attention(x, k, v), (q,), (k.mean() + q,))
    for mine, other in zip(got, wanted, strict=True):
        assert mine.dtype == torch.float32 and torch.equal(mine, other)


def test_out_must_not_overlap(qkv):
    q = qkv[0]
    for x in (q, q.half()):
        with pytest.raises(ValueError, match="out must not"):
            flashcli.attention(x, x, x, out=x)


def test_a_kernel_of_gpus_needs_one(qkv):
    with pytest.raises(flashcli.FlashError):
        flashcli.attention(*qkv, kernel="mma")
    qkv[0].requires_grad_()
    with pytest.raises((ValueError, flashcli.FlashError)):
        flashcli.attention(*qkv, backend="cuda")
