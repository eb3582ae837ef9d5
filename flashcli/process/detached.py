"""Processes of Python on their own, which end neither with this one nor with its terminal."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any


def begin(arguments: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
    """Begin ``python ARGUMENTS`` with this process's modules, in a session of its own; OSError if it cannot be.

    Nobody reads what it says, but for what ``options`` of Popen say.
    """
    root = str(Path(__file__).parents[2])
    given: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
    given["env"] = {**os.environ, "PYTHONPATH": os.pathsep.join([root, *map(str, sys.path)])}
    return subprocess.Popen([sys.executable, "-P", *arguments], start_new_session=True, **(given | options))
