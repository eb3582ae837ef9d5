"""What the launchers of MPI and Slurm tell each task that they start, in its environment, and what they leave it."""

from __future__ import annotations

import os
from collections.abc import Mapping

# The number of tasks, as launchers tell each of them, the innermost launcher first. Not SLURM_NTASKS: a batch script
# has it too, which is no task of a step.
TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def tasks(environment: Mapping[str, str]) -> int:
    """How many tasks the launcher has started; 1 without one, 0 if it does not say."""
    for name in TASKS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0 if "PMIX_RANK" in environment else 1


def local_rank(environment: Mapping[str, str]) -> int | None:
    """The number of this task among those on its host, if the launcher says it."""
    found = (environment[name] for name in LOCAL_RANK if environment.get(name, "").isdigit())
    return next(map(int, found), None)


def cores() -> frozenset[int]:
    """Those that this process may use: fewer than the machine's under a launcher, taskset or in a container."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(usable)
