from __future__ import annotations

import json
import os
import re

import pytest
from support import flashcli, python_path, script

from flashcli.compiler import cache
from flashcli.gpu import driver as cuda_driver
from flashcli.measure import diagnosis


@pytest.fixture(scope="module")
def lines():
    """What is found on this machine as it is."""
    return flashcli("doctor").out.splitlines()


@pytest.fixture
def no_pycuda(no_pycuda, monkeypatch, tmp_path):
    """Nor the user's cache, of which doctor checks every kernel: it may hold hundreds."""
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))


def test_without_a_gpu(no_pycuda, monkeypatch, tmp_path):
    monkeypatch.setenv("NVCC", "")
    monkeypatch.setenv("CC", "")
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "not" / "there" / "yet"))
    done = flashcli("doctor")
    assert (done.code, done.err) == (0, "")
    lines = done.out.splitlines()
    assert lines[0].startswith("[ok] Python: 3.")
    assert lines[1].startswith("[ok] CPU backend: ")
    assert lines[2:6] == [
        "[--] C compiler: not found",
        "     Hint: install gcc, or set CC; kernel sequential needs it.",
        "[--] nvcc: not found",
        "     Hint: install the CUDA toolkit, load its module, or set CUDA_HOME.",
    ]
    missing = lines.index("[--] CUDA backend: there is no NVIDIA driver here (libcuda was not found).")
    assert lines[missing + 1].startswith("     Hint: ")


def test_what_arrays_on_a_gpu_need_has_a_line(lines):
    [line] = [line for line in lines if "arrays on a GPU: " in line]
    assert re.fullmatch(
        r"\[ok\] .*: cuda-bindings \d\S*, compiled by \S+|\[--\] .*: .*(driver|GPU|cuda-bindings|NVRTC).*", line
    )


@pytest.mark.parametrize(
    ("nvcc", "problem", "ok", "text"),
    [
        ("/bin/nvcc", "not asked", True, "cuda-bindings 13.0, compiled by /bin/nvcc"),
        (None, "", True, "cuda-bindings 13.0, compiled by NVRTC"),
        (None, "its library is not found", False, "there is no nvcc, nor NVRTC: its library is not found"),
    ],
)
def test_who_compiles_for_arrays_on_a_gpu(monkeypatch, nvcc, problem, ok, text):
    monkeypatch.setattr(diagnosis, "bindings", lambda: None)
    monkeypatch.setattr(diagnosis.compiler, "find_nvcc", lambda: nvcc)
    monkeypatch.setattr(diagnosis.compiler, "nvrtc_problem", lambda: problem)
    monkeypatch.setattr(diagnosis.metadata, "version", lambda name: "13.0")
    finding = diagnosis._in_place()
    assert (finding.ok, finding.text) == (ok, text) and bool(finding.hint) is not ok


def test_mpi_is_named_or_missed(lines):
    [line] = [line for line in lines if "MPI: " in line]
    assert re.fullmatch(r"\[ok\] MPI: mpi4py \d\S*, .*MPI.*|\[--\] MPI: mpi4py.* is not installed\.", line)


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("raise ModuleNotFoundError('mpi4py')", "apart, is not installed."),
        (
            "raise RuntimeError('cannot load MPI library')",
            "mpi4py does not load an MPI library: cannot load MPI library.",
        ),
    ],
)
def test_an_mpi4py_that_finds_no_library_is_no_mpi(tmp_path, statement, message):
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "mpi4py" / "MPI.py").write_text(statement)
    lines = flashcli("doctor", env={"PYTHONPATH": python_path(tmp_path)}).out.splitlines()
    [index] = [index for index, line in enumerate(lines) if "MPI: " in line]
    assert lines[index].startswith("[--] MPI: mpi4py") and lines[index].endswith(message)
    assert lines[index + 1].startswith("     Hint: ")


def test_the_driver_has_a_line(lines):
    [line] = [line for line in lines if "GPU driver: " in line]
    assert re.fullmatch(r"\[ok\] GPU driver: NVIDIA (\d[\d.]+, )?for CUDA \d+\.\d|\[--\] GPU driver: .*driver.*", line)


def test_which_driver_it_is(monkeypatch):
    class Driver:
        def cuDriverGetVersion(self, where):
            where._obj.value = 12080
            return 0

    monkeypatch.setattr(cuda_driver, "libcuda", Driver)
    monkeypatch.setattr(cuda_driver, "problem", lambda: "")
    assert diagnosis._driver().text.endswith("for CUDA 12.8")


def test_json(no_pycuda):
    findings = {finding["name"]: finding for finding in json.loads(flashcli("doctor", "--json", "-").out)}
    assert findings["CPU backend"]["ok"] is True
    assert findings["CUDA backend"]["ok"] is False and "driver" in findings["CUDA backend"]["hint"]


def test_a_driver_without_a_gpu(fake_gpu, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_COUNT", "0")
    done = flashcli("doctor")
    assert (done.code, done.err) == (0, "")
    assert "[--] CUDA backend: the driver finds no GPU.\n     Hint: is one allocated to this job?\n" in done.out


def test_what_the_sequential_program_needs(no_pycuda, monkeypatch, tmp_path):
    compiler = script(tmp_path / "my-cc", "#!/bin/sh\n")
    monkeypatch.setenv("CC", f"{compiler} -O1")
    assert f"[ok] C compiler: {compiler} -O1\n" in flashcli("doctor").out


def test_the_cache_has_kernels_for_gpus_and_for_the_host(no_pycuda, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path))
    for name in ("mma.cubin", "wgmma.cubin", "sequential.so", "tmpx"):
        cache.store(tmp_path / name, b"code")
    assert f"[ok] kernel cache: {tmp_path}, 3 kernels\n" in flashcli("doctor").out
    (tmp_path / "mma.cubin").write_bytes(b"code")
    os.mkfifo(tmp_path / "fifo.so")
    assert f"{tmp_path}, 2 kernels; 2 more are damaged, or from an older version\n" in flashcli("doctor").out


def test_a_cache_that_cannot_be_written(no_pycuda, monkeypatch, tmp_path, ordinary_user):
    tmp_path.chmod(0o555)
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))
    done = flashcli("doctor", **ordinary_user)
    tmp_path.chmod(0o755)
    assert f"[--] kernel cache: {tmp_path}/cubins, 0 kernels; not writable: permission denied" in done.out


def test_a_cache_that_only_root_may_seem_to_write(no_pycuda, monkeypatch):
    """Permissions say that it can be written; only to try tells that it cannot."""
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", "/proc/self/cubins")
    assert "[--] kernel cache: /proc/self/cubins, 0 kernels; not writable: " in flashcli("doctor").out


def test_looking_into_the_cache_leaves_nothing(no_pycuda, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cache" / "cubins"))
    assert "[ok] kernel cache: " in flashcli("doctor").out
    assert not (tmp_path / "cache").exists()


def test_the_means_of_the_judge_are_told(no_pycuda):
    [line] = [line for line in flashcli("doctor").out.splitlines() if "judge: " in line]
    ways = "a PID namespace|a control group|stopping and killing its processes"
    assert re.fullmatch(rf"\[(ok|--)\] judge: programs are contained by ({ways}); (a|no) sandbox by bubblewrap", line)
