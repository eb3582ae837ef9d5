"""`run --emulate`: a kernel for GPUs on the CPU, file to file."""

from __future__ import annotations

import json

import numpy as np
import pytest
from oracle import Asked, plain
from support import flashcli, random_qkv, read_floats, write_input

from flashcli.errors import UsageError
from flashcli.files.cut import TILE, Cut
from flashcli.kernels.problem import Problem
from flashcli.run import slots_emulated
from flashcli.run.arrays import Arrays
from flashcli.run.slots_emulated import EmulatedBackend
from flashcli.run.stream import Watch, stream
from flashcli.run.timeline import Timeline

B, N, d = 3, 40, 16
QKV = random_qkv(B, N, d)


@pytest.fixture(autouse=True)
def cache(emulated, monkeypatch):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(emulated))


@pytest.fixture
def given(tmp_path):
    return write_input(tmp_path / "in", QKV)


def right(qkv, causal=False):
    return plain(Asked(*np.moveaxis(qkv, 1, 0), causal))[0]


def streamed(backend, qkv, by, warn=print):
    """The answer of a backend to chunks that are cut so."""
    out = np.full_like(qkv[:, 0], np.nan)
    arrays = Arrays(*np.moveaxis(qkv, 1, 0), out)
    with backend:
        stream(arrays, backend, arrays, by, watch=Watch(Timeline(), warn=warn))
    return out


def test_a_kernel_computes_a_file_and_the_report_says_that_it_is_emulated(given, tmp_path):
    done = flashcli("run", given, tmp_path / "out", "--emulate", "--kernel", "fused", "--causal", "--threads", 2)
    assert (done.code, done.err) == (0, "")
    assert done.out.endswith(
        "backend: emulated on the CPU as on sm_90a, 2 threads, kernel fused (Br=32, Bc=32); "
        "its times say nothing about a GPU\n"
    )
    np.testing.assert_allclose(read_floats(tmp_path / "out", (B, N, d)), right(QKV, causal=True), atol=1e-5)


def test_its_record_is_no_gpus(given, tmp_path):
    done = flashcli("run", given, tmp_path / "out", "--emulate", "--kernel", "fused", "--causal", "--json", "-")
    record = json.loads(done.out)
    assert (record["backend"], record["kernel"], record["arch"]) == ("emulated", "fused", "sm_90a")
    assert not record.keys() & {"kernel_seconds", "tflops", "device"}


def test_rows_of_a_long_batch_and_what_is_not_finite_are_right(emulated):
    qkv = random_qkv(2, TILE + 20, 8)
    want = right(qkv)
    qkv[1, 2, 5, 3] = np.inf  # in V: a kernel that splits numbers would make NaN of it
    want[1, :, 3] = np.inf
    warned = []
    by = Cut(whole=False, batches=1, rows=TILE)
    got = streamed(EmulatedBackend("mma", Problem(1, TILE, TILE + 20, 8)), qkv, by, warned.append)
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert len(warned) == 1 and warned[0] == "inf in V at (batch, row, column) = (1, 5, 3)"


def test_how_long_it_takes_is_told_or_refused(monkeypatch):
    notices: list[str] = []
    monkeypatch.setattr(slots_emulated, "KNOWN_AFTER", 0)
    monkeypatch.setattr(slots_emulated, "LONG", 0)
    whole = Cut(True, B, N)

    def backend():
        return EmulatedBackend("fused", Problem(B, N, N, d, causal=True), notice=notices.append)

    streamed(backend(), QKV, whole)
    assert len(notices) == 1 and notices[0].startswith("to emulate this takes about ")
    monkeypatch.setattr(slots_emulated, "TOO_LONG", 0)
    with pytest.raises(UsageError, match="to emulate this would take about"):
        streamed(backend(), QKV, whole)


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        ([], 2, "--emulate is for a kernel of GPUs, by name."),
        (["--kernel", "sequential"], 2, "--emulate is for a kernel of GPUs, by name."),
        (["--kernel", "fused", "--backend", "cuda"], 2, "--backend cuda: what is emulated runs on the CPU"),
        (["--kernel", "fused", "--device", "0"], 2, "--device: what is emulated runs on the CPU"),
        (["--kernel", "fused", "--devices", "all"], 2, "--devices is for GPUs, not for the emulator."),
        (["--kernel", "fused", "--precision", "fp16"], 2, "kernel fused has no fp16."),
    ],
)
def test_what_does_not_go_together_is_refused(given, tmp_path, options, code, message):
    flashcli("run", given, tmp_path / "out", "--emulate", *options).assert_error(code, message)


def test_a_program_for_the_cpu_needs_no_emulator(given, tmp_path):
    done = flashcli("run", given, tmp_path / "out", "--emulate", "--kernel", "sequential")
    assert "Hint: leave it out: sequential runs on the CPU as it is." in done.err


def test_without_a_gpu_a_kernel_is_offered_emulated(given, tmp_path):
    done = flashcli("run", given, tmp_path / "out", "--kernel", "fused", env={"CUDA_VISIBLE_DEVICES": ""})
    if done.code:  # where there is no GPU, or no PyCUDA
        done.assert_error(69)
        assert "Or add --emulate" in done.err
    assert "--emulate --kernel fused" in flashcli("kernels", "fused", "--arch", "sm_90a").out


def test_without_a_compiler_the_run_ends_with_a_hint(given, tmp_path):
    environment = {"CXX": "", "FLASHCLI_CACHE_DIR": str(tmp_path)}
    done = flashcli("run", given, tmp_path / "out", "--emulate", "--kernel", "fused", env=environment)
    done.assert_error(69, "the emulator needs a C++ compiler, and there is none.")
    assert not (tmp_path / "out").exists()
