"""flashcli profile: what it asks of ncu, how it reads the answer, and what is left where there is none."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from dataclasses import asdict

import pytest
from support import FAKE_NVCC, flashcli, script

from flashcli.asked.decode import BlockSparse
from flashcli.errors import BackendUnavailable
from flashcli.files.decode.cases import Case
from flashcli.kernels import occupancy
from flashcli.measure import profiling
from flashcli.measure.profiling import METRICS

SHAPE = ("--shape", "2,20,32")
# What a launch counts, as ncu's raw page prints it: values with commas, a line of units.
COUNTED = {
    "gpu__time_duration.sum": ("2,000,000", "ns"),
    "sm__warps_active.avg.pct_of_peak_sustained_active": ("11.9", "%"),
    "sm__maximum_warps_per_active_cycle_pct": ("12.5", "%"),
    "smsp__cycles_active.avg.pct_of_peak_sustained_elapsed": ("98.76", "%"),
    "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed": ("0", "%"),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_ld.sum": ("1,000,000,000", ""),
    "l1tex__data_pipe_lsu_wavefronts_mem_shared_op_st.sum": ("125,000,000", ""),
    "l1tex__t_bytes_pipe_lsu_mem_global_op_ld.sum": ("6,000,000,000", "byte"),
    "l1tex__t_bytes_pipe_lsu_mem_global_op_st.sum": ("2,000,000,000", "byte"),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_ld.sum": ("1,234", ""),
    "l1tex__data_bank_conflicts_pipe_lsu_mem_shared_op_st.sum": ("0", ""),
    "memory_l1_wavefronts_shared": ("1,125,000,007", ""),
    "memory_l1_wavefronts_shared_ideal": ("1,125,000,000", ""),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_ld.sum": ("0", "byte"),
    "l1tex__t_bytes_pipe_lsu_mem_local_op_st.sum": ("0", "byte"),
    "dram__bytes_read.sum": ("60,000,000", "byte"),
    "dram__bytes_write.sum": ("20,000,000", "byte"),
    "launch__registers_per_thread": ("168", "register/thread"),
    "launch__shared_mem_per_block_static": ("0", "byte/block"),
    "launch__shared_mem_per_block_dynamic": ("28,672", "byte/block"),
    "launch__occupancy_limit_registers": ("2", "block"),
    "launch__occupancy_limit_shared_mem": ("7", "block"),
    "launch__occupancy_limit_warps": ("16", "block"),
    "launch__occupancy_limit_blocks": ("32", "block"),
}
NCU = f"""#!{sys.executable}
import csv, json, os, sys
json.dump(sys.argv[1:], open(os.environ["ASKED"], "w"))
say, counted = os.environ.get("SAY", ""), json.loads(os.environ["COUNTED"])
print("==PROF== Connected to process 4242 (/usr/bin/python3)")
asked = sys.argv[sys.argv.index("--metrics") + 1].split(",")
if say or (unknown := [name for name in asked if name not in counted]):
    print(say or f"==ERROR== Failed to find metric regex:^{{unknown[0].partition('.')[0]}}(\\\\.(sum|avg))?$")
    sys.exit(1)
about = {{"ID": "0", "Process ID": "4242", "Process Name": "python3", "Host Name": "127.0.0.1", "Context": "1",
         "Kernel Name": "", "Stream": "13", "Block Size": "(128, 1, 1)", "Grid Size": "(160, 1, 1)", "Device": "0",
         "CC": "8.0"}}
out = csv.writer(sys.stdout, quoting=csv.QUOTE_ALL, lineterminator="\\n")
out.writerow([*about, *asked])
out.writerow([""] * len(about) + [counted[name][1] for name in asked])
for function in os.environ["FUNCTIONS"].split():
    out.writerow([*(about | {{"Kernel Name": function}}).values(), *(counted[name][0] for name in asked)])
print("==PROF== Disconnected from process 4242")
"""
PTXAS = f"""{FAKE_NVCC}
echo "\
ptxas info    : Compiling entry function 'prepare' for 'sm_80'
ptxas info    : Used 64 registers, 1024 bytes smem
ptxas info    : Compiling entry function 'attention' for 'sm_80'
    112 bytes stack frame, 108 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 245 registers, 400 bytes cmem[0]" >&2
"""


@pytest.fixture
def ncu(fake_gpu, monkeypatch, tmp_path):
    """An ncu that gives COUNTED for the functions of mma; ``ncu(say=..., ...)`` changes what it says."""
    script(tmp_path / "bin-ncu", NCU).rename(_folder(tmp_path / "bin") / "ncu")
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("ASKED", str(tmp_path / "asked.json"))
    monkeypatch.setenv("NVCC", str(script(tmp_path / "ptxas", PTXAS)))

    def change(say: str = "", functions: str = "prepare attention", **changes) -> None:
        counted = {name: changes.get(name.partition(".")[0], value) for name, value in COUNTED.items()}
        monkeypatch.setenv("COUNTED", json.dumps({name: value for name, value in counted.items() if value}))
        monkeypatch.setenv("FUNCTIONS", functions)
        monkeypatch.setenv("SAY", say)

    change()
    return change


def _folder(path):
    path.mkdir()
    return path


def profile(*options: object) -> list[dict]:
    done = flashcli("profile", *SHAPE, "--kernel", "mma", "--json", "-", *options)
    assert done.code == 0, done.err
    return json.loads(done.out)["rows"]


def test_every_metric_is_one_that_the_test_knows():
    assert set(METRICS.values()) == set(COUNTED)


def test_a_row_for_each_function(ncu):
    prepare, attention = profile()
    assert (prepare["function"], attention["function"]) == ("prepare", "attention")
    assert attention == {
        "case": "(2, 20, 32)", "B": 2, "N": 20, "d": 32, "contender": "mma", "function": "attention", "launches": 1,
        "seconds": pytest.approx(2e-3), "occupancy": 11.9, "possible_occupancy": 12.5, "sm_efficiency": 98.76,
        "tensor_pipe": 0, "shared_load": pytest.approx(64e12), "shared_store": pytest.approx(8e12),
        "global_load": pytest.approx(3e12), "global_store": pytest.approx(1e12), "load_conflicts": 1234,
        "store_conflicts": 0, "excess_wavefronts": 7, "local_bytes": 0, "dram_bytes": 80_000_000, "registers": 168,
        "shared": 28672, "limited_by": "registers",
    }  # fmt: skip


def test_what_is_asked_of_ncu(ncu, tmp_path):
    profile()
    asked = json.loads((tmp_path / "asked.json").read_text())
    assert asked[-6:] == [sys.executable, "-m", "flashcli.measure.profiling", "mma", "2,20,32", "0"]
    options = dict(zip(asked[1:-6:2], asked[2:-6:2], strict=True))  # after --csv
    assert (options["--clock-control"], options["--page"], options["--print-units"]) == ("none", "raw", "base")
    assert (options["--kernel-id"], options["--launch-count"]) == (":::2", "2")  # of each function one launch


def test_the_table(ncu):
    done = flashcli("profile", *SHAPE, "--kernel", "mma")
    title, head, *lines = done.out.splitlines()
    assert title == "(2, 20, 32)"
    assert [line.split()[:4] for line in lines] == [["mma", name, "2.000", "ms"] for name in ("prepare", "attention")]
    assert "occupancy (possible)" in head and "possible occupancy " not in head
    for text in ("12 % (12 %)", "99 %", "64000 / 8000", "3000 / 1000", "1234 / 0", " 7 ", " 168 ", " 0 B ", "28.0 KiB"):
        assert text in lines[1]


@pytest.mark.parametrize("cell", ["n/a", "(!) n/a", ""])
def test_a_cell_that_is_no_number_is_left_out(ncu, cell):
    ncu(dram__bytes_read=(cell, "byte"), gpu__time_duration=(cell, ""))
    _, attention = profile()
    assert not {"dram_bytes", "seconds", "shared_load", "global_store"} & set(attention)
    assert attention["excess_wavefronts"] == 7


def test_a_metric_that_ncu_does_not_know_is_not_asked_for_again(ncu):
    ncu(memory_l1_wavefronts_shared_ideal=None, dram__bytes_write=None)
    _, attention = profile()
    assert not {"excess_wavefronts", "dram_bytes"} & set(attention)
    assert attention["load_conflicts"] == 1234


@pytest.mark.parametrize(("unit", "seconds"), [("us", 2.0), ("msecond", 2000.0), ("nsecond", 0.002)])
def test_times_have_units(unit, seconds):
    assert profiling._number("2,000,000", unit) == pytest.approx(seconds)


# Without counters

ASKED_FOR_TOO_MUCH = (
    "==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters on the "
    "target device 0. For instructions on enabling permissions and to get more information see "
    "https://developer.nvidia.com/ERR_NVGPUCTRPERM"
)


def test_counters_that_are_forbidden(ncu, tmp_path):
    ncu(say=ASKED_FOR_TOO_MUCH)
    done = flashcli("profile", *SHAPE, "--kernel", "q_in_registers", "--kernel", "mma", "--json", tmp_path / "x.json")
    done.assert_error(69, "ERR_NVGPUCTRPERM")
    assert "NVreg_RestrictProfilingToAdminUsers=0" in done.err and "CAP_SYS_ADMIN" in done.err
    rows = done.out.splitlines()[1:]
    assert [row.split()[:2] for row in rows] == [
        ["rung", "function"], ["q_in_registers", "attention"], ["mma", "prepare"], ["mma", "attention"]
    ]  # fmt: skip
    assert "12 %" in rows[3] and " registers " in rows[3] and "245" in rows[3] and "108 B" in rows[3]
    assert "tensor pipe" not in rows[0]  # a column that nothing is known for
    assert "ERR_NVGPUCTRPERM" in json.loads((tmp_path / "x.json").read_text())["circumstances"]["counters"]


def test_no_ncu(monkeypatch):
    monkeypatch.setattr(profiling.shutil, "which", lambda name: None)
    monkeypatch.setattr(profiling.compiler, "find_nvcc", lambda: None)
    with pytest.raises(BackendUnavailable, match="ncu, was not found"):
        profiling.find_ncu()


def test_without_ncu_the_compilers_figures_are_shown(fake_gpu, monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "ptxas", PTXAS)))
    monkeypatch.setenv("PATH", os.path.dirname(sys.executable))
    if profiling.shutil.which("/usr/local/cuda/bin/ncu"):
        pytest.skip("there is an ncu in the usual folder")
    done = flashcli("profile", *SHAPE, "--kernel", "mma", "--json", "-")
    done.assert_error(69, "Nsight Compute's command, ncu, was not found.")
    assert [row["registers"] for row in json.loads(done.out)["rows"]] == [64, 245]


@pytest.mark.parametrize(
    ("say", "reason"),
    [
        ("==ERROR== Failed to initialize the profiler: LibraryNotLoaded.", "profiler: LibraryNotLoaded."),
        ("nothing", "gave no figures: it counted nothing."),
    ],
)
def test_an_ncu_that_gives_nothing(ncu, say, reason):
    ncu(say=say)
    flashcli("profile", *SHAPE, "--kernel", "mma").assert_error(69, reason)


def test_a_rung_that_fails_leaves_the_others(ncu):
    ncu(say="Error: kernel mma failed on Fake GPU: no.\nHint: try another.\n==ERROR== The application returned 70.")
    assert [row["error"] for row in profile()] == ["kernel mma failed on Fake GPU: no."]


def test_a_rung_that_does_not_run_here_is_skipped(ncu):
    ncu(functions="attention")
    done = flashcli("profile", *SHAPE, "--kernel", "register_tiled", "--kernel", "wgmma")
    assert done.code == 0, done.err
    assert "wgmma           skipped: it needs sm_90a" in done.out.splitlines()[-1]


def test_without_a_gpu_the_compilers_figures_are_shown(no_pycuda, monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "ptxas", PTXAS)))
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))
    done = flashcli("profile", *SHAPE, "--kernel", "mma", "--kernel", "sequential", "--json", "-")
    done.assert_error(69, "there is no NVIDIA driver here")
    assert done.err.count("Notice: no usable GPU: this is what the compiler knows of an H200.") == 1
    prepare, attention, host = json.loads(done.out)["rows"]
    assert (prepare["registers"], attention["registers"], attention["spilled"]) == (64, 245, 108)
    assert (attention["possible_occupancy"], attention["limited_by"]) == (12.5, "registers")
    assert host["skipped"] == "it runs on the host"


def test_without_a_gpu_and_a_compiler_there_is_nothing_to_show(no_pycuda, monkeypatch):
    monkeypatch.setenv("NVCC", "")
    done = flashcli("profile", *SHAPE)
    done.assert_error(69, "there is no NVIDIA driver here")
    assert done.out == "" and "Notice" not in done.err


DECODED = ("--decode", "3,8,2,64", "--lengths", "700,0,9")


def test_paged_decode_is_profiled_by_its_own_kernels(ncu, tmp_path):
    ncu(functions="paged_v2 reduce")
    kernels = ("--kernel", "paged_v2", "--kernel", "tensor")
    done = flashcli("profile", *DECODED, *kernels, "--layout", "hnd", "--json", "-")
    assert done.code == 0, done.err
    refused, tensor = json.loads(done.out)["rows"][0], json.loads((tmp_path / "asked.json").read_text())
    assert refused["skipped"] == "vLLM's kernels read layout vllm alone" and "tensor" in tensor
    done = flashcli("profile", *DECODED, "--kernel", "paged_v2", "--json", "-")
    rows = json.loads(done.out)["rows"]
    assert [(row["case"], row["N"], row["function"]) for row in rows] == [
        ("3x(700,0,9) 8/2 D=64", 700, "paged_v2"), ("3x(700,0,9) 8/2 D=64", 700, "reduce")
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ((*DECODED, "--case", "t10"), "--decode goes with neither --case nor --shape"),
        ((*DECODED, "--kernel", "mma"), "mma is no kernel of paged decode"),
        (("--kernel", "split"), "split is no kernel of attention"),
    ],
)
def test_kernels_and_inputs_of_two_operations_are_refused(options, words):
    flashcli("profile", *options).assert_error(2, words)


# What ncu runs


def test_a_case_of_paged_decode_is_decoded_twice_or_more(monkeypatch):
    asked = []

    class Decoder(contextlib.nullcontext):
        def decode(self, case, sequences):
            asked.append((case.query.shape, case.sparse, sequences))

    monkeypatch.setattr(profiling, "DecodeCuda", lambda kernel: contextlib.nullcontext(Decoder()))
    sparse = BlockSparse(3, 32)
    profiling.exercise("paged_v2", json.dumps(asdict(Case(2, 4, 2, 64, "700,5", sparse=sparse))))
    assert asked == [((2, 1, 4, 64), sparse, range(2))] * profiling.LAUNCH


def test_every_function_is_launched_twice_or_more(fake_gpu):
    profiling.exercise("mma", "2,20,32", "0")
    functions = [name for name, *_ in fake_gpu.launches]
    assert min(functions.count(name) for name in ("prepare", "attention")) >= profiling.LAUNCH


# Occupancy

GTX_1080 = occupancy.Multiprocessor(threads=2048, blocks=32, registers=65536, shared=96 * 1024, reserved=0)
A100 = occupancy.Multiprocessor(threads=2048, blocks=32, registers=65536, shared=164 * 1024, reserved=1024)


@pytest.mark.parametrize(
    ("has", "threads", "registers", "shared", "blocks", "percent", "limited_by"),
    [
        (GTX_1080, 128, 64, 48 * 1024, 2, 12.5, "shared memory"),  # the report's
        (A100, 128, 245, 28 * 1024, 2, 12.5, "registers"),
        (A100, 1024, 32, 0, 2, 100, "registers, warps"),
        (A100, 32, 16, 0, 32, 50, "blocks"),
        (A100, 128, 40, 40 * 1024, 4, 25, "shared memory"),
        (A100, 96, 168, 0, 4, 18.75, "registers"),
        (A100, 128, 16, 200 * 1024, 0, 0, "shared memory"),
    ],
)
def test_what_a_multiprocessor_holds(has, threads, registers, shared, blocks, percent, limited_by):
    assert occupancy.occupancy(has, threads, registers, shared) == (blocks, percent, limited_by)
