"""The registry of paged decode: what every entry must keep to, and what the compiler says of it."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from emulator import claims
from emulator.decode import DecodeEmulated
from support import sampled

from bench.decode_judge import Answer, Judge
from bench.paged_plot import Shares
from flashcli.asked.decode import LAYOUTS
from flashcli.compiler import compiler
from flashcli.files.decode.cases import Case, make, outlined
from flashcli.kernels import decode, merge, write_kv
from flashcli.kernels.decode import CEILING, KERNELS, VERSIONS, Argument, build_of, choose, problem_of, takes_v1
from flashcli.kernels.operation import Build, Gpu, Launch
from flashcli.kernels.pages import cache_strides
from flashcli.kernels.tuning.decode import AHEAD_OF_LENGTH, BY_LENGTHS, BY_NUMBER, PIECE_AFTER_PIECE, Problem, Tuning
from flashcli.run.decode_cuda import DecodeCuda

H200, BEFORE_HOPPER = Gpu((9, 0), 132), Gpu((8, 9), 132)
WRITE = Build(write_kv.KERNEL, Problem(64, 16, "float16", "float8_e4m3fn", False, total=1))
every_kernel = pytest.mark.parametrize("kernel", [*KERNELS.values(), CEILING], ids=[*KERNELS, "read"])


def sized(page: int = 16, **sizes: int) -> Problem:
    """What is decoded by heads of 64 numbers."""
    return Problem(64, page, "float16", "float16", True, **sizes)


@every_kernel
def test_the_source_is_there_and_says_what_it_is(kernel):
    source = (compiler.SOURCES / kernel.file).read_text()
    assert source.startswith("// ") and "// What" in source and "// Why" in source
    assert kernel is CEILING or "// What it costs" in source


def test_every_source_is_registered():
    sources = sorted(str(path.relative_to(compiler.SOURCES)) for path in compiler.SOURCES.glob("decode/*.cu"))
    assert sources == [
        CEILING.file,
        *(kernel.file for kernel in KERNELS.values()),
        merge.KERNEL.file,
        write_kv.KERNEL.file,
    ]


@pytest.mark.parametrize(
    ("struct", "argument", "where", "build"),
    [
        ("Decode", Argument, "decode.cuh", Build(KERNELS["split"], Problem(64, 16, "float16", "float16", False, 1))),
        ("WriteKv", write_kv.Argument, "write_kv.cu", WRITE),
        ("Merge", merge.Argument, "merge_answers.cu", Build(merge.KERNEL, Problem(64, 1, "float16", "float16", False))),
    ],
    ids=["Decode", "WriteKv", "Merge"],
)
def test_the_compiler_and_python_agree_on_every_field_of_the_argument(
    emulated, tmp_path, struct, argument, where, build
):
    claims.check(tmp_path, f"decode/{where}", claims.of_fields(argument, struct), build.macros())


TUNINGS = [
    Tuning(), Tuning(finds=BY_LENGTHS), Tuning(finds=BY_NUMBER),
    Tuning(blocks=2, finds=AHEAD_OF_LENGTH, under_way=2, cluster=8),
]  # fmt: skip
TENSOR_PROBLEMS = [
    Problem(d, page, "float16", cache_type, transposed, rows)
    for d, page, cache_type, transposed, rows in [
        (64, 16, "float16", False, 8), (128, 16, "float8_e4m3fn", False, 8), (128, 16, "float16", False, 8),
        (128, 16, "float16", True, 8), (128, 1, "float16", False, 8), (128, 8, "float16", False, 8),
        (128, 16, "float16", False, 16), (64, 16, "float8_e4m3fn", False, 16),
    ]
]  # fmt: skip


@every_kernel
def test_no_register_is_spilled_where_it_matters(resources, kernel):
    problem = kernel.fitted(Problem(128, 16, "float16", "float16", True, heads=4))._replace(tuning=Tuning())
    for function, found in resources(Build(kernel, problem), "sm_90a").items():
        assert found.spilled == 0 and not found.warnings, function


# Each problem with a tuning, each tuning with two of the problems.
TUNED = [(problem, TUNINGS[(i + i // 4) % 4]) for i, problem in enumerate(TENSOR_PROBLEMS)]


@pytest.mark.parametrize(("problem", "tuning"), sampled(TUNED, 5), ids=str)
def test_tensor_spills_nothing_however_it_is_tuned(resources, problem, tuning):
    build = Build(KERNELS["tensor"], problem._replace(tuning=tuning))
    reported = resources(build, "sm_90a")
    for function, found in reported.items():
        assert found.spilled == 0 and not found.warnings, function
    assert reported["tensor"].registers * tuning.threads * build.macros()["BLOCKS"] <= 65536  # a multiprocessor's


@pytest.mark.parametrize(("d", "cache_type"), sampled([(48, "float16"), (64, "float8_e5m2")]))
def test_two_tiles_of_a_warp_leave_room_for_four_blocks_where_heads_are_short(resources, d, cache_type):
    problem = Problem(d, 16, "float16", cache_type, False, 8, Tuning(finds=BY_NUMBER, under_way=2))
    found = resources(Build(KERNELS["tensor"], problem), "sm_90a")["tensor"]
    assert found.registers <= 128 and found.spilled == 0 and not found.warnings


@pytest.mark.parametrize(
    ("sequences", "tokens", "heads", "d", "page", "layout", "blocks", "finds", "under_way"),
    [
        (2, 4096, 64, 128, 16, "hnd", 2, AHEAD_OF_LENGTH, 2),
        (8, 4096, 64, 128, 16, "hnd", 4, BY_LENGTHS, 1),
        (9, 4096, 64, 128, 16, "hnd", 4, BY_NUMBER, 1),
        (100, 4096, 64, 128, 16, "hnd", 4, BY_NUMBER, 1),  # of 6400 blocks 5600 may have no piece
        (200, 4096, 64, 128, 16, "hnd", 3, PIECE_AFTER_PIECE, 1),
        (9, 8192, 64, 128, 16, "hnd", 4, BY_NUMBER, 1),
        (9, 8704, 64, 128, 16, "hnd", 3, PIECE_AFTER_PIECE, 1),  # 17 pieces a sequence
        (8, 4096, 64, 128, 8, "hnd", 4, BY_LENGTHS, 1),
        (9, 4096, 64, 128, 16, "vllm", 4, BY_NUMBER, 1),
        (9, 8704, 64, 128, 16, "vllm", 3, PIECE_AFTER_PIECE, 1),
        (8, 4096, 64, 64, 16, "hnd", 2, AHEAD_OF_LENGTH, 2),
        (8, 8192, 64, 64, 16, "hnd", 4, BY_LENGTHS, 1),
        (8, 16384, 64, 64, 16, "hnd", 4, BY_NUMBER, 2),
        (8, 17408, 64, 64, 16, "hnd", 4, PIECE_AFTER_PIECE, 1),
        (20, 8192, 64, 32, 16, "hnd", 4, BY_NUMBER, 2),
        (1, 4096, 64, 256, 16, "hnd", 2, BY_LENGTHS, 1),
        (9, 4096, 64, 256, 16, "hnd", 2, PIECE_AFTER_PIECE, 1),
        (6, 4096, 128, 128, 16, "hnd", 3, BY_LENGTHS, 1),  # 16 rows share a head of the cache
        (7, 4096, 128, 128, 16, "hnd", 3, BY_NUMBER, 1),
        (16, 8192, 128, 64, 16, "hnd", 4, BY_NUMBER, 1),
    ],
)
def test_a_block_has_a_piece_unless_many_may_be_missing_and_two_tiles_of_a_warp_are_under_way_where_memory_needs_them(
    sequences, tokens, heads, d, page, layout, blocks, finds, under_way
):
    asked = outlined(Case(sequences, heads, 8, d, str(tokens), page=page, layout=layout))
    build = build_of(KERNELS["tensor"], asked.outline, BEFORE_HOPPER)
    macros = build.macros()
    *before, launch, merge = build.launches()
    assert (macros["BLOCKS"], macros["FINDS"], macros["UNDER_WAY"]) == (blocks, finds, under_way)
    pieces = sequences * 8 * tokens // macros["PIECE"]
    assert launch.grid == (min(pieces, blocks * 132) if finds == PIECE_AFTER_PIECE else pieces)
    assert [launch.function for launch in before] == ["begin"] * (finds == PIECE_AFTER_PIECE)
    assert (launch.early, merge.early) == (finds == PIECE_AFTER_PIECE, True)


def test_what_is_never_cut_is_never_merged_and_where_rows_are_few_pieces_are_smaller():
    tensor = KERNELS["tensor"]

    def found(H: int, Hkv: int, tokens: int) -> tuple[int, list[tuple[str, int, int]]]:
        asked = outlined(Case(100, H, Hkv, 128, str(tokens), layout="hnd"))
        build = build_of(tensor, asked.outline)
        return build.macros()["PIECE"], [one[:3] for one in build.launches() if one.function != "tensor"]

    begin = ("begin", 1, 32)
    assert found(32, 8, 512) == (512, []) and found(32, 8, 513) == (512, [("merge", 800, 128)])
    assert found(16, 8, 512) == (256, []) and found(16, 8, 2049) == (256, [begin, ("merge", 1600, 64)])
    assert found(24, 8, 10**6) == (512, [begin, ("merge", 2400, 192)])


def test_grouped_takes_partitions_in_turn_where_many_blocks_would_have_none_and_bytes_stay(emulated, monkeypatch):
    grouped = KERNELS["grouped"]
    long = grouped.fitted(sized(sequences=256, heads=32, kv_heads=8, table_width=8192))
    assert Build(grouped, long).steps()[0].launch.grid == 2**16 and Build(grouped, long).macros()["STEP"] == 32
    asked = make(Case(2, 2, 1, 64, "1700,3", query_type="float32", layout="nhd", window=1200))
    want, want_lse = DecodeEmulated(emulated, "grouped").decode(asked, range(2))
    assert Judge(asked).problem(Answer(want, want_lse)) == ""
    monkeypatch.setattr(decode, "MOST_BLOCKS", 4)
    assert build_of(grouped, asked.outline).macros()["STEP"] == 2
    out, lse = DecodeEmulated(emulated, "grouped").decode(asked, range(2))
    assert out.tobytes() == want.tobytes() and lse.tobytes() == want_lse.tobytes()


@pytest.mark.parametrize(
    ("sequences", "tokens", "d", "cluster"),
    [(1, 4096, 128, 8), (2, 4096, 128, 8), (3, 4096, 128, 1), (1, 4097, 128, 1), (5, 1500, 128, 1), (4, 1500, 128, 4),
     (8, 1024, 128, 2), (16, 512, 128, 1), (4, 4096, 64, 4)],
)  # fmt: skip
def test_a_cluster_merges_the_pieces_of_few_sequences_on_gpus_that_have_some(sequences, tokens, d, cluster):
    asked = outlined(Case(sequences, 64, 8, d, str(tokens), layout="hnd"))
    build = build_of(KERNELS["tensor"], asked.outline)
    assert build.problem.tuning.cluster == build.macros()["CLUSTER"] == cluster
    for gpu in (H200, BEFORE_HOPPER):
        launch, *others = build.launches(gpu=gpu)
        assert launch.grid % cluster == 0 and (cluster == 1 or launch.grid == sequences * 8 * cluster)
        merges = tokens > 512 and (cluster == 1 or gpu is BEFORE_HOPPER)
        assert [other.function for other in others] == ["merge"] * merges


@pytest.mark.gpu
def test_bytes_depend_neither_on_company_nor_on_how_blocks_find_their_pieces(gpu):
    asked = make(Case(9, 16, 8, 128, "2048,5,700,0,130,1,2,3,1200", layout="hnd"))
    some, alone = (
        dataclasses.replace(asked, **{name: getattr(asked, name)[:n] for name in ("query", "block_tables", "seq_lens")})
        for n in (8, 1)
    )
    wide = dataclasses.replace(asked, block_tables=np.pad(asked.block_tables, ((0, 0), (0, 200)), constant_values=-1))
    builds = [build_of(KERNELS["tensor"], one.outline) for one in (asked, wide, some, alone)]
    assert [build.problem.tuning for build in builds] == [
        Tuning(piece=2**17, finds=BY_NUMBER), Tuning(piece=2**17), Tuning(piece=2**17, finds=BY_LENGTHS),
        Tuning(piece=2**17, blocks=2, finds=AHEAD_OF_LENGTH, under_way=2, cluster=8),
    ]  # fmt: skip
    with DecodeCuda("tensor") as backend:
        out, lse = backend.decode(asked, range(9))
        of_wide = backend.decode(wide, range(9))
        of_some = backend.decode(asked, range(8))
        of_one = [backend.decode(asked, range(s, s + 1)) for s in range(9)]
    assert np.any(out) and out.tobytes() == b"".join(found.tobytes() for found, _ in of_one)
    assert lse.tobytes() == b"".join(found.tobytes() for _, found in of_one)
    assert [whole.tobytes() for whole in (out, lse)] == [found.tobytes() for found in of_wide]
    assert [whole[:8].tobytes() for whole in (out, lse)] == [found.tobytes() for found in of_some]


LARGE = sized(sequences=300, tokens=8, heads=40, kv_heads=8, table_width=900)


@every_kernel
@pytest.mark.parametrize("problem", [sized(1), LARGE, sized(1, sequences=3, heads=71, table_width=40)])
def test_every_launch_has_blocks(kernel, problem):
    for launch in Build(kernel, kernel.fitted(problem)).launches():
        assert 1 <= launch.grid < 2**31 and 1 <= launch.threads <= 1024


@every_kernel
def test_counters_are_within_the_workspace_and_every_function_is_named(kernel):
    build = Build(kernel, kernel.fitted(LARGE)._replace(tuning=Tuning()))
    counters = build.counters()
    assert 4 * counters <= build.workspace() and (counters > 0) == (kernel.name in ("split", "prompt", "read"))
    small = build.launches(sequences=3, tokens=1, heads=8, kv_heads=2, table_width=400)
    assert [launch.function for launch in build.functions()] == [launch.function for launch in small]


@pytest.mark.parametrize(
    "tuning", [Tuning(cluster=8), Tuning(finds=BY_NUMBER, cluster=8), Tuning(finds=AHEAD_OF_LENGTH, cluster=2)]
)
def test_clusters_that_would_not_merge_all_pieces_are_refused(tuning):
    problem = Problem(128, 16, "float16", "float16", False, 8, tuning, heads=32, kv_heads=8, table_width=128)
    build = Build(KERNELS["tensor"], problem)
    with pytest.raises(decode.UsageError, match="do not merge 4 pieces"):
        build.launches()
    assert build.functions()[-1].function == "merge"


def test_v1_refuses_what_its_shared_memory_does_not_hold():
    with pytest.raises(decode.UsageError, match="100000 tokens"):
        Build(KERNELS["paged_v1"], sized(table_width=6250)).launches()


@pytest.mark.parametrize(
    ("longest", "sequences", "heads", "v1"),
    [(512, 1, 1, True), (513, 1, 1, False), (513, 16, 32, False), (513, 27, 19, True), (8192, 27, 19, True),
     (8193, 27, 19, False), (8193, 1, 1, False)],
)  # fmt: skip
def test_vllm_takes_v1_for_sequences_of_one_partition_or_more_than_512_blocks(longest, sequences, heads, v1):
    assert takes_v1(longest, sequences, heads) == v1


@pytest.mark.parametrize(
    ("d", "page", "kind", "cache"),
    [(128, 16, "float16", "float16"), (80, 8, "float32", "int8")],
)
def test_the_picture_of_who_has_what_is_of_the_kernels_own_numbers(emulated, tmp_path, d, page, kind, cache):
    equal = [f"{name} == {number}" for name, number in Shares.of(d, page, kind)._asdict().items()]
    build = Build(KERNELS["paged_v1"], Problem(d, page, kind, cache, True))
    claims.check(tmp_path, "decode/paged.cuh", equal, build.macros())


@pytest.mark.parametrize(
    ("problem", "words"),
    [(Problem(64, 16, "float16", "float16", False), "layout vllm alone"), (sized()._replace(page=2), "less than four"),
     (sized()._replace(page=256, query_type="float32"), "does not reach over 256 tokens of float32")],
)  # fmt: skip
def test_v1_and_v2_refuse_what_vllms_threads_cannot_share(problem, words):
    for name in VERSIONS:
        assert words in KERNELS[name].refuses(problem)
        assert KERNELS[name].refuses(sized()) == ""


def test_factors_and_an_lse_that_nobody_wants_are_in_the_scratch_and_counters_are_cleared():
    asked = make(Case(3, 4, 2, 64, "5,700,0", cache_type="float8_e5m2", query_type="float32"))
    asked = dataclasses.replace(asked, k_scale=0.5, v_scale=1.0).outline
    build = build_of(KERNELS["split"], asked)
    found = decode.plan_of(build, asked)
    end = build.workspace()
    assert found.clear == ((0, 0, build.counters()), (end, 0x3F000000, 1)) and build.counters() > 4
    assert found.inside == ((decode.POINTERS.index("k_scale"), end), (decode.POINTERS.index("lse"), end + 4))
    assert found.workspace == end + 4 + 4 * 3 * 4 and end % 16 == 0 and found.unread == ()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_lead_to_the_numbers_that_numpy_finds(layout):
    asked = make(Case(2, 4, 2, 32, "40", page=8, layout=layout))
    strides = cache_strides(asked.outline)
    keys, values = asked.key_cache.reshape(-1), asked.value_cache.reshape(-1)
    page, head, slot, d, x = 3, 1, 5, 21, 8
    at = page * strides["key_page"] + head * strides["key_head"] + slot * strides["key_slot"]
    at += d // x * strides["key_chunk"] + d % x
    found = {"vllm": lambda: asked.key_cache[page, head, d // x, slot, d % x],
             "nhd": lambda: asked.key_cache[page, slot, head, d],
             "hnd": lambda: asked.key_cache[page, head, slot, d]}[layout]()  # fmt: skip
    np.testing.assert_array_equal(keys[at], found)
    at = page * strides["value_page"] + head * strides["value_head"] + slot * strides["value_slot"]
    at += d * (asked.page if layout == "vllm" else 1)
    found = {"vllm": lambda: asked.value_cache[page, head, d, slot],
             "nhd": lambda: asked.value_cache[page, slot, head, d],
             "hnd": lambda: asked.value_cache[page, head, slot, d]}[layout]()  # fmt: skip
    np.testing.assert_array_equal(values[at], found)


def test_a_window_beyond_the_tables_is_as_long_as_they_have_room_so_that_no_int_overflows_in_a_kernel():
    asked = make(Case(1, 2, 1, 64, "5", T=8))
    given = [dataclasses.replace(asked, window=window) for window in (0, 9, 16, 17, 2**31 - 1)]
    assert [decode.argument(one.outline).window for one in given] == [0, 9, 16, 16, 16]


@pytest.mark.parametrize(("query_type", "kernel"), [("float16", "tensor"), ("float32", "grouped")])
def test_without_a_name_the_fastest_kernel_that_takes_the_problem_is_built(query_type, kernel):
    assert choose(problem_of(make(Case(1, 2, 1, 64, "5", query_type=query_type)).outline)).kernel.name == kernel


def test_a_named_kernel_that_refuses_says_why():
    with pytest.raises(decode.UsageError, match="kernel tensor cannot compute this: tensor cores have no float32"):
        choose(problem_of(make(Case(1, 2, 1, 64, "5", query_type="float32")).outline), "tensor")


def test_writing_has_a_thread_for_each_vector_and_spills_nothing(resources):
    assert WRITE.launches(total=0, kv_heads=8) == ()
    assert WRITE.launches(total=33, kv_heads=8) == (Launch("write_kv", 5, 256),)  # 33 * 8 * 4 vectors of 16 bytes
    [found] = resources(WRITE, "sm_90a").values()
    assert found.spilled == 0 and not found.warnings
