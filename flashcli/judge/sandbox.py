"""The place where a submission runs: a clean environment, a folder of its own, limits, containment; and a sandbox if
the rules say so.

Without one, all this keeps mistakes from spoiling a judging, and no process outlives its run; but the program runs as
the judging user, and can read and write what that user can.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from flashcli.errors import BackendUnavailable
from flashcli.judge.rules import Rules
from flashcli.judge.supervision import Finished, Request, Supervision
from flashcli.judge.texts import last_line, printable

# Where programs, libraries and GPUs are. Everything else (tokens, ssh agents, PYTHONPATH...) stays with the judge.
PASSED_ON = (
    "PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ", "CUDA_HOME", "CUDA_PATH", "NVCC",
    "CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "OMP_NUM_THREADS",
)  # fmt: skip

# Prints "gpu" or "cpu" and its name. Times must never be compared across different ones.
WHERE = """
gpu=${CUDA_VISIBLE_DEVICES-0}; gpu=${gpu%%,*}
[ -n "$gpu" ] && name=$(nvidia-smi --id="$gpu" --query-gpu=name --format=csv,noheader 2>/dev/null) &&
    [ -n "$name" ] && { echo "gpu $name"; exit; }
name=$(sed -n 's/^model name[^:]*: *//p' /proc/cpuinfo | head -n 1)
echo "cpu ${name:-$(uname -m)}"
"""
SANDBOX_SECONDS = 60.0  # seconds that this may take


def environment(folder: Path, rules: Rules) -> dict[str, str]:
    """The clean environment of a program whose own folder is ``folder``."""
    passed_on = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED_ON or (rules.launcher and name.startswith("SLURM_"))  # srun finds its allocation by them
    }
    own = {"HOME": str(folder), "TMPDIR": str(folder), "PWD": str(folder), "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return {"PATH": os.defpath, "LANG": "C.UTF-8"} | passed_on | own | rules.environment


def confined(
    supervision: Supervision,
    command: list[str],
    folder: Path,
    rules: Rules,
    time_limit: float,
    output_bytes: int = 0,
    own: Sequence[Path] = (),
    began: Callable[[], None] = lambda: None,
) -> Finished:
    """Run a command in a folder of its own, behind the launcher if the rules have one. OSError if it cannot start."""
    request = Request(
        command, str(folder), environment(folder, rules), time_limit, rules.grace, rules.processes,
        {"core": 0, "fsize": rules.file_size + output_bytes, "as": rules.memory}, rules.containment, rules.sandbox,
        list(map(str, own)), rules.readable,
    )  # fmt: skip
    return supervision.run(request, rules.launcher, began)


def trusted(
    supervision: Supervision,
    command: list[str],
    rules: Rules,
    time_limit: float,
    extra: dict[str, str] | None = None,
    began: Callable[[], None] = lambda: None,
) -> Finished:
    """Run a command of our own: contained, but without limits, in the judge's environment and what is ``extra``."""
    request = Request(command, None, os.environ | (extra or {}), time_limit, rules.grace, containment=rules.containment)
    return supervision.run(request, rules.launcher, began)


def means() -> tuple[str, bool]:
    """How processes can be contained on this machine, and whether there is a sandbox."""
    with Supervision() as supervision:
        nothing = Request(["/bin/sh", "-c", ":"], "/", {"PATH": os.environ.get("PATH", os.defpath)}, SANDBOX_SECONDS)
        containment = supervision.run(nothing).containment
        nothing.sandbox, nothing.folder = "bwrap", tempfile.gettempdir()
        try:
            sandboxed = supervision.run(nothing).returncode == 0
        except OSError:
            sandboxed = False
    return containment, sandboxed


class Machine(NamedTuple):
    """Where programs run: the GPU's name, else the CPU's; and what holds their processes together."""

    device: str
    is_gpu: bool
    containment: str


def find_machine(supervision: Supervision, rules: Rules, folder: Path) -> Machine:
    """Find the machine where programs run, behind the launcher and in the sandbox. BackendUnavailable if that fails."""
    if rules.launcher and not shutil.which(rules.launcher[0]):
        raise BackendUnavailable(
            f"the rules' launcher {rules.launcher[0]!r} is not on this machine.",
            "judge where it is, or change the rules.",
        )
    request = Request(
        ["/bin/sh", "-c", WHERE], str(folder), dict(os.environ), SANDBOX_SECONDS, 1.0, containment=rules.containment,
        sandbox=rules.sandbox, readable=rules.readable,
    )  # fmt: skip
    try:
        found = supervision.run(request, rules.launcher)
    except OSError as error:
        found = Finished(0.0, 127, "", (error.strerror or str(error)).lower(), "")
    if rules.sandbox and found.returncode:
        hint = "install bubblewrap, allow user namespaces, or judge without a sandbox."
        if "Can't find source path" in found.printed:
            hint = "correct readable in the rules."
        raise BackendUnavailable(f"the sandbox {rules.sandbox!r} does not work{last_line(found.printed)}.", hint)
    kind, _, name = found.printed.partition("\n")[0].partition(" ")
    if kind not in ("gpu", "cpu"):
        return Machine("unknown", False, found.containment)
    return Machine(printable(name), kind == "gpu", found.containment)
