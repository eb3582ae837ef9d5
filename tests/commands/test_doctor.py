from __future__ import annotations

import json
import re

from support import flashcli, script


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
    assert "[--] CUDA backend: PyCUDA is not installed (pycuda is missing)." in lines
    assert lines[-1].startswith("     Hint: ")


def test_mpi_is_named_or_missed():
    [line] = [line for line in flashcli("doctor").out.splitlines() if "MPI: " in line]
    assert re.fullmatch(r"\[ok\] MPI: mpi4py \d\S*|\[--\] MPI: mpi4py is not installed", line)


def test_json(no_pycuda):
    findings = {finding["name"]: finding for finding in json.loads(flashcli("doctor", "--json", "-").out)}
    assert findings["CPU backend"]["ok"] is True
    assert findings["CUDA backend"]["ok"] is False and "pip install" in findings["CUDA backend"]["hint"]


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
        (tmp_path / name).touch()
    assert f"[ok] kernel cache: {tmp_path}, 3 kernels\n" in flashcli("doctor").out


def test_a_cache_that_cannot_be_written(no_pycuda, monkeypatch, tmp_path, ordinary_user):
    tmp_path.chmod(0o555)
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cubins"))
    done = flashcli("doctor", **ordinary_user)
    tmp_path.chmod(0o755)
    assert f"[--] kernel cache: {tmp_path}/cubins, 0 kernels" in done.out
