"""What the tests ask of Slurm."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from support import ON_ONE_MACHINE, Finished, environment, flashcli_in, leftovers, random_qkv, script, write_input

# The command line with chunks of one batch, which take a second to read; {fault} can patch more. Each task leaves a
# file begun.RANK when it reads its first one: then it has done with the start of MPI, in which it had better not be
# stopped.
SLOW = """
import os, signal, sys, time
import flashcli.files.cut
flashcli.files.cut.CHUNK_BYTES = 1
rank = int(os.environ.get("PMIX_RANK", 0))
read = os.preadv
def slow(*args):
    open(f"begun.{{rank}}", "w").close()
    time.sleep(1)
    return read(*args)
os.preadv = slow
{fault}
from flashcli.cli import main
sys.exit(main())
"""
OLD = b"the old output"
CRASHED = "Signal: Segmentation fault"  # as Open MPI tells of it
Meanwhile = Callable[[subprocess.Popen], object]


class Cluster:
    late_job = ""  # the number of what takes too long, once it has begun

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "bin").mkdir()
        flashcli_in(folder / "bin")
        yielding = {"OMPI_MCA_mpi_yield_when_idle": "1"}  # there are more tasks than cores
        path = f"{folder}/bin:{os.environ['PATH']}"
        self._environment = environment(SLURM_CONF=str(folder / "slurm.conf"), PATH=path, **yielding, **ON_ONE_MACHINE)

    def start(self, line: str, cwd: Path | None = None) -> subprocess.Popen:
        pipe = subprocess.PIPE
        return subprocess.Popen(
            shlex.split(line), env=self._environment, cwd=cwd, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe
        )

    def run(self, line: str, cwd: Path | None = None, meanwhile: Meanwhile = lambda process: None) -> Finished:
        """What a command did; once more if it crashed, as Open MPI does in one of some hundred launches."""

        def once() -> Finished:
            process = self.start(line, cwd)
            meanwhile(process)
            return finish(process)

        done = once()
        if CRASHED not in done.err:
            return done
        for left in [*map(cwd.joinpath, leftovers(cwd)), *cwd.glob("begun.*")] if cwd else ():
            left.unlink()
        return once()

    def slow_run(self, folder: Path, fault: str = "") -> str:
        """A command line that takes minutes to compute an output that is there already, from an input in the folder."""
        folder.mkdir(exist_ok=True)
        write_input(folder / "in", random_qkv(400, 2, 4))
        (folder / "out").write_bytes(OLD)
        program = script(folder / "slow.py", SLOW.format(fault=fault))
        return f"{shlex.quote(sys.executable)} {program} run in out --backend cpu"

    def begin_what_takes_too_long(self) -> None:
        """A job that has as little time as a job can have; Slurm looks every half minute."""
        folder = self.folder / "late"
        begun = "until ls -A | grep -q tmp$; do sleep 0.1; done"
        too_late = "scontrol update JobId=$SLURM_JOB_ID EndTime=now"
        script(folder / "job", f"#!/bin/sh\nsrun --mpi=pmix {self.slow_run(folder)} &\n{begun}\n{too_late}\nwait\n")
        self.late_job = self.run("sbatch --parsable -N2 -n2 --time=1 --output=log job", cwd=folder).out.strip()

    def state(self, job: str) -> str:
        """Of a job, such as RUNNING."""
        return self.run(f"squeue --noheader --states=all --format=%T --jobs={job}").out.strip()


def finish(process: subprocess.Popen) -> Finished:
    out, err = (text.decode() for text in process.communicate(timeout=60))
    told = [line for line in err.splitlines(keepends=True) if not line.startswith("srun: job ")]  # is queued, is begun
    return Finished(process.returncode, out, "".join(told))


def wait_for(condition: Callable[[], object], seconds: float = 60) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)
