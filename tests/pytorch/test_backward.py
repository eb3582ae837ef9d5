"""flashcli.attention_backward of PyTorch's tensors, on the CPU and, with each kernel, on a GPU."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from gradients_oracle import DISTRIBUTIONS, NAMES, draw  # noqa: E402
from support import sampled  # noqa: E402
from tolerances import FACTOR, FLOOR  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch_oracle import gradients, oracle  # noqa: E402

import flashcli  # noqa: E402
from flashcli import torch as ours  # noqa: E402
from flashcli.errors import BackendUnavailable  # noqa: E402
from flashcli.kernels.backward import KERNELS, of_sizes  # noqa: E402
from flashcli.torch import backward, replacing, sdpa  # noqa: E402
from flashcli.torch.sight import Sight  # noqa: E402

B, H, Hkv, M, N, d = 2, 4, 2, 150, 200, 64
ERROR = 2e-6  # relative L2: what plain fp32 has on normal numbers


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture
def gpu():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    torch.set_default_device("cuda")
    yield
    torch.set_default_device(None)


@pytest.fixture(params=list(KERNELS))
def kernel(request, gpu):
    """The name of each kernel that runs here, and takes heads of any length."""
    kernel = KERNELS[request.param]
    if not kernel.runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{request.param} does not run on this GPU")
    if reason := kernel.refuses(of_sizes(d, B=B, H=H, Hkv=Hkv, M=M, N=N)):
        pytest.skip(reason)
    return request.param


def four(rows=M, keys=N, head=d, heads=(H, Hkv), batches=B):
    """dO, Q, K, V."""
    return [torch.randn(batches, heads[i > 1], (rows, keys)[i > 1], head) for i in range(4)]


def check(do, q, k, v, error=ERROR, **options):
    """Ours against float64, and given O and the LSE too."""
    asked = {name: x for name, x in options.items() if name != "kernel"}
    bias = options.get("bias")
    with_bias = bias is not None and bias.dtype != torch.bool
    forward = {name: x for name, x in asked.items() if name != "dlse"}
    o, lse = flashcli.attention(q, k, v, return_lse=True, **forward)
    got = flashcli.attention_backward(do, q, k, v, o=o, lse=lse, return_dbias=with_bias, **options)
    right = gradients(do, q, k, v, **asked)
    assert len(got) == len(right)
    for name, mine, other in zip(NAMES, got, right, strict=False):
        assert mine.shape == other.shape and mine.dtype == torch.float32
        assert mine.isfinite().all(), name
        size = max(float(other.norm()), 100.0 if name == "dbias" else 0.0)  # summed over keys, dS is 0
        off = float((mine.double() - other).norm()) / size
        assert off < error, f"{name}: {off:.3g}"
    return got


# On the CPU


def test_tensors_on_the_cpu():
    bias = torch.randn(M, N)
    check(*four(head=8), bias=bias, causal=True, q_start=N - M, dlse=torch.randn(B, H, M))
    got = flashcli.attention_backward(*four(head=8))
    assert len(got) == 3 and all(x.is_contiguous() for x in got)


def test_gradcheck_of_the_formulas_that_are_for_gradients_of_gradients():
    do, q, k, v = (x[:1, :, :3].requires_grad_() for x in four(4, 5, 3))
    inputs = [x.detach().double().requires_grad_() for x in (do, q, k, v)]

    def formulas(do, q, k, v):
        o, lse = oracle(q, k, v, causal=True, q_start=1)
        return backward.gradients(do, None, q, k, v, o, lse, backward.Scores(None, None, True, None, 1, Sight()))[:3]

    torch.autograd.gradcheck(formulas, inputs)


@pytest.mark.parametrize(("grad", "bias", "rows_first"), sampled([(False, None, False), (True, (H, 1, 6), True)]))
def test_the_operator_keeps_to_pytorchs_rules(grad, bias, rows_first):
    do, q, k, v = (x.requires_grad_(grad) for x in four(5, 6, 8))
    added = None if bias is None else torch.randn(bias).requires_grad_(grad)
    o, lse = (x.detach() for x in flashcli.attention(q, k, v, bias=added, return_lse=True))
    torch.library.opcheck(
        torch.ops.flashcli.attention_backward.default, (do, None, q, k, v, added, None, o, lse),
        {"return_dbias": bias is not None, "rows_first": rows_first},
    )  # fmt: skip


def test_gradients_of_given_gradients():
    do, q, k, v = (x.requires_grad_() for x in four(5, 6, 8))
    got = flashcli.attention_backward(do, q, k, v, causal=True)
    weights = [torch.randn(x.shape) for x in got]
    mine = torch.autograd.grad(sum((x * w).sum() for x, w in zip(got, weights, strict=True)), (do, q, k, v))
    given = [x.detach().double().requires_grad_() for x in (q, k, v)]
    do64 = do.detach().double().requires_grad_()
    first = torch.autograd.grad((oracle(*given, causal=True)[0] * do64).sum(), given, create_graph=True)
    loss = sum((x * w).sum() for x, w in zip(first, weights, strict=True))
    for x, y in zip(mine, torch.autograd.grad(loss, (do64, *given)), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=1e-4)


BAD = {
    "NumPy's": ("do", lambda x: x.numpy(), TypeError, "do must be a PyTorch tensor, as q is, not ndarray"),
    "elsewhere": ("do", lambda x: x.to("meta"), ValueError, "do must be on cpu, as q is, not on meta"),
    "double": ("do", lambda x: x.double(), TypeError, "do must be a float32 array, not float64"),
    "a shape": ("do", lambda x: x[:, :1], ValueError, "do must have the shape of q"),
    "o alone": ("o", lambda x: x, ValueError, "o must be given together with lse"),
}


@pytest.mark.parametrize(("name", "spoil", "kind", "message"), BAD.values(), ids=BAD)
def test_bad_tensors_are_told_by_name(name, spoil, kind, message):
    given = dict(zip(("do", "q", "k", "v"), four(5, 6, 8), strict=True))
    given[name] = spoil(given.get(name, given["do"]))
    with pytest.raises(kind, match=message):
        flashcli.attention_backward(**given)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"scale": "x"}, "scale must be a number, not str"),
        ({"causal": "yes"}, "causal must be True or False, not str"),
        ({"causal": True, "q_start": 1.5}, "q_start must be a whole number, not float"),
    ],
    ids=str,
)
def test_bad_options_are_told_by_name(options, message):
    with pytest.raises(TypeError, match=message):
        flashcli.attention_backward(*four(5, 6, 8), **options)


def test_the_farthest_q_start_is_one_from_where_all_is_seen():
    given = four(5, 6, 8)
    got = flashcli.attention_backward(*given, causal=True, q_start=10**30)
    assert all(torch.equal(x, y) for x, y in zip(got, flashcli.attention_backward(*given), strict=True))


@pytest.mark.parametrize("options", [{"backend": "cuda"}, {"kernel": "plain"}])
def test_a_gpu_for_tensors_on_the_cpu_is_refused(options):
    with pytest.raises(ValueError, match="backend must be 'auto' or 'cpu', and kernel None, for tensors on cpu"):
        flashcli.attention_backward(*four(5, 6, 8), **options)


def test_what_replaces_pytorchs_gradients_keeps_its_promises(monkeypatch):
    monkeypatch.setattr(replacing, "supported", lambda *given, halves: True)
    monkeypatch.setattr(backward, "compute", backward.operator)
    do, q, k, v = four(7, 9, 8, (H, H))
    bias = torch.randn(B, H, 7, 9)
    o, lse = flashcli.attention(q, k, v, bias=bias, return_lse=True)
    seed = torch.zeros((), dtype=torch.int64)
    ours_of = replacing._backward_or(None)
    given = [do, q, k, v, bias, o, replacing._as_theirs(lse), seed, seed, 0.0, [True] * 4]
    got = ours_of(None, *given, scale=None)
    metas = [x.to("meta") if isinstance(x, torch.Tensor) else x for x in given]
    promised = torch.ops.aten._scaled_dot_product_efficient_attention_backward(*metas)
    for mine, theirs, right in zip(got, promised, gradients(do, q, k, v, bias), strict=True):
        assert (mine.shape, mine.stride(), mine.dtype) == (theirs.shape, theirs.stride(), theirs.dtype)
        torch.testing.assert_close(mine.double(), right, rtol=1e-4, atol=1e-5)


def test_gradients_that_we_do_not_do_go_to_the_original(monkeypatch):
    class Original:
        def call_boxed(self, *given, **options):
            return given, options

    do, q, k, v = four(5, 5, 8)
    seed = torch.zeros((), dtype=torch.int64)
    given = [do, q, k, v, None, q, q[..., 0], seed, seed, 0.5, [True] * 4, True]
    got, options = replacing._backward_or(Original())("keys", *given, scale=2.0)
    assert got == ("keys", *given) and options == {"scale": 2.0}


# On a GPU, with every kernel

on_gpu = pytest.mark.gpu


@on_gpu
@pytest.mark.parametrize("causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_as_accurate_as_naive_gradients(kernel, distribution, causal):
    for head in (32, 64, 128):
        given = [torch.from_numpy(x).cuda() for x in draw(distribution, 1, 4, 2, 300, 1100, head)]
        options = {"causal": causal, "q_start": 700}
        right = gradients(*given, **options)
        naive = gradients(*given, dtype=torch.float32, **options)
        got = flashcli.attention_backward(*given, kernel=kernel, **options)
        for name, mine, plain, other in zip(("dQ", "dK", "dV"), got, naive, right, strict=True):
            errors = [float((x.double() - other).norm() / other.norm()) for x in (mine, plain)]
            print(f"{kernel} {distribution} d={head} {name}: {errors[0]:.2e}, {errors[0] / errors[1]:.2f} times naive")
            assert errors[0] <= FACTOR * errors[1] + FLOOR, f"{name}, d = {head}: {errors}"


@on_gpu
@pytest.mark.parametrize(("rows", "keys", "head"), [(64, 64, 32), (128, 100, 64), (33, 128, 17)])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("by", ["mma_short", "wgmma_whole"])
def test_gradients_of_the_shortest_heads_are_as_accurate_as_naive_ones(gpu, by, distribution, rows, keys, head):
    if not KERNELS[by].runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{by} does not run on this GPU")
    given = [torch.from_numpy(x).cuda() for x in draw(distribution, 2, 4, 4, rows, keys, head)]
    for options in ({}, {"causal": True, "q_start": keys - rows}, {"bias": torch.randn(4, 1, keys) > -1}):
        right, naive = gradients(*given, **options), gradients(*given, dtype=torch.float32, **options)
        got = flashcli.attention_backward(*given, kernel=by, **options)
        for name, mine, plain, other in zip(("dQ", "dK", "dV"), got, naive, right, strict=True):
            errors = [float((x.double() - other).norm() / other.norm()) for x in (mine, plain)]
            assert errors[0] <= FACTOR * errors[1] + FLOOR, f"{name}, {options.keys()}: {errors}"


LAYOUTS = {
    "contiguous": lambda rows, heads: torch.randn(B, heads, rows, d),
    "rows first": lambda rows, heads: torch.randn(B, rows, heads, d).transpose(1, 2),
    "fused": lambda rows, heads: torch.randn(B, rows, 3, heads, d)[:, :, 1].transpose(1, 2),
    "broadcast": lambda rows, heads: torch.randn(heads, rows, d).expand(B, heads, rows, d),
    "odd": lambda rows, heads: torch.randn(B * rows * heads * (d + 1) + 1)[1:].view(B, heads, rows, d + 1)[..., :d],
}


@on_gpu
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, layout):
    make = LAYOUTS[layout]
    check(make(M, H), make(M, H), make(N, Hkv), make(N, Hkv), causal=True, q_start=N - M, kernel=kernel)


@on_gpu
@pytest.mark.parametrize(("rows", "keys"), [(1, 1), (1, 300), (5, 33), (65, 31), (129, 257), (300, 1)])
def test_ragged_shapes(kernel, rows, keys):
    do, q, k, v = four(rows, keys)
    for options in ({}, {"causal": True}, {"causal": True, "q_start": keys - rows}, {"causal": True, "q_start": -3}):
        got = flashcli.attention_backward(do, q, k, v, kernel=kernel, **options)
        for mine, right in zip(got, gradients(do, q, k, v, **options), strict=True):
            torch.testing.assert_close(mine.double(), right, rtol=1e-5, atol=1e-5 * float(right.abs().max() + 1))


@on_gpu
@pytest.mark.parametrize("head", [1, 17, 30, 80, 96, 160, 192, 200, 256])
def test_head_sizes(kernel, head):
    if reason := KERNELS[kernel].refuses(of_sizes(head)):
        with pytest.raises(BackendUnavailable, match=reason):
            flashcli.attention_backward(*four(head=head), kernel=kernel)
        return
    check(*four(head=head), causal=True, q_start=N - M, kernel=kernel)


BIASES = [(B, H, M, N), (B, 1, 1, N), (B, 1, M, N), (H, 1, N), (M, N), (M, 1), (H, 1, 1), (1,)]


@on_gpu
def test_biases(kernel):
    given = four(head=40)
    for shape in BIASES:
        bias = torch.randn(*shape)
        check(*given, bias=bias, kernel=kernel, error=2 * ERROR)
        check(*given, bias=bias > -1, kernel=kernel, error=2 * ERROR)
    check(*given, bias=torch.randn(B, H, N, M).mT, causal=True, q_start=30, kernel=kernel)
    check(*given, bias=torch.randn(M, N + 1)[:, 1:], kernel=kernel, dlse=torch.randn(B, H, M))


@on_gpu
def test_rows_that_see_nothing_have_zeros_and_add_nothing(kernel):
    do, q, k, v = four()
    mask = torch.ones(M, N, dtype=torch.bool)
    mask[7] = False
    causal, masked = ({"causal": True, "q_start": -3}, [0, 1, 2]), ({"bias": mask}, [7])
    for options, rows in (causal, masked):
        dq, *_ = check(do, q, k, v, kernel=kernel, **options)
        assert not dq[:, :, rows].any()
        dq, *_ = flashcli.attention_backward(do, q, k, v * torch.nan, kernel=kernel, **options)
        assert not dq[:, :, rows].any()


@on_gpu
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", range(4), ids=["dO", "Q", "K", "V"])
def test_what_is_not_finite_is_not_lost(kernel, where, value):
    given = four(heads=(H, H))
    given[where][1, 1, 60, 5] = value
    got, right = flashcli.attention_backward(*given, kernel=kernel), gradients(*given)
    exact = flashcli.attention_backward(*given, kernel="plain")
    for mine, plain, other in zip(got, exact, right, strict=True):
        finite = mine.isfinite()
        assert torch.equal(finite, plain.isfinite()) and finite.sum() >= finite.numel() * (B * H - 1) // (B * H)
        torch.testing.assert_close(mine[finite].double(), other[finite], rtol=1e-5, atol=1e-5)


@on_gpu
def test_bytes_do_not_depend_on_company(kernel):
    given = four(heads=(6, 6), batches=5)
    together = flashcli.attention_backward(*given, causal=True, kernel=kernel)
    for b, h in ((0, 0), (3, 2), (4, 5)):
        alone = flashcli.attention_backward(*(x[b, h : h + 1] for x in given), causal=True, kernel=kernel)
        for one, all_ in zip(alone, together, strict=True):
            assert torch.equal(one[0], all_[b, h])


@on_gpu
@pytest.mark.parametrize(
    ("rows", "keys", "head"), [(128, 128, 32), (60, 64, 64), (190, 130, 64), (1, 1, 17), (70, 200, 32)]
)
def test_a_block_with_a_whole_head_has_the_bytes_of_blocks_with_tiles(gpu, rows, keys, head):
    if not KERNELS["wgmma"].runs_on(torch.cuda.get_device_capability()):
        pytest.skip("wgmma does not run on this GPU")
    given, of_heads = four(rows, keys, head, (H, H)), torch.randn(H, 1, keys)
    for options in (
        {}, {"causal": True, "q_start": keys - rows}, {"causal": True, "q_start": -3}, {"bias": of_heads > 0},
        {"bias": of_heads, "return_dbias": True, "dlse": torch.randn(B, H, rows)},
    ):  # fmt: skip
        if "dlse" in options:
            o, lse = flashcli.attention(*given[1:], bias=of_heads, return_lse=True)
            options |= {"o": o, "lse": lse}
        tiles, whole = (flashcli.attention_backward(*given, kernel=k, **options) for k in ("wgmma", "wgmma_short"))
        assert all(torch.equal(x, y) for x, y in zip(tiles, whole, strict=True)), options.keys()


def test_a_flag_is_anything_that_is_true_or_false():
    one = torch.ones(1, 2, 4)
    assert len(flashcli.attention_backward(one, one, one, one, return_dbias=[])) == 3


@on_gpu
def test_a_hundred_times_the_same_bytes(kernel):
    given = four()
    options = {"bias": torch.randn(H, 1, N), "return_dbias": True, "causal": True, "q_start": N - M}
    first = flashcli.attention_backward(*given, kernel=kernel, **options)
    for _ in range(100):
        again = flashcli.attention_backward(*given, kernel=kernel, **options)
        assert all(torch.equal(x, y) for x, y in zip(first, again, strict=True))


@on_gpu
def test_a_broadcast_gradient(kernel):
    _, q, k, v = four()
    one = torch.ones(()).expand(q.shape)
    for x, y in zip(flashcli.attention_backward(one, q, k, v, kernel=kernel), gradients(one, q, k, v), strict=True):
        torch.testing.assert_close(x.double(), y, rtol=1e-4, atol=2e-5)


# On a GPU, as PyTorch's


@on_gpu
def test_a_training_step_in_a_graph(gpu):
    _, q, k, v = four(heads=(H, H))
    weights = torch.randn(q.shape)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]

    def step():
        for x in leaves:
            x.grad = None
        (flashcli.attention(*leaves, causal=True) * weights).sum().backward()

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    with torch.no_grad():
        for x in leaves:
            x.mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    for x, right in zip(leaves, gradients(weights, *leaves, causal=True), strict=True):
        assert float((x.grad.double() - right).norm() / right.norm()) < ERROR


@on_gpu
@pytest.mark.parametrize("mask", [False, True])
def test_gradients_in_the_place_of_pytorchs(gpu, mask):
    do, q, k, v = four(heads=(H, H))
    options = {"attn_mask": torch.rand(M, N) > 0.2} if mask else {"is_causal": True}
    named = {"bias": options["attn_mask"]} if mask else {"causal": True}
    leaves = [x.requires_grad_() for x in (q, k, v)]
    with ours.replacing_sdpa():
        functional.scaled_dot_product_attention(*leaves, **options).backward(do)
    for x, right in zip(leaves, gradients(do, *leaves, **named), strict=True):
        assert float((x.grad.double() - right).norm() / right.norm()) < ERROR
        x.grad = None
    o = functional.scaled_dot_product_attention(*leaves, **options)  # PyTorch's, with our gradients
    with ours.replacing_sdpa():
        o.backward(do)
    for x, right in zip(leaves, gradients(do, *leaves, **named), strict=True):
        assert float((x.grad.double() - right).norm() / right.norm()) < ERROR


@on_gpu
def test_a_compiled_training_step(gpu):
    do, q, k, v = four(heads=(H, H))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    compiled = torch.compile(lambda q, k, v: flashcli.attention(q * 2, k, v, causal=True) * 2, fullgraph=True)
    mine = torch.autograd.grad((compiled(*leaves) * do).sum(), leaves)
    plain = torch.autograd.grad((flashcli.attention(q * 2, k, v, causal=True) * 2 * do).sum(), leaves)
    for x, y in zip(mine, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-5, atol=1e-5)


@on_gpu
def test_our_sdpa_has_gradients_in_pytorchs_layout(gpu):
    _, q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2).requires_grad_() for x in four(heads=(H, H)))
    sdpa.scaled_dot_product_attention(q, k, v).sum().backward()
    assert q.grad.transpose(1, 2).is_contiguous() and k.grad.transpose(1, 2).is_contiguous()


@on_gpu
def test_arrays_of_cupys(kernel):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    given = four()
    right = gradients(*given, causal=True)
    got = flashcli.attention_backward(*(cupy.from_dlpack(x) for x in given), causal=True, kernel=kernel)
    for mine, other in zip(got, right, strict=True):
        assert isinstance(mine, cupy.ndarray)
        mine = torch.from_dlpack(mine)
        assert float((mine.double() - other).norm() / other.norm()) < ERROR
