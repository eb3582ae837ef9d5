"""Is every kernel of paged decode right? Cases over all that may be asked for, each judged against float64."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from typing import NamedTuple

import click
import numpy as np

from flashcli.backends.decode_cuda import DecodeCuda
from flashcli.errors import FlashError
from flashcli.files.decode_cases import Case, make, outlined
from flashcli.kernels import decode
from flashcli.kernels.decode import KERNELS
from flashcli.measure.builds import compile_all
from flashcli.measure.decode_judge import Answer, Judge
from flashcli.paged import LAYOUTS, BlockSparse

IN_TURN = decode.Tuning.piece_after_piece  # as tensor's blocks do in large batches only
SMALL = Case(3, 8, 2, 128, "320,64,77", sharpness=4.0)


def grid() -> Iterator[Case]:
    """Cases over all that may be asked for."""
    types = [
        ("float32", ""), ("float16", ""), ("bfloat16", ""), ("float16", "float8_e4m3fn"), ("bfloat16", "float8_e5m2"),
        ("float32", "float8_e4m3fn"),
    ]  # fmt: skip
    for (query, cache), layout in itertools.product(types, LAYOUTS):
        small = dataclasses.replace(SMALL, query_type=query, cache_type=cache, layout=layout)
        yield small
        for D, page in itertools.product((32, 64, 80, 96, 112, 128, 192, 256), (8, 16, 32)):
            if D != 112 or page == 16:
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


def described(case: Case) -> str:
    """How a case differs from the first one."""
    changes = {name: value for name, value in vars(case).items() if value != getattr(SMALL, name)}
    return ", ".join(f"{name}={value}" for name, value in changes.items()) or "the plain case"


class Found(NamedTuple):
    """What checking found: cases that count, void ones, and what was wrong, in words."""

    counted: int
    void: int
    wrong: list[str]


def check_kernels(names: list[str], every: int = 1) -> Found:
    """Each kernel on each ``every``-th case of the grid; other company and another tuning must give the same bytes."""
    counted, void, wrong = 0, 0, []
    cases = list(itertools.islice(grid(), 0, None, every))
    _compile(names, cases)
    for case in cases:
        asked = make(case)
        judge = Judge(asked)
        if passed := judge.void():
            void += 1
            click.echo(f"void, for {passed} would pass: {described(case)}", err=True)
        counted += 1
        for name in names:
            if KERNELS[name].refuses(decode.problem_of(KERNELS[name], asked)):
                continue
            try:
                with DecodeCuda(name) as backend:
                    got = Answer(*backend.decode(asked, range(asked.S)))
                    alone = [backend.decode(asked, range(s, s + 1)) for s in range(asked.S)]
                with DecodeCuda(name, IN_TURN) as backend:
                    in_turn = Answer(*backend.decode(asked, range(asked.S)))
            except FlashError as error:
                wrong.append(f"{name}: {described(case)}: {error}")
                continue
            if told := judge.problem(got):
                wrong.append(f"{name}: {described(case)}: {told}")
            if np.concatenate([out for out, _ in alone]).tobytes() != got.out.tobytes():
                wrong.append(f"{name}: {described(case)}: a sequence alone has other bytes than in the batch")
            if in_turn.out.tobytes() != got.out.tobytes():
                wrong.append(f"{name}: {described(case)}: piece after piece it has other bytes")
    return Found(counted, void, wrong)


def _compile(names: list[str], cases: list[Case]) -> None:
    """All that is needed for some cases, their builds side by side."""
    pairs = itertools.product([KERNELS[name] for name in names], map(outlined, cases))
    problems = [(kernel, decode.problem_of(kernel, asked)) for kernel, asked in pairs]
    in_turn = [(kernel, problem._replace(tuning=IN_TURN(problem.tuning))) for kernel, problem in problems]
    compile_all(decode.Build(kernel, problem) for kernel, problem in problems + in_turn)
