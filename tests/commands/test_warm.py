"""`flashcli warm`: what is compiled ahead, for whom, and that the calls then compile nothing."""

from __future__ import annotations

import json
import time

import pytest
from support import FAKE_NVCC, SOON, flashcli, script

from flashcli.asked.attention import backward, call, contiguous
from flashcli.asked.how import How
from flashcli.commands import warm
from flashcli.compiler import compiler
from flashcli.gpu import driver, plain
from flashcli.kernels import decode, usual
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.backward import BACKWARD
from flashcli.kernels.choice import choose
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.plan import ATTENTION
from flashcli.kernels.problem import Problem
from flashcli.kernels.speed import speed


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", FAKE_NVCC)))
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_what_run_needs_is_there_afterwards_for_a_reader_of_the_folder(folder, tmp_path, monkeypatch):
    done = flashcli("warm", "run", "--d", "64", "--arch", "sm_80", "--json", "-")
    told = json.loads(done.out)
    assert done.code == 0 and told["arch"] == "sm_80" and told["folder"] == str(folder)
    assert told["builds"] == len(list(folder.iterdir())) == 2  # masked, and not
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", f"{tmp_path / 'own'}:{folder}")
    monkeypatch.setattr(compiler, "_compile", lambda *of: pytest.fail("compiled"))
    problem = Problem(8, 512, 512, 64)
    assert compiler.cubin(Build(choose((8, 0), problem), problem), "sm_80")


def test_new_kernels_are_kept_in_the_first_folder_only(folder, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", f"{tmp_path / 'own'}:{folder}")
    compiler.cubin(Build(KERNELS["fused"], Problem(1, 64, 64, 32)), "sm_80")
    assert len(list((tmp_path / "own").iterdir())) == 1 and not folder.exists()


@pytest.mark.parametrize("name", usual.CALLS)
@pytest.mark.parametrize("gpu", [Gpu((6, 1), 20), Gpu((8, 6), 68), Gpu((9, 0), 132)], ids=str)
def test_builds_are_of_kernels_that_the_gpu_runs_and_differ(name, gpu):
    builds = usual.builds(gpu, [name], [64])
    assert builds and all(build.kernel.runs_on(gpu.capability) for build in builds)
    assert len({(build.kernel.name, str(build.macros())) for build in builds}) == len(builds)


def test_a_machine_without_a_gpu_is_asked_for_an_architecture(folder):
    done = flashcli("warm", "run", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code != 0 and "name an architecture" in done.err


def test_the_first_gpu_is_what_calls_will_find_it_to_be(monkeypatch):
    class Library:
        def cuDeviceGet(self, found, number):
            return 0

        def cuDeviceGetName(self, text, size, device):
            text.value = b"NVIDIA GeForce RTX 3080"
            return 0

        def cuDeviceGetAttribute(self, found, number, device):
            found._obj.value = {75: 8, 76: 6, 16: 68, 13: 1710000, 36: 9501000, 37: 320}[number]
            return 0

    monkeypatch.setattr(driver, "problem", lambda: "")
    monkeypatch.setattr(plain, "libcuda", Library)
    name = "NVIDIA GeForce RTX 3080"
    assert warm._first_gpu() == Gpu((8, 6), 68, "GPU 0", speed((8, 6), name, 68, 1710, 2 * 9.501e9 * 320 / 8))


GPUS = [
    Gpu((9, 0), 132), Gpu((8, 6), 68, speed=speed((8, 6), "NVIDIA GeForce RTX 3080", 68, 1710, 7.6e11)), Gpu((7, 5), 22)
]  # fmt: skip


@pytest.mark.parametrize("gpu", GPUS, ids=lambda gpu: compiler.architecture(gpu.capability))
@pytest.mark.parametrize("causal", [False, True])
def test_calls_of_usual_shapes_find_all_that_they_need(gpu, causal):
    for d in usual.HEADS:
        there = {key(build) for build in usual.builds(gpu, ["attention", "backward"], [d])}
        q, k = contiguous((2, 8, 2048, d), "float32"), contiguous((2, 8, 1024, d), "float32")
        asked = call(q, k, k, causal=causal).at(0)
        plans = [ATTENTION.plan(asked, gpu, How(return_lse=lse)) for lse in (False, True)]
        plans.append(BACKWARD.plan(backward(q, q, k, k, causal=causal).at(0), gpu, How()))
        assert {key(build) for plan in plans for build in plan.builds()} <= there


@pytest.mark.parametrize(("sequences", "width"), [(1, 20), (8, 128), (64, 300), (256, 16)])
def test_decode_of_usual_batches_finds_what_it_needs(sequences, width):
    gpu = Gpu((9, 0), 132)
    there = {key(build) for build in usual.builds(gpu, ["decode"], [64])}
    of = {"sequences": sequences, "heads": 32, "kv_heads": 8, "table_width": width, "gpu": gpu}
    assert key(decode.choose(decode.Problem(64, 16, "float16", "float16", True, **of))) in there


def key(build: Build) -> tuple:
    return build.kernel.name, *build.macros().items()


def test_what_most_shapes_need_comes_first_and_runs_are_of_the_homeworks_heads():
    builds = usual.builds(Gpu((9, 0), 132), ["run", "attention"])
    assert builds[0].problem.d in (32, 64) and builds[0].kernel.name == "wgmma"
    assert {build.problem.d for build in usual.builds(Gpu((9, 0), 132), ["run"])} == {32, 64}


def test_the_background_is_a_process_that_outlives_the_command(folder, tmp_path):
    done = flashcli("warm", "run", "--d", "64", "--arch", "sm_80", "--background")
    assert done.code == 0 and "in the background" in done.out
    end = time.monotonic() + SOON
    while not folder.exists() or len([*folder.glob("*.cubin")]) < 2:
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("variables", "said"),
    [({"NVCC": ""}, "nvcc, was not found"), ({"FLASHCLI_CACHE_DIR": "/proc/nowhere"}, "cannot write to")],
)
def test_what_cannot_be_compiled_or_kept_is_told_before_the_background(folder, variables, said):
    done = flashcli("warm", "run", "--arch", "sm_80", "--background", env=variables)
    assert done.code != 0 and said in done.err
