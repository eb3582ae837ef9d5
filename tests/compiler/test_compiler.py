"""From source to cubin: when the compiler runs, when the cache answers, and what nvcc's complaints become."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from support import FAKE_NVCC, WITHOUT_UTF_8, python, sampled, script

from bench.compile_all import builds
from flashcli.compiler import cache, compiler, nvrtc
from flashcli.compiler.compiler import architecture, compile_failure, cubin, find_nvcc, parse_ptxas, resources
from flashcli.errors import BackendUnavailable, KernelFailure
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build, Kernel
from flashcli.kernels.problem import Problem
from flashcli.kernels.registry import OPERATIONS

PROBLEM = Problem(10, 2048, 2048, 64)
BUILD = Build(KERNELS["q_in_registers"], PROBLEM)
MASKED = replace(BUILD, problem=PROBLEM._replace(causal=True))
SHORTER = replace(BUILD, problem=PROBLEM._replace(d=32))


@pytest.fixture
def compiled(tmp_path, monkeypatch) -> list[list[str]]:
    """An empty cache, and a compiler that gives "code 1", "code 2", ... and the options of each call."""
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", "")))
    calls = []

    def compile(build, nvcc, arch):
        calls.append([*compiler.options(build), arch])
        return b"code %d" % len(calls)

    monkeypatch.setattr(compiler, "_compile", compile)
    return calls


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A copy of cuda/ that may be changed."""
    folder = Path(shutil.copytree(compiler.SOURCES, tmp_path / "cuda"))
    monkeypatch.setattr(compiler, "SOURCES", folder)
    return folder


# The cache


def test_a_hit_starts_no_process(compiled, monkeypatch):
    code = cubin(BUILD, "sm_80")

    def start(*args, **options):
        raise AssertionError(f"a process was started: {args}")

    for module, name in [(subprocess, "Popen"), (os, "system"), (os, "posix_spawn"), (os, "fork")]:
        monkeypatch.setattr(module, name, start)
    assert cubin(BUILD, "sm_80") == code == b"code 1"
    assert len(compiled) == 1


@pytest.mark.parametrize(
    ("build", "arch"),
    [
        (SHORTER, "sm_80"),
        (MASKED, "sm_80"),
        (BUILD, "sm_90a"),
    ],
)
def test_another_build_is_another_cubin(compiled, build, arch):
    assert cubin(BUILD, "sm_80") == b"code 1"
    assert cubin(build, arch) == b"code 2"
    assert cubin(BUILD, "sm_80") == b"code 1"


@pytest.mark.parametrize("name", [BUILD.kernel.file, "common.cuh"])
def test_a_changed_source_or_header_is_compiled_again(compiled, sources, name):
    cubin(BUILD, "sm_80")
    with open(sources / name, "a") as file:
        file.write("// changed\n")
    assert cubin(BUILD, "sm_80") == b"code 2"


def test_changed_options_are_compiled_again(compiled, monkeypatch):
    cubin(BUILD, "sm_80")
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-Xptxas=-O2"))
    assert cubin(BUILD, "sm_80") == b"code 2"


def test_the_locale_does_not_change_how_sources_are_read():
    program = (
        "from flashcli.compiler import compiler; from flashcli.kernels.attention import KERNELS\n"
        "from flashcli.kernels.operation import Build; from flashcli.kernels.problem import Problem\n"
        "print(compiler._stem(Build(KERNELS['q_in_registers'], Problem(10, 2048, 2048, 64)), 'sm_80'))"
    )
    done = python("-c", program, env=WITHOUT_UTF_8)
    assert (done.out, done.err) == (compiler._stem(BUILD, "sm_80") + "\n", "")


def test_another_compiler_compiles_again(compiled, tmp_path, monkeypatch):
    cubin(BUILD, "sm_80")
    monkeypatch.setenv("NVCC", str(script(tmp_path / "other-nvcc", "#!/bin/sh\nexit 0\n# newer\n")))
    assert cubin(BUILD, "sm_80") == b"code 2"


def test_without_a_compiler_what_is_cached_will_do(compiled, monkeypatch):
    code = cubin(BUILD, "sm_80")
    monkeypatch.setenv("NVCC", "")
    assert cubin(BUILD, "sm_80") == code
    with pytest.raises(BackendUnavailable, match="there is no nvcc") as caught:
        cubin(SHORTER, "sm_80")
    assert "CUDA_HOME" in caught.value.hint


def fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def flip_a_bit(path: Path) -> None:
    kept = bytearray(path.read_bytes())
    kept[3] ^= 1
    path.write_bytes(kept)


DAMAGES = {
    "empty": lambda path: os.truncate(path, 0),
    "cut off": lambda path: os.truncate(path, 20),
    "a bit flipped": flip_a_bit,
    "without its checksum": lambda path: path.write_bytes(b"code 7"),
    "a FIFO": fifo,
    "a device": link_to_a_device,
    "unreadably large": lambda path: os.truncate(path, 2**40),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_what_is_damaged_in_the_cache_is_made_anew(compiled, monkeypatch, tmp_path, damage):
    cubin(BUILD, "sm_80")
    [path] = (tmp_path / "cubins").iterdir()
    whole = path.read_bytes()
    damage(path)
    monkeypatch.setenv("NVCC", "")
    with pytest.raises(BackendUnavailable, match="no cached"):
        cubin(BUILD, "sm_80")
    monkeypatch.setenv("NVCC", str(tmp_path / "nvcc"))
    assert [cubin(BUILD, "sm_80") for _ in range(2)] == [b"code 2"] * 2
    assert path.read_bytes()[:6] == b"code 2" and len(path.read_bytes()) == len(whole)


def test_without_a_compiler_a_damaged_cubin_does_not_hide_a_whole_one(compiled, monkeypatch, tmp_path):
    cubin(BUILD, "sm_80")
    [path] = (tmp_path / "cubins").iterdir()
    damaged = path.with_name(f"{path.stem.rpartition('-')[0]}-0.cubin")
    damaged.write_bytes(b"damaged")
    assert sorted([path, damaged])[0] == damaged
    monkeypatch.setenv("NVCC", "")
    assert cubin(BUILD, "sm_80") == b"code 1"


def test_parallel_first_runs_never_read_a_torn_file(tmp_path):
    path, whole = tmp_path / "cubins" / "x.cubin", [bytes([number]) * 300_000 for number in range(8)]

    def store_and_load(code: bytes) -> bytes | None:
        cache.store(path, code)
        return cache.load(path)

    with ThreadPoolExecutor(8) as pool:
        for code in pool.map(store_and_load, whole * 8):
            assert code in whole
    assert os.listdir(path.parent) == ["x.cubin"]


def test_a_failed_write_leaves_nothing_in_the_cache(compiled, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    assert cubin(BUILD, "sm_80") == b"code 1"
    assert os.listdir(tmp_path / "cubins") == []


def test_a_cache_that_cannot_be_written_is_no_error(compiled, tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "file" / "inside"))
    assert [cubin(BUILD, "sm_80") for _ in range(2)] == [b"code 1", b"code 2"]


def test_the_macros_reach_the_compiler(compiled):
    cubin(MASKED, "sm_90a")
    [call] = compiled
    assert {"-DHEAD_DIM=64", "-DCAUSAL=1", "-DBR=128", "-DBC=32", "-DTHREADS=128", "sm_90a"} <= set(call)


@pytest.mark.parametrize(
    ("variables", "folder"),
    [
        ({"FLASHCLI_CACHE_DIR": "/one", "XDG_CACHE_HOME": "/two"}, "/one"),
        ({"XDG_CACHE_HOME": "/two"}, "/two/flashcli"),
        ({}, "/home/somebody/.cache/flashcli"),
    ],
)
def test_where_the_cache_is(monkeypatch, variables, folder):
    monkeypatch.delenv("FLASHCLI_CACHE_DIR", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/home/somebody")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(cache.folder()) == folder


# Finding nvcc


@pytest.fixture
def toolkits(tmp_path, monkeypatch) -> Path:
    """Three toolkits, a/bin/nvcc to c/bin/nvcc, none of them found by default."""
    for name in "abc":
        (tmp_path / name / "bin").mkdir(parents=True)
        script(tmp_path / name / "bin" / "nvcc", "")
    for name in ("NVCC", "CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", str(tmp_path / "c" / "bin"))
    return tmp_path


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, "c"),
        ({"CUDA_HOME": "b"}, "b"),
        ({"CUDA_PATH": "b"}, "b"),
        ({"CUDA_HOME": "nowhere"}, "c"),
        ({"CUDA_HOME": "b", "NVCC": "a/bin/nvcc"}, "a"),
    ],
)
def test_where_nvcc_is_found(toolkits, monkeypatch, variables, found):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(toolkits / value))
    assert find_nvcc() == toolkits / found / "bin" / "nvcc"


@pytest.mark.parametrize("value", ["", "nonesuch-nvcc"])
def test_an_nvcc_that_is_named_is_the_only_one(toolkits, monkeypatch, value):
    monkeypatch.setenv("NVCC", value)
    assert find_nvcc() is None


@pytest.mark.parametrize(
    ("capability", "name"), [((6, 1), "sm_61"), ((8, 0), "sm_80"), ((9, 0), "sm_90a"), ((12, 0), "sm_120")]
)
def test_names_of_architectures(capability, name):
    assert architecture(capability) == name


# What nvcc says


@pytest.mark.parametrize(
    ("output", "kind", "message"),
    [
        ("nvcc fatal   : Failed to preprocess host compiler properties.", BackendUnavailable, "no host compiler"),
        ("gcc: fatal error: cannot execute 'cc1plus': No such file", BackendUnavailable, "no host compiler"),
        ("sh: 1: g++: not found\nnvcc error   : 'g++' died", BackendUnavailable, "no host compiler"),
        ("error: -- unsupported GNU version! gcc versions later than 13 are", BackendUnavailable, "no host compiler"),
        ("nvcc fatal   : Unsupported gpu architecture 'compute_120'", BackendUnavailable, "cannot compile for sm_80"),
        ("nvcc fatal   : Value 'sm_61' is not defined for option 'gpu-architecture'", BackendUnavailable, "for sm_80"),
        ('x.cu(3): error: identifier "foo" is undefined', KernelFailure, '"foo" is undefined'),
    ],
)  # fmt: skip
def test_what_a_complaint_of_nvcc_means(output, kind, message):
    failure = compile_failure(output, "sm_80")
    assert type(failure) is kind
    assert message in str(failure) and failure.hint


@pytest.fixture
def empty_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))


def test_a_failing_nvcc_is_reported(empty_cache, tmp_path, monkeypatch):
    failing = script(tmp_path / "nvcc", "#!/bin/sh\necho 'nvcc fatal   : Cannot find compiler g++' >&2\nexit 1\n")
    monkeypatch.setenv("NVCC", str(failing))
    with pytest.raises(BackendUnavailable, match="no host compiler"):
        cubin(BUILD, "sm_80")


@pytest.mark.parametrize("asked", [cubin, resources])
def test_an_nvcc_that_fails_without_a_word_is_reported(empty_cache, tmp_path, monkeypatch, asked):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", "#!/bin/sh\nkill -9 $$\n")))
    with pytest.raises(KernelFailure, match=r"nvcc could not compile the kernel: exit code -9\."):
        asked(BUILD, "sm_80")


def test_an_nvcc_that_cannot_be_run_is_reported(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", "no program\n")))
    with pytest.raises(BackendUnavailable, match="cannot be run"):
        cubin(BUILD, "sm_80")


def test_an_nvcc_that_makes_nothing_is_reported(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", "#!/bin/sh\n")))
    with pytest.raises(KernelFailure, match=r"cannot read .*kernel\.cubin"):
        cubin(BUILD, "sm_80")


def test_nvcc_is_given_the_source_the_headers_and_the_options(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", FAKE_NVCC)))
    given = cubin(MASKED, "sm_80").decode().split()
    assert {"-cubin", "-arch=sm_80", "-DCAUSAL=1", "-std=c++17", str(compiler.SOURCES / MASKED.kernel.file)} <= {*given}
    assert f"-I{compiler.SOURCES}" in given and f"-I{compiler.SOURCES / 'attention'}" in given


PTXAS = """\
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'split' for 'sm_90a'
ptxas info    : Function properties for split
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 0 barriers
ptxas info    : (C7510) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ... 'attention'
ptxas info    : Compiling entry function 'attention' for 'sm_90a'
ptxas info    : Function properties for attention
    112 bytes stack frame, 108 bytes spill stores, 96 bytes spill loads
ptxas info    : Used 255 registers, used 1 barriers, 112 bytes cumulative stack size, 49152 bytes smem
"""


def test_a_report_of_ptxas_is_understood():
    found = parse_ptxas(PTXAS)
    assert [(name, x.registers, x.spilled, x.shared) for name, x in found.items()] == [
        ("split", 40, 0, 0),
        ("attention", 255, 108, 49152),
    ]
    assert all("C7510" in x.warnings[0] for x in found.values())


def test_that_an_architecture_is_deprecated_is_no_warning_of_a_kernel():
    told = "nvrtc: warning: Architectures prior to '<compute/sm>_75' are deprecated and may be removed\n"
    assert not parse_ptxas(told + PTXAS.replace("(C7510)", ""))["split"].warnings


def test_a_report_is_kept_for_the_same_source_options_and_compiler(empty_cache, tmp_path, monkeypatch):
    (tmp_path / "report").write_text(PTXAS)
    reporting = f"#!/bin/sh\necho >> {tmp_path}/calls\ncat {tmp_path}/report >&2\n"
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", reporting)))
    assert resources(BUILD, "sm_90a") == resources(BUILD, "sm_90a") == parse_ptxas(PTXAS)
    resources(BUILD, "sm_80")
    resources(MASKED, "sm_90a")
    monkeypatch.setenv("NVCC", str(script(tmp_path / "other-nvcc", reporting)))
    resources(BUILD, "sm_90a")
    assert (tmp_path / "calls").read_text().count("\n") == 4


def test_the_report_of_what_does_not_compile_is_not_kept(empty_cache, tmp_path, monkeypatch):
    monkeypatch.setenv("NVCC", str(script(tmp_path / "nvcc", "#!/bin/sh\necho 'x.cu(3): error: no.' >&2\nexit 1\n")))
    for _ in range(2):
        with pytest.raises(KernelFailure, match="could not compile the kernel"):
            resources(BUILD, "sm_90a")


# The kernels: a sample of what `make compile-all` has

GPUS = [(6, 1), (8, 0), (9, 0)]


def switches(build: Build, arch: str) -> set[tuple[str, object]]:
    """The macros that decide what code there is, with their values, and the architecture; others only say how much."""
    return {("arch", arch), *((name, value) for name, value in build.macros().items() if value < 8)}


def forms(operation: str, kernel: Kernel) -> list[tuple[Build, str]]:
    """Builds for each of the GPUs in turn that runs the kernel: few that have every switch's values."""
    found = [[(build, architecture(gpu)) for build in builds(operation, kernel, gpu)] for gpu in GPUS]
    runs = [some for some in found if some]
    each = [runs[i % len(runs)][i] for i in range(min(map(len, runs)))]
    left = set().union(*(switches(*one) for one in each))
    chosen = []
    while left:
        best = max(each, key=lambda one: len(left & switches(*one)))
        left -= switches(*best)
        chosen.append(best)
    return chosen


EVERY = [(operation.name, kernel) for operation in OPERATIONS.values() for kernel in operation.kernels.values()]
COMPILED = [(operation, kernel) for operation, kernel in EVERY if not kernel.on_host]


@pytest.mark.parametrize(
    ("operation", "kernel"), sampled(COMPILED, 4), ids=lambda one: one if isinstance(one, str) else one.name
)
@pytest.mark.skipif(bool(nvrtc.problem()), reason=f"there is no NVRTC here: {nvrtc.problem()}")
def test_every_form_of_a_kernel_compiles(operation, kernel):
    """NVRTC of CUDA 12, which the tests install, has none of the host's headers, and knows old GPUs.

    It shows in a fourth of a full build's time: as the quick build that a first call would take, or as a quick one of
    the full build's code.
    """
    for build, arch in forms(operation, kernel):
        quick = compiler.QUICK if kernel.explicit and build.problem.work < math.inf else compiler.QUICK[:1]
        code, log = compiler._nvrtc(build, arch, *quick)
        assert code.startswith(b"\x7fELF") and "warning #" not in log, log


def defaults(operation: str, kernel: Kernel) -> list[tuple[Build, str]]:
    """Builds that compute by default on sm_80 or sm_90a: one of each usual length of heads, or of another length."""
    found: dict[int, tuple[Build, str]] = {}
    for gpu in GPUS[:0:-1]:
        for build, default in builds(operation, kernel, gpu).items():
            if default:
                found.setdefault(build.problem.d, (build, architecture(gpu)))
    usual = (64, 128, 256) if operation == "attention" else (64, 128)
    return [found[d] for d in usual if d in found] or list(found.values())[:1]


def may_spill(build: Build) -> int:
    """Bytes of registers that a default may spill: gradients beside a bias or a mask, or packed, need more than all."""
    if build.kernel.file.startswith("decode/"):
        return 8  # `tensor` on sm_80, with 64 rows of heads of 128 numbers
    if not build.kernel.file.startswith("backward/"):
        return 4
    if build.kernel.file.startswith("backward/tangents"):
        if not build.kernel.arch_only:
            return 224  # by FFMA: two sums and two tiles of scores
        return 8 if build.problem.d <= 64 else 192  # two sums of 128 numbers beside two scores and their halves
    return 104 if build.problem.bias else 16 if build.problem.sequences else 4


@pytest.mark.parametrize(
    ("build", "arch"),
    sampled([form for operation, kernel in COMPILED for form in defaults(operation, kernel)], 8),
    ids=lambda one: one if isinstance(one, str) else f"{one.kernel.file}-{one.problem.d}",
)
@pytest.mark.skipif(find_nvcc() is None, reason="there is no nvcc here")
def test_a_default_hardly_spills_and_has_no_warnings(build, arch):
    found = resources(build, arch)
    assert {launch.function for launch in build.functions()} <= set(found)
    assert not [f"{name}: {one}" for name, one in found.items() if one.warnings or one.spilled > may_spill(build)]
