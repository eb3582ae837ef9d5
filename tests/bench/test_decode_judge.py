"""The judge of paged decode: what it lets pass, and what not."""

from __future__ import annotations

import dataclasses
import itertools
import operator

import numpy as np
import pytest

from bench.decode_check import SMALL, builds_for, described, grid
from bench.decode_judge import Answer, Judge
from flashcli.cpu.decode import DecodeCpu
from flashcli.files.decode.cases import Case, make
from flashcli.kernels.decode import KERNELS

CASE = Case(3, 4, 2, 64, "64,48,30", sharpness=4.0)
HARDEST = dataclasses.replace(SMALL, D=96, page=32, query_type="float32", alibi=True)  # for the CPU, of the grid
SOME = [HARDEST, *itertools.islice(grid(), 3, None, 101)]


@pytest.mark.parametrize("case", SOME, ids=described)
def test_a_case_counts_and_the_cpu_passes_it(case):
    asked = make(case)
    judge = Judge(asked)
    with DecodeCpu() as backend:
        answer = Answer(*backend.decode(asked, range(asked.S)))
    assert (judge.void(), judge.problem(answer)) == ("", "")


@pytest.mark.parametrize("query_type", ["float32", "float16", "bfloat16"])
def test_an_answer_that_is_a_little_off_does_not_pass(query_type):
    judge = Judge(make(dataclasses.replace(CASE, query_type=query_type)))
    off = judge.want.out * (1 + {"float32": 1e-5, "float16": 1e-2, "bfloat16": 5e-2}[query_type])
    assert "error" in judge.problem(Answer(off, judge.want.lse))
    assert judge.problem(judge.want) == ""


def test_in_float32_the_millionth_that_vllm_adds_to_a_sum_does_not_pass():
    judge = Judge(make(dataclasses.replace(CASE, query_type="float32", lengths="1,1,1")))  # the sum is exp(0)
    assert "error" in judge.problem(Answer(judge.want.out / (1 + 1e-6), judge.want.lse))


def test_a_wrong_lse_and_numbers_that_are_none_do_not_pass():
    judge = Judge(make(CASE))
    assert "LSE is off" in judge.problem(Answer(judge.want.out, judge.want.lse + 0.01))
    assert "-inf elsewhere" in judge.problem(Answer(judge.want.out, np.where(judge.want.lse > 0, -np.inf, 1)))
    assert "not finite" in judge.problem(Answer(judge.want.out * np.nan, judge.want.lse))


def test_a_case_in_which_nonsense_passes_is_void():
    assert "zeros" in Judge(make(dataclasses.replace(CASE, lengths="0,0,0"))).void()


@pytest.mark.parametrize("kernel", KERNELS)
def test_every_kernel_has_builds_for_the_cases_that_it_takes(kernel):
    cases = [*SOME, *[case for case in grid() if case.queries][::7]]
    built = {build.kernel.name for build in builds_for([kernel], cases)}
    assert kernel in built


@pytest.mark.parametrize("missing", range(4))
def test_any_three_of_types_layout_head_size_and_page_occur_together(missing):
    asked = {((case.query_type, case.cache_type), case.layout, case.D, case.page) for case in grid()}
    types, layouts = ({one[i] for one in asked} for i in (0, 1))
    every = itertools.product(types, layouts, (32, 64, 80, 96, 112, 128, 192, 256), (8, 16, 32))
    three = operator.itemgetter(*(i for i in range(4) if i != missing))
    assert {three(four) for four in every} <= {three(four) for four in asked}
