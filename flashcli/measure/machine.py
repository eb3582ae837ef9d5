"""The machine: its GPUs, and what a record must say of it so that others can repeat the measurement."""

from __future__ import annotations

import datetime
import os
import platform
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np

from flashcli import __version__
from flashcli.cpu.workers import blas_text
from flashcli.errors import BackendUnavailable
from flashcli.gpu.pycuda import Gpu

PACKAGES = ("torch", "triton", "transformers")  # whose versions are told where they were used


def gpus() -> list[Gpu]:
    """The GPUs that this process can use; BackendUnavailable if there is none."""
    from flashcli.gpu import pycuda as session

    if not (found := session.devices()):
        raise BackendUnavailable("the driver finds no GPU.", "is one allocated to this job?")
    return found


def pytorchs_gpu() -> Gpu:
    """The GPU that PyTorch, which is installed, takes first; BackendUnavailable if it finds none."""
    import torch

    if not torch.cuda.is_available():
        raise BackendUnavailable("PyTorch finds no GPU.", "is one allocated to this job?")
    found = torch.cuda.get_device_properties(0)
    return Gpu(found.name, (found.major, found.minor), found.total_memory)


def circumstances() -> dict[str, object]:
    """When and how something was measured, and by which versions."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": repeatable(sys.argv[1:]),
        "commit": os.environ.get("FLASHCLI_COMMIT")
        or _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12"),
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": _cpu_name(),
        **{name: sys.modules[name].__version__ for name in PACKAGES if hasattr(sys.modules.get(name), "__version__")},
    }


def repeatable(arguments: list[str]) -> str:
    """The command line, as a shell reads it, without the files that results went to."""
    return re.sub(
        r" --(json|csv|markdown|plot|trace)([ =](?!--)('[^']*'|\S+))?", "", shlex.join(["flashcli", *arguments])
    )


def cpu_circumstances(threads: int) -> dict[str, object]:
    return {"threads": threads, "blas": blas_text()}


def gpu_circumstances() -> dict[str, object]:
    """Circumstances: the first GPU and its driver; BackendUnavailable if there is none."""
    from flashcli.gpu import pycuda as session

    return _of_gpu(gpus()[0], session.load_driver().get_driver_version())


def pytorchs_circumstances(backend: str) -> dict[str, object]:
    """Circumstances of what PyTorch computes on a GPU, "cuda", or on the "cpu"; without PyCUDA."""
    import torch

    from flashcli.gpu import driver

    if backend == "cuda":
        return _of_gpu(pytorchs_gpu(), driver.cuda_version())
    return cpu_circumstances(torch.get_num_threads())


def _of_gpu(gpu: Gpu, version: int) -> dict[str, object]:
    return {
        "gpu": gpu.name,
        "compute_capability": "{}.{}".format(*gpu.capability),
        "memory_gib": round(gpu.memory / 2**30),
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
        "driver": _driver_version(),
    }


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_line(*command: str) -> str:
    """The first line that a command prints, if it is installed and has something to say."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return (result.stdout.splitlines() or ["unknown"])[0].strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
