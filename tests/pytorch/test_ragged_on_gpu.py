"""Ragged queries on a GPU: types, layouts, pages and options against float64, and which bytes are the same."""

from __future__ import annotations

import dataclasses
import itertools
import math

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

import flashcli  # noqa: E402
from flashcli.asked.decode import LAYOUTS  # noqa: E402
from flashcli.asked.how import How  # noqa: E402
from flashcli.compiler import compiler  # noqa: E402
from flashcli.files.decode.cases import Case, make  # noqa: E402
from flashcli.gpu.place import place_of_device  # noqa: E402
from flashcli.kernels import decode  # noqa: E402
from flashcli.measure.builds import compile_for  # noqa: E402
from flashcli.measure.decode_arrays import Given  # noqa: E402
from flashcli.measure.decode_times import WRONG  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch finds no GPU"),
]
TYPES = [
    ("float16", ""), ("bfloat16", ""), ("float32", ""), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"),
    ("float16", "int8"), ("float32", "int8"),
]  # fmt: skip
OPTIONS = [{}, {"window": 50}, {"alibi": True}, {"softcap": 3.0, "sinks": True}, {"causal": False}]
QUERIES = "1,1,2,9,0,3000,1,700"


def cases():
    """Each type in each layout, with pages of 1, 16 and 256 tokens in turn, and the options in turn."""
    for i, ((query, cache), layout) in enumerate(itertools.product(TYPES, LAYOUTS)):
        page = (1, 16, 256)[(i + i // 3) % 3]
        lengths = f"0,1,{page - 1},{page},{page + 1},3000,2900,1500"
        yield Case(
            8, 4, 2, (64, 128)[i % 2], lengths, page=page, layout=layout, query_type=query, cache_type=cache,
            queries=QUERIES, sharpness=1.5, **OPTIONS[i % 5],
        )  # fmt: skip


def named(case):
    options = [f"{name}={value}" for name, value in OPTIONS[[*cases()].index(case) % 5].items()]
    return " ".join([case.query_type, case.cache_type, case.layout, str(case.page), *options])


@pytest.fixture(scope="module", autouse=True)
def compiled():
    """Code for all cases, side by side."""
    gpu = place_of_device(0).gpu
    plans = [decode.plan(make(case).outline, gpu, How()) for case in cases()]
    compile_for(compiler.architecture(gpu.capability), {build for plan in plans for build in plan.builds()})


def called(asked, **changes):
    """O and LSE of the public call, as NumPy's arrays of the query's bits."""
    given = Given("", asked)
    tensors = {name: given.tensors[name] for name in given.tensors if name not in ("out", "lse")}
    tensors["query"] = tensors["query"][:, 0] if asked.is_ragged or asked.T == 1 else tensors["query"]
    options = {
        "layout": asked.layout, "scale": asked.scale, "sliding_window": asked.window, "softcap": asked.softcap,
        "causal": asked.causal, "one_result": asked.one_result, "max_query_len": asked.max_query_len,
    }  # fmt: skip
    return flashcli.decode(**tensors, **options, return_lse=True, **changes)


def right(asked):
    """O and LSE in float64, spelled out, one sequence after the other."""
    given, of = Given("", asked), {"device": "cuda", "dtype": torch.float64}
    outs, lses = [], []
    for s in range(asked.S):
        K, V = (x.nan_to_num().repeat_interleave(asked.group, 0) for x in given.rows(s))  # NaN is where nobody looks
        K, V = K * asked.k_scale, V * asked.v_scale
        q = given.tensors["query"][asked.starts[s] : asked.starts[s + 1], 0].double().transpose(0, 1)
        T, N = q.shape[1], K.shape[1]
        at = torch.arange(T, **of)[:, None] + N - T if asked.causal else torch.full((T, 1), N - 1.0, **of)
        behind = torch.arange(N, **of) - at
        S = q @ K.transpose(1, 2) * asked.scale
        S = asked.softcap * torch.tanh(S / asked.softcap) if asked.softcap else S
        if asked.alibi_slopes is not None:
            S += given.tensors["alibi_slopes"].double()[:, None, None] * behind
        S = S.masked_fill((behind > 0) | (behind <= -(asked.window or math.inf)), -math.inf)
        sinks = given.tensors["sinks"].double() if asked.sinks is not None else torch.full((asked.H,), -math.inf, **of)
        lse = torch.logaddexp(S.logsumexp(2), sinks[:, None])
        P = torch.exp(S - lse.clamp(min=-1e300)[:, :, None])
        outs.append((P @ V).transpose(0, 1)), lses.append(lse.transpose(0, 1))
    return torch.cat(outs), torch.cat(lses)


@pytest.mark.parametrize("case", list(cases()), ids=named)
def test_ragged_queries_of_every_type_and_layout_have_the_answer_of_float64(case):
    asked = make(case)
    out, lse = called(asked)
    want, want_lse = right(asked)
    assert not out.isnan().any()
    off, most = WRONG[case.query_type], float(want.abs().max())
    assert float((out.double() - want).norm() / want.norm()) < off
    assert float((out.double() - want).abs().max()) < 8 * off * most
    torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


def same(got, want):
    assert all(a.cpu().numpy().tobytes() == b.cpu().numpy().tobytes() for a, b in zip(got, want, strict=True))


def chunk(whole, first, count, ragged=True):
    """Query tokens ``first`` and the next ones of a prompt, with as much of the cache as they see."""
    part = dataclasses.replace(
        whole, query=whole.query[first : first + count], query_starts=np.int32([0, count]),
        seq_lens=np.int32([first + count]),
    )  # fmt: skip
    if ragged:
        return part
    return dataclasses.replace(part, query=part.query.reshape(1, count, *part.query.shape[2:]), query_starts=None)


@pytest.mark.parametrize("cache", ["", "int8"])
@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_with_one_result_a_token_has_the_same_bytes_alone_among_eight_in_a_chunk_and_in_a_prompt(kind, cache):
    case = Case(1, 8, 2, 128, "3000", layout="nhd", queries="3000", query_type=kind, cache_type=cache)
    whole = dataclasses.replace(make(case), one_result=True)
    out, lse = called(whole)
    for first, count, ragged in [
        (2999, 1, True), (2999, 1, False), (1300, 8, True), (1300, 8, False), (1000, 700, True), (0, 40, True),
    ]:  # fmt: skip
        same(called(chunk(whole, first, count, ragged)), (out[first : first + count], lse[first : first + count]))


@pytest.mark.parametrize("kind", ["float16", "float32"])
def test_a_sequences_bytes_depend_on_no_other_one(kind):
    asked = make(Case(6, 8, 2, 64, "1,40,3000,700,9,2000", queries="1,8,1500,9,0,300", query_type=kind))
    out, lse = called(asked)
    for s in range(6):
        rows = slice(asked.starts[s], asked.starts[s + 1])
        if asked.counts[s]:
            same(called(asked.part(range(s, s + 1))), (out[rows], lse[rows]))


@pytest.mark.parametrize(("kind", "most"), [("float16", 1), ("float32", 1), ("float32", 8), ("float32", None)])
def test_single_tokens_have_the_bytes_of_one_token_a_sequence(kind, most):
    asked = make(Case(5, 8, 2, 128, "1,40,3000,700,2000", queries="1x5", query_type=kind))
    plain = dataclasses.replace(asked, query_starts=None)
    same(called(dataclasses.replace(asked, max_query_len=most)), called(plain))


def test_a_largest_query_length_that_is_too_small_changes_no_answer(monkeypatch):
    for kind in ("float16", "float32"):
        asked = make(Case(3, 8, 2, 64, "40,500,9", queries="1,300,9", query_type=kind))
        # NumPy's way would refuse it.
        out, lse = called(dataclasses.replace(asked, max_query_len=1))
        want, want_lse = right(asked)
        assert float((out.double() - want).norm() / want.norm()) < WRONG[kind]
        torch.testing.assert_close(lse.double(), want_lse, rtol=1e-3, atol=1e-3)


def test_gathered_prompts_can_be_replayed_with_other_lengths(monkeypatch):
    """They are gathered in several passes, and behind the last one's there are query tokens of no sequence."""
    monkeypatch.setattr("flashcli.kernels.tuning.decode.GATHERED", 2**21)
    case = Case(6, 8, 2, 64, "600,40,500,700,9,300", queries="60,8,10,300,9,2", query_type="float32", layout="hnd")
    asked, other = make(case), make(dataclasses.replace(case, queries="3,9,2,300,8,30"))
    given = Given("", asked)
    tensors = {name: given.tensors[name] for name in ("key_cache", "value_cache", "block_tables", "seq_lens")}
    query, starts = torch.zeros(400, 8, 64, device="cuda"), given.tensors["query_starts"]

    def call():
        return flashcli.decode(query, **tensors, query_starts=starts, layout="hnd", return_lse=True)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call()
    for one in (asked, other):
        query[: one.total] = torch.from_numpy(one.query[:, 0])
        starts.copy_(torch.from_numpy(one.query_starts))
        graph.replay()
        want, want_lse = right(dataclasses.replace(one, key_cache=asked.key_cache, value_cache=asked.value_cache))
        assert float((out[: one.total].double() - want).norm() / want.norm()) < WRONG["float32"]
        torch.testing.assert_close(lse[: one.total].double(), want_lse, rtol=1e-3, atol=1e-3)
        assert not out[one.total :].any() and bool(lse[one.total :].isneginf().all())


def test_gathered_prompts_have_the_bytes_of_attention_of_packed_sequences():
    asked = make(Case(2, 8, 2, 128, "700,300", queries="700,90", layout="nhd", query_type="float32"))
    out, lse = called(asked)
    given = Given("", asked)
    keys, values = (torch.cat([x[i].float().transpose(0, 1) for x in map(given.rows, (0, 1))]) for i in (0, 1))
    k_starts = torch.tensor([0, 700, 1000], dtype=torch.int32, device="cuda")
    packed = flashcli.attention(
        given.tensors["query"][:, 0], keys, values, causal=True, cu_seqlens_q=given.tensors["query_starts"],
        cu_seqlens_k=k_starts, return_lse=True,
    )  # fmt: skip
    same((out, lse.T.contiguous()), packed)
