"""Float32 prompts, gathered for attention of packed sequences: which calls they are, their scratch, their answers."""

from __future__ import annotations

import dataclasses

import fake_driver
import numpy as np
import pytest
from emulator.decode import DecodeEmulated

from flashcli.cpu.decode import DecodeCpu
from flashcli.files.decode.cases import Case, make
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import Prepared
from flashcli.kernels import decode
from flashcli.kernels.decode import choose, problem_of
from flashcli.kernels.operation import Gpu
from flashcli.kernels.tuning import decode as tuning
from flashcli.kernels.tuning.decode import Problem, gathered_together, passes

PROMPTS = Case(5, 4, 2, 64, "70,20,9,33,200", layout="nhd", queries="20,1,9,8,60", query_type="float32")


def prompts(**others) -> Problem:
    """Prompts of 8192 tokens at most, heads 32/8 of 128 numbers."""
    return Problem(**{
        "d": 128, "page": 16, "query_type": "float32", "cache_type": "float32", "transposed": False, "sequences": 1,
        "heads": 32, "kv_heads": 8, "table_width": 512, "ragged": True, "total": 8192, "packs": True, **others,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({}, "gather"), ({"cache_type": "int8"}, "gather"), ({"window": 9}, "gather"), ({"alibi": True}, "gather"),
        ({"causal": False}, "gather"), ({"causal": False, "window": 9}, "grouped"),
        ({"causal": False, "alibi": True}, "grouped"), ({"softcap": 2.0}, "grouped"), ({"sinks": True}, "grouped"),
        ({"queries": ""}, "grouped"), ({"query_type": "float16"}, "prompt"),
    ],
    ids=str,
)  # fmt: skip
def test_prompts_are_gathered_where_attention_of_packed_sequences_has_what_they_ask_for(change, kernel):
    assert choose(problem_of(make(dataclasses.replace(PROMPTS, **change)).outline)).kernel.name == kernel


@pytest.mark.parametrize(
    ("change", "kernel"),
    [
        ({"max_query_len": 8}, "grouped"), ({"max_query_len": 60}, "gather"), ({"one_result": True}, "grouped"),
        ({"gpu": Gpu((6, 1), 20)}, "gather"), ({"table_width": 2**24}, "grouped"),
    ],
    ids=str,
)  # fmt: skip
def test_short_queries_and_tables_that_are_too_wide_are_for_grouped(change, kernel):
    change = change | ({"packs": False} if "one_result" in change else {})
    assert choose(prompts(**change)).kernel.name == kernel


def test_scratch_is_bounded_by_what_is_gathered_at_a_time():
    one = prompts()
    assert (gathered_together(one), passes(one)) == (1, 1)
    many = prompts(sequences=256, total=8192, table_width=256)  # of 4096 tokens: 32 MiB each
    assert (gathered_together(many), passes(many)) == (8, 32)
    chunks = prompts(sequences=130, total=128 + 8, table_width=256)  # at most 15 have more than 8 query tokens
    assert passes(chunks) == 2
    long = prompts(table_width=8192)  # one sequence has room for more
    assert (gathered_together(long), passes(long)) == (1, 1)
    asked = make(Case(1, 32, 8, 128, "8192", layout="nhd", queries="8192", query_type="float32"))
    assert decode.plan(asked.outline, Gpu((9, 0), 132)).workspace < 2**28


def test_prompts_have_the_same_bytes_in_one_pass_and_in_several_and_short_ones_those_of_their_tokens(
    emulated, monkeypatch
):
    """The query token behind the last sequence's is of none."""
    asked = make(PROMPTS)
    asked = dataclasses.replace(asked, query=np.concatenate([asked.query, asked.query[:1]]))
    found = []
    for most in (tuning.GATHERED, 2**19, 1):
        monkeypatch.setattr(tuning, "GATHERED", most)
        out, lse = np.full((99, 4, 64), np.nan, np.float32), np.full((99, 4), np.nan, np.float32)
        build = choose(problem_of(asked.outline))
        found.append((passes(build.problem), out, lse))
        DecodeEmulated(emulated).launch(build, asked, out, lse)
    assert [some for some, *_ in found] == [1, 3, 5]
    assert len({out.tobytes() + lse.tobytes() for _, out, lse in found}) == 1
    assert not out[98].any() and np.isneginf(lse[98]).all()
    with DecodeCpu(1) as backend:
        want, want_lse = backend.decode(make(PROMPTS), range(5))
    np.testing.assert_allclose(out[:98], want, rtol=0, atol=5e-6)
    np.testing.assert_allclose(lse[:98], want_lse, rtol=2e-6, atol=2e-6)
    eight = asked.part(range(3, 4))
    plain = dataclasses.replace(eight, query=eight.query.reshape(1, 8, 4, 64), query_starts=None)
    for t in (0, 7):
        alone, its_lse = DecodeEmulated(emulated).decode(plain.token(0, t), range(1))
        assert alone.tobytes() == out[30 + t].tobytes() and its_lse.tobytes() == lse[30 + t].tobytes()


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "vllm", "cache_type": "int8", "page": 4, "window": 30, "alibi": True},
        {"layout": "hnd", "cache_type": "float8_e5m2", "page": 1, "causal": False},
    ],
    ids=str,
)
def test_prompts_of_every_cache_are_right(emulated, changes):
    asked = make(dataclasses.replace(PROMPTS, S=3, lengths="40,0,70", queries="50,2,30", **changes))
    assert choose(problem_of(asked.outline)).kernel.name == "gather"
    out, lse = DecodeEmulated(emulated).decode(asked, range(3))
    with DecodeCpu(1) as backend:
        want, want_lse = backend.decode(asked, range(3))
    np.testing.assert_allclose(out, want, rtol=0, atol=1e-5)
    np.testing.assert_allclose(lse, want_lse, rtol=4e-6, atol=4e-6)


def test_all_launches_of_a_call_are_queued_in_order_with_what_each_is_given(driver, monkeypatch):
    driver.capability = 9, 0
    seen = []
    monkeypatch.setattr(fake_driver, "attention", lambda given, macros: seen.append(given))
    monkeypatch.setattr(fake_driver, "decode", lambda given, macros: None)
    monkeypatch.setattr(tuning, "GATHERED", 1)
    place, asked = place_of_device(0), make(dataclasses.replace(PROMPTS, S=2, lengths="70,20", queries="9,9"))
    prepared = Prepared(place, decode.DECODE, decode.plan(asked.outline, place.gpu))
    at = {name: 2**20 * i for i, name in enumerate(decode.POINTERS, 1)} | {"alibi_slopes": 0, "sinks": 0}
    prepared.launch(0, *at.values())
    names = [name for name, _, _ in driver.launches]
    assert names == ["lay_out", *["gather", "prepare", "attention"] * 2, "finish", "grouped", "merge"]
    for number, given in enumerate(seen):
        assert (given.Q, given.O, given.slopes) == (at["query"], at["out"], None)
        scratch = given.q_starts, given.k_starts, given.lse, given.K, given.V, given.workspace
        assert at["workspace"] + 12 * number == scratch[0] and [*scratch] == sorted(scratch)
        assert scratch[-1] < at["workspace"] + prepared.workspace
