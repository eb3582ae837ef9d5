"""Several GPUs of one machine: the same bytes as from one, and one outcome. The GPUs compute in NumPy, except for the
tests marked gpu."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import threading
import time

import numpy as np
import pytest
from support import SOON, command, environment, flashcli, leftovers, random_qkv, write_input

from flashcli.__main__ import prepare_run
from flashcli.asked.shape import TILE
from flashcli.errors import Stopped
from flashcli.gpu import warm_up
from flashcli.gpu.pycuda import devices
from flashcli.run import launchers, pipeline
from flashcli.run.request import Request
from flashcli.run.slots_cpu import CpuBackend
from flashcli.run.threads import together

SHORT = random_qkv(40, 60, 32)
LONG = random_qkv(3, 2 * TILE + 100, 32)
KERNEL = ["--kernel", "q_in_registers"]


@pytest.fixture
def gpus(fake_gpu, monkeypatch):
    monkeypatch.setenv("FAKE_GPU_COUNT", "4")
    return fake_gpu


@pytest.fixture
def given(tmp_path):
    return write_input(tmp_path / "x.in", SHORT)


@pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])
@pytest.mark.parametrize(("chosen", "count"), [("all", 4), ("0,2", 2), ("3,1,0", 3)])
@pytest.mark.parametrize("qkv", [SHORT, LONG, LONG[:1]], ids=["batches", "rows", "one batch"])
def test_the_bytes_are_those_of_one_device(gpus, tmp_path, out, qkv, chosen, count, causal):
    given, one = write_input(tmp_path / "x.in", qkv), tmp_path / "one.out"
    assert flashcli("run", given, one, *KERNEL, *causal).code == 0
    done = flashcli("run", given, out, *KERNEL, *causal, "--devices", chosen, "--json", "-")
    assert (done.code, done.err) == (0, "")
    assert out.read_bytes() == one.read_bytes()
    record = json.loads(done.out)
    assert [part["gpu"] for part in record["devices"]] == (
        list(range(4)) if chosen == "all" else [int(number) for number in chosen.split(",")]
    )
    assert len({part["bus"] for part in record["devices"]}) == count
    assert sum(part["rows"] for part in record["devices"]) == qkv.shape[0] * qkv.shape[2]
    assert max(part["kernel_seconds"] for part in record["devices"]) <= record["kernel_seconds"]


def test_all_devices_get_the_tiles_that_one_would(monkeypatch, tmp_path, out):
    given, asked = write_input(tmp_path / "x.in", random_qkv(10, TILE + 1, 8)), []  # three cut it by rows, one does not

    def opened(request, shape, rows, notice):
        asked.append((shape, rows))
        return CpuBackend(threads=1)

    monkeypatch.setattr(pipeline, "open_backend", opened)
    for chosen in ((), (0, 1, 2)):
        pipeline.run(pipeline.Order(str(given), str(out), Request(), chosen))
    assert len(asked) == 4 and len(set(asked)) == 1


def test_more_devices_than_work(gpus, tmp_path, out):
    given = write_input(tmp_path / "x.in", SHORT[:1])
    done = flashcli("run", given, out, *KERNEL, "--devices", "all", "--json", "-")
    assert done.code == 0
    assert sorted(part["rows"] for part in json.loads(done.out)["devices"]) == [0, 0, 0, 60]


def test_the_report_has_a_line_for_each(gpus, given, out):
    lines = flashcli("run", given, out, *KERNEL, "--devices", "0,1").out.splitlines()
    assert lines[5] == "backend: cuda, Fake GPU (sm_80), kernel q_in_registers (Br=128, Bc=64)"
    assert lines[7].split() == [
        "gpu", "device", "bus", "first", "row", "rows", "input", "computation", "output", "kernel", "seconds"
    ]  # fmt: skip
    for line, index in zip(lines[8:10], (0, 1), strict=True):
        assert re.fullmatch(rf"{index} +Fake GPU +0000:0{index}:00.0 +{1200 * index} +1200( +\d+\.\d\d\d){{4}}", line)
    assert re.fullmatch(r"slowest: gpu \d, \d\.\d{3} s; fastest: gpu \d, \d\.\d{3} s; imbalance: \d+\.\d%", lines[10])


def test_one_device_of_several_is_an_ordinary_run(gpus, given, out):
    plain, named = (
        json.loads(flashcli("run", given, out, *KERNEL, *extra, "--json", "-").out)
        for extra in ([], ["--devices", "2"])
    )
    assert plain.keys() == named.keys()
    assert (plain["bus"], named["bus"]) == ("0000:00:00.0", "0000:02:00.0")


def test_a_trace_has_a_group_of_tracks_for_each(gpus, given, out, tmp_path):
    trace = tmp_path / "trace.json"
    flashcli("run", given, out, *KERNEL, "--devices", "0,3", "--trace", trace)
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {"GPU 0", "GPU 3"}


def test_one_warning_whatever_the_device_that_finds_it(gpus, tmp_path, out):
    spoilt = SHORT.copy()
    spoilt[[9, 30], 1, 5, 3] = np.nan
    given = write_input(tmp_path / "x.in", spoilt)
    done = flashcli("run", given, out, *KERNEL, "--devices", "all")
    assert done.code == 0
    assert done.err.count("\n") == 1 and "first nan in K at (batch, row, column) = (9, 5, 3)" in done.err


@pytest.mark.parametrize(("step", "code"), [("context", 69), ("load", 70), ("launch", 70)])
def test_when_one_fails_all_end_and_nothing_is_left(gpus, monkeypatch, given, out, step, code):
    out.write_text("old")
    monkeypatch.setenv("FAKE_GPU_FAILS", f"{step}@2")
    done = flashcli("run", given, out, *KERNEL, "--devices", "all")
    done.assert_error(code, f"fake failure of {step}.")
    assert done.err.splitlines()[-1] == "Where: GPU 2."
    assert out.read_text() == "old" and not leftovers(out.parent)


def test_a_device_that_is_not_there(gpus, given, out):
    flashcli("run", given, out, "--devices", "0,4").assert_error(69, "GPU 4 does not exist: the last of 4 is number 3.")


def test_too_little_memory_on_every_device_splits_the_batches(gpus, monkeypatch, given, out, tmp_path):
    one = tmp_path / "one.out"
    flashcli("run", given, one, *KERNEL)
    monkeypatch.setenv("FAKE_GPU_BYTES", str(3 * 4 * SHORT[0, 0].nbytes))  # enough for three batches
    assert flashcli("run", given, out, *KERNEL, "--devices", "0,1").code == 0
    assert out.read_bytes() == one.read_bytes()


def test_a_limit_on_memory_holds_for_each(gpus, given, out):
    done = flashcli("run", given, out, *KERNEL, "--devices", "0,1", "--max-device-memory", "1K")
    done.assert_error(71, "one batch of N = 60, d = 32 needs")


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_all_and_leaves_nothing(gpus, monkeypatch, tmp_path, out, number, code):
    monkeypatch.setenv("FAKE_GPU_PAUSE", "0.3")
    given = write_input(tmp_path / "x.in", random_qkv(40, 400, 128))
    process = subprocess.Popen(
        command("run", given, out, *KERNEL, "--devices", "0,1"), env=environment(), stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )  # fmt: skip
    while process.poll() is None and not any((out.parent / name).stat().st_size for name in leftovers(out.parent)):
        time.sleep(0.01)
    process.send_signal(number)
    start = time.monotonic()
    _, stderr = process.communicate(timeout=2 * SOON)
    assert time.monotonic() - start < SOON
    assert process.returncode == code
    assert stderr.decode().endswith("; nothing is left half-written.\n")
    assert not os.listdir(out.parent)


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--devices", "0,1", "--device", "0"], "--device and --devices were both given."),
        (["--devices", "all", "--backend", "cpu"], "--devices is for GPUs, not for the cpu backend."),
    ],
)
def test_what_does_not_go_together(gpus, given, out, options, complaint):
    flashcli("run", given, out, *options).assert_error(2, complaint)
    assert not out.exists()


@pytest.mark.parametrize("value", ["", "0,", "0,0", "0,00", "-1", "every", "0 1"])
def test_what_is_no_list_of_devices(given, out, value):
    done = flashcli("run", given, out, "--devices", value)
    assert done.code == 2 and "neither 'all' nor different numbers of GPUs" in done.err


def test_all_of_none(gpus, monkeypatch, given, out):
    monkeypatch.setenv("FAKE_GPU_COUNT", "0")
    flashcli("run", given, out, "--devices", "all").assert_error(69, "there is no GPU.")


def test_what_cannot_seek_is_for_one_device(gpus, given, out):
    os.mkfifo(out)
    reader = threading.Thread(target=out.read_bytes)
    reader.start()
    flashcli("run", given, out, *KERNEL, "--devices", "0,1").assert_error(2, "it cannot seek")
    reader.join(timeout=SOON)
    assert flashcli("run", given, "/dev/null", *KERNEL, "--devices", "0,1").code == 0


@pytest.mark.parametrize(
    ("arguments", "environment", "count", "expected"),
    [
        ([], {}, 4, [0]),
        (["--device", "2"], {}, 4, [2]),
        (["--devices=0,3"], {}, 4, [0, 3]),
        (["--devices", "all"], {}, 3, [0, 1, 2]),
        (["--devices", "nonsense"], {}, 3, []),
        ([], {"OMPI_COMM_WORLD_SIZE": "8", "OMPI_COMM_WORLD_LOCAL_RANK": "5"}, 4, [1]),
        ([], {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}, 4, [3]),
        ([], {"PMI_SIZE": "8"}, 4, []),
        ([], {"SLURM_STEP_NUM_TASKS": "8", "SLURM_LOCALID": "3"}, 0, []),
    ],
)
def test_the_contexts_that_start_early_are_those_needed(arguments, environment, count, expected):
    assert list(launchers.devices_wanted(["x.in", "x.out", *arguments], environment, count)) == expected


@pytest.mark.parametrize(
    ("arguments", "begun"),
    [([], True), (["--backend", "cuda"], True), (["--backend", "cpu"], False), (["--kernel=sequential"], False)],
)
@pytest.mark.parametrize("queues", ["", "4"])
def test_what_a_run_begins_with(monkeypatch, arguments, begun, queues):
    chosen, started = {"CUDA_DEVICE_MAX_CONNECTIONS": queues} if queues else {}, []
    monkeypatch.setattr(os, "environ", chosen)
    monkeypatch.setattr(warm_up, "warm_up", started.append)
    prepare_run(["x.in", "x.out", *arguments])
    assert chosen == {"CUDA_DEVICE_MAX_CONNECTIONS": queues or "1"}
    assert len(started) == begun


@pytest.mark.parametrize("trace", [["--trace", "x.json"], ["--trace=x.json"]])
def test_a_trace_has_as_many_queues_as_the_driver_makes(monkeypatch, trace):
    """Events after copies would hold up what is behind them in a single one."""
    monkeypatch.setattr(os, "environ", chosen := dict[str, str]())
    prepare_run(["x.in", "x.out", "--backend=cpu", *trace])
    assert chosen == {}


# Threads that stop together


def test_results_come_in_the_order_of_the_jobs():
    assert together([lambda check, n=n: time.sleep(0.02 * (3 - n)) or n for n in range(3)]) == [0, 1, 2]


def test_the_first_error_stops_the_others():
    ended = []

    def patient(check):
        try:
            while True:
                check()
                time.sleep(0.001)
        except Stopped:
            ended.append(True)
            raise

    def hasty(check):
        time.sleep(0.01)
        raise ZeroDivisionError("first")

    with pytest.raises(ZeroDivisionError, match="first"):
        together([patient, hasty, patient])
    assert ended == [True, True]


# On real GPUs


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(40, 200, 64), (3, 5000, 64), (1, 20000, 64), (2, 3000, 40)])
def test_all_real_gpus_give_the_bytes_of_one(gpu, tmp_path, out, shape, causal):
    if len(devices()) < 2:
        pytest.skip("one GPU only")
    given, one = write_input(tmp_path / "x.in", random_qkv(*shape)), tmp_path / "one.out"
    assert flashcli("run", given, one, "--backend", "cuda", *causal).code == 0
    done = flashcli("run", given, out, "--devices", "all", *causal)
    assert (done.code, done.err) == (0, "")
    assert out.read_bytes() == one.read_bytes()
