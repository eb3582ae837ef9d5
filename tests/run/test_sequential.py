"""The sequential program in C: how it is compiled and kept, and what surrounds it. Answers: see test_attention.py."""

from __future__ import annotations

import json
import os
import subprocess

import numpy as np
import pytest
from support import flashcli, forward, random_qkv, read_floats, script, write_input
from tolerances import assert_accurate

from flashcli.asked.shape import Shape
from flashcli.compiler.compiler import find_cc
from flashcli.errors import BackendUnavailable
from flashcli.measure.bench import kernel_contender
from flashcli.run.request import Request, open_backend
from flashcli.run.slots_sequential import ROWS, SequentialBackend

QKV = random_qkv(5, 60, 32)


@pytest.fixture
def cc(tmp_path, monkeypatch) -> list[str]:
    """An empty cache and a compiler that notes down each call; gives the file of notes."""
    if find_cc() is None:
        pytest.skip("there is no C compiler here")
    notes = tmp_path / "notes"
    notes.touch()
    real = " ".join(find_cc())
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setenv("CC", str(script(tmp_path / "my-cc", f'#!/bin/sh\necho "$@" >>{notes}\nexec {real} "$@"\n')))
    return notes


@pytest.fixture
def given(tmp_path):
    return write_input(tmp_path / "x.in", QKV)


def test_a_hit_starts_no_process(cc, monkeypatch):
    with SequentialBackend(32) as backend:
        assert_accurate(forward(backend, QKV), QKV)

    def start(*args, **options):
        raise AssertionError(f"a process was started: {args}")

    monkeypatch.setattr(subprocess, "run", start)
    with SequentialBackend(32) as backend:
        assert_accurate(forward(backend, QKV), QKV)


def test_another_build_or_compiler_compiles_again(cc, monkeypatch):
    for d, causal in [(32, False), (32, True), (33, False), (32, False)]:
        SequentialBackend(d, causal)
    assert len(cc.read_text().splitlines()) == 3
    monkeypatch.setenv("CC", f"{cc.parent}/my-cc -g")
    SequentialBackend(32)
    assert cc.read_text().splitlines()[3].startswith("-g ")


def test_without_a_compiler_what_is_cached_will_do(cc, monkeypatch):
    SequentialBackend(32)
    monkeypatch.setenv("CC", "")
    with SequentialBackend(32) as backend:
        assert_accurate(forward(backend, QKV), QKV)
    with pytest.raises(BackendUnavailable, match=r"no C compiler .* no cached sequential for d = 64"):
        SequentialBackend(64)


def zero_the_second_half(path):
    """Its headers are right: the loader takes it, and the process crashes."""
    code = path.read_bytes()
    path.unlink()  # loaded: not to be written over
    path.write_bytes(code[: len(code) // 2] + bytes(len(code) - len(code) // 2))


def fifo(path):
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize("damage", [zero_the_second_half, fifo])
def test_a_damaged_library_is_compiled_again(cc, given, out, damage):
    assert flashcli("run", given, out, "--kernel", "sequential").code == 0
    want = out.read_bytes()
    [library] = cc.parent.glob("cache/*.so")
    damage(library)
    done = flashcli("run", given, out, "--kernel", "sequential", timeout=20)
    assert (done.code, done.err, out.read_bytes()) == (0, "", want)
    assert len(cc.read_text().splitlines()) == 2


def test_a_library_that_the_system_does_not_load_is_told(cc, monkeypatch):
    monkeypatch.setenv(
        "CC", str(script(cc.parent / "cc", '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done; echo >"$2"\n'))
    )
    with pytest.raises(BackendUnavailable, match="the compiled kernel cannot be loaded") as caught:
        SequentialBackend(32)
    assert "noexec" in caught.value.hint


def test_a_cache_that_cannot_be_written_is_no_error(cc, monkeypatch):
    monkeypatch.setenv("FLASHCLI_CACHE_DIR", str(cc / "inside"))
    with SequentialBackend(32) as backend:
        assert_accurate(forward(backend, QKV), QKV)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("d", [40, 64])
def test_ranges_of_rows(cc, d, causal):
    q, k, v = random_qkv(1, 333, d)[0]
    out, backend = np.full_like(q, np.nan), SequentialBackend(d, causal)
    for first, end in [(0, 1), (1, 100), (100, 292), (292, 333)]:
        backend.attend_rows(q[first:end], k, v, out[first:end], first)
    assert_accurate(out[None], np.stack([q, k, v])[None], causal)


def test_more_rows_than_a_call_takes(cc):
    qkv = random_qkv(2, 2 * ROWS + 1, 16)
    with SequentialBackend(16, causal=True, scale=0.3) as backend:
        assert_accurate(forward(backend, qkv), qkv, causal=True, scale=0.3)


def test_it_is_timed_like_any_kernel(cc):
    inputs, out = [random_qkv(1, 50, 32, seed=seed) for seed in (1, 2)], np.full((1, 50, 32), np.nan, np.float32)
    seconds = kernel_contender("sequential", "fp32", causal=False).measure(inputs, out, 3)
    assert len(seconds) == 3 and min(seconds) > 0
    assert_accurate(out, inputs[0])


@pytest.mark.parametrize("backend", ["auto", "cpu"])
def test_run_with_it(cc, given, tmp_path, backend):
    done = flashcli("run", given, tmp_path / "out", "--kernel", "sequential", "--backend", backend, "--json", "-")
    assert (done.code, done.err) == (0, "")
    record = json.loads(done.out)
    assert (record["backend"], record["kernel"], record["threads"]) == ("cpu", "sequential", 1)
    assert record["description"] == "cpu, one core, kernel sequential (Br=32, Bc=32)"
    assert_accurate(read_floats(tmp_path / "out", QKV[:, 0].shape), QKV)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--backend", "cuda"], "--backend cuda: for GPUs, but kernel sequential runs on the CPU."),
        (["--device", "0"], "--device: for GPUs"),
        (["--max-device-memory", "1G"], "--max-device-memory: for GPUs"),
        (["--precision", "fp16"], "kernel sequential has no fp16."),
    ],
)
def test_what_only_a_gpu_has_is_wrong_usage(given, tmp_path, options, message):
    flashcli("run", given, tmp_path / "out", "--kernel", "sequential", *options).assert_error(2, message)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("compiler", "message"),
    [
        ("", "there is no C compiler (cc, gcc or clang), and no cached sequential for d = 32."),
        ("nonesuch-cc", "there is no C compiler (nonesuch-cc)"),
        (
            "#!/bin/sh\necho 'no such option' >&2\nexit 1\n",
            "does not compile attention/00_sequential.c: no such option.",
        ),
        ("no program\n", "cannot be run"),
        ("#!/bin/sh\nexit 0\n", "does not compile attention/00_sequential.c: it has written nothing."),
        ("#!/bin/sh\nprintf '\\351\\n' >&2\nexit 1\n", "does not compile attention/00_sequential.c: \ufffd."),
    ],
)
def test_no_compiler_that_works_is_code_69(given, tmp_path, compiler, message):
    named = str(script(tmp_path / "bad-cc", compiler)) if "\n" in compiler else compiler
    environment = {"CC": named, "FLASHCLI_CACHE_DIR": str(tmp_path / "cache")}
    done = flashcli("run", given, tmp_path / "out", "--kernel", "sequential", env=environment)
    done.assert_error(69, message)
    assert not (tmp_path / "out").exists()


def test_it_is_never_chosen_by_itself(no_pycuda):
    with open_backend(Request(), Shape(1, 60, 32)) as backend:
        assert "kernel" not in backend.details()
