"""What the kernels of paged decode answer, on a GPU and emulated on the CPU; and the command, on a GPU."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from emulator.decode import DecodeEmulated
from support import flashcli, sampled

from bench.decode_check import a_block_a_piece, check_kernels, grid, piece_after_piece
from bench.decode_judge import Answer, Judge
from flashcli.asked.decode import BlockSparse
from flashcli.files.decode.cases import Case, generate, make
from flashcli.kernels.decode import KERNELS, VERSIONS, build_of
from flashcli.kernels.tuning.decode import AHEAD_OF_LENGTH, BY_LENGTHS, Tuning
from flashcli.measure.builds import compile_all
from flashcli.run import decode
from flashcli.run.decode_cuda import DecodeCuda

BUILDS = [  # what kernels are compiled for; what comes with the argument is drawn
    Case(4, 15, 3, 64, page=16, layout="vllm"),
    Case(4, 12, 2, 128, page=1, layout="nhd", query_type="bfloat16", cache_type="float8_e4m3fn"),
    Case(4, 71, 1, 32, page=1024, layout="hnd", cache_type="float8_e5m2"),
    Case(4, 10, 2, 256, page=8, layout="vllm", cache_type="float8_e4m3fn"),
    Case(4, 7, 1, 80, page=128, layout="nhd", query_type="float32", cache_type="float8_e5m2"),
    Case(4, 16, 2, 96, page=4, layout="hnd", query_type="float32"),
    Case(4, 9, 3, 120, page=8, layout="vllm", query_type="float32"),
    Case(4, 6, 2, 128, page=32, layout="vllm", query_type="bfloat16", cache_type="int8"),
]

FOR_ALL = [name for name in KERNELS if name != "gather"]  # which takes ragged queries only, see test_gather.py


def as_it_is(tuning: Tuning) -> Tuning:
    return tuning


@pytest.fixture(params=["emulated", pytest.param("gpu", marks=pytest.mark.gpu)])
def opened(request):
    """``opened(kernel, retuned)`` is the backend; see DecodeCuda."""
    if request.param == "gpu":
        request.getfixturevalue("gpu")
        return DecodeCuda
    return functools.partial(DecodeEmulated, request.getfixturevalue("emulated"))


def emulated_some(names: str, cases: list, emulated: list | None = None) -> pytest.MarkDecorator:
    """Cases of a test that are all computed on a GPU; of them those ``emulated``, outside CI those `sampled`."""
    pairs = [("emulated", *case) for case in sampled(cases if emulated is None else emulated, 5)]
    pairs += [pytest.param("gpu", *case, marks=pytest.mark.gpu) for case in cases]
    return pytest.mark.parametrize(f"opened, {names}", pairs, indirect=["opened"], ids=str)


def drawn(case: Case) -> Iterator[Case]:
    """Every option beside every other one, and sequences that are shorter than their query tokens."""
    rng = random.Random(0)
    for seed in range(6):
        lengths = rng.sample([0, 1, 7, case.page, 33, 640, 1025, 1500], case.S)
        stride, block, local, step = rng.choice([2, 3]), case.page, rng.choice([1, 2]), rng.choice([-2, 0, 3])
        yield dataclasses.replace(
            case, seed=seed, lengths=",".join(map(str, lengths)), T=rng.choice([1, 2, 8]), alibi=rng.random() < 0.5,
            window=rng.choice([0, 0, 5, 600]), pages=rng.choice(["unique", "reversed"]),
            sparse=BlockSparse(stride, block, local, step, 1) if rng.random() < 0.5 else None,
            queries=",".join(str(rng.choice([0, 1, 2, 9, 40])) for _ in range(case.S)) if seed % 2 else "",
            softcap=3.0 if seed % 3 == 1 else 0.0, sinks=seed % 3 == 2,
        )  # fmt: skip
    yield dataclasses.replace(case, lengths="0,3,40,1", T=8, window=2**31 - 1)


# Heads of 256 numbers are emulated below, by the kernel that is used most.
@emulated_some("build", [(build,) for build in BUILDS], [(build,) for build in BUILDS if build.D < 256])
def test_every_kernel_is_right_whatever_is_asked_for_together(opened, build):
    cases, some = list(drawn(build)), slice(BUILDS.index(build) % 6, None, 6)
    requests = [make(case) for case in (cases if opened is DecodeCuda else cases[some])]
    builds = [[build_of(kernel, asked.outline) for kernel in KERNELS.values()] for asked in requests]
    if opened is DecodeCuda:
        compile_all(itertools.chain(*builds))
    for asked, some in zip(requests, builds, strict=True):
        judge = Judge(asked)
        assert "zeros" not in judge.void()
        for name in (one.kernel.name for one in some if not one.kernel.refuses(one.problem)):
            with opened(name) as backend:
                told = judge.problem(Answer(*backend.decode(asked, range(asked.S))))
            assert told == "", (name, asked.seq_lens, asked.T, asked.window, asked.sparse)


@pytest.mark.parametrize("name", FOR_ALL)
def test_bytes_depend_neither_on_the_order_of_pages_nor_on_company_nor_on_how_large_the_gpu_is(opened, name):
    query_type = "float16" if name in ("tensor", "prompt") else "float32"
    layout = "vllm" if name in VERSIONS else "hnd"
    queries = "20,9,0,60" if name == "gather" else ""
    asked = make(Case(4, 8, 2, 64, "700,3,0,1030", layout=layout, query_type=query_type, queries=queries))
    order = np.random.default_rng(1).permutation(asked.pages)
    places = np.argsort(order).astype(np.int32)  # of each page
    moved = dataclasses.replace(
        asked, key_cache=asked.key_cache[order], value_cache=asked.value_cache[order],
        block_tables=np.where(asked.block_tables < 0, np.int32(-1), places[asked.block_tables]),
    )  # fmt: skip
    with opened(name) as backend:
        out, lse = backend.decode(asked, range(4))
        elsewhere = backend.decode(moved, range(4))
        alone = [backend.decode(asked, range(s, s + 1)) for s in range(4)]
    with opened(name, piece_after_piece) as backend:
        backend._session.multiprocessors = 1
        small = backend.decode(asked, range(4))
    assert out.any() and [x.tobytes() for x in elsewhere] == [out.tobytes(), lse.tobytes()]
    assert [x.tobytes() for x in small] == [out.tobytes(), lse.tobytes()]
    assert out.tobytes() == b"".join(found.tobytes() for found, _ in alone)


@pytest.mark.parametrize("name", ["paged_v2", "grouped", "split", "tensor"])
def test_a_ragged_query_token_has_the_bytes_that_it_has_alone(opened, name):
    query_type = "float16" if name == "tensor" else "float32"
    asked = make(Case(3, 4, 2, 64, "700,40,1030", queries="2,0,7", query_type=query_type, softcap=9.0))
    asked = dataclasses.replace(asked, one_result=name == "tensor")
    with opened(name) as backend:
        out, lse = backend.decode(asked, range(3))
        for s, t, row in [(0, 0, 0), (2, 0, 2), (2, 6, 8)]:
            alone = dataclasses.replace(
                asked, query=asked.query[row : row + 1], block_tables=asked.block_tables[s : s + 1], query_starts=None,
                seq_lens=np.array([asked.position(s, t) + 1], np.int32),
            )  # fmt: skip
            its_out, its_lse = backend.decode(alone, range(1))
            assert its_out[0, 0].tobytes() == out[row].tobytes() and its_lse[0, 0].tobytes() == lse[row].tobytes()
    assert out.any()


def assert_same_bytes(opened, asked, *forms):
    """All of these forms of the fastest kernel give a right answer, and the same bytes."""
    found = []
    for retuned in forms:
        with opened("tensor", retuned) as backend:
            found.append(Answer(*backend.decode(asked, range(asked.S))))
    assert Judge(asked).problem(found[0]) == "" and found[0].out.any()
    for other in found[1:]:
        assert found[0].out.tobytes() == other.out.tobytes() and found[0].lse.tobytes() == other.lse.tobytes()


@emulated_some("D", [(80,), (128,), (256,)])
def test_answers_from_any_number_of_pieces_are_right_and_the_same_however_blocks_share_them(opened, D):
    lengths = [1, 513, 4096, 12300, 70_000]  # up to 48 pieces, which some warps merge together
    if opened is not DecodeCuda:
        lengths = [1, 513, 2, 700, 12_300 if D == 256 else 25_000]
    for H in (2, 7) if opened is DecodeCuda else (7,):
        asked = make(Case(len(lengths), H, 1, D, ",".join(map(str, lengths)), layout="nhd"))
        build = build_of(KERNELS["tensor"], asked.outline)
        assert build.problem.tuning.finds == BY_LENGTHS
        assert_same_bytes(opened, asked, as_it_is, piece_after_piece, a_block_a_piece)


PIECES = [  # and how many blocks a cluster has
    (Case(1, 32, 8, 128, "4096"), 8),
    (Case(4, 15, 3, 128, "2001,700,0,5"), 4),
    (Case(2, 24, 2, 64, "1025,3000", T=2, alibi=True), 4),  # three tiles of rows
    (Case(3, 16, 8, 128, "600,257,31", window=300), 4),  # pieces of 256 tokens
    (Case(5, 8, 1, 128, "4000,900,1700,0,2600", T=3, window=700, cache_type="float8_e5m2"), 4),
    (Case(3, 8, 2, 64, "9000,5,12345"), 1),  # more pieces than a cluster has blocks
    (Case(1, 8, 2, 128, "40000", window=9000), 1),  # the length says how long pieces are
]


@emulated_some(
    "layout, case, cluster", [(layout, *piece) for layout in ("vllm", "nhd") for piece in PIECES],
    emulated=[(("vllm", "nhd")[i % 2], *piece) for i, piece in enumerate(PIECES)],
)  # fmt: skip
def test_pieces_found_by_the_numbers_of_blocks_and_merged_by_clusters_give_the_bytes_of_any(
    opened, layout, case, cluster
):
    asked = make(dataclasses.replace(case, layout=layout))
    tuning = build_of(KERNELS["tensor"], asked.outline).problem.tuning
    assert (tuning.finds, tuning.under_way, tuning.cluster) == (AHEAD_OF_LENGTH, 2, cluster)
    others = piece_after_piece, a_block_a_piece
    assert_same_bytes(opened, asked, as_it_is, lambda tuning: tuning._replace(cluster=1), *others)


class FewAtOnce(DecodeCuda):
    """A GPU whose memory holds few pages."""

    at_once = 40_000


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 50])
def test_a_cache_that_is_too_large_goes_through_in_groups_and_gives_the_same_bytes(gpu, tmp_path, window):
    asked = generate(str(tmp_path / "x"), Case(6, 8, 2, 64, "40,300,0,7,1000,90", window=window))
    assert asked.key_cache.nbytes > FewAtOnce.at_once and len(decode.groups(asked, FewAtOnce.at_once)) > 3
    for opener, name in ((DecodeCuda, "whole"), (FewAtOnce, "grouped")):
        decode.run(tmp_path / "x", tmp_path / name, opener)
    assert (tmp_path / "grouped").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.mark.gpu
def test_the_command_has_the_cpus_answer_by_each_kernel(gpu, tmp_path: Path):
    options = ("--lengths", "900,5,0", "--query-tokens", 2, "--alibi", "--fp8", "e4m3", "--window", 100)
    flashcli("generate", "x", "--decode", "3,8,2,64", *options, cwd=tmp_path)
    flashcli("decode", "x", "want", "--backend", "cpu", cwd=tmp_path)
    for name in FOR_ALL:
        done = flashcli("decode", "x", "got", "--kernel", name, cwd=tmp_path)
        assert done.code == 0 and f"kernel {name}" in done.out and "GB/s of keys and values" in done.out, done.err
        done = flashcli("compare", "got", "want", "--tolerance", "2e-3", cwd=tmp_path)
        assert done.code == 0, done.out


def test_checking_finds_nothing_wrong_with_the_kernels_and_says_what_is_wrong_with_others(emulated, capsys):
    opened = functools.partial(DecodeEmulated, emulated)
    cases = [case for case in itertools.islice(grid(), 0, None, 60) if case.query_type == "float16"]
    found = check_kernels(["grouped", "tensor"], cases, opened)
    assert found.counted == len(cases) > 1 and found.wrong == []

    class Wrong(DecodeEmulated):
        def decode(self, asked, sequences):
            out, lse = super().decode(asked, sequences)
            out[-1] *= len(out)
            return out, lse

    wrong = check_kernels(["tensor"], cases[:1], functools.partial(Wrong, emulated)).wrong
    assert len(wrong) == 2 and "error" in wrong[0] and "a sequence alone has other bytes" in wrong[1]
