"""On a real Slurm of two nodes: the lines that the guide shows, several tasks, their ends, and judging."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from cluster import CRASHED, OLD, Cluster, finish, wait_for
from support import ROOT, THOROUGH, flashcli, leftovers, python_path, random_qkv, script, write_input

CPU = "--backend cpu"
# Open MPI ends rank 0 at once if it hears of the other's end before Slurm asks rank 0 to end; then nobody clears up.
ENDED_BY_MPI = "task 0: Exited with exit code 14"


def line_of(page: str) -> str:
    """The line with srun that a page shows."""
    [line] = re.findall(r"\bsrun .*?flashcli run in out\b", (ROOT / page).read_text())
    return line


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With an input, and with what one process makes of it."""
    write_input(tmp_path / "in", random_qkv(24, 60, 32))
    assert flashcli("run", "in", "one.out", *CPU.split(), cwd=tmp_path).code == 0
    return tmp_path


def assert_untouched(folder: Path) -> None:
    assert (folder / "out").read_bytes() == OLD and not leftovers(folder)


# The guide


def test_the_line_for_one_gpu(cluster: Cluster, folder):
    done = cluster.run(f"{line_of('README.md')} {CPU}", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert (folder / "out").read_bytes() == (folder / "one.out").read_bytes()


def test_the_line_for_two_nodes_writes_the_bytes_of_one_process(cluster: Cluster, mpi, folder):
    done = cluster.run(f"{line_of('docs/several-gpus.md')} {CPU}", cwd=folder)
    assert (done.code, done.err) == (0, "")
    assert (folder / "out").read_bytes() == (folder / "one.out").read_bytes()
    ranks = re.findall(r"^(\d) +(n\d) ", done.out, re.MULTILINE)
    assert ranks == [(str(rank), "n1" if rank < 4 else "n2") for rank in range(8)]


# Refusals


def test_tasks_that_cannot_find_each_other_are_refused_once(cluster: Cluster, folder):
    done = cluster.run(f"srun -N2 -n2 --mpi=none flashcli run in out {CPU}", cwd=folder)
    assert done.code == 69
    assert done.err.count("Error: srun started 2 tasks") == done.err.count("Hint: srun --mpi=pmix for Open MPI") == 1
    assert not (folder / "out").exists()


def test_tasks_on_different_inputs_are_refused(cluster: Cluster, mpi, folder):
    write_input(folder / "other", random_qkv(24, 60, 32, seed=1))
    (folder / "out").write_bytes(OLD)
    line = f"exec flashcli run $([ $SLURM_PROCID = 1 ] && echo other || echo in) out {CPU}"
    done = cluster.run(f"srun -N2 -n2 -K --mpi=pmix sh -c {shlex.quote(line)}", cwd=folder)
    assert done.code == 65 and "Error: 'other' holds other values on rank 1 than on rank 0.\n" in done.err
    assert "Where: rank 1 on n2.\n" in done.err
    assert_untouched(folder)


# Ends


def test_a_rank_that_is_killed_ends_all(cluster: Cluster, mpi, tmp_path):
    line = cluster.slow_run(tmp_path, "if rank == 1: os.preadv = lambda *args: os.kill(os.getpid(), signal.SIGKILL)")
    done = cluster.run(f"srun -N2 -n2 -K --mpi=pmix {line}", cwd=tmp_path)
    assert done.code != 0 and "Total Time" not in done.out
    assert (tmp_path / "out").read_bytes() == OLD
    if ENDED_BY_MPI not in done.err:
        assert_untouched(tmp_path)


def test_a_job_that_is_cancelled_leaves_nothing(cluster: Cluster, mpi, tmp_path):
    begun = [tmp_path / f"begun.{rank}" for rank in (0, 1)]

    def cancel(process: subprocess.Popen) -> None:
        wait_for(lambda: (leftovers(tmp_path) and all(map(Path.exists, begun))) or process.poll() is not None)
        assert cluster.run("scancel --name=cancel").code == 0

    line = f"srun -N2 -n2 --mpi=pmix --job-name=cancel {cluster.slow_run(tmp_path)}"
    done = cluster.run(line, cwd=tmp_path, meanwhile=cancel)
    assert done.code != 0 and "terminated; nothing is left half-written." in done.err
    assert_untouched(tmp_path)


# Judging

SUBMISSION = f"""#!/bin/sh
echo $CUDA_VISIBLE_DEVICES on $(uname -n) >>NOTES
PYTHONPATH={shlex.quote(python_path())} exec {shlex.quote(sys.executable)} -m flashcli run {CPU} -- "$@"
"""


@pytest.fixture
def submissions(tmp_path: Path) -> Path:
    """A folder with cases/ and three submissions: alice's is right, bob's wrong, and carol's ends never."""
    (tmp_path / "cases").mkdir()
    write_input(tmp_path / "cases" / "c1.in", random_qkv(2, 30, 8))
    programs = {
        "alice": SUBMISSION.replace("NOTES", f"{tmp_path}/notes"),
        "bob": '#!/bin/sh\ncat "$1" >"$2"\n',
        "carol": "#!/bin/sh\nexec sleep 1000\n",
    }
    for name, text in programs.items():
        (tmp_path / name).mkdir()
        script(tmp_path / name / "hw4", text)
    return tmp_path


def test_an_array_job_judges_one_submission_a_task(cluster: Cluster, submissions):
    judge = "flashcli judge cases --exe $name/hw4 --results $name.jsonl"
    choose = "name=$([ $SLURM_ARRAY_TASK_ID = 0 ] && echo alice || echo bob)"
    script(submissions / "job", f"#!/bin/sh\n{choose}\n{judge}\n")
    assert cluster.run("sbatch --wait --array=0-1 --gres=gpu:1 --output=log-%a job", cwd=submissions).code == 1
    assert "1 of 1 accepted" in (submissions / "log-0").read_text()
    assert "0 of 1 accepted" in (submissions / "log-1").read_text()
    board = flashcli("scoreboard", "alice.jsonl", "bob.jsonl", cwd=submissions).out
    ranked = re.findall(r"^([\d-]) +(\w+)/hw4 +(\d of \d) ", board, re.MULTILINE)
    assert ranked == [("1", "alice", "1 of 1"), ("-", "bob", "0 of 1")]


def test_a_judge_sends_submissions_to_a_node(cluster: Cluster, submissions):
    launcher = 'launcher = ["srun", "-N1", "-n1", "--gres=gpu:1"]'
    (submissions / "rules.toml").write_text(f'cases = "cases"\ntime_limit = 2\ngrace = 0.2\n{launcher}\n')
    done = cluster.run("flashcli judge rules.toml --exe alice/hw4 --exe carol/hw4", cwd=submissions)
    assert done.code == 1
    assert "alice/hw4  accepted\n" in done.out and "carol/hw4  time limit exceeded" in done.out
    [place] = set((submissions / "notes").read_text().splitlines())
    assert place in ("0 on n1", "0 on n2")  # the other node may still clean up after another test's job
    queue = cluster.run("squeue --noheader --format=%i").out.split()
    assert set(queue) <= {cluster.late_job}


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_a_judge_that_is_ended_gives_the_node_back(cluster: Cluster, submissions, number):
    launcher = 'launcher = ["srun", "-N1", "-n1", "--gres=gpu:1"]'
    (submissions / "rules.toml").write_text(f'cases = "cases"\ntime_limit = 60\n{launcher}\n')
    judge = cluster.start("flashcli judge rules.toml --exe carol/hw4", cwd=submissions)

    def running() -> bool:
        return "flashcli-" in cluster.run("squeue --noheader --states=running --format=%j").out

    wait_for(running)
    judge.send_signal(number)
    finish(judge)
    wait_for(lambda: not running(), seconds=15)


# The last, because Slurm looks at limits every half minute only


@pytest.mark.skipif(not THOROUGH, reason="Slurm looks at time limits every half minute: CI waits for that")
def test_a_job_beyond_its_time_limit_leaves_nothing(cluster: Cluster, mpi):
    wait_for(lambda: cluster.state(cluster.late_job) not in ("RUNNING", "COMPLETING", "PENDING"), seconds=150)
    folder = cluster.folder / "late"
    log = (folder / "log").read_text()
    if CRASHED in log:
        pytest.skip("Open MPI has crashed, as it does in one of some hundred launches")
    assert cluster.state(cluster.late_job) == "TIMEOUT", log
    assert "terminated; nothing is left half-written." in log
    assert_untouched(folder)
