"""Is every kernel of paged decode right? Cases over all that may be asked for, each judged against float64."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import multiprocessing
import operator
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from typing import Any, NamedTuple

import click
import numpy as np

from bench.decode_judge import Answer, Judge
from bench.rows import Judged
from flashcli.asked.decode import LAYOUTS, BlockSparse
from flashcli.errors import FlashError
from flashcli.files.decode.cases import Case, make, outlined
from flashcli.kernels import decode
from flashcli.kernels.decode import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.tuning.decode import BY_NUMBER, PIECE_AFTER_PIECE, Tuning
from flashcli.run.decode_cuda import DecodeCuda

SMALL = Case(3, 8, 2, 128, "320,64,77", sharpness=4.0)


def grid() -> Iterator[Case]:
    """Cases over all that may be asked for."""
    types = [
        ("float32", ""), ("float16", ""), ("bfloat16", ""), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"),
        ("float32", "float8_e4m3fn"), ("float16", "int8"),
    ]  # fmt: skip
    for (i, (query, cache)), (j, layout) in itertools.product(enumerate(types), enumerate(LAYOUTS)):
        small = dataclasses.replace(SMALL, query_type=query, cache_type=cache, layout=layout)
        yield small
        for k, D in enumerate((32, 64, 80, 96, 112, 128, 192, 256)):
            page = (32, 8, 16)[(i + j + k) % 3]  # any two of types, layout and head size occur with each
            yield dataclasses.replace(small, D=D, page=page, alibi=(D // 16 + page // 8) % 2 == 0)
        for page in (1, 2, 64, 256):
            yield dataclasses.replace(small, page=page, lengths="512,256,77")
        for H, Hkv in ((8, 8), (5, 1), (6, 1), (7, 1), (16, 1), (71, 1), (24, 2)):
            yield dataclasses.replace(small, H=H, Hkv=Hkv)
        for T in (2, 5, 8):
            yield dataclasses.replace(small, T=T, alibi=T == 5)
        yield dataclasses.replace(small, window=50)
        yield dataclasses.replace(small, window=33, T=4)
        yield dataclasses.replace(small, lengths="3008,0,1024", H=4)
        yield dataclasses.replace(small, lengths="16,1,16")
        yield dataclasses.replace(small, S=5, lengths="1,0,64,64,1500", pages="reversed")
        yield dataclasses.replace(small, lengths="320,320,320", pages="shared")
        yield dataclasses.replace(small, value_scale=100.0)
        yield dataclasses.replace(small, sharpness=20.0)
        for step in (0, 1, -1):
            yield dataclasses.replace(small, sparse=BlockSparse(3, 32, 1, step, 1), lengths="640,64,77")
    yield dataclasses.replace(SMALL, D=120, layout="hnd", cache_type="float8_e4m3fn")
    yield dataclasses.replace(SMALL, D=56, layout="nhd")
    for (query, cache), layout in itertools.product(types, LAYOUTS):
        small = dataclasses.replace(SMALL, query_type=query, cache_type=cache, layout=layout)
        window, alibi = 50 * (layout == "hnd"), layout == "nhd"
        yield dataclasses.replace(small, queries="3,64,1")
        yield dataclasses.replace(small, S=5, lengths="16,700,0,33,1030", queries="20,2,1,0,9", window=window)
        yield dataclasses.replace(small, queries="3,64,1", causal=False, window=window, alibi=alibi)
        yield dataclasses.replace(small, softcap=2.0, alibi=alibi)
        yield dataclasses.replace(small, sinks=True, queries="1,20,4", lengths="3008,64,77")


def described(case: Case) -> str:
    """How a case differs from the first one."""
    changes = {name: value for name, value in vars(case).items() if value != getattr(SMALL, name)}
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "the plain case"


class Verdict(NamedTuple):
    """A kernel's answer to a case: the largest of its errors as a share of what is allowed, and how many were found."""

    kernel: str
    case: Case
    share: float
    wrong: int


class Found(NamedTuple):
    """The findings of a check: how many cases, how many of them void, what was wrong in words, and all verdicts."""

    counted: int
    void: int
    wrong: list[str]
    verdicts: list[Verdict]


def piece_after_piece(tuning: Tuning) -> Tuning:
    """The tuning with several pieces to a block, which looks for the next piece while it computes."""
    return tuning._replace(blocks=0, finds=PIECE_AFTER_PIECE, under_way=1, cluster=1)


def a_block_a_piece(tuning: Tuning) -> Tuning:
    """The tuning with a block of its own for each piece, known by its number, in batches of any size."""
    return tuning._replace(blocks=0, finds=BY_NUMBER, under_way=1, cluster=1)


def forms(build: Build) -> dict[str, Tuning]:
    """Other tunings that are to give the same bytes, by what blocks do there."""
    if "FINDS" not in build.macros():
        return {}
    own = build.problem.tuning
    others = {"piece after piece": piece_after_piece(own), "a block a piece": a_block_a_piece(own)}
    return {name: tuning for name, tuning in others.items() if tuning != own}


def check_kernels(names: list[str], cases: list[Case], opened: Callable[..., Any] = DecodeCuda) -> Found:
    """Each kernel on each case; other company and other tunings must give the same bytes.

    ``opened`` makes a backend of a kernel's name and what to retune, as DecodeCuda does.
    """
    counted, void = 0, 0
    wrong: list[str] = []
    verdicts: list[Verdict] = []
    for case in cases:
        asked = make(case)
        judge = Judge(asked)
        if passed := judge.void():
            void += 1
            click.echo(f"void, for {passed} would pass: {described(case)}", err=True)
        counted += 1
        for name in names:
            build = decode.build_of(KERNELS[name], asked.outline)
            if build.kernel.refuses(build.problem):
                continue
            others: dict[str, Answer] = {}
            before = len(wrong)
            try:
                with opened(name) as backend:
                    got = Answer(*backend.decode(asked, range(asked.S)))
                    alone = [backend.decode(asked, range(s, s + 1)) for s in range(asked.S)]
                for form, tuning in forms(build).items():
                    with opened(name, lambda own, tuning=tuning: tuning) as backend:
                        others[form] = Answer(*backend.decode(asked, range(asked.S)))
            except FlashError as error:
                wrong.append(f"{name}: {described(case)}: {error}")
                continue
            if told := judge.problem(got):
                wrong.append(f"{name}: {described(case)}: {told}")
            if np.concatenate([out for out, _ in alone]).tobytes() != got.out.tobytes():
                wrong.append(f"{name}: {described(case)}: a sequence alone has other bytes than in the batch")
            wrong += [
                f"{name}: {described(case)}: {form} it has other bytes"
                for form, other in others.items()
                if other.out.tobytes() != got.out.tobytes()
            ]
            if not passed:
                verdicts.append(Verdict(name, case, judge.share(got), len(wrong) - before))
    return Found(counted, void, wrong, verdicts)


def check_side_by_side(names: list[str], cases: list[Case], processes: int) -> Found:
    """`check_kernels` in so many processes, which share the cases: most of the time goes into right answers."""
    with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
        found = list(pool.map(_check_share, itertools.repeat(names), [cases[i::processes] for i in range(processes)]))
    return Found(*(functools.reduce(operator.add, some) for some in zip(*found, strict=True)))


def _check_share(names: list[str], cases: list[Case]) -> Found:
    with DecodeCuda():  # which keeps the context, while one kernel after the other is opened in it
        return check_kernels(names, cases)


def judged(verdicts: list[Verdict]) -> list[Judged]:
    """A row for each kernel and pair of types, of the query and the cache."""
    of: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        case = verdict.case
        types = case.query_type + (f", {case.cache_type}" if case.cache_type else "")
        of.setdefault((types, verdict.kernel), []).append(verdict)
    return [_judged(types, kernel, some) for (types, kernel), some in of.items()]


def _judged(types: str, kernel: str, verdicts: list[Verdict]) -> Judged:
    hardest = max(verdicts, key=lambda verdict: verdict.share)
    asked, wrong = outlined(hardest.case), sum(verdict.wrong > 0 for verdict in verdicts)
    return Judged(
        case=types, B=asked.S, N=asked.longest, d=asked.D, contender=kernel, cases=len(verdicts), wrong=wrong,
        share=hardest.share, hardest=described(hardest.case),
    )  # fmt: skip


def builds_for(names: list[str], cases: list[Case]) -> list[Build]:
    """Every build that checking these kernels on these cases needs."""
    builds: list[Build] = []
    for name, asked in itertools.product(names, (outlined(case).outline for case in cases)):
        build = decode.build_of(KERNELS[name], asked)
        if not build.kernel.refuses(build.problem):
            builds += decode.plan_of(build, asked).builds()
    others = [
        Build(build.kernel, build.problem._replace(tuning=tuning))
        for build in builds
        for tuning in forms(build).values()
    ]
    return builds + others
