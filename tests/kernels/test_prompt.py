"""Many query rows together: which calls the kernel `prompt` is for, and that a token's bytes have one result there."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulator.decode import DecodeEmulated
from support import sampled

from bench.decode_judge import Answer, Judge
from flashcli.files.decode.cases import Case, make
from flashcli.kernels.decode import choose, problem_of
from flashcli.kernels.decode import steps as steps_of
from flashcli.kernels.operation import Gpu
from flashcli.kernels.tuning.decode import Problem

HOPPER, ADA = Gpu((9, 0), 132), Gpu((8, 9), 128)


def half(**others) -> Problem:
    return Problem(**{
        "d": 128, "page": 16, "query_type": "float16", "cache_type": "float16", "transposed": False, "sequences": 3,
        "heads": 32, "kv_heads": 8, "table_width": 256, "gpu": HOPPER, **others,
    })  # fmt: skip


@pytest.mark.parametrize(
    ("problem", "name"),
    [
        (half(ragged=True, total=9), "prompt"),
        (half(ragged=True, total=9, cache_type="int8"), "prompt"),
        (half(ragged=True, total=9, gpu=ADA), "tensor"),
        (half(ragged=True, total=9, sparse=True), "tensor"),
        (half(ragged=True, total=9, query_type="float32", cache_type="float32"), "grouped"),
        (half(ragged=True, total=9, max_query_len=1), "tensor"),
        (half(ragged=True, total=9, max_query_len=2), "tensor"),  # 8 rows
        (half(ragged=True, total=9, max_query_len=4), "tensor"),  # 16 rows
        (half(ragged=True, total=9, max_query_len=5), "prompt"),
        (half(ragged=True, total=9, max_query_len=1, heads=72, kv_heads=1), "prompt"),
        (half(ragged=True, total=9, max_query_len=1, one_result=True), "prompt"),
        (half(tokens=1), "tensor"),
        (half(tokens=8, heads=64), "prompt"),
        (half(tokens=8, heads=64, gpu=ADA), "tensor"),
        (half(tokens=8, heads=64, transposed=True), "prompt"),
        (half(tokens=8, heads=64, cache_type="int8"), "tensor"),  # 64 rows
        (half(tokens=3, kv_heads=1), "prompt"),
        (half(tokens=1, one_result=True), "prompt"),
    ],
)
def test_ragged_queries_and_many_rows_are_for_prompt_where_it_can_serve(problem, name):
    assert choose(problem).kernel.name == name


def test_scratch_follows_from_the_sequences_where_there_are_many_query_tokens():
    build = choose(half(ragged=True, sequences=1, total=8192, table_width=512))
    assert build.workspace() < 2**24
    assert build.counters() * 4 <= build.workspace()


@pytest.mark.parametrize(
    ("problem", "steps"),
    [
        (half(ragged=True, total=999), [("prompt", 128), ("merge", 128)]),
        (half(ragged=True, total=999, max_query_len=2), [("tensor", 8), ("merge", 8)]),
        (half(ragged=True, total=999, max_query_len=2, table_width=32), [("tensor", 8)]),  # nothing is cut
        (half(ragged=True, total=999, gpu=ADA), [("tensor", 64), ("tensor", 8), ("merge", 8)]),
        (half(ragged=True, total=999, gpu=ADA, heads=96), [("tensor", 64), ("tensor", 16), ("merge", 16)]),
        (half(ragged=True, total=999, gpu=ADA, d=256), [("tensor", 32), ("tensor", 8), ("merge", 8)]),
        (half(ragged=True, total=999, gpu=ADA, kv_heads=1), [("tensor", 64), ("merge", 64)]),
        (half(ragged=True, total=999, gpu=ADA, one_result=True), [("tensor", 64)]),
    ],
)
def test_without_prompt_sequences_of_few_rows_have_a_launch_of_their_own(problem, steps):
    assert [(one.launch.function, one.build.problem.rows) for one in steps_of(choose(problem))] == steps


@pytest.mark.parametrize(("gpu", "layout"), [(HOPPER, "nhd"), (HOPPER, "vllm"), (ADA, "nhd")])
def test_sequences_of_many_and_few_rows_are_right_and_have_the_bytes_that_they_have_alone(emulated, gpu, layout):
    case = Case(6, 8, 2, 64, "70,9,133,150,2100,2100", layout=layout, queries="5,0,1,40,2,3", window=2000)
    asked, engine = make(case), DecodeEmulated(emulated, gpu=gpu)
    answer = Answer(*engine.decode(asked, range(6)))
    assert Judge(asked).problem(answer) == ""
    for s in (2, 3, 4, 5):
        out, lse = engine.decode(asked, range(s, s + 1))
        its = slice(*asked.query_starts[s : s + 2])
        assert out.tobytes() == answer.out[its].tobytes() and lse.tobytes() == answer.lse[its].tobytes()


@pytest.mark.parametrize(
    ("layout", "page", "D"),
    sampled([("hnd", 8, 80), ("nhd", 16, 64), ("vllm", 8, 40), ("vllm", 16, 64), ("vllm", 64, 128)]),
)
def test_tiles_by_the_copy_engine_and_by_threads_give_the_same_bytes(emulated, layout, page, D):
    asked = make(Case(3, 4, 2, D, "300,5,130", page=page, layout=layout, queries="20,2,130", window=100))
    found = []
    for boxes in (True, False):
        build = choose(problem_of(asked.outline, HOPPER)._replace(boxes=boxes))
        assert build.macros()["BOXES"] == boxes
        out, lse = np.full(asked.query[:, 0].shape, np.nan, np.float16), np.full((asked.total, 4), np.nan, np.float32)
        DecodeEmulated(emulated).launch(build, asked, out, lse)
        found.append(Answer(out, lse))
    assert Judge(asked).problem(found[0]) == ""
    assert found[0].out.tobytes() == found[1].out.tobytes() and found[0].lse.tobytes() == found[1].lse.tobytes()


def test_a_cache_whose_pages_are_the_same_memory_has_no_boxes():
    asked = make(Case(2, 4, 2, 64, "300,5", layout="nhd", queries="20,2")).outline
    key = asked.key_cache._replace(strides=(0, *asked.key_cache.strides[1:]))
    assert problem_of(asked).boxes and not problem_of(dataclasses.replace(asked, key_cache=key)).boxes


@pytest.mark.parametrize(
    ("most", "gpu"),
    [(0, ADA._replace(multiprocessors=1)), (0, HOPPER._replace(multiprocessors=1)), (4, HOPPER), (4, ADA)],
    ids=["two launches draw", "one draws", "more tokens than the caller says", "and on older GPUs"],
)
def test_blocks_that_draw_row_tiles_leave_out_none(emulated, most, gpu):
    case = Case(8, 8, 2, 64, "700,5,0,2100,9,70x3", layout="nhd", queries="4,2,0,21,1,1,1,40")
    asked = dataclasses.replace(make(case), max_query_len=most or None)
    assert Judge(asked).problem(Answer(*DecodeEmulated(emulated, gpu=gpu).decode(asked, range(8)))) == ""


@pytest.mark.parametrize("gpu", [HOPPER, ADA])
def test_a_token_has_one_result_alone_among_eight_in_a_chunk_and_in_a_prompt(emulated, gpu):
    whole = make(Case(1, 2, 1, 64, "300", layout="nhd", queries="300"))
    whole = dataclasses.replace(whole, one_result=True)
    engine = DecodeEmulated(emulated, gpu=gpu)
    out, lse = engine.decode(whole, range(1))
    for first, count in ((299, 1), (200, 8), (100, 90)):
        query = whole.query[first : first + count]
        part = dataclasses.replace(
            whole, query=query, query_starts=np.array([0, count], np.int32),
            seq_lens=np.array([first + count], np.int32),
        )  # fmt: skip
        alone = dataclasses.replace(part, query=query.reshape(1, count, 2, 64), query_starts=None)
        for asked in (part, alone):
            one, its_lse = engine.decode(asked, range(1))
            assert one.tobytes() == out[first : first + count].tobytes()
            assert its_lse.tobytes() == lse[first : first + count].tobytes()
    assert choose(problem_of(whole.outline, gpu)).problem.tuning.pieces == 1


def test_single_tokens_that_the_caller_says_they_are_have_the_bytes_of_one_token_a_sequence(emulated):
    """The third sequence has no query token, and one behind them all is of no sequence."""
    asked = make(Case(4, 4, 2, 64, "70,1,9,600", layout="nhd", queries="1,1,0,1"))
    query = np.concatenate([asked.query, asked.query[:1]])
    asked = dataclasses.replace(asked, query=query, max_query_len=1)
    out, lse = np.full((*query.shape[:1], 4, 64), np.nan, np.float16), np.full((4, 4), np.nan, np.float32)
    build = choose(problem_of(asked.outline, HOPPER))
    assert build.kernel.name == "tensor"
    DecodeEmulated(emulated).launch(build, asked, out, lse)
    of = [0, 1, 3]
    plain = dataclasses.replace(
        asked, query=asked.query[:3], query_starts=None, block_tables=asked.block_tables[of],
        seq_lens=asked.seq_lens[of], max_query_len=None,
    )  # fmt: skip
    want, want_lse = DecodeEmulated(emulated).decode(plain, range(3))
    assert out[:3].tobytes() == want.tobytes() and lse[:3].tobytes() == want_lse.tobytes()
    assert not out[3].any() and np.isneginf(lse[3]).all()
