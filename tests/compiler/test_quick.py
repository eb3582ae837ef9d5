"""Quick builds that answer first calls: when they may, and that the full build is made meanwhile, once."""

from __future__ import annotations

import os
import runpy
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from support import FAKE_NVCC, ROOT, SOON, sampled, script

from flashcli.compiler import cache, compiler, nvrtc, quick
from flashcli.kernels import backward, decode
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem

ARCH = "sm_90a"
PROBLEM = Problem(8, 512, 512, 64, in_place=True, batch_invariant=True)
BUILD = Build(KERNELS["wgmma"], PROBLEM)
QUICK, FULL = (b"quick", True), (b"full", False)
FAKE = ROOT / "tests" / "fake_nvrtc"
# Another process, whose first call is this file's.
FIRST = "import sys; sys.path.append('tests/compiler'); from test_quick import *; sys.stdout.buffer.write(first()[0])"


def first(build: Build = BUILD) -> tuple[bytes, bool]:
    return quick.first_cubin(build, ARCH)


@pytest.fixture
def told(tmp_path, monkeypatch) -> Path:
    """The folder that tests/fake_nvrtc obeys, here and in other processes; the cache is empty, and there is no nvcc."""
    folder = tmp_path / "fake"
    folder.mkdir()
    for name, value in (("FAKE_NVRTC", folder), ("FLASHCLI_CACHE_DIR", tmp_path / "cubins"), ("NVCC", "nvrtc")):
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("FLASHCLI_QUICK", "1")
    monkeypatch.setattr(quick, "_begun", {})
    monkeypatch.syspath_prepend(FAKE)
    monkeypatch.setattr(nvrtc, "problem", lambda: "")
    monkeypatch.setattr(nvrtc, "cubin", runpy.run_path(str(FAKE / "sitecustomize.py"))["cubin"])
    return folder


def calls(told: Path) -> list[str]:
    """The builds that were begun, by all processes, in order."""
    return (told / "calls").read_text().split() if (told / "calls").exists() else []


def until(happens: Callable[[], bool]) -> None:
    end = time.monotonic() + SOON
    while not happens():
        assert time.monotonic() < end
        time.sleep(0.01)


def ended() -> bool:
    return not quick.is_under_way(BUILD, ARCH)


def started(before: str = "", after: str = "", **variables: str) -> subprocess.Popen[bytes]:
    """Another process, of a session of its own, that makes a first call; something is done ``before`` and ``after``."""
    path = os.pathsep.join([str(FAKE), str(ROOT / "tests"), str(ROOT)])
    environment = {**os.environ, "PYTHONPATH": path, **variables}
    command = [sys.executable, "-c", before + FIRST + after]
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=subprocess.PIPE, start_new_session=True)


def test_a_quick_build_answers_while_the_full_one_is_made(told):
    (told / "hold").touch()
    assert first() == QUICK and quick.is_under_way(BUILD, ARCH)
    (told / "hold").unlink()
    until(ended)
    assert first() == FULL and calls(told) == ["quick", "full"]
    assert [path.suffix for path in cache.folder().iterdir()] == [".cubin"]  # and no lock


def test_a_full_build_is_as_good_behind_a_quick_one(tmp_path, monkeypatch):
    """Options of quick builds stay in force in the process whose NVRTC makes one."""
    if problem := nvrtc.problem():
        pytest.skip(f"there is no NVRTC here: {problem}")
    monkeypatch.setenv("NVCC", "nvrtc")
    monkeypatch.setenv("FLASHCLI_QUICK", "1")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["tests", "tests/compiler", *sys.path]))
    build = EXPLICIT[1][0]

    def made(by: str) -> dict[str, bytes]:
        monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / by))
        program = f"from test_quick import *; assert {by}(EXPLICIT[1][0], ARCH)[1]"
        subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)
        until(lambda: compiler.kept(build, ARCH) is not None)
        return functions(compiler.cubin(build, ARCH))

    assert made("quick.first_cubin") == made("compiler.cubin")


def test_another_process_begins_no_second_full_build(told):
    (told / "hold").touch()
    other = [started() for _ in range(2)]
    assert first() == QUICK and [process.communicate()[0] for process in other] == [b"quick"] * 2
    (told / "hold").unlink()
    until(ended)
    assert compiler.kept(BUILD, ARCH) == b"full" and sorted(calls(told)) == ["full", "quick", "quick", "quick"]


def test_whoever_wants_the_full_build_waits_for_the_one_under_way(told):
    (told / "hold").touch()
    assert first() == QUICK
    until(lambda: "full" in calls(told))
    other = started(FLASHCLI_QUICK="0")
    with pytest.raises(subprocess.TimeoutExpired):
        other.wait(0.5)
    (told / "hold").unlink()
    assert compiler.cubin(BUILD, ARCH) == b"full" and other.communicate()[0] == b"full"
    assert calls(told) == ["quick", "full"]


def test_a_full_build_whose_process_dies_is_made_here(told):
    (told / "die").touch()
    assert first() == QUICK
    until(ended)
    assert compiler.kept(BUILD, ARCH) is None and compiler.cubin(BUILD, ARCH) == b"full"
    assert calls(told) == ["quick", "full", "full"]


def test_the_cache_is_filled_though_all_processes_of_the_job_are_killed(told):
    (told / "hold").touch()
    with started(after="; sys.stdout.flush(); time.sleep(99)") as process:
        assert process.stdout.read(5) == b"quick"
        os.killpg(process.pid, signal.SIGKILL)
    (told / "hold").unlink()
    until(lambda: compiler.kept(BUILD, ARCH) is not None)


@pytest.mark.parametrize("folder", ["/dev/null/cubins", "/proc/cubins"], ids=["no folder", "read only"])
def test_a_cache_that_cannot_be_written_has_the_full_build_made_here(told, monkeypatch, folder):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", folder)
    assert first() == FULL and calls(told) == ["full"]
    until(ended)


def test_a_full_disk_has_the_full_build_made_here(told):
    other = started("import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (2**12, 2**12)); ")
    assert other.communicate()[0] == b"full" and calls(told) == ["full"]


def test_a_full_build_in_a_shared_folder_answers_at_once(told, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "shared"))
    assert compiler.cubin(BUILD, ARCH) == b"full"
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", f"{tmp_path / 'own'}:{tmp_path / 'shared'}")
    assert first() == FULL and calls(told) == ["full"]


def test_a_full_build_goes_to_the_first_of_the_folders(told, tmp_path, monkeypatch):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", f"{tmp_path / 'own'}:{tmp_path / 'shared'}")
    assert first() == QUICK
    until(ended)
    assert len([*(tmp_path / "own").glob("*.cubin")]) == 1 and not (tmp_path / "shared").exists()


@pytest.mark.parametrize(
    "build",
    [
        Build(KERNELS["register_tiled"], PROBLEM),
        replace(BUILD, problem=PROBLEM._replace(M=1, N=quick.MOST // (128 * 64) + 1)),
        Build(KERNELS["wgmma"], PROBLEM._replace(bias="alibi and float32")),
        Build(backward.KERNELS["wgmma"], backward.of_sizes(64, M=512, N=512, sequences=3)),
    ],
    ids=["sums that a compiler may join", "a large problem", "ALiBi beside a bias", "gradients of packed sequences"],
)
def test_what_waits_for_the_full_build(told, monkeypatch, build):
    assert first(build) == FULL and calls(told) == ["full"]


def test_it_can_be_turned_off(told, monkeypatch):
    monkeypatch.setenv("FLASHCLI_QUICK", "0")
    assert first() == FULL and calls(told) == ["full"]


def test_a_program_that_python_is_built_into_is_not_run_again(told, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/usr/bin/uwsgi")
    assert first() == FULL and calls(told) == ["full"]


def test_a_library_that_knows_no_quick_builds(told):
    (told / "old").touch()
    assert first() == FULL and calls(told).count("full") == 1


def test_whoever_names_a_compiler_gets_no_other(told, monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", FAKE_NVCC)))
    code, is_quick = first()
    assert b"-cubin" in code and not is_quick and not calls(told)


PAGED = decode.choose(
    decode.Problem(64, 16, "float16", "float16", True, sequences=8, heads=32, kv_heads=8, table_width=128)
)


GRADIENTS = (
    ("wgmma", {"causal": True, "windowed": True, "bias": "both", "dbias": (2, 8, 200, 200)}),
    ("wgmma_short", {"M": 120, "N": 120}),
    ("mma_short", {"M": 60, "N": 60, "mask_of_keys": True, "bias": "bool"}),
    ("mma", {"d": 96, "bias": "float32"}),
    ("register_tiled", {"causal": True}),
)


def gradients(kernel: str, **of: object) -> Build:
    sizes = {"d": 64, "B": 2, "H": 8, "Hkv": 8, "M": 200, "N": 200}
    return Build(backward.KERNELS[kernel], backward.of_sizes(**(sizes | of)))


EXPLICIT = (
    (BUILD, ARCH),
    (Build(KERNELS["wgmma_short"], PROBLEM._replace(in_place=False)), ARCH),
    (Build(KERNELS["mma_short"], PROBLEM._replace(M=96, N=96)), ARCH),
    (PAGED, ARCH),
    (Build(KERNELS["mma"], PROBLEM), "sm_80"),
    *((gradients(name, **of), ARCH) for name, of in GRADIENTS),
)


@pytest.mark.parametrize(
    ("build", "arch"), sampled(EXPLICIT, 4), ids=lambda x: x.kernel.name if isinstance(x, Build) else ""
)
def test_no_product_and_sum_are_left_for_the_compiler_to_join(build, arch):
    """The machine code is the same whether it may or not: ptxas, too, joins what PTX leaves to it."""
    if problem := nvrtc.problem():
        pytest.skip(f"there is no NVRTC here: {problem}")
    assert build.kernel.explicit
    joined, apart = (functions(compiler._nvrtc(build, arch, f"-fmad={may}")[0]) for may in ("true", "false"))
    assert joined and joined == apart


def functions(cubin: bytes) -> dict[str, bytes]:
    """The machine code of each function of a cubin, which is an ELF file of 64 bits."""
    start, size, count, last = struct.unpack_from("<Q10xHHH", cubin, 40)
    sections = [struct.unpack_from("<II16xQQ", cubin, start + size * i) for i in range(count)]
    at = sections[last][2]  # of the names
    named = {cubin[at + name :].partition(b"\0")[0].decode(): (first, length) for name, _, first, length in sections}
    return {name: cubin[first : first + length] for name, (first, length) in named.items() if name.startswith(".text.")}
