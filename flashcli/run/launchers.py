"""Variables that the launchers of MPI and Slurm set in the environment of each task that they start."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

# The number of tasks, as launchers tell each of them, the innermost launcher first. Not SLURM_NTASKS: a batch script
# has it too, which is no task of a step.
TASKS = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS")
CONNECTING = ("PMI", "PALS_")  # how names begin that PMI, PMI2, PMIx and Cray's PALS put into the environment
RANK = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "MV2_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
LOCAL_RANK = ("OMPI_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID", "MV2_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID")


def tasks(environment: Mapping[str, str]) -> int:
    """How many tasks the launcher has started; 1 without one, 0 if it does not say."""
    for name in TASKS:
        if environment.get(name, "").isdigit():
            return int(environment[name])
    return 0 if "PMIX_RANK" in environment else 1


def unconnected(environment: Mapping[str, str]) -> bool:
    """Whether Slurm started several tasks, and left out by what an MPI library finds the others of its launch."""
    by_slurm = not any(name in environment for name in TASKS[:-1])
    return by_slurm and tasks(environment) > 1 and not any(name.startswith(CONNECTING) for name in environment)


def rank(environment: Mapping[str, str]) -> int | None:
    """The number of this task among all, if the launcher says it."""
    return _first_number(environment, RANK)


def local_rank(environment: Mapping[str, str]) -> int | None:
    """The number of this task among those on its host, if the launcher says it."""
    return _first_number(environment, LOCAL_RANK)


def _first_number(environment: Mapping[str, str], names: Sequence[str]) -> int | None:
    found = (environment[name] for name in names if environment.get(name, "").isdigit())
    return next(map(int, found), None)


def devices_wanted(arguments: Sequence[str], environment: Mapping[str, str], count: int) -> Sequence[int]:
    """Which of ``count`` devices the command will use; none, if that is not certain."""
    for name, value in itertools.pairwise(" ".join(arguments).replace("=", " ").split()):
        if name in ("--device", "--devices"):
            return range(count) if value == "all" else [int(n) for n in value.split(",") if n.isdecimal()]
    if tasks(environment) == 1:
        return [0]
    turn = local_rank(environment)
    return [] if turn is None or count == 0 else [turn % count]
