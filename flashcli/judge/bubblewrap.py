"""A sandbox by bubblewrap (bwrap): what a submission sees of the machine, and that it sees no more.

Python's own modules only: the supervisor calls it, on the machine where the command runs.
"""

from __future__ import annotations

import glob
import os
from collections.abc import Mapping

SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/opt", "/sys")
# Names in /etc by which programs find libraries and the names of users; nothing that is meant for few eyes.
SETTINGS = (
    "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "alternatives", "passwd", "group", "nsswitch.conf", "localtime",
    "OpenCL", "nvidia-container-runtime",
)  # fmt: skip
DEVICES = ("/dev/nvidia*", "/dev/dri", "/dev/kfd")  # of GPUs
TOOLKITS = ("CUDA_HOME", "CUDA_PATH", "LD_LIBRARY_PATH")  # variables that name folders outside of `SYSTEM`


def command(folder: str, own: list[str], readable: list[str], environment: Mapping[str, str]) -> list[str]:
    """The words to put before a command, so that it can only write ``folder``, and read its ``own`` files, the rules'
    ``readable`` folders, the system and the GPU's toolkit.

    It has no network, sees no other process, and everything that it writes elsewhere is in memory and gone with it.
    """
    words = ["bwrap", "--unshare-all", "--cap-drop", "ALL", "--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp"]
    for place in SYSTEM:
        if os.path.islink(place):
            words += ["--symlink", os.readlink(place), place]
        else:
            words += ["--ro-bind-try", place, place]
    for place in [*(f"/etc/{name}" for name in SETTINGS), *_toolkits(environment, [folder, *own])]:
        words += ["--ro-bind-try", place, place]
    for place in sorted({name for pattern in DEVICES for name in glob.glob(pattern)}):
        words += ["--dev-bind-try", place, place]
    for place in [*readable, *own]:
        words += ["--ro-bind", place, place]
    return [*words, "--bind", folder, folder, "--chdir", folder, "--"]


def _toolkits(environment: Mapping[str, str], hidden: list[str]) -> list[str]:
    """The folders that the environment names for libraries, but for those that hold one of the ``hidden``."""
    named = ":".join(environment.get(name, "") for name in TOOLKITS).split(":")
    places = dict.fromkeys(os.path.realpath(place) for place in named if place.startswith("/"))
    return [place for place in places if not any(f"{path}/".startswith(f"{place.rstrip('/')}/") for path in hidden)]
