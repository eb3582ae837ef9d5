"""flashcli as a submission to such a judge: an executable `hw4`, run as `./hw4 IN OUT`, and a Makefile for it."""

from __future__ import annotations

import contextlib
import shlex
import site
import sys
from pathlib import Path

from flashcli.errors import CannotCreate, UsageError, explained
from flashcli.files.outputs import AtomicFile
from flashcli.judge.submissions import python_path

# Between them they need every build that the thirty cases need, on any Hopper GPU; a test holds them to it.
WARM_UP = [f"{shape},{d}" for d in (32, 64) for shape in ("2,128", "2,512", "80,1024", "1,16384")]

PROGRAM = """\
#!/bin/sh
# flashcli as the homework's program: ./hw4 IN OUT
# A judge may run this with another HOME, so what Python and nvcc's results are found by is named here.
folder=$(CDPATH= cd -- "$(dirname -- "$0")" && pwd)
export FLASHCLI_CACHE_DIR="$folder/cache" PYTHONUSERBASE={base} PYTHONPATH={path}
exec {python} -P -m flashcli run {options}-- "$@"
"""

MAKEFILE = """\
# make hw4: compile the kernels that cases of the course's shapes need, so that no judged run has to wait for nvcc.
# Where there is no GPU, there is nothing to compile; hw4 itself needs no making.
.PHONY: hw4
hw4:
\tchmod +x hw4
\tset -e; for shape in {shapes}; do \\
\t    PYTHONPATH={path} {python} -P -m flashcli generate .warm.in --force --shape $$shape; \\
\t    ./hw4 .warm.in .warm.out || {{ echo "hw4 does not run on this machine; it may on the judge's."; break; }}; \\
\tdone
\trm -f .warm.in .warm.out
"""


def export(folder: Path, backend: str, kernel: str | None) -> list[Path]:
    """Write hw4 and its Makefile; files of others are not overwritten. Returns what was written."""
    options = "".join(f"--{name} {value} " for name, value in {"backend": backend, "kernel": kernel}.items() if value)
    values = {
        "shapes": " ".join(WARM_UP),
        "python": shlex.quote(sys.executable),
        "path": shlex.quote(python_path()),
        "base": shlex.quote(site.getuserbase()),
    }
    contents = {
        "hw4": PROGRAM.format(options=options, **values),
        "Makefile": MAKEFILE.format(**{name: text.replace("$", "$$") for name, text in values.items()}),
    }
    with explained("create", folder, CannotCreate):
        folder.mkdir(parents=True, exist_ok=True)
    for name in contents:
        if (folder / name).exists():
            raise UsageError(f"{str(folder / name)!r} is there already.", "name a new folder.")
    with contextlib.ExitStack() as stack:
        files = [stack.enter_context(AtomicFile(folder / name)) for name in contents]
        for file, content in zip(files, contents.values(), strict=True):
            file.write_at(0, memoryview(content.encode()))
        for file in files:  # none before all are whole
            file.commit()
    with explained("write", folder / "hw4", CannotCreate):
        (folder / "hw4").chmod(0o755)
    return [folder / name for name in contents]
