"""The varlen functions that engines call, flash-attn's and vLLM's, on tensors on the CPU."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

torch = pytest.importorskip("torch")

from support import ROOT, python_in  # noqa: E402

import flashcli  # noqa: E402
from flashcli.cpu.decode import DecodeCpu  # noqa: E402
from flashcli.files.decode.cases import Case, make  # noqa: E402
from flashcli.torch import flash_attn, vllm  # noqa: E402

pytestmark = pytest.mark.usefixtures("no_pycuda")  # else a GPU computes, and has other bytes than the CPU's backend
CASE = Case(3, 4, 2, 32, "30,5,17", queries="4,1,17", page=8, query_type="float32", layout="nhd")


def given(**changes):
    asked = make(dataclasses.replace(CASE, **changes))
    with DecodeCpu(1) as backend:
        out, lse = (torch.from_numpy(x) for x in backend.decode(asked, range(asked.S)))
    caches = (torch.from_numpy(x) for x in (asked.key_cache, asked.value_cache))
    starts, tables, lengths = (torch.from_numpy(x) for x in (asked.query_starts, asked.block_tables, asked.seq_lens))
    return (torch.from_numpy(asked.query[:, 0]), *caches, starts, tables, lengths), (out, lse), asked


def test_the_arguments_are_those_of_the_engines_in_their_order():
    """Facts of flash-attn 2.7 and of vLLM's flash-attention, by which calls without keywords are made."""
    orders = {
        flash_attn.flash_attn_varlen_func: "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
        "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table",
        flash_attn.flash_attn_with_kvcache: "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
        "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
        "return_softmax_lse",
        vllm.reshape_and_cache_flash: "key value key_cache value_cache slot_mapping kv_cache_dtype k_scale v_scale",
        vllm.merge_attn_states: "output prefix_output prefix_lse suffix_output suffix_lse output_lse",
        vllm.flash_attn_varlen_func: "q k v max_seqlen_q cu_seqlens_q max_seqlen_k cu_seqlens_k seqused_k q_v "
        "dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs block_table "
        "return_softmax_lse out scheduler_metadata q_descale k_descale v_descale num_splits fa_version s_aux "
        "cp_world_size cp_rank cp_tot_seqused_k",
    }  # fmt: skip
    for function, names in orders.items():
        assert [*inspect.signature(function).parameters] == names.split()


@pytest.mark.parametrize("changes", [{}, {"window": 6}, {"softcap": 2.0}, {"alibi": True}, {"causal": False}], ids=str)
def test_flash_attns_varlen_function_reads_pages(changes):
    (q, k, v, starts, tables, lengths), (want, want_lse), asked = given(**changes)
    k_starts = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
    slopes = None if asked.alibi_slopes is None else torch.from_numpy(asked.alibi_slopes)
    out, lse, none = flash_attn.flash_attn_varlen_func(
        q, k, v, starts, k_starts, 17, 30, 0.0, None, asked.causal, (asked.window - 1, 0) if asked.window else (-1, -1),
        asked.softcap, slopes, False, True, tables,
    )  # fmt: skip
    assert torch.equal(out, want) and torch.equal(lse, want_lse.T) and none is None


def test_flashinfers_pages_become_a_table_and_its_one_cache_is_read_where_it_lies():
    """The lines of docs/decode.md for callers of FlashInfer."""
    (q, K, V, starts, tables, lengths), (want, _), _ = given()
    counts, cache = (lengths + 7) // 8, torch.stack([K, V], 1)
    indices = torch.cat([row[:n] for row, n in zip(tables, counts.tolist(), strict=True)])
    names = {
        "torch": torch, "page": 8, "most_pages": 4, "paged_kv_indices": indices,
        "paged_kv_indptr": torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(),
        "paged_kv_last_page_len": lengths - (counts - 1) * 8,
    }  # fmt: skip
    [shown] = [block for block in python_in(ROOT / "docs/decode.md") if "paged_kv_indptr" in block]
    exec(shown, names)
    cache_of = {"key_cache": cache[:, 0], "value_cache": cache[:, 1], "layout": "nhd"}
    made = {name: names[name] for name in ("block_tables", "seq_lens")}
    assert torch.equal(flashcli.decode(q, **cache_of, **made, query_starts=starts), want)


def test_vllms_varlen_function_has_sinks_descales_and_an_array_for_the_answer():
    (q, k, v, starts, tables, lengths), (want, want_lse), asked = given(sinks=True, window=6)
    into = torch.empty_like(q)
    out, lse = vllm.flash_attn_varlen_func(
        q=q, k=k, v=v, max_seqlen_q=17, cu_seqlens_q=starts, max_seqlen_k=30, seqused_k=lengths, causal=True,
        window_size=[5, 0], block_table=tables, return_softmax_lse=True, out=into, fa_version=3,
        s_aux=torch.from_numpy(asked.sinks), k_descale=torch.ones(1).expand(3, 2), v_descale=torch.ones(1).expand(3, 2),
    )  # fmt: skip
    assert out is into and torch.equal(out, want) and torch.equal(lse, want_lse.T)
    with pytest.raises(ValueError, match="out must not share memory with query"):
        vllm.flash_attn_varlen_func(q, k, v, 17, starts, 30, None, lengths, causal=True, block_table=tables, out=q)
    only = vllm.flash_attn_varlen_func(q, k, v, 17, starts, 30, None, lengths, causal=True, block_table=tables)
    assert only.shape == q.shape and not torch.equal(only, want)


@pytest.mark.parametrize("T", [1, 3])
def test_a_cache_gets_new_tokens_and_then_is_attended_to(T):
    whole = make(Case(3, 4, 2, 32, "30,5,17", T=T, page=8, query_type="float32", layout="nhd"))
    with DecodeCpu(1) as backend:
        want, want_lse = (torch.from_numpy(x) for x in backend.decode(whole, range(3)))
    tables, lengths = torch.from_numpy(whole.block_tables), torch.from_numpy(whole.seq_lens)
    caches = [torch.from_numpy(x.copy()) for x in (whole.key_cache, whole.value_cache)]
    places = lengths[:, None].long() - T + torch.arange(T)
    pages = tables.gather(1, places // 8).long()
    new = [cache[pages, places % 8].clone() for cache in caches]
    for cache in caches:
        cache[pages, places % 8] = torch.nan
    q = torch.from_numpy(whole.query)
    out, lse = flash_attn.flash_attn_with_kvcache(
        q, *caches, *new, cache_seqlens=lengths - T, block_table=tables, causal=True, return_softmax_lse=True
    )
    assert torch.equal(out, want) and torch.equal(lse, want_lse.transpose(1, 2))
    again = flash_attn.flash_attn_with_kvcache(q, *caches, cache_seqlens=lengths, block_table=tables, causal=True)
    assert torch.equal(again, want)


NEW = {"k": torch.ones(3, 1, 2, 32), "v": torch.ones(3, 1, 2, 32)}


@pytest.mark.parametrize(
    "change",
    [
        {"softmax_scale": "1"}, {"softcap": -1.0}, {"window_size": 3}, {"window_size": (2, 2), "causal": False},
        {"alibi_slopes": torch.ones(5)}, {"q": torch.ones(3, 1, 4, 16)},
    ],
    ids=lambda change: "-".join(change),
)  # fmt: skip
def test_what_is_refused_has_written_nothing(change):
    (q, k, v, _, tables, lengths), _, _ = given(queries="1,1,1")
    caches = [k.clone(), v.clone()]
    arguments = {"q": q[:, None], "cache_seqlens": lengths - 1, "block_table": tables, "causal": True, **NEW}
    with pytest.raises((TypeError, ValueError)):
        flash_attn.flash_attn_with_kvcache(**arguments | change, k_cache=caches[0], v_cache=caches[1])
    torch.testing.assert_close(caches, [k, v], rtol=0, atol=0, equal_nan=True)


def test_new_tokens_beyond_the_table_are_written_nowhere():
    tables = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32)
    slots = flash_attn._slots(tables, torch.tensor([[6, 7, 8], [-1, 0, 2**31 - 1]], dtype=torch.int32), 4)
    assert slots.clamp(min=-1).tolist() == [[6, 7, -1], [-1, 0, -1]]
    assert (flash_attn._slots(tables[:, :0], torch.tensor([[0], [5]], dtype=torch.int32), 4) < 0).all()


@pytest.mark.parametrize(
    ("change", "error", "complaint"),
    [
        ({"k": torch.ones(3, 2, 32), "v": torch.ones(3, 2, 32)}, ValueError, "k has shape .3, 2, 32., where .S, T"),
        ({"k": torch.ones(3, 1, 2, 32), "v": torch.ones(2, 1, 2, 32)}, ValueError, "v has shape .* with S = 3"),
        ({"q": torch.ones(3, 0, 4, 32)}, ValueError, r"q has shape \[3, 0, 4, 32\]"),
        ({"q": torch.ones(3, 4, 32)}, ValueError, r"q has shape \[3, 4, 32\]"),
        ({"k_cache": [1]}, TypeError, "k_cache must be a PyTorch tensor, not list"),
        ({"k": [1], "v": torch.ones(3, 1, 2, 32)}, TypeError, "k must be a PyTorch tensor, not list"),
        ({**NEW, "block_table": torch.ones(1, 3, 2, dtype=torch.int32)}, ValueError, "block_table has shape .1, 3, 2."),
        ({**NEW, "cache_seqlens": torch.tensor(3, dtype=torch.int32)}, ValueError, r"cache_seqlens has shape \[\],"),
        ({"window_size": 3}, TypeError, "window_size must be two whole numbers, .left, right., not 3"),
    ],
)
def test_a_cache_is_not_attended_to_by_what_does_not_fit(change, error, complaint):
    (q, k, v, _, tables, lengths), _, _ = given(queries="1,1,1")
    arguments = {"q": q[:, None], "k_cache": k, "v_cache": v, "cache_seqlens": lengths - 1, "block_table": tables}
    with pytest.raises(error, match=complaint):
        flash_attn.flash_attn_with_kvcache(**arguments | change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"dropout_p": 0.1}, "dropout_p has no meaning for flashcli"),
        ({"block_table": None}, "block_table must be given"),
        ({"seqused_k": None}, "seqused_k must be given"),
        ({"q_v": torch.ones(2)}, "q_v has no meaning for flashcli"),
        ({"cp_world_size": 2}, "cp_world_size has no meaning"),
        ({"causal": False, "window_size": (4, 4)}, "without causal=True there are neither windows nor"),
        ({"k_descale": torch.ones(3, 2)}, "k_descale must be one number for all sequences and heads"),
        ({"v_descale": torch.ones(0, 2)}, "v_descale must be one number for all sequences and heads"),
        ({"v_descale": 2.0}, "v_descale must be a PyTorch tensor, not float"),
        ({"s_aux": [1.0]}, "s_aux must be a PyTorch tensor, not list"),
        ({"q": torch.ones(17, 4, 32).to_sparse()}, "query must be a dense tensor, not sparse_coo"),
    ],
    ids=str,
)
def test_what_is_not_computed_is_refused_with_a_sentence(change, complaint):
    (q, k, v, starts, tables, lengths), _, _ = given()
    arguments = {
        "q": q, "k": k, "v": v, "max_seqlen_q": 17, "cu_seqlens_q": starts, "max_seqlen_k": 30, "seqused_k": lengths,
        "causal": True, "block_table": tables,
    }  # fmt: skip
    with pytest.raises((TypeError, ValueError), match=complaint):
        vllm.flash_attn_varlen_func(**arguments | change)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"output": [1]}, "output must be a PyTorch tensor, not list"),
        ({"output": torch.ones(5, 3, 4, 32)}, r"output must have shape \[3, 4, 32\], not \[5, 3, 4, 32\]"),
        ({"prefix_lse": torch.ones(3)}, r"prefix_lse must have shape \[4, 3\], not \[3\]"),
        ({"output_lse": torch.ones(3, 4)}, r"output_lse must have shape \[4, 3\], not \[3, 4\]"),
    ],
)
def test_answers_that_do_not_fit_are_not_merged(change, complaint):
    given = {"output": torch.zeros(3, 4, 32), "prefix_output": torch.ones(3, 4, 32), "prefix_lse": torch.ones(4, 3)}
    given |= {"suffix_output": torch.ones(3, 4, 32), "suffix_lse": torch.ones(4, 3)} | change
    with pytest.raises((TypeError, ValueError), match=complaint):
        vllm.merge_attn_states(**given)
    assert given["output"] == [1] or given["output"].unique().numel() == 1


def test_rotary_embeddings_are_refused():
    (q, k, v, _, tables, lengths), _, _ = given(queries="1,1,1")
    with pytest.raises(ValueError, match="rotary_cos has no meaning for flashcli"):
        flash_attn.flash_attn_with_kvcache(
            q[:, None], k, v, rotary_cos=torch.ones(1), cache_seqlens=lengths, block_table=tables
        )


def test_the_largest_query_length_goes_to_the_choice_of_a_kernel():
    (q, k, v, starts, tables, lengths), _, _ = given()
    with pytest.raises(ValueError, match="sequence 2 17 query tokens, more than max_query_len = 16"):
        vllm.flash_attn_varlen_func(q, k, v, 16, starts, 30, None, lengths, causal=True, block_table=tables)


def test_a_step_of_vllms_backend_is_computed_as_it_stands():
    """New tokens go into the cache; attention is to a prefix that all share, and to the rest; both answers meet."""
    (q, k, v, starts, tables, lengths), (want, want_lse), _ = given(pages="shared", lengths="40,24,33")
    last = lengths.long() - 1
    slots = tables.gather(1, last[:, None] // 8)[:, 0] * 8 + last % 8
    new = [cache.reshape(-1, 2, 32)[slots] for cache in (k, v)]
    whole = torch.stack([k, v], 1)
    caches, one, output, output_lse = whole.unbind(1), torch.ones(()), torch.empty_like(q), torch.empty(4, len(q))
    for cache in caches:
        cache[slots // 8, slots % 8] = torch.nan
    padded = [torch.cat([x, x[:1]]) for x in new]
    vllm.reshape_and_cache_flash(*padded, *caches, slots, "auto", one, one)
    options = {
        "q": q, "k": caches[0], "v": caches[1], "max_seqlen_k": 40, "softmax_scale": 32**-0.5, "alibi_slopes": None,
        "window_size": [-1, -1], "softcap": 0, "fa_version": 3, "scheduler_metadata": None, "num_splits": 1,
        "s_aux": None, "return_softmax_lse": True, **{f"{name}_descale": one.expand(3, 2) for name in "qkv"},
    }  # fmt: skip
    prefix = vllm.flash_attn_varlen_func(
        cu_seqlens_q=torch.tensor([0, len(q)], dtype=torch.int32), seqused_k=torch.tensor([16], dtype=torch.int32),
        max_seqlen_q=len(q), causal=False, block_table=tables[:1], **options,
    )  # fmt: skip
    rest = vllm.flash_attn_varlen_func(
        cu_seqlens_q=starts, seqused_k=lengths - 16, max_seqlen_q=17, causal=True, block_table=tables[:, 2:], **options
    )
    vllm.merge_attn_states(output, *prefix, *rest, output_lse)
    torch.testing.assert_close(output, want)
    torch.testing.assert_close(output_lse, want_lse.T)
