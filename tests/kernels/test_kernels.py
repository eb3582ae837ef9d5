"""The registry: what every entry must keep to."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
from support import GPU_KERNELS, flashcli

from flashcli.asked.shape import MAX_D, ceil_div
from flashcli.compiler.compiler import SOURCES, find_nvcc
from flashcli.errors import BackendUnavailable
from flashcli.kernels.attention import KERNELS, chunk_tiles, is_paired, splits, way_of, wgmma_partial
from flashcli.kernels.choice import SHORT_HEAD, choose, exact
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.kernels.registry import OPERATIONS
from flashcli.kernels.tuning.chunks import FOLD, FOLD_SHARED, SPREAD, WHOLE, chunks

PROBLEM = Problem(10, 2048, 2048, 64)
every_kernel = pytest.mark.parametrize("kernel", KERNELS.values(), ids=KERNELS)
every_gpu_kernel = pytest.mark.parametrize("kernel", [KERNELS[name] for name in GPU_KERNELS], ids=GPU_KERNELS)


@every_kernel
def test_the_source_is_there_and_says_what_it_is(kernel):
    source = (SOURCES / kernel.file).read_text()
    assert source.startswith("// ")
    assert kernel.on_host or 'extern "C" __global__' in source


def test_every_source_is_registered():
    sources = [
        str(path.relative_to(SOURCES)) for pattern in ("*.c", "*.cu") for path in SOURCES.glob(f"attention/{pattern}")
    ]
    assert sorted(sources) == [kernel.file for kernel in KERNELS.values()]  # numbered as they are registered


@every_kernel
def test_every_head_size_has_tiles_that_fit(kernel):
    sizes = itertools.product([(1, 1), (10, 2048), (2, 32768), (13600, 128)], range(1, MAX_D + 1), kernel.precisions)
    for (B, N), d, precision in sizes:
        problem = Problem(B, N, N, d, precision=precision)
        if kernel.refuses(problem):
            continue
        tiling = kernel.tiling(problem)
        assert tiling.Br > 0 and tiling.Bc > 0
        assert tiling.threads == 1 if kernel.on_host else tiling.threads in range(32, 1025, 32)
        assert 0 <= tiling.shared <= 227 * 1024


@every_gpu_kernel
@pytest.mark.parametrize(("B", "N"), [(1, 1), (3, 1000), (14000, 128), (1, 300_000)])
def test_every_launch_has_blocks_and_a_function(kernel, B, N):
    build = Build(kernel, Problem(10, 2048, 2048, 64))
    known = {launch.function for launch in build.functions()}
    for launch in itertools.islice(build.launches(B=B, M=N, N=N), 10_000):  # there may be 10^8
        assert launch.function in known
        assert 1 <= launch.grid < 2**31
        assert launch.threads % 32 == 0


@pytest.mark.parametrize(("M", "N"), [(1, 1), (32, 33), (100, 64)])
def test_the_baseline_takes_five_steps_for_each_pair_of_tiles(M, N):
    launches = list(Build(KERNELS["baseline"], Problem(10, 2048, 2048, 64)).launches(B=3, M=M, N=N))
    pairs = [(i, j) for i in range(-(-M // 32)) for j in range(-(-N // 32))]
    assert [launch.tile for launch in launches] == [pair for pair in pairs for _ in range(5)]
    assert [launch.function for launch in launches[:5]] == [launch.function for launch in launches[-5:]]
    assert {launch.grid for launch in launches} == {3}


@every_kernel
def test_a_longer_input_never_needs_less_workspace(kernel):
    build = Build(kernel, Problem(10, 2048, 2048, 40))
    shapes = [(1, 1, 1), (1, 1, 200), (1, 200, 200), (3, 200, 200), (3, 3000, 3000)]
    sizes = [build.workspace(B=B, M=M, N=N) for B, M, N in shapes]
    assert sizes == sorted(sizes) and sizes[0] >= 0


@pytest.mark.parametrize("causal", [False, True])
def test_macros_name_the_build(causal):
    macros = Build(KERNELS["q_in_registers"], Problem(1, 1, 1, 40, causal)).macros()
    assert (macros["HEAD_DIM"], macros["CAUSAL"]) == (40, causal)


@pytest.mark.parametrize(
    ("name", "d", "tiles"),
    [
        ("baseline", 32, (32, 32)), ("baseline", 64, (32, 32)), ("fused", 32, (32, 32)), ("fused", 64, (32, 32)),
        ("max_shared", 32, (128, 32)), ("max_shared", 64, (128, 16)),
        ("no_bank_conflicts", 32, (128, 32)), ("no_bank_conflicts", 64, (128, 16)),
        ("q_in_registers", 32, (128, 64)), ("q_in_registers", 64, (128, 32)),
    ],
)  # fmt: skip
def test_the_tiles_of_the_report(name, d, tiles):
    assert KERNELS[name].tiling(Problem(10, 2048, 2048, d))[:2] == tiles


def test_max_shared_changes_the_tiles_alone():
    fused, max_shared = (
        (SOURCES / KERNELS[name].file).read_text().split("\n#include", 1)[1] for name in ("fused", "max_shared")
    )
    assert fused == max_shared and KERNELS["fused"].launches == KERNELS["max_shared"].launches


def test_no_gpu_runs_the_sequential_program():
    assert not KERNELS["sequential"].runs_on((9, 0)) and KERNELS["sequential"] != choose((5, 0), PROBLEM)


@pytest.mark.parametrize("capability", [(6, 1), (7, 5), (8, 0), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_the_kernel_that_is_chosen_runs_on_the_device(capability):
    kernel = choose(capability, PROBLEM)
    assert kernel.runs_on(capability) and exact(kernel).runs_on(capability)
    assert not exact(kernel).splits


def test_half_precision_needs_a_kernel_that_has_it():
    assert "fp16" in choose((9, 0), PROBLEM._replace(precision="fp16")).precisions
    with pytest.raises(BackendUnavailable, match="no kernel computes in fp16 on sm_61"):
        choose((6, 1), PROBLEM._replace(precision="fp16"))


def test_no_kernel_for_a_device_that_is_too_old():
    with pytest.raises(BackendUnavailable):
        choose((3, 5), PROBLEM)


def test_the_ladder_as_a_table():
    done = flashcli("kernels", "--d", 64)
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) == 2 * len(KERNELS)
    for kernel, about, summary in zip(KERNELS.values(), lines[::2], lines[1::2], strict=True):
        needs = "a C compiler" if kernel.on_host else r"sm_\d+a?"
        assert re.fullmatch(
            rf"{kernel.name}: Br=\d+, Bc=\d+, \d+ threads?, needs {needs}; cuda/{re.escape(kernel.file)}", about
        )
        assert summary == f"    {kernel.summary}"
    assert "q_in_registers: Br=128, Bc=32, 128 threads, needs sm_50; cuda/attention/10_q_in_registers.cu" in lines


def test_a_source_that_is_named_is_there_wherever_one_is(tmp_path):
    [line, *_] = flashcli("kernels", cwd=tmp_path).out.splitlines()
    assert Path(line.rpartition("; ")[2]).is_file()
    record = json.loads(flashcli("kernels", "mma", "--json", "-", cwd=tmp_path, env={"NVCC": ""}).out)
    assert Path(record["source"]).is_absolute() and Path(record["source"]).is_file()


@pytest.mark.parametrize("d", ["0", "257", "x"])
def test_a_head_size_that_cannot_be_is_wrong_usage(d):
    assert flashcli("kernels", "--d", d).code == 2


def test_short_heads_are_left_to_ffma_in_fp32():
    assert not choose((9, 0), PROBLEM._replace(d=SHORT_HEAD - 1)).splits
    assert choose((9, 0), PROBLEM._replace(d=SHORT_HEAD)).splits
    assert choose((9, 0), PROBLEM._replace(d=1, precision="fp16")).splits


@pytest.mark.parametrize(
    ("N", "d", "chosen"),
    [
        (128, 32, "wgmma_short"),
        (448, 64, "wgmma_short"),
        (449, 64, "wgmma"),
        (192, 80, "wgmma_short"),
        (193, 128, "wgmma"),
        (32, 128, "wgmma"),
        (128, 33, "wgmma"),
    ],
)
def test_short_sequences_have_a_kernel_of_their_own(N, d, chosen):
    assert choose((9, 0), Problem(1000, N, N, d)).name == chosen


def test_a_rung_that_is_added_is_not_everybodys_kernel(monkeypatch):
    monkeypatch.setitem(KERNELS, "lesson", replace(KERNELS["wgmma"], name="lesson"))
    assert choose((9, 0), PROBLEM).name == "wgmma"


@pytest.mark.skipif(find_nvcc() is None, reason="no nvcc")
def test_one_kernel_is_shown_with_what_it_takes():
    done = flashcli("kernels", "wgmma", "--d", 32, "--arch", "sm_90a")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Tensor cores at fp32 accuracy on Hopper")
    assert "15_wgmma.cu\nneeds sm_90a; any d from 1 to 256\nd = 32: Br=" in done.out
    assert re.search(r"\nattention on sm_90a: \d+ registers a thread, 0 bytes spilled, ", done.out)


@pytest.mark.parametrize(
    ("name", "arch", "complaint"),
    [
        ("mma", "sm_75", "kernel mma needs sm_80 or later, not sm_75."),
        ("wgmma", "sm_90", "kernel wgmma is for sm_90a only, not for sm_90."),
        ("wgmma", "sm_100", "kernel wgmma is for sm_90a only, not for sm_100."),
        ("mma", "hopper", "'hopper' is not an architecture."),
        ("mma", "sm_99", "'sm_99' is not an architecture."),
        ("sequential", "sm_80", "kernel sequential runs on the CPU, not on sm_80."),
    ],
)
def test_an_architecture_that_does_not_run_it_is_wrong_usage(name, arch, complaint):
    flashcli("kernels", name, "--arch", arch).assert_error(2, complaint)


def test_a_kernel_that_the_gpu_here_does_not_run_is_shown_for_one_that_does(fake_gpu, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_CAPABILITY", "6.1")
    assert json.loads(flashcli("kernels", "mma", "--json", "-").out)["arch"] == "sm_80"
    assert json.loads(flashcli("kernels", "q_in_registers", "--json", "-").out)["arch"] == "sm_61"


@pytest.mark.parametrize("arguments", [["run"], ["kernels"], ["profile"]])
def test_help_names_no_kernels_in_one_word(arguments):
    done = flashcli(*arguments, "--help")
    assert done.code == 0 and "NAME" in done.out and "|max_shared|" not in done.out


def test_a_name_that_is_no_kernels_is_answered_with_those_that_are():
    done = flashcli("kernels", "foo")
    assert done.code == 2 and "|" not in done.err
    names = dict.fromkeys(name for operation in OPERATIONS.values() for name in operation.kernels)
    assert f"'foo' is not one of {', '.join(map(repr, names))}." in done.err


@pytest.mark.parametrize(
    ("operation", "name"), [(one.name, name) for one in OPERATIONS.values() for name in one.kernels]
)
def test_every_kernel_of_every_operation_is_shown(operation, name):
    done = flashcli("kernels", name, "--operation", operation, "--json", "-", env={"NVCC": ""})
    assert done.code == 0, done.err
    kernel, told = OPERATIONS[operation].kernels[name], json.loads(done.out)
    assert (told["operation"], told["file"], told["summary"]) == (operation, kernel.file, kernel.summary)
    assert told["threads"] > 0 and told["functions"] == {}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_the_list_of_an_operation_has_what_each_kernel_needs_or_which_heads_it_has_not(operation):
    done = flashcli("kernels", "--operation", operation, "--d", 200, "--json", "-")
    assert done.code == 0, done.err
    for row, kernel in zip(json.loads(done.out), OPERATIONS[operation].kernels.values(), strict=True):
        assert row["name"] == kernel.name and row["needs"]
        assert ("threads" in row) != ("has no heads of 200 numbers: " in row.get("refused", ""))


@pytest.mark.parametrize(("name", "operation"), [("tensor", "decode"), ("plain", "backward"), ("mma", "attention")])
def test_a_name_alone_is_looked_for_in_all_operations(name, operation):
    told = json.loads(flashcli("kernels", name, "--json", "-", env={"NVCC": ""}).out)
    assert told["operation"] == operation


def test_a_name_of_another_operation_and_heads_that_a_kernel_has_not_are_refused():
    done = flashcli("kernels", "mma", "--operation", "decode")
    assert done.code == 2 and "mma is a kernel of attention and backward, not of decode." in done.err
    flashcli("kernels", "tensor", "--d", 60).assert_error(2, "kernel tensor has no heads of 60 numbers: rows of")


@pytest.mark.parametrize("name", ["paged_v1", "grouped", "split", "write_kv"])
def test_heads_that_no_cache_has_are_refused(name):
    told = f"kernel {name} has no heads of 37 numbers: a cache has heads of a multiple of 8 numbers."
    flashcli("kernels", name, "--d", 37).assert_error(2, told)


@pytest.mark.parametrize("option", [["--causal"], ["--precision", "fp16"]])
def test_what_says_something_of_a_shape_alone_is_refused_without_one(option):
    done = flashcli("kernels", "mma", *option)
    assert done.code == 2 and f"{option[0]} has a meaning with --shape only." in done.err


def test_a_kernel_for_one_architecture_is_shown_for_that_on_any_gpu(fake_gpu):
    done = flashcli("kernels", "wgmma", "--json", "-")
    assert done.code == 0, done.err
    assert json.loads(done.out)["arch"] == "sm_90a"
    assert json.loads(flashcli("kernels", "mma", "--json", "-").out)["arch"] == "sm_80"  # the fake GPU's


IN_PLACE = Problem(1, 2048, 2048, 64, in_place=True, batch_invariant=True)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("M", "N"), [(1, 1024), (1024, 1024), (2048, 2048), (100, 70_000), (8192, 8192)])
@pytest.mark.parametrize("d", [32, 64, 96, 128, 256])
def test_where_keys_are_cut_depends_on_neither_batch_nor_gpu(M, N, d, causal):
    problem = IN_PLACE._replace(M=M, N=N, d=d, causal=causal)
    others = [problem._replace(B=B, sms=sms) for B in (1, 10, 500) for sms in (16, 132)]
    tilings = [KERNELS["wgmma"].tiling(one) for one in others]
    assert len({(chunk_tiles(tiling, one), tiling.Bc) for tiling, one in zip(tilings, others, strict=True)}) == 1


def test_few_row_tiles_are_shared_by_many_blocks_and_many_are_not():
    def blocks(B: int) -> int:
        _, launch = Build(KERNELS["wgmma"], IN_PLACE._replace(B=B)).launches()
        return launch.grid

    assert blocks(1) > 2048 // 64 and blocks(4) > 100
    assert way_of(Build(KERNELS["wgmma"], IN_PLACE._replace(B=500)).tiling) == FOLD_SHARED


def test_a_few_row_tiles_are_those_of_clusters_and_need_no_memory():
    build = Build(KERNELS["wgmma"], IN_PLACE._replace(M=1024, N=1024))
    _, launch = build.launches()
    assert dict(build.tiling.macros)["CLUSTER"] == 4 and launch.grid == 4 * 1024 // 64
    assert wgmma_partial(build.tiling, build.problem) == 0


@pytest.mark.parametrize("other", [{"B": 2}, {"causal": True}, {"N": 1023}, {"M": 100, "N": 3000}, {"sms": 64}])
def test_there_are_no_clusters_of_more_row_tiles_than_run_at_once_nor_where_chunks_are_too_many_or_too_few(other):
    problem = IN_PLACE._replace(M=1024, N=1024)._replace(**other)
    assert dict(Build(KERNELS["wgmma"], problem).tiling.macros).get("CLUSTER", 1) == 1


@pytest.mark.parametrize(("B", "M", "N", "d"), [(1, 512, 512, 256), (3, 256, 200, 192), (20, 10, 130, 160)])
def test_few_row_tiles_of_long_heads_with_few_keys_are_those_of_clusters_with_a_tile_of_keys_for_each_block(B, M, N, d):
    few = IN_PLACE._replace(B=B, M=M, N=N, d=d)
    build = Build(KERNELS["wgmma"], few)
    _, launch = build.launches()
    tiles = ceil_div(N, 64)
    assert dict(build.tiling.macros)["CLUSTER"] == tiles and launch.grid == B * ceil_div(M, 64) * tiles
    assert wgmma_partial(build.tiling, few) == 0 and chunk_tiles(build.tiling, few) == 1
    for other in ({"B": 99}, {"d": 128}, {"bias": "bool"}, {"causal": True}, {"precision": "fp16"}, {"N": 513}):
        assert way_of(KERNELS["wgmma"].tiling(few._replace(**other))) == WHOLE


SPLIT_BY_BLOCKS = [
    (200, 64, 64, 64),
    (45, 64, 64, 64),
    (200, 64, 128, 64),
    (60, 128, 128, 64),
    (67, 128, 128, 128),
    (200, 65, 65, 128),
]


@pytest.mark.parametrize(("B", "M", "N", "Br"), SPLIT_BY_BLOCKS)
def test_many_long_heads_with_few_rows_and_keys_are_split_by_their_blocks_without_a_pre_pass(B, M, N, Br):
    grid, threads = min(132, B * ceil_div(M, Br)), 256 + 2 * Br
    for causal in (False, True):
        build = Build(KERNELS["wgmma"], IN_PLACE._replace(B=B, M=M, N=N, d=160, causal=causal))
        [launch] = build.launches()
        assert splits(build.tiling) and not is_paired(build.tiling)
        assert (build.tiling.Br, launch.grid, launch.threads, build.workspace()) == (Br, grid, threads, 0)


@pytest.mark.parametrize(
    "other",
    [{"B": 44}, {"M": 129}, {"N": 129}, {"N": 64}, {"d": 128}, {"group": 2}, {"bias": "bool"}, {"precision": "fp16"}],
)
def test_a_pre_pass_splits_heads_that_are_few_or_have_more_rows_and_keys_or_a_bias(other):
    problem = IN_PLACE._replace(B=200, M=128, N=128, d=160)._replace(**other)
    assert Build(KERNELS["wgmma"], problem).prepares


def test_blocks_that_split_long_heads_spill_no_register(resources):
    for N, dense in itertools.product((64, 128), (False, True)):
        problem = IN_PLACE._replace(B=200, M=N, N=N, d=256, dense=dense, lse=True)
        found = resources(Build(KERNELS["wgmma"], problem), "sm_90a")
        assert not any(one.spilled or one.warnings for one in found.values())


FEW = [
    (8, 1000, 32, False), (7, 777, 80, False), (12, 512, 64, True), (12, 768, 64, True), (1, 1024, 64, False),
    (1, 1024, 16, False), (8, 512, 128, True),
]  # fmt: skip


@pytest.mark.parametrize(("B", "N", "d", "causal"), FEW)
def test_where_row_tiles_are_few_two_warpgroups_share_one_if_there_is_room(B, N, d, causal):
    few = IN_PLACE._replace(B=B, M=N, N=N, d=d, causal=causal)
    wgmma = KERNELS["wgmma"]
    assert is_paired(wgmma.tiling(few))
    for other in ({"B": 2000}, {"d": 256}, {"bias": "bool"}, {"precision": "fp16"}):
        assert not is_paired(wgmma.tiling(few._replace(**other)))


@pytest.mark.parametrize(("d", "way"), [(128, FOLD), (256, SPREAD)])
def test_blocks_share_row_tiles_whose_keys_and_values_fit_no_cache_where_heads_are_long(d, way):
    """157 row tiles on 132 multiprocessors would else take two rounds."""
    problem = IN_PLACE._replace(B=256 // d, M=20000, N=20000, d=d)
    assert way_of(KERNELS["wgmma"].tiling(problem)) == way


@pytest.mark.parametrize("causal", [False, True])
def test_two_warpgroups_that_share_rows_have_one_row_tile_or_chunk_for_any_number_of_heads(causal):
    for N, B in itertools.product((600, 1024, 1100), (1, 2, 300)):
        build = Build(KERNELS["wgmma"], IN_PLACE._replace(B=2, M=N, N=N, causal=causal))
        _, launch = build.launches(B=B)
        assert is_paired(build.tiling) and launch.grid == B * ceil_div(N, 64) * chunks(build.problem, 128)


def test_only_what_a_block_folds_is_parked_in_shared_memory():
    """Beside Q of a long head, and panels of K and V, there is no room for it: long.cuh."""
    for d in (32, 64, 96, 128, 160, 192, 256):
        way = way_of(Build(KERNELS["wgmma"], IN_PLACE._replace(B=500, d=d)).tiling)
        assert way == FOLD or (way == FOLD_SHARED and d <= 128)


@pytest.mark.parametrize("B", [1, 500])
def test_chunks_of_every_head_size_fit(B):
    for d in range(1, MAX_D + 1):
        tiling = Build(KERNELS["wgmma"], IN_PLACE._replace(B=B, d=d)).tiling
        assert tiling.shared <= 226 * 1024 and way_of(tiling) != WHOLE
        assert d <= 128 or way_of(tiling) in (FOLD, SPREAD)  # in shared memory there would be no room


def test_short_sequences_are_not_cut():
    build = Build(KERNELS["wgmma"], IN_PLACE._replace(M=512, N=512))
    assert chunk_tiles(build.tiling, build.problem) == 0 and way_of(build.tiling) == WHOLE
    assert wgmma_partial(build.tiling, build.problem) == 0


def test_five_warpgroups_multiply_the_shortest_heads_without_a_mask_and_spill_no_register(resources):
    shortest = Problem(2000, 256, 256, 16, in_place=True, batch_invariant=True)
    others = {}, {"d": 8}, {"B": 132}, {"M": 64}, {"causal": True}, {"d": 17}, {"bias": "float32"}
    threads = [KERNELS["wgmma_short"].tiling(shortest._replace(**other)).threads for other in others]
    assert threads == [768, 768, 640, 640, 640, 640, 512]
    for N in (256, 896):
        found = resources(Build(KERNELS["wgmma_short"], shortest._replace(M=N, N=N)), "sm_90a")
        assert not found["attention"].spilled and not found["attention"].warnings


@pytest.mark.parametrize(("N", "d", "other"), [(200, 64, {"dense": False}), (128, 128, {"causal": True})])
def test_wgmma_short_spills_no_register_where_rows_lie_apart_or_heads_are_long(resources, N, d, other):
    problem = Problem(2000, N, N, d, in_place=True, batch_invariant=True, **other)
    found = resources(Build(KERNELS["wgmma_short"], problem), "sm_90a")
    assert not found["attention"].spilled and not found["attention"].warnings


@pytest.mark.parametrize(
    ("bias", "of_keys", "threads", "longest"),
    [("", False, 640, 64), ("bool", True, 640, 64), ("bool", False, 512, 32), ("both", True, 512, 32)],
)
def test_a_mask_of_keys_alone_costs_wgmma_short_no_registers(bias, of_keys, threads, longest):
    kernel = KERNELS["wgmma_short"]
    asked = Problem(100, 200, 200, 32, in_place=True, bias=bias, mask_of_keys=of_keys)
    assert kernel.tiling(asked).threads == threads
    assert [kernel.refuses(asked._replace(d=d)) == "" for d in (32, 64)] == [True, longest == 64]
