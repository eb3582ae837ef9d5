"""What a submission gets to run in: a clean environment, a folder of its own, and resource limits.

It keeps mistakes from spoiling a judging. It is no sandbox against an attacker: the program runs as the judging user,
and can read and write what that user can. For that, put a real one (bwrap, a container, Slurm) into ``launcher``.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import subprocess
from pathlib import Path

from flashcli.errors import BackendUnavailable
from flashcli.judge.processes import Finished, execute, tasks_of_user
from flashcli.judge.rules import Rules

# Where programs, libraries and GPUs are. Everything else (tokens, ssh agents, PYTHONPATH...) stays with the judge.
PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "CUDA_HOME", "CUDA_PATH", "NVCC",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
)  # fmt: skip


def environment(folder: Path, rules: Rules) -> dict[str, str]:
    """The clean environment of a program whose own folder is ``folder``."""
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or (rules.launcher and name.startswith("SLURM_"))  # srun finds its allocation by them
    }
    own = {"HOME": str(folder), "TMPDIR": str(folder), "PWD": str(folder), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"PATH": os.defpath, "LANG": "C.UTF-8"} | passed_on | own | rules.environment


def confined(command: list[str], folder: Path, rules: Rules, time_limit: float, output_bytes: int = 0) -> Finished:
    """Run a command in a folder of its own, behind the launcher if the rules have one. OSError if it cannot start."""
    limits = {"core": 0, "fsize": rules.file_size + output_bytes, "as": rules.memory}
    if not rules.launcher:  # with one, the program runs on another machine: what follows is about this one
        limits["cpu"] = math.ceil(time_limit + rules.grace) * (os.cpu_count() or 1)
        limits["nproc"] = 2 * rules.processes + tasks_of_user()  # a wall behind the bound that `execute` watches
    return execute(
        [*rules.launcher, *prlimit(limits), *command], folder, environment(folder, rules), time_limit, rules.grace,
        rules.processes,
    )  # fmt: skip


def prlimit(limits: dict[str, int | None]) -> list[str]:
    """A command prefix (util-linux) that sets resource limits, none above what the system allows.

    Not Popen's preexec_fn: that is unsafe beside NumPy's threads, and forking this large process takes 5 ms.
    """
    if not shutil.which("prlimit"):
        return []
    words = ["prlimit"]
    for name, value in limits.items():
        if value is not None:
            _, most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
            words.append(f"--{name}={value if most == resource.RLIM_INFINITY else min(value, most)}")
    return [*words, "--"]


def check_launcher(launcher: tuple[str, ...]) -> None:
    if launcher and not shutil.which(launcher[0]):
        raise BackendUnavailable(
            f"the rules' launcher {launcher[0]!r} is not on this machine.", "judge where it is, or change the rules."
        )


def device_name(rules: Rules) -> str:
    """Where programs run, which is what times must never be compared across: the GPU's name, else the CPU's."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").partition(",")[0]
    query = ["nvidia-smi", f"--id={gpu}", "--query-gpu=name", "--format=csv,noheader"]
    if gpu and (name := _printed([*rules.launcher, *query])):
        return name
    info = _printed([*rules.launcher, "cat", "/proc/cpuinfo"], lines=None)
    names = [line.partition(":")[2].strip() for line in info.splitlines() if line.startswith("model name")]
    return names[0] if names else _printed([*rules.launcher, "uname", "-m"]) or "unknown"


def _printed(command: list[str], lines: int | None = 1) -> str:
    """What a command prints, or "" if it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
    return "\n".join(run.stdout.strip().splitlines()[:lines])


def remove(folder: Path) -> None:
    """rm, for it gets through any depth of folders that a program may have made; what it cannot remove stays."""
    subprocess.run(["rm", "-rf", "--", folder], stderr=subprocess.DEVNULL, check=False)
