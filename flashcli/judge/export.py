"""flashcli as a submission to such a judge: an executable `hw4`, run as `./hw4 IN OUT`, and a Makefile for it."""

from __future__ import annotations

import os
import shlex
import site
import sys
from pathlib import Path

import flashcli
from flashcli.errors import CannotCreate, UsageError, explained

PROGRAM = """\
#!/bin/sh
# flashcli as the homework's program: ./hw4 IN OUT
# A judge may run this with another HOME, so what Python and nvcc's results are found by is named here.
folder=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
export FLASHCLI_CACHE_DIR="$folder/cache" PYTHONUSERBASE={base} PYTHONPATH={path}
exec {python} -m flashcli run {options}-- "$@"
"""

MAKEFILE = """\
# make hw4: compile the kernels that the course's cases need, so that no judged run has to wait for nvcc.
# Where there is no GPU, there is nothing to compile; hw4 itself needs no making.
.PHONY: hw4
hw4:
\tchmod +x hw4
\tset -e; for d in 32 64; do \\
\t    PYTHONPATH={path} {python} -m flashcli generate .warm.in --shape 2,128,$$d; \\
\t    ./hw4 .warm.in .warm.out || echo "hw4 does not run on this machine; it may on the judge's."; \\
\tdone
\trm -f .warm.in .warm.out
"""


def export(folder: Path, backend: str, kernel: str | None) -> list[Path]:
    """Write hw4 and its Makefile; files of others are not overwritten. Returns what was written."""
    options = "".join(f"--{name} {value} " for name, value in {"backend": backend, "kernel": kernel}.items() if value)
    path = [str(Path(flashcli.__file__).parent.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    found_by = {
        "python": shlex.quote(sys.executable),
        "path": shlex.quote(os.pathsep.join(path)),
        "base": shlex.quote(site.getuserbase()),
    }
    contents = {
        "hw4": PROGRAM.format(options=options, **found_by),
        "Makefile": MAKEFILE.format(**{name: text.replace("$", "$$") for name, text in found_by.items()}),
    }
    with explained("create", folder, CannotCreate):
        folder.mkdir(parents=True, exist_ok=True)
    for name in contents:
        if (folder / name).exists():
            raise UsageError(f"{str(folder / name)!r} is there already.", "name a new folder.")
    return [_write(folder / name, content) for name, content in contents.items()]


def _write(path: Path, content: str) -> Path:
    with explained("write", path, CannotCreate):
        path.write_text(content)
        path.chmod(0o755 if path.name == "hw4" else 0o644)
    return path
