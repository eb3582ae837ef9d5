"""Tensors and other arrays on a GPU, computed where they lie."""

from __future__ import annotations

import random
import subprocess
import sys
import threading

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from support import environment, python_path  # noqa: E402
from torch.nn import functional  # noqa: E402
from torch_oracle import oracle  # noqa: E402

import flashcli  # noqa: E402
from flashcli import torch as ours  # noqa: E402
from flashcli.errors import BackendUnavailable  # noqa: E402
from flashcli.kernels.attention import KERNELS  # noqa: E402
from flashcli.kernels.choice import TWINS  # noqa: E402
from flashcli.kernels.problem import Problem  # noqa: E402

pytestmark = pytest.mark.gpu

STRIDED = [name for name, kernel in KERNELS.items() if kernel.strided and name != "mma_short"]  # which has tests below
B, H, Hkv, M, N, d = 2, 4, 2, 150, 200, 64
ERROR = 2e-6  # relative L2: what plain fp32 has on normal numbers


@pytest.fixture(autouse=True)
def on_gpu():
    if not torch.cuda.is_available():
        pytest.skip("PyTorch finds no GPU")
    torch.manual_seed(0)


@pytest.fixture(params=[None, *STRIDED])
def kernel(request):
    """None, then the name of each kernel for arrays that runs here."""
    name = request.param
    if name and not KERNELS[name].runs_on(torch.cuda.get_device_capability()):
        pytest.skip(f"{name} does not run on this GPU")
    return name


def tensor(*shape, grad=False):
    return torch.randn(*shape, device="cuda", requires_grad=grad)


def head_with_bias(kernel) -> int:
    """A head size for which the kernel takes a bias."""
    return 32 if kernel == "wgmma_short" else d


def error(got, right) -> float:
    """Relative L2."""
    return float((got.double() - right).norm() / right.norm())


def check(q, k, v, **options):
    """Ours against float64, O and LSE."""
    wanted = {name: x for name, x in options.items() if name in ("bias", "causal", "scale", "q_start")}
    o, lse = flashcli.attention(q, k, v, return_lse=True, **options)
    right, right_lse = oracle(q, k, v, **wanted)
    assert error(o, right) < ERROR
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)


# Layouts, shapes, biases, with every kernel


def fused(rows, heads):
    return tensor(B, rows, 3, heads, d)[:, :, 1].transpose(1, 2)


def odd(rows, heads):
    """Rows that start on 4 bytes, not on 16."""
    return tensor(B * rows * heads * (d + 1) + 1)[1:].view(B, heads, rows, d + 1)[..., :d]


LAYOUTS = {
    "contiguous": lambda rows, heads: tensor(B, heads, rows, d),
    "rows first": lambda rows, heads: tensor(B, rows, heads, d).transpose(1, 2),
    "fused": fused,
    "broadcast": lambda rows, heads: tensor(heads, rows, d).expand(B, heads, rows, d),
    "odd": odd,
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(kernel, layout, causal):
    make = LAYOUTS[layout]
    q, k, v = make(M, H), make(N, Hkv), make(N, Hkv)
    if layout == "odd" and kernel == "wgmma_short":
        with pytest.raises(BackendUnavailable, match="wgmma_short"):
            flashcli.attention(q, k, v, kernel=kernel)
        return
    check(q, k, v, causal=causal, q_start=N - M if causal else 0, kernel=kernel)


@pytest.mark.parametrize("layout", ["rows first", "fused"])
def test_out_is_written_as_it_lies(kernel, layout):
    q, k, out = tensor(B, H, M, d), tensor(B, Hkv, N, d), LAYOUTS[layout](M, H)
    before = out._base.clone()
    written = torch.zeros_like(before, dtype=torch.bool)
    torch.as_strided(written, out.shape, out.stride(), out.storage_offset()).fill_(True)
    assert flashcli.attention(q, k, k, out=out, kernel=kernel) is out
    assert error(out, oracle(q, k, k)[0]) < ERROR
    assert torch.equal(out._base[~written], before[~written])


@pytest.mark.parametrize(("rows", "keys", "head"), [(1, 1, 8), (49, 49, 32), (300, 77, 40), (5, 112, 64), (96, 96, 17)])
def test_few_keys(rows, keys, head):
    """The kernel for up to 128 keys, and the one that is chosen."""
    of_three = (rows, H), (keys, Hkv), (keys, Hkv)
    for kernel in ("mma_short", None):
        for q, k, v in (
            [tensor(B, heads, n, head) for n, heads in of_three],
            [tensor(B, n, heads, head + 1)[..., 1:].transpose(1, 2) for n, heads in of_three],
        ):
            for options in (
                {}, {"causal": True, "q_start": keys - rows}, {"bias": tensor(H, rows, keys)},
                {"bias": tensor(B, 1, 1, keys) > -1, "causal": True},
            ):  # fmt: skip
                check(q, k, v, kernel=kernel, **options)


SHAPES = [(1, 1), (1, 300), (5, 33), (65, 31), (129, 257), (300, 1)]


@pytest.mark.parametrize(("rows", "keys"), SHAPES)
def test_ragged_shapes(kernel, rows, keys):
    q, k, v = tensor(B, H, rows, d), tensor(B, Hkv, keys, d), tensor(B, Hkv, keys, d)
    for options in ({}, {"causal": True}, {"causal": True, "q_start": keys - rows}):
        o, lse = flashcli.attention(q, k, v, return_lse=True, kernel=kernel, **options)
        right, right_lse = oracle(q, k, v, **options)
        torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("head", [1, 30, 96, 256])
def test_head_sizes(head):
    check(tensor(B, H, M, head), tensor(B, Hkv, N, head), tensor(B, Hkv, N, head), causal=True, q_start=N - M)


@pytest.mark.parametrize("head", [16, 64, 128, 256])
def test_the_lse_of_a_key_of_zeros_is_zero(kernel, head):
    if kernel and KERNELS[kernel].refuses(Problem(1, 1, 1, head, in_place=True)):
        return
    zeros = torch.zeros(1, 1, 1, head, device="cuda")
    assert flashcli.attention(zeros, zeros, zeros, return_lse=True, kernel=kernel)[1].item() == 0


@pytest.mark.parametrize(("keys", "head"), [(100, 64), (300, 64), (300, 256)])
def test_scores_up_to_the_end_of_float32_are_compared_over_tiles_of_any_scale(kernel, keys, head):
    """Keys of which one is so large, in a number that no query looks at, that its whole tile has another scale."""
    if kernel and KERNELS[kernel].refuses(Problem(1, keys, keys, head, in_place=True)):
        return
    q, k, v = torch.empty(3, 1, 1, keys, head).uniform_(1, 2).cuda()
    q, k = q * 2.0**60, k * 2.0**57
    k[:, :, :20] *= 2
    q[..., 0], k[:, :, 5, 0] = 0, 2.0**66
    o, lse = flashcli.attention(q, k, v, return_lse=True, kernel=kernel)
    right, right_lse = oracle(q, k, v)
    torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=0)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=0)


BIASES = [(B, H, M, N), (B, 1, 1, N), (B, 1, M, N), (H, 1, N), (M, N), (M, 1)]


@pytest.mark.parametrize("mask", [False, True])
def test_biases(kernel, mask):
    head = head_with_bias(kernel)
    q, k, v = tensor(B, H, M, head), tensor(B, Hkv, N, head), tensor(B, Hkv, N, head)
    for shape in BIASES:
        bias = tensor(*shape)
        check(q, k, v, bias=bias > -1 if mask else bias, kernel=kernel)
    transposed = tensor(B, H, N, M).mT
    check(q, k, v, bias=transposed > -1 if mask else transposed, kernel=kernel)
    odd_bias = tensor(M, N + 1)[:, 1:]
    check(q, k, v, bias=odd_bias > -1 if mask else odd_bias, causal=True, q_start=N - M, kernel=kernel)


@pytest.mark.parametrize("seed", range(8))
def test_all_at_once(kernel, seed):
    """Grouped heads, a bias, q_start, a scale, each matrix with a layout of its own, an answer among other numbers."""
    pick = random.Random(seed).choice
    head = 32 if kernel == "wgmma_short" else pick([12, 64, 200])
    (rows, keys), batches, shared, group = pick(SHAPES[1:]), pick([1, 3]), pick([1, 2]), pick([1, 3])
    lies = [
        lambda heads, length: tensor(batches, heads, length, head),
        lambda heads, length: tensor(batches, length, heads, head).transpose(1, 2),
        lambda heads, length: tensor(batches, length, 3, heads, head)[:, :, 1].transpose(1, 2),
        lambda heads, length: tensor(1, heads, 2 * length, head)[:, :, ::2].expand(batches, -1, -1, -1),
    ]
    q, k, v = pick(lies)(shared * group, rows), pick(lies)(shared, keys), pick(lies)(shared, keys)
    scores = batches, shared * group, rows, keys
    bias = tensor(*(length if pick([True, False]) else 1 for length in scores))
    options = {
        "bias": bias > -0.5 if pick([True, False]) else bias.masked_fill(bias < -1, -torch.inf),
        "causal": pick([True, False]),
        "q_start": pick([0, keys - rows, -2, 2**40]),
        "scale": pick([None, 0.1, -0.05, 0]),
    }
    around = tensor(batches, rows + 1, shared * group, 2 * head)
    before, out = around.clone(), around[:, 1:, :, :head].transpose(1, 2)
    try:
        o, lse = flashcli.attention(q, k, v, return_lse=True, out=out, kernel=kernel, **options)
    except BackendUnavailable:
        pytest.skip(f"{kernel} refuses it")
    right, right_lse = oracle(q, k, v, **options)
    torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)
    before[:, 1:, :, :head] = around[:, 1:, :, :head]
    assert o is out and torch.equal(around, before)


def test_rows_that_see_nothing(kernel):
    head = head_with_bias(kernel)
    q, k = tensor(B, H, M, head), tensor(B, Hkv, N, head)
    mask = torch.ones(M, N, dtype=torch.bool, device="cuda")
    mask[7] = False
    for options, rows in (({"bias": mask}, [7]), ({"causal": True, "q_start": -3}, [0, 1, 2])):
        o, lse = flashcli.attention(q, k, k, return_lse=True, kernel=kernel, **options)
        assert not o[:, :, rows].any() and (lse[:, :, rows] == -torch.inf).all()
        assert o.isfinite().all() and lse.isfinite().sum() == lse.numel() - len(rows) * B * H
        o, lse = flashcli.attention(q, k, k * torch.nan, return_lse=True, kernel=kernel, **options)
        assert not o[:, :, rows].any() and (lse[:, :, rows] == -torch.inf).all()
        assert o.isnan().sum() == o.numel() - len(rows) * B * H * head


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_what_is_not_finite_is_as_ieee_has_it(kernel, where, value):
    given = {"q": tensor(B, H, M, d), "k": tensor(B, Hkv, N, d), "v": tensor(B, Hkv, N, d)}
    given[where][1, 1, 60, 5] = value
    o, lse = flashcli.attention(**given, causal=True, return_lse=True, kernel=kernel)
    right, right_lse = oracle(**given, causal=True)
    seen = slice(60, None) if where == "v" else slice(None)  # float64 multiplies what a row does not see by 0
    torch.testing.assert_close(o[:, :, seen].double(), right[:, :, seen], rtol=1e-5, atol=1e-5, equal_nan=True)
    finite = right_lse.isfinite()
    torch.testing.assert_close(lse[finite].double(), right_lse[finite], rtol=1e-5, atol=2e-5)
    if kernel != "register_tiled":  # whose tiles have it, and multiply it by 0
        assert o[:, :, :60].isfinite().all(), "rows that do not see it"


def test_a_row_that_is_not_finite_changes_no_other(kernel):
    q, k, v = tensor(B, H, M, d), tensor(B, Hkv, N, d), tensor(B, Hkv, N, d)
    before, lse_before = flashcli.attention(q, k, v, return_lse=True, kernel=kernel)
    others = torch.ones(B, H, M, dtype=torch.bool, device="cuda")
    for row in ((0, 0, 0), (1, 2, 77), (1, 3, M - 1)):
        q[*row, 5], others[row] = torch.inf, False
    o, lse = flashcli.attention(q, k, v, return_lse=True, kernel=kernel)
    assert o[~others].isnan().all() and lse[~others].isnan().all()
    assert torch.equal(o[others], before[others]) and torch.equal(lse[others], lse_before[others])


SPOILT = [
    {"head": 12}, {"head": 30, "layout": "odd"}, {"head": 96, "causal": True, "layout": "fused"}, {"head": 200},
    {"head": 256, "causal": True, "layout": "odd"}, {"layout": "fused"}, {"rows": 1}, {"rows": 33, "keys": 1},
    {"keys": 1100}, {"head": 256, "keys": 1100, "causal": True}, {"head": 32, "bias": (B, H, 1, 1)}, {"bias": (1, N)},
]  # fmt: skip


@pytest.mark.parametrize("options", SPOILT, ids=str)
def test_an_infinity_in_a_column_of_v_reaches_no_other(kernel, options):
    """All rows are done again."""
    options = {"head": d, "rows": M, "keys": N, "layout": "contiguous", **options}
    head, rows, keys, layout = (options.pop(name) for name in ("head", "rows", "keys", "layout"))
    if "bias" in options:
        options["bias"] = tensor(*options["bias"]).expand(B, H, rows, keys)
    make = {
        "contiguous": lambda rows, heads: tensor(B, heads, rows, head),
        "fused": lambda rows, heads: tensor(B, rows, 3, heads, head)[:, :, 1].transpose(1, 2),
        "odd": lambda rows, heads: tensor(B, heads, rows, head + 1)[..., 1:],
    }[layout]
    q, k, v = make(rows, H), make(keys, Hkv), make(keys, Hkv)
    v[:, :, 0, 5] = torch.inf
    try:
        o, lse = flashcli.attention(q, k, v, return_lse=True, kernel=kernel, **options)
    except BackendUnavailable:
        pytest.skip(f"{kernel} refuses it")
    right, right_lse = oracle(q, k, v, **options)
    torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)
    assert (o[..., 5] == torch.inf).all() and o.isfinite().sum() == o.numel() // head * (head - 1)


def test_a_rows_bytes_do_not_depend_on_its_company(kernel):
    q, k, v = tensor(7, 6, M, d), tensor(7, 6, N, d), tensor(7, 6, N, d)
    together, lse = flashcli.attention(q, k, v, causal=True, return_lse=True, kernel=kernel)
    order = torch.randperm(6, device="cuda")
    permuted = flashcli.attention(q[:, order], k[:, order], v[:, order], causal=True, kernel=kernel)
    assert torch.equal(permuted, together[:, order])
    for index in range(7):
        alone, lse_alone = flashcli.attention(
            *(x[index : index + 1] for x in (q, k, v)), causal=True, return_lse=True, kernel=kernel
        )
        assert torch.equal(alone[0], together[index]) and torch.equal(lse_alone[0], lse[index])
    one = flashcli.attention(q[2, 3:4], k[2, 3:4], v[2, 3:4], causal=True, kernel=kernel)
    assert torch.equal(one[0], together[2, 3])


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("rows", "head"), [(32, 64), (128, 32), (200, 64), (250, 8), (448, 48), (880, 24)])
def test_twins_give_the_same_bytes(rows, head, causal):
    """Which of them computes may depend on the batch and on how arrays lie."""
    if not all(KERNELS[name].runs_on(torch.cuda.get_device_capability()) for name in TWINS):
        pytest.skip("not both run on this GPU")
    problem = Problem(21, rows, rows, head, causal, in_place=True, batch_invariant=True)
    if len({KERNELS[name].tiling(problem).Bc for name in TWINS}) > 1:
        pytest.skip("their tiles have different numbers of keys")
    q, k, v = (tensor(7, 3, rows, head) for _ in range(3))
    one, other = (flashcli.attention(q, k, v, causal=causal, kernel=name) for name in TWINS)
    assert torch.equal(one, other)


CHUNKED = {  # M, N, d, options: keys are cut into chunks
    "square": (1024, 1024, 64, {}),
    "ragged": (900, 1700, 64, {}),
    "causal": (1100, 1100, 64, {"causal": True}),
    "a long cache": (200, 2500, 64, {"causal": True, "q_start": 2300}),
    "one query": (1, 5000, 64, {}),
    "rows that see nothing": (1030, 1030, 64, {"causal": True, "q_start": -5}),
    "heads of 32": (1000, 1030, 32, {}),
    "heads of 96": (600, 1500, 96, {"causal": True, "q_start": 900}),
    "heads of 128": (1100, 1300, 128, {}),
    "heads of 130": (600, 1030, 130, {"causal": True, "q_start": 430}),
    "heads of 192": (1030, 1100, 192, {}),
    "heads of 256": (600, 1100, 256, {"causal": True, "q_start": 500}),
}
chunked = pytest.mark.parametrize("case", CHUNKED.values(), ids=CHUNKED)


@pytest.fixture
def hopper():
    if not KERNELS["wgmma"].runs_on(torch.cuda.get_device_capability()):
        pytest.skip("keys are cut into chunks on Hopper")


@chunked
def test_keys_in_chunks(hopper, case):
    rows, keys, head, options = case
    q, k, v = tensor(B, H, rows, head), tensor(B, Hkv, keys, head), tensor(B, Hkv, keys, head)
    o, lse = flashcli.attention(q, k, v, return_lse=True, **options)
    right, right_lse = oracle(q, k, v, **options)
    assert error(o, right) < ERROR
    torch.testing.assert_close(lse.double(), right_lse, rtol=1e-5, atol=2e-5)


@chunked
def test_who_computes_which_chunk_changes_no_bit(hopper, case):
    rows, keys, head, options = case
    q, k, v = tensor(1, 70, rows, head), tensor(1, 70, keys, head), tensor(1, 70, keys, head)
    options = {**options, "return_lse": True, "kernel": "wgmma"}
    together, lse = flashcli.attention(q, k, v, **options)  # blocks have whole row tiles
    for heads in (1, 7, 20):  # and chunks of several, more of them, or fewer, than there are multiprocessors
        few, lse_of_few = flashcli.attention(*(x[:, -heads:] for x in (q, k, v)), **options)
        assert torch.equal(few, together[:, -heads:]) and torch.equal(lse_of_few, lse[:, -heads:])
    apart = [torch.stack([x[0, -7:]] * 3, 2)[None, :, :, 1] for x in (q, k, v)]
    assert torch.equal(flashcli.attention(*apart, **options)[0], together[:, -7:])
    order = torch.randperm(7, device="cuda") + 63
    permuted, _ = flashcli.attention(*(x[:, order] for x in (q, k, v)), **options)
    assert torch.equal(permuted, together[:, order])


def test_a_chunk_with_a_number_that_is_not_finite(hopper):
    q, k, v = tensor(1, 1, 300, d), tensor(1, 1, 3000, d), tensor(1, 1, 3000, d)
    q[0, 0, 7, 3] = torch.nan
    v[0, 0, 2999, 5] = torch.inf
    torch.testing.assert_close(
        flashcli.attention(q, k, v).double(), oracle(q, k, v)[0], rtol=1e-5, atol=1e-5, equal_nan=True
    )


def test_where_a_row_looks_at_one_key_its_value_comes_back(kernel):
    """Nothing is to be given back where nothing has been lost to truncation."""
    q, k, v = tensor(B, H, M, d), tensor(B, H, N, d), tensor(B, H, N, d)
    for o in (
        flashcli.attention(q, k[:, :, :1], v[:, :, :1], kernel=kernel),
        flashcli.attention(1e4 * k, 1e4 * k, v, kernel=kernel)[:, :, :1],
    ):
        assert ((o - v[:, :, :1]).abs() <= 2.0**-22 * v.abs().max()).all()


def test_empty_tensors():
    q, k = tensor(B, H, M, d), tensor(B, H, 0, d)
    o, lse = flashcli.attention(q, k, k, return_lse=True)
    assert not o.any() and (lse == -torch.inf).all()
    assert flashcli.attention(k, q, q).shape == k.shape
    assert flashcli.attention(q[:0], q[:0], q[:0]).shape == (0, H, M, d)


# Streams, threads, graphs


def test_it_runs_on_the_current_stream():
    q, k = tensor(B, H, M, d), tensor(B, H, N, d)
    right = oracle(q, k * 3, k)[0]
    torch.cuda.synchronize()
    for stream in (torch.cuda.Stream(), torch.cuda.Stream(priority=-1)):
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)  # what comes later on this stream has to wait
            o = flashcli.attention(q, k * 3, k)
        stream.synchronize()
        assert error(o, right) < ERROR


def test_nothing_waits_for_the_gpu():
    q = tensor(B, H, M, d)
    flashcli.attention(q, q, q)
    torch.cuda.synchronize()
    torch.cuda._sleep(2_000_000_000)
    flashcli.attention(q, q, q)
    assert not torch.cuda.current_stream().query()
    torch.cuda.synchronize()


def test_threads_do_not_get_in_each_others_way():
    shapes = [(B, H, rows, d) for rows in (M, N)]
    inputs = [[tensor(*shapes[i % 2]) for _ in range(3)] for i in range(8)]
    right = [oracle(*x, causal=True)[0] for x in inputs]
    torch.cuda.synchronize()
    wrong = []

    def ask(index):
        stream = torch.cuda.Stream() if index % 4 else torch.cuda.default_stream()
        with torch.cuda.stream(stream):
            answers = [flashcli.attention(*inputs[index], causal=True) for _ in range(20)]
        stream.synchronize()
        wrong.extend(index for o in answers if not error(o, right[index]) < ERROR)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("warm", [True, False])
def test_a_graph_is_captured_and_replayed(kernel, warm):
    head = d if warm else 48  # for which nothing has been compiled and loaded
    q, k, v = tensor(B, H, M, head), tensor(B, Hkv, N, head), tensor(B, Hkv, N, head)
    if warm:
        flashcli.attention(q, k, v, causal=True, kernel=kernel)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashcli.attention(q, k, v, causal=True, kernel=kernel)
    for _ in range(2):
        for x in (q, k, v):
            x.normal_()
        q[0, 0, 3, 0] = torch.nan  # rows that are not finite need no host
        graph.replay()
        right = oracle(q, k, v, causal=True)[0]
        torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5, equal_nan=True)


def test_a_graph_in_which_copies_come_before(kernel):
    """A launch that may begin before the one before it has ended may follow what is no launch, and two streams."""
    q, k, v = tensor(B, H, M, d), tensor(B, H, N, d), tensor(B, H, N, d)
    from_q, from_k = torch.empty_like(q), torch.empty_like(k)
    flashcli.attention(q, k, v, kernel=kernel)
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            k.copy_(from_k)
        q.copy_(from_q)
        main.wait_stream(side)
        o = flashcli.attention(q, k, v, kernel=kernel)
    for _ in range(3):
        from_q.normal_(), from_k.normal_()
        graph.replay()
        assert error(o, oracle(from_q, from_k, v)[0]) < ERROR


@pytest.mark.parametrize("rows", [150, 1100])
def test_each_call_waits_for_what_the_one_before_has_written(kernel, rows):
    """Also where its launches begin before that one's have ended, and use the same scratch."""
    q, k, v = (tensor(1, 3, rows, d) for _ in range(3))

    def chained(after_each) -> torch.Tensor:
        as_query, as_value = q, v
        for _ in range(20):
            as_query = flashcli.attention(as_query, k, as_value, kernel=kernel)
            after_each()
            as_value = flashcli.attention(q, as_query + k, v, kernel=kernel)
            after_each()
        return as_value

    assert torch.equal(chained(torch.cuda.synchronize), chained(lambda: None))


# Two GPUs


@pytest.fixture
def other_gpu():
    if torch.cuda.device_count() < 2:
        pytest.skip("there is one GPU only")
    yield torch.device("cuda:1")
    assert torch.cuda.current_device() == 0, "another GPU has become the current one"


@pytest.mark.parametrize("layout", ["contiguous", "fused"])
def test_two_gpus_give_the_same_bytes(kernel, other_gpu, layout):
    q, k, v = (LAYOUTS[layout](*x) for x in ((M, H), (N, Hkv), (N, Hkv)))
    options = {"causal": True, "q_start": N - M, "return_lse": True, "kernel": kernel}
    here = flashcli.attention(q, k, v, **options)
    there = flashcli.attention(*(x.to(other_gpu) for x in (q, k, v)), **options)
    for one, other in zip(here, there, strict=True):
        assert other.device == other_gpu and torch.equal(one.cpu(), other.cpu())
    assert error(here[0], oracle(q, k, v, causal=True, q_start=N - M)[0]) < ERROR


def test_tensors_on_a_gpu_that_is_not_the_current_one(other_gpu):
    q, k, v = (torch.randn(B, heads, M, d, device=other_gpu, requires_grad=True) for heads in (H, Hkv, Hkv))
    q.data[1, 1, 60, 5] = torch.nan  # rows to be done again
    right = oracle(q, k, v)[0]
    stream = torch.cuda.Stream(other_gpu)
    stream.wait_stream(torch.cuda.current_stream(other_gpu))
    with torch.cuda.device(other_gpu), torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # what comes later on this stream has to wait
        late = q.detach() * 1
        on_a_stream = flashcli.attention(late, k.detach(), v.detach())
    stream.synchronize()
    by_interface = torch.from_dlpack(flashcli.attention(*(ByInterface(x.detach()) for x in (q, k, v))))
    by_operator = flashcli.attention(q, k, v)
    for o in (on_a_stream, by_interface, by_operator):
        assert o.device == other_gpu
        torch.testing.assert_close(o.double(), right, rtol=1e-5, atol=1e-5, equal_nan=True)
    clean = torch.randn(B, H, M, d, device=other_gpu, requires_grad=True)
    [mine], [other] = (torch.autograd.grad(f(clean, k, v).square().sum(), [clean]) for f in (flashcli.attention, exact))
    assert error(mine, other.double()) < 4e-6


def exact(q, k, v):
    return oracle(q, k, v)[0]


@pytest.mark.parametrize("name", ["k", "v", "bias", "out"])
def test_tensors_of_two_gpus_are_not_mixed(other_gpu, name):
    q = torch.randn(B, H, M, d, device=other_gpu)
    given = {"q": q, "k": q.clone(), "v": q.clone(), "bias": q.new_zeros(M, M), "out": torch.empty_like(q)}
    with pytest.raises(ValueError, match=f"{name} must be on cuda:1, as q is, not on cuda:0"):
        flashcli.attention(**{**given, name: given[name].to("cuda:0")})
    if name in ("k", "v"):
        by_interface = {x: ByInterface(given[x] if x != name else given[x].to("cuda:0")) for x in "qkv"}
        with pytest.raises(ValueError, match=f"{name} must be on GPU 1, as q is, not on GPU 0"):
            flashcli.attention(**by_interface)


# Other libraries


class ByInterface:
    def __init__(self, tensor):
        self.tensor, self.__cuda_array_interface__ = tensor, tensor.__cuda_array_interface__


class ByDlpack:
    def __init__(self, tensor):
        self.tensor = tensor

    def __dlpack__(self, **options):
        return self.tensor.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.tensor.__dlpack_device__()


@pytest.mark.parametrize("kind", [ByInterface, ByDlpack])
def test_any_array_that_says_where_it_is(kind):
    q, k = tensor(B, M, H, d).transpose(1, 2), tensor(B, Hkv, N, d)
    right, right_lse = oracle(q, k, k, causal=True)
    o, lse = flashcli.attention(kind(q), kind(k), kind(k), causal=True, return_lse=True)
    assert error(torch.from_dlpack(o), right) < ERROR
    torch.testing.assert_close(torch.as_tensor(lse, device="cuda").double(), right_lse, rtol=1e-5, atol=2e-5)
    out = torch.empty_like(q)
    flashcli.attention(kind(q), kind(k), kind(k), causal=True, out=kind(out))
    assert error(out, right) < ERROR


def test_memory_of_the_host_is_told():
    q = tensor(B, H, M, d)
    interface = {**q.__cuda_array_interface__, "data": (torch.zeros(q.shape).data_ptr(), False)}
    host = type("Host", (), {"__cuda_array_interface__": interface})()
    with pytest.raises(ValueError, match="k must be in the memory of a GPU"):
        flashcli.attention(ByInterface(q), host, ByInterface(q))


def test_cupy():
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    q, k = tensor(B, H, M, d), tensor(B, Hkv, N, d)
    right = oracle(q, k, k)[0]
    torch.cuda.synchronize()
    with cupy.cuda.Stream(non_blocking=True) as stream:
        o, lse = flashcli.attention(*(cupy.asarray(x) for x in (q, k, k)), return_lse=True)
        stream.synchronize()
    assert isinstance(o, cupy.ndarray) and lse.shape == (B, H, M)
    assert error(torch.as_tensor(o, device="cuda"), right) < ERROR


def test_cupys_pools_of_another_gpu(other_gpu):
    cupy = pytest.importorskip("cupy", reason="CuPy is not installed")
    q = tensor(1, 2, 40, 32)
    with cupy.cuda.Device(other_gpu.index):
        for pool in (cupy.cuda.MemoryPool(), cupy.cuda.MemoryAsyncPool()):
            with cupy.cuda.using_allocator(pool.malloc):
                there = cupy.asarray(q.cpu().numpy())
                o = flashcli.attention(there, there, there)
            assert o.device.id == other_gpu.index
            assert error(torch.from_dlpack(o).cpu(), oracle(q, q, q)[0].cpu()) < ERROR


def test_jax():
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if jax.default_backend() != "gpu":
        pytest.skip("JAX finds no GPU")

    @jax.jit
    def late(key):
        """Numbers that are there after 400 products, which they do not depend on but for having to wait for them."""
        large = jax.random.normal(key, (4096, 4096))
        large = jax.lax.fori_loop(0, 400, lambda _, x: jax.numpy.tanh(x @ x), large)
        return jax.random.normal(key, (B, H, M, d)) + 1e-30 * large[0, 0]

    q = late(jax.random.key(0)).block_until_ready()
    flashcli.attention(q, q, q)  # all is compiled
    q = late(jax.random.key(1))
    o = jax.dlpack.from_dlpack(flashcli.attention(q, q, q))
    tensors = [torch.from_dlpack(q)] * 3
    assert error(torch.from_dlpack(o), oracle(*tensors)[0]) < ERROR


PYCUDA = """
import numpy as np, pycuda.autoinit
from pycuda import gpuarray
import flashcli
q = np.random.default_rng(0).normal(size=(2, 150, 64)).astype(np.float32)
o, out = gpuarray.to_gpu(q), gpuarray.empty(q.shape, np.float32)
assert flashcli.attention(o, o, o, out=out) is out
s = q.astype(np.float64) @ q.swapaxes(1, 2) / 8
p = np.exp(s - s.max(-1, keepdims=True))
right = p @ q / p.sum(-1, keepdims=True)
assert np.linalg.norm(out.get() - right) < 2e-6 * np.linalg.norm(right)
"""


def test_arrays_of_pycuda_in_a_context_of_its_own():
    pytest.importorskip("pycuda", reason="PyCUDA is not installed")
    done = subprocess.run([sys.executable, "-c", PYCUDA], env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


BARE = """
import sys, torch, flashcli
q = torch.randn(2, 4, 300, 64, device="cuda")
o = flashcli.attention(q, q, q)
right = torch.softmax(q.double() @ q.double().mT / 8, -1) @ q.double()
assert (o - right).norm() < 2e-6 * right.norm()
assert "pycuda" not in sys.modules
"""


def test_neither_a_toolkit_nor_pycuda_is_needed(tmp_path):
    (tmp_path / "stub" / "pycuda").mkdir(parents=True)
    (tmp_path / "stub" / "pycuda" / "__init__.py").write_text("raise ModuleNotFoundError('pycuda')")
    cache = tmp_path / "cache"
    env = environment(
        NVCC="nvrtc", PATH="/nonexistent", FLASHCLI_CACHE_DIR=str(cache), PYTHONPATH=python_path(tmp_path / "stub")
    )
    done = subprocess.run([sys.executable, "-c", BARE], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(path.name.endswith("-nvrtc.cubin") for path in cache.iterdir()) and any(cache.iterdir())


# PyTorch: gradients, compiled functions, the place of its own attention


@pytest.mark.parametrize("options", [{}, {"causal": True, "q_start": 50}, {"bias": (B, 1, M, N)}], ids=str)
def test_gradients(options):
    q, k, v = tensor(B, H, M, d, grad=True), tensor(B, Hkv, N, d, grad=True), tensor(B, Hkv, N, d, grad=True)
    options = {name: tensor(*x, grad=True) if name == "bias" else x for name, x in options.items()}
    inputs = [q, k, v, *([options["bias"]] if "bias" in options else [])]
    weights = tensor(B, M, H, d).transpose(1, 2)
    got = torch.autograd.grad((flashcli.attention(q, k, v, **options) * weights).sum(), inputs)
    right = torch.autograd.grad((oracle(q, k, v, **options)[0] * weights).sum(), inputs)
    for mine, other in zip(got, right, strict=True):
        assert error(mine, other.double()) < 4e-6


def test_the_operator_keeps_to_pytorchs_rules():
    q, k = tensor(B, H, 33, d, grad=True), tensor(B, Hkv, 40, d, grad=True)
    torch.library.opcheck(torch.ops.flashcli.attention.default, (q, k, k), {"causal": True, "rows_first": True})


def test_a_compiled_function_has_no_break():
    compiled = torch.compile(lambda q, k: flashcli.attention(q.sin(), k, k, causal=True) * 2, fullgraph=True)
    for rows in (64, 100):
        q, k = tensor(B, H, rows, d, grad=True), tensor(B, Hkv, rows, d)
        right = oracle(q.sin(), k, k, causal=True)[0] * 2
        got = compiled(q, k)
        assert error(got, right) < ERROR
        [mine], [other] = (torch.autograd.grad(x.square().sum(), [q]) for x in (got, right))
        assert error(mine, other.double()) < 4e-6


@pytest.mark.parametrize(
    "options", [{}, {"is_causal": True}, {"enable_gqa": True}, {"attn_mask": (B, 1, 1, M)}], ids=str
)
def test_scaled_dot_product_attention(options):
    heads = Hkv if "enable_gqa" in options else H
    q, k = tensor(B, M, H, d).transpose(1, 2), tensor(B, M, heads, d).transpose(1, 2)
    options = {name: tensor(*x) if name == "attn_mask" else x for name, x in options.items()}
    got = ours.scaled_dot_product_attention(q, k, k, **options)
    right = functional.scaled_dot_product_attention(q.double(), k.double(), k.double(), **{
        name: x.double() if name == "attn_mask" else x for name, x in options.items()
    })  # fmt: skip
    assert error(got, right) < ERROR and got.transpose(1, 2).is_contiguous()


def kernels_of(function) -> str:
    """The names of the kernels that ran."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        function()
        torch.cuda.synchronize()
    return " ".join(event.key for event in profile.key_averages())


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": (B, H, M, N)}], ids=str)
def test_replacing_sdpa(options, capfd):
    q, k, v = tensor(B, H, M, d, grad=True), tensor(B, H, N, d, grad=True), tensor(B, H, N, d, grad=True)
    options = {name: tensor(*x) if name == "attn_mask" else x for name, x in options.items()}

    def theirs():
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
            return functional.scaled_dot_product_attention(q, k, v, **options)

    assert "fmha" in kernels_of(theirs)
    right = oracle(q, k, v, options.get("attn_mask"), options.get("is_causal", False))[0]
    with ours.replacing_sdpa():
        assert "fmha" not in kernels_of(theirs)
        got = theirs()
        weights = tensor(*got.shape)
        mine = torch.autograd.grad((got * weights).sum(), (q, k, v))
        compiled = torch.compile(
            lambda q: functional.scaled_dot_product_attention(q, k, v, **options) * 2, fullgraph=True
        )(q)
    assert error(got, right) < ERROR and error(compiled, 2 * right) < ERROR
    for one, other in zip(mine, torch.autograd.grad((right * weights).sum(), (q, k, v)), strict=True):
        assert error(one, other.double()) < 1e-5
    assert "fmha" in kernels_of(theirs)
    assert "Overriding" not in "".join(capfd.readouterr())


def test_half_precision_stays_pytorchs_while_fp32_is_replaced():
    q = tensor(B, H, M, d).half()
    with ours.replacing_sdpa(), torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.EFFICIENT_ATTENTION):
        assert functional.scaled_dot_product_attention(q, q, q).dtype == torch.half


@pytest.mark.parametrize("which", ["gpt2", "llama", "bert"])
def test_models_of_transformers(which):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    ours.register_transformers()
    small = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 100}
    config = {
        "gpt2": lambda: transformers.GPT2Config(n_layer=2, n_head=4, n_embd=128, vocab_size=100),
        "llama": lambda: transformers.LlamaConfig(**small, num_key_value_heads=2, intermediate_size=256),
        "bert": lambda: transformers.BertConfig(**small, intermediate_size=256),
    }[which]()
    tokens = torch.randint(0, 100, (2, 80), device="cuda")
    padding = torch.ones(2, 80, dtype=torch.long, device="cuda")
    padding[1, 60:] = 0
    answers = []
    for implementation, dtype in (("eager", torch.float64), ("fp32", torch.float32)):
        torch.manual_seed(0)
        model = transformers.AutoModel.from_config(config, attn_implementation=implementation).eval().cuda()
        with torch.no_grad():
            answers.append(model.to(dtype)(tokens, attention_mask=padding).last_hidden_state[padding.bool()])
    assert error(answers[1], answers[0].double()) < 1e-5


# Bad input


def test_what_is_mixed_or_overlaps_is_told_and_nothing_is_queued():
    q, k = tensor(B, H, M, d), tensor(B, H, M, d)
    all_bad = [
        ({"k": k.cpu()}, ValueError, "k must be on cuda:0, as q is, not on cpu"),
        ({"v": k.cpu().numpy()}, TypeError, "v must be a PyTorch tensor"),
        ({"k": k.double()}, TypeError, "k must be a float32 array, not float64"),
        ({"v": k.mT.contiguous().mT}, ValueError, "v must be contiguous along its last axis"),
        ({"out": q}, ValueError, "out must not share memory with q"),
        ({"bias": tensor(3, M, M)}, ValueError, "bias must be broadcastable"),
        ({"backend": "cpu"}, ValueError, "backend must be"),
        ({"scale": float("nan")}, ValueError, "scale must be finite"),
    ]
    torch.cuda.synchronize()  # to make them takes the GPU, too
    for bad, kind, message in all_bad:
        with pytest.raises(kind, match=message):
            flashcli.attention(**{"q": q, "k": k, "v": k, **bad})
    assert torch.cuda.current_stream().query()
