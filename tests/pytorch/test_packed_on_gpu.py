"""Windows, ALiBi's slopes and packed sequences on tensors on a GPU, by each kernel."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from flashcli import attention, attention_backward  # noqa: E402
from flashcli.kernels.attention import KERNELS  # noqa: E402
from flashcli.torch import gradients  # noqa: E402
from flashcli.torch.sight import Sight  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]
LENGTHS, KEYS = (5, 0, 700, 1, 64, 300, 0, 131), (9, 3, 700, 0, 200, 1300, 0, 129)
H, Hkv = 4, 2
CALLS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window": (70, 30)},
    "window to the left": {"window": (200, -1)},
    "slopes": {"alibi_slopes": (H,), "causal": True},
    "slopes of sequences, window": {"alibi_slopes": (len(LENGTHS), H), "window": (90, 0)},
}
every_call = pytest.mark.parametrize("options", CALLS.values(), ids=CALLS)


def of_forward(capability):
    return [name for name in ("register_tiled", "mma", "wgmma") if KERNELS[name].runs_on(capability)]


KERNELS_HERE = of_forward(torch.cuda.get_device_capability()) if torch.cuda.is_available() else []


def starts(lengths):
    return torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device="cuda")


def random(*shape):
    return torch.randn(*shape, device="cuda")


def filled(options):
    return {name: torch.rand(x, device="cuda") / 8 if name == "alibi_slopes" else x for name, x in options.items()}


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def right(q, k, v, of_q=None, of_k=None, do=None, causal=False, window=(-1, -1), alibi_slopes=None, q_start=0):
    """O and the LSE, and with dO gradients, in float64, spelled out."""
    slopes = None if alibi_slopes is None else alibi_slopes.double()
    q, k, v = q.double(), k.double(), v.double()
    scores = gradients.Scores(None, None, causal, None, q_start, Sight(window, slopes, of_q, of_k))
    o, lse = gradients.attention(q, k, v, scores)
    if do is None:
        return o, lse
    return o, lse, *gradients.gradients(do.double(), None, q, k, v, o, lse, scores)[:3]


def assert_near(got, want, factor=1.0):
    finite = want.isfinite()
    assert torch.equal(got[~finite].double(), want[~finite])
    assert (got[finite] - want[finite]).norm() <= factor * 2e-6 * want[finite].norm()


@every_call
@pytest.mark.parametrize("d", [30, 64, 128])
@pytest.mark.parametrize("kernel", [*KERNELS_HERE, None])
def test_packed_sequences_are_right_and_have_their_own_bytes(kernel, d, options):
    of_q, of_k, options = starts(LENGTHS), starts(KEYS), filled(options)
    q, k, v = random(sum(LENGTHS), H, d), random(sum(KEYS), Hkv, d), random(sum(KEYS), Hkv, d)
    do, named = random(sum(LENGTHS), H, d), options | {"cu_seqlens_q": of_q, "cu_seqlens_k": of_k, "kernel": kernel}
    o, lse = attention(q, k, v, return_lse=True, **named)
    found = attention_backward(do, q, k, v, o=o, lse=lse, **named)
    for got, want in zip((o, lse, *found), right(q, k, v, of_q, of_k, do, **options), strict=True):
        assert_near(got, want)
    for some in ([2], [5, 2], [7, 1, 4, 3]):
        q_, o_, do_, dq, k_, v_, dk, dv = (
            torch.cat([x[at[s] : at[s + 1]] for s in some])
            for xs, at in (((q, o, do, found[0]), of_q), ((k, v, found[1], found[2]), of_k))
            for x in xs
        )
        alone = options.copy()
        if options.get("alibi_slopes", q).ndim == 2:
            alone["alibi_slopes"] = options["alibi_slopes"][some]
        named = {"cu_seqlens_q": starts([LENGTHS[s] for s in some]), "cu_seqlens_k": starts([KEYS[s] for s in some])}
        o_again, lse_again = attention(q_, k_, v_, kernel=kernel, return_lse=True, **alone, **named)
        again = attention_backward(do_, q_, k_, v_, o=o_again, lse=lse_again, kernel=kernel, **alone, **named)
        assert all(torch.equal(x, y) for x, y in zip((o_again, *again), (o_, dq, dk, dv), strict=True))


@every_call
@pytest.mark.parametrize("d", [64, 200])
@pytest.mark.parametrize("kernel", [*KERNELS_HERE, None])
def test_dense_tensors_take_windows_and_slopes(kernel, d, options):
    options = filled(options)
    if kernel == "wgmma" and d > 128 and "window" in options:
        pytest.skip("it does not take them")
    if options.get("alibi_slopes", torch.empty(0)).ndim == 2:
        options["alibi_slopes"] = options["alibi_slopes"][:2]
    q, k, v = random(2, H, 600, d), random(2, Hkv, 900, d), random(2, Hkv, 900, d)
    for q_start in (0, 300, -40):
        named = options | {"q_start": q_start, "kernel": kernel if d <= 128 else None}
        o, lse = attention(q, k, v, **options, q_start=q_start, kernel=kernel, return_lse=True)
        found = attention_backward(o, q, k, v, o=o, lse=lse, **named)
        for got, want in zip((o, lse, *found), right(q, k, v, do=o, q_start=q_start, **options), strict=True):
            assert_near(got, want)


def test_a_graph_takes_other_lengths_where_it_is_replayed():
    q, k, v = random(500, H, 64), random(500, H, 64), random(500, H, 64)
    of_q = starts((100, 300, 100))
    attention(q, k, v, cu_seqlens_q=of_q, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = attention(q, k, v, cu_seqlens_q=of_q, causal=True)
    for lengths in ((0, 500, 0), (1, 498, 1)):
        of_q.copy_(starts(lengths))
        graph.replay()
        assert_near(o, right(q, k, v, of_q, of_q, causal=True)[0])


@pytest.mark.parametrize("kernel", KERNELS_HERE)
def test_starts_that_make_no_sense_lead_nowhere(kernel):
    q, k, v = random(500, H, 64), random(400, H, 64), random(400, H, 64)
    for of_q in ((0, 900, -7, 500), (500, 400, 300, 0), (-900, 2**31 - 1, 0, 2**30), (7, 7, 7, 7)):
        rubbish = torch.tensor(of_q, dtype=torch.int32, device="cuda")
        attention(q, k, v, cu_seqlens_q=rubbish, cu_seqlens_k=rubbish.flip(0), kernel=kernel, causal=True)
    torch.cuda.synchronize()


def test_nan_of_one_sequence_does_not_reach_another():
    q, k, v = random(300, H, 64), random(300, H, 64), random(300, H, 64)
    of_q = starts((100, 150, 50))
    want = attention(q, k, v, cu_seqlens_q=of_q)
    v[120] = torch.nan
    got = attention(q, k, v, cu_seqlens_q=of_q)
    assert torch.equal(got[:100], want[:100]) and torch.equal(got[250:], want[250:]) and got[100:250].isnan().all()
