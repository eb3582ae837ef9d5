"""flashcli bench: what it refuses and when, what its rows say, and where its records go."""

from __future__ import annotations

import json
import os
import runpy
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from click.testing import CliRunner
from support import ROOT, flashcli, leftovers

from flashcli.asked.shape import Shape, tflops
from flashcli.commands import bench_tensors
from flashcli.commands.bench import command
from flashcli.errors import BackendUnavailable, UsageError
from flashcli.files.outputs import write_whole
from flashcli.files.verify import reference
from flashcli.gpu.pycuda import load_driver
from flashcli.measure import bench, peers
from flashcli.measure.rows import Row

TINY = ("bench", "--backend", "cpu", "--runs", 2, "--threads", 1, "--shape", "2,20,8")
SHAPE = Shape(2, 20, 8)


def right(inputs, out, runs):
    out[...] = [reference(qkv, True) for qkv in inputs[0]]
    return [0.5] * runs


def wrong(inputs, out, runs):
    out[...] = 1
    return [0.5] * runs


def failing(error):
    def measure(inputs, out, runs):
        raise error

    return measure


def rows_of(*measures, ceilings=None):
    contenders = [bench.Contender(str(i), "float32", "fp32", measure) for i, measure in enumerate(measures)]
    return list(bench.bench({"tiny": SHAPE}, contenders, bench.Conditions(3, True, 0, ceilings or {})))


@pytest.mark.parametrize(
    "words", [("bench", "--shape", "2,20,8"), ("bench-decode", "--shape", "1,2,1,32", "--lengths", "9")]
)
def test_a_cpu_is_timed_five_times_if_nothing_is_said(words):
    done = flashcli(*words, "--backend", "cpu", "--threads", 1, "--json", "-")
    assert [row["runs"] for row in json.loads(done.out)["rows"]] == [5]


def test_of_the_reports_cases_a_cpu_has_the_first_and_says_so(monkeypatch):
    contender = bench.Contender("it", "float32", None, lambda inputs, out, runs: right(inputs, out, runs))
    monkeypatch.setattr(bench, "cpu_contenders", lambda *_: [contender])
    monkeypatch.setattr(
        bench, "bench", lambda shapes, *_: [Row.about(name, shape, "it") for name, shape in shapes.items()]
    )
    done = CliRunner().invoke(command, ["--backend", "cpu"])
    assert "Notice: timing t10 only: t11, t22, t29, t30 take minutes on a CPU, and --case names them." in done.stderr
    assert "t10 it" in done.stderr and "t11 it" not in done.stderr


@pytest.mark.parametrize("more", [(), ("--backend", "cpu"), ("--ladder",)], ids=str)
def test_a_kernel_of_the_host_is_timed_without_a_gpu(no_pycuda, more):
    done = flashcli("bench", "--kernel", "sequential", "--shape", "2,20,8", "--runs", 2, *more, "--json", "-")
    assert done.code == 0 and "Notice" not in done.err, done.err
    [row] = json.loads(done.out)["rows"]
    assert (row["contender"], row["runs"]) == ("sequential", 2) and row["relative_l2"] < 1e-6


def test_a_column_that_nothing_is_in_is_left_out():
    done = flashcli(*TINY)
    assert "relative L2" in done.out and "of floor" not in done.out


@pytest.mark.parametrize(
    ("option", "name"),
    [
        ("--heads", "bench-tensors"),
        ("--backward", "bench-tensors"),
        ("--decode", "bench-decode"),
        ("--fp8", "bench-decode"),
    ],
)
def test_an_option_of_another_command_says_of_which(option, name):
    done = flashcli("bench", option)
    assert done.code == 2 and f"No such option '{option}'. See `flashcli {name} --help`." in done.err
    done = flashcli("bench", "--nonesuch")
    assert done.code == 2 and "See `" not in done.err


def test_a_shape_needs_no_testcases(tmp_path):
    done = flashcli(*TINY, cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.err
    assert "flashcli cpu" in done.out


def test_the_thirty_cases_are_there_wherever_one_is(tmp_path):
    done = flashcli(*TINY, "--case", "t01", cwd=tmp_path, env={"PYTHONPATH": str(ROOT)})
    assert done.code == 0, done.err
    assert "t01" in done.out


@pytest.mark.parametrize("against", [[], ["--against", "torch"]], ids=["cpu", "torch"])
def test_causal_is_causal_on_the_cpu(tmp_path, against):
    if against:
        pytest.importorskip("torch")
    done = flashcli(*TINY, "--causal", *against, "--json", tmp_path / "x.json")
    assert done.code == 0, done.err
    rows = json.loads((tmp_path / "x.json").read_text())["rows"]
    assert len(rows) == 1 + bool(against)
    assert all(row["causal"] and row["relative_l2"] < 1e-6 for row in rows)


OOM = failing(MemoryError("none is left"))


@pytest.mark.parametrize(
    ("measures", "code"),
    [([right], 0), ([right, wrong], 1), ([OOM, right], 0), ([OOM, OOM], 1)],
    ids=["ok", "one is wrong", "one fails", "all fail"],
)
def test_the_exit_code_is_1_if_one_is_wrong_or_all_fail(monkeypatch, tmp_path, measures, code):
    contenders = [bench.Contender("it", "float32", None, measure) for measure in measures]
    monkeypatch.setattr(bench, "cpu_contenders", lambda *_: contenders)
    path = tmp_path / "x.csv"
    done = CliRunner().invoke(command, [*map(str, TINY[1:]), "--causal", "--csv", str(path)])
    assert done.exit_code == code, done.output
    assert "2,20,8" in path.read_text()  # the record is written all the same


@pytest.mark.parametrize("option", ["--json", "--csv", "--markdown"])
def test_a_record_that_cannot_be_created_is_told_before_the_timing(tmp_path, option):
    done = flashcli(*TINY, option, tmp_path / "missing" / "x")
    done.assert_error(73, "cannot write", "missing")
    assert "flashcli cpu" not in done.err
    done = flashcli(*TINY, option, tmp_path)
    done.assert_error(73, "folder")
    assert "flashcli cpu" not in done.err


def test_two_results_do_not_go_into_one_file(tmp_path):
    files = ["--json", tmp_path / "x", "--csv", tmp_path / "x"]
    flashcli("bench", "--backend", "cpu", "--shape", "1,8,8", *files).assert_error(2, "is named twice")
    assert not os.listdir(tmp_path)


def test_a_record_in_a_folder_that_is_not_writable_is_told_before_the_timing(tmp_path, ordinary_user):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    done = flashcli(*TINY, "--json", locked / "x", **ordinary_user)
    done.assert_error(77, "permission denied")
    assert "flashcli cpu" not in done.err


def test_a_record_replaces_the_old_one_at_once(tmp_path):
    path, kept = tmp_path / "x.json", tmp_path / "kept.json"
    path.write_text("old")
    os.link(path, kept)
    assert flashcli(*TINY, "--json", path).code == 0
    assert kept.read_text() == "old"
    assert json.loads(path.read_text())["rows"]
    assert leftovers(tmp_path) == []


def test_an_interrupted_bench_leaves_the_old_record(monkeypatch, tmp_path):
    path = tmp_path / "x.json"
    path.write_text("old")
    contender = bench.Contender("it", "float32", None, failing(KeyboardInterrupt()))
    monkeypatch.setattr(bench, "cpu_contenders", lambda *_: [contender])
    CliRunner().invoke(command, [*map(str, TINY[1:]), "--json", str(path)])
    assert path.read_text() == "old"
    monkeypatch.setattr(os, "replace", MagicMock(side_effect=KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        write_whole(path, "new")
    assert path.read_text() == "old"
    assert leftovers(tmp_path) == []


def test_two_views_go_to_stdout():
    done = flashcli(*TINY, "--json", "-", "--csv", "-")
    assert done.code == 0, done.err
    assert '"circumstances"' in done.out and "case,B,N,d,causal" in done.out


def test_a_record_on_stdout_is_all_there_is(tmp_path):
    done = flashcli(*TINY, "--json", "-", "--csv", tmp_path / "x.csv")
    assert len(json.loads(done.out)["rows"]) == 1
    assert "median" in done.err  # the table
    assert "median" in flashcli(*TINY, "--csv", tmp_path / "x.csv").out


def test_unknown_precisions_and_kernels_are_refused_before_the_driver(no_pycuda):
    for option in ("--precision", "--kernel", "--against"):
        done = flashcli("bench", "--backend", "cuda", option, "foo")
        assert done.code == 2 and f"Invalid value for '{option}': 'foo' is not one of" in done.err
    flashcli("bench", "--backend", "cuda", "--shape", "1,8,8").assert_error(69, "there is no NVIDIA driver here")


@pytest.mark.parametrize("arguments", [["bench", "--backend", "cuda"], ["bench", "--ladder"], ["profile"]])
def test_a_driver_without_a_gpu(fake_gpu, monkeypatch, arguments):
    monkeypatch.setenv("FAKE_GPU_COUNT", "0")
    flashcli(*arguments, "--shape", "2,20,8").assert_error(69, "the driver finds no GPU.")


def test_without_a_gpu_the_cpu_is_timed_with_one_notice(no_pycuda, tmp_path):
    done = flashcli("bench", "--shape", "2,20,8", "--runs", 1, "--json", tmp_path / "x.json")
    assert done.code == 0, done.err
    assert done.err.count("Notice: no usable GPU, timing the CPU: ") == 1
    record = json.loads((tmp_path / "x.json").read_text())
    assert [row["contender"] for row in record["rows"]] == ["flashcli cpu"] and record["circumstances"]["threads"]


@pytest.mark.parametrize("asked", [["--backend", "cuda"], ["--kernel", "mma"], ["--precision", "fp16"]])
def test_nothing_else_is_timed_than_what_was_asked_for(no_pycuda, asked):
    done = flashcli("bench", "--shape", "2,20,8", *asked)
    done.assert_error(69)
    assert f"Or time the CPU: leave out {' '.join(asked)}." in done.err


def test_the_hint_of_a_machine_without_a_driver_names_no_option_that_some_commands_lack(pycuda_stub):
    pycuda_stub("raise ImportError('libcuda.so.1: cannot open shared object file')")
    with pytest.raises(BackendUnavailable) as error:
        load_driver()
    assert "with a GPU and its driver" in error.value.hint and "--backend" not in error.value.hint


def test_with_a_gpu_that_is_timed(fake_gpu):
    done = flashcli("bench", "--shape", "2,20,8", "--runs", 1, "--kernel", "mma", "--json", "-")
    assert json.loads(done.out)["circumstances"]["gpu"] == "Fake GPU"


def test_a_peer_that_is_not_installed_or_not_for_the_cpu(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: name == "triton")
    for name, kind, complaint in (
        ("torch", BackendUnavailable, "torch is not installed."),
        ("triton", UsageError, "--against triton is for GPUs"),
    ):
        done = CliRunner().invoke(command, [*map(str, TINY[1:]), "--against", name])
        assert isinstance(done.exception, kind) and complaint in str(done.exception)


def test_tensors_are_pytorchs(monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda name: False)
    done = CliRunner().invoke(bench_tensors.command, ["--shape", "2,20,8"])
    assert isinstance(done.exception, BackendUnavailable) and "torch is not installed" in str(done.exception)


def test_threads_are_for_the_cpu():
    flashcli("bench", "--shape", "2,20,8", "--threads", 2).assert_error(2, "--threads is for the cpu backend")


@pytest.mark.parametrize(("option", "value"), [("--kernel", "all"), ("--kernel", "mma"), ("--precision", "fp16")])
def test_the_cpu_has_neither_kernels_nor_precisions(option, value):
    flashcli(*TINY, option, value).assert_error(2, option)


def test_causal_counts_the_pairs_that_are_computed():
    operations = 4 * SHAPE.B * (SHAPE.N * (SHAPE.N + 1) // 2) * SHAPE.d
    [row] = rows_of(right, ceilings={"fp32": 1e9, "bytes": 1e9})
    assert row.tflops == pytest.approx(operations / 0.5 / 1e12)
    assert row.floor_operations == pytest.approx(operations / 1e9)
    assert tflops(2, 20, 8, 0.5) == pytest.approx(4 * 2 * 20 * 20 * 8 / 0.5 / 1e12)


@pytest.mark.parametrize("error", [RuntimeError("no\nmore"), ValueError("no"), AssertionError()])
def test_a_peer_that_fails_in_any_way_leaves_the_other_rows(error):
    failed, fine = rows_of(failing(error), right)
    assert failed.error in ("no", "AssertionError")
    assert fine.seconds == 0.5


def test_release_survives_a_broken_context(monkeypatch):
    cuda = MagicMock()
    cuda.empty_cache.side_effect = RuntimeError("CUDA error: an illegal memory access was encountered")
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda))
    peers.release()
    cuda.empty_cache.assert_called_once()


def test_without_a_peer_pytorch_is_not_imported(monkeypatch):
    """Its import takes 3 s, more than most shapes."""
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    peers.release()
    assert "torch" not in sys.modules


@pytest.mark.parametrize("d", [48, 8])
def test_the_triton_peer_refuses_what_it_does_not_support(monkeypatch, d):
    for name in ("torch", "triton", "triton.language"):
        monkeypatch.setitem(sys.modules, name, MagicMock())
    attend = runpy.run_path(peers.__file__.replace("peers.py", "peer_triton.py"))["attend"]
    tensors = [SimpleNamespace(shape=(1, 1, 100, n), new_empty=MagicMock(), stride=lambda: (1,) * 4) for n in (d, 64)]
    with pytest.raises(RuntimeError, match="d a power of two"):
        attend(*tensors[:1] * 3)
    attend(*tensors[1:] * 3)
