"""`flashcli warm`: what is compiled ahead, for whom, and that the calls then compile nothing."""

from __future__ import annotations

import json

import pytest
from support import FAKE_NVCC, flashcli, script

from flashcli.commands import warm
from flashcli.compiler import compiler
from flashcli.gpu import driver, plain
from flashcli.kernels import usual
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.choice import choose
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.problem import Problem


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


@pytest.mark.parametrize("call", usual.CALLS)
@pytest.mark.parametrize("gpu", [Gpu((6, 1), 20), Gpu((8, 6), 68), Gpu((9, 0), 132)], ids=str)
def test_builds_are_of_kernels_that_the_gpu_runs_and_differ(call, gpu):
    builds = usual.builds(gpu, [call], [64])
    assert builds and all(build.kernel.runs_on(gpu.capability) for build in builds)
    assert len({(build.kernel.name, str(build.macros())) for build in builds}) == len(builds)


def test_a_machine_without_a_gpu_is_asked_for_an_architecture(folder):
    done = flashcli("warm", "run", env={"CUDA_VISIBLE_DEVICES": ""})
    assert done.code != 0 and "name an architecture" in done.err


def test_the_first_gpu_tells_its_capability_and_multiprocessors(monkeypatch):
    class Library:
        def cuDeviceGet(self, found, number):
            return 0

        def cuDeviceGetAttribute(self, found, number, device):
            found._obj.value = {75: 8, 76: 6, 16: 68}[number]
            return 0

    monkeypatch.setattr(driver, "problem", lambda: "")
    monkeypatch.setattr(plain, "libcuda", Library)
    assert warm._first_gpu() == ((8, 6), 68)
