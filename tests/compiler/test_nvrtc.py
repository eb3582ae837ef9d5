"""NVRTC in the place of nvcc: when it is asked, and what it says. That it compiles kernels, test_compiler.py shows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashcli.compiler import compiler, nvrtc
from flashcli.compiler.compiler import cubin
from flashcli.errors import BackendUnavailable, KernelFailure
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem

PROBLEM = Problem(8, 200, 200, 64)
BUILD = Build(KERNELS["register_tiled"], PROBLEM)


@pytest.fixture
def no_nvcc(monkeypatch, tmp_path) -> None:
    """An empty cache, and no toolkit."""
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(compiler, "find_nvcc", lambda: None)
    monkeypatch.delenv("NVCC", raising=False)


@pytest.fixture
def compiled(no_nvcc, monkeypatch) -> list[list[str]]:
    """A library that gives "code"; and the options of each call."""
    calls = []

    def compile(source, name, arch, options, include):
        calls.append([*options, arch])
        return b"code", ""

    monkeypatch.setattr(nvrtc, "problem", lambda: "")
    monkeypatch.setattr(nvrtc, "cubin", compile)
    return calls


def test_without_nvcc_it_compiles_once_and_the_cache_keeps_it(compiled):
    assert [cubin(BUILD, "sm_90a") for _ in range(2)] == [b"code"] * 2
    [options] = compiled
    assert {"-DHEAD_DIM=64", "-std=c++17", "sm_90a"} <= {*options}


@pytest.mark.parametrize("named", ["", "nonesuch-nvcc"])
def test_whoever_names_a_compiler_gets_no_other(compiled, monkeypatch, named):
    monkeypatch.setenv("NVCC", named)
    with pytest.raises(BackendUnavailable, match="there is no nvcc"):
        cubin(BUILD, "sm_90a")
    assert not compiled


def test_it_can_be_named(compiled, monkeypatch):
    monkeypatch.setenv("NVCC", "nvrtc")
    assert cubin(BUILD, "sm_90a") == b"code"


def test_what_is_missing_is_told(no_nvcc, monkeypatch):
    monkeypatch.setattr(nvrtc, "problem", lambda: "cuda-bindings is not installed")
    with pytest.raises(BackendUnavailable, match=r"no NVRTC in its place .cuda-bindings is not installed"):
        cubin(BUILD, "sm_90a")


@pytest.mark.parametrize(
    ("log", "kind", "message"),
    [
        ("nvrtc: error: invalid value for --gpu-architecture (-arch)", BackendUnavailable, "cannot compile for sm_90a"),
        ('x.cu(3): error: identifier "foo" is undefined', KernelFailure, "NVRTC could not compile the kernel: x.cu"),
    ],
)
def test_what_a_complaint_means(compiled, monkeypatch, log, kind, message):
    def refuse(*arguments):
        raise nvrtc.CompileError(log)

    monkeypatch.setattr(nvrtc, "cubin", refuse)
    with pytest.raises(kind, match=message):
        cubin(BUILD, "sm_90a")


# The library itself


@pytest.fixture
def real(no_nvcc) -> None:
    if problem := nvrtc.problem():
        pytest.skip(f"there is no NVRTC here: {problem}")


def test_a_mistake_is_found_in_its_file_and_line(real, monkeypatch, tmp_path):
    (tmp_path / "common.cuh").touch()
    (tmp_path / "wrong.cu").write_text('extern "C" __global__ void f() {}\nint x = y;\n')
    monkeypatch.setattr(compiler, "SOURCES", tmp_path)
    with pytest.raises(KernelFailure, match=r'wrong\.cu\(2\): error: identifier "y" is undefined'):
        cubin(replace(BUILD, kernel=replace(BUILD.kernel, file="wrong.cu")), "sm_90a")


def test_an_architecture_that_it_does_not_know_is_told(real):
    with pytest.raises(BackendUnavailable, match="cannot compile for sm_11"):
        cubin(BUILD, "sm_11")
