"""Kernels in a submission's program: what of a multiprocessor each needs, by cuobjdump where that is installed."""

from __future__ import annotations

import os
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from flashcli.judge.rules import Rules
from flashcli.judge.runnable import is_compiled
from flashcli.judge.sandbox import confined
from flashcli.judge.scratch import Scratch
from flashcli.judge.supervision import Supervision
from flashcli.judge.texts import printable
from flashcli.kernels.occupancy import MULTIPROCESSORS, occupancy

THREADS = 256  # of a block: a program says how many only when it launches a kernel, and so with dynamic shared memory
MOST = 40  # kernels of a program that are told of
LONGEST = 100  # signs of a name, which templates can make very long
SECONDS = 30.0
LOOK = 'if command -v c++filt > /dev/null; then "$0" -res-usage "$1" | c++filt; else "$0" -res-usage "$1"; fi'


class ProgramKernel(NamedTuple):
    """A kernel of a program, compiled for one architecture."""

    name: str
    arch: str
    registers: int  # a thread
    shared: int  # static bytes a block
    local: int  # bytes a thread: the stack, with what was spilled
    occupancy: float | None  # most warps of a multiprocessor that blocks of `THREADS` fill, in %; None: unknown `arch`


def kernels(program: str, rules: Rules, scratch: Scratch, supervision: Supervision) -> list[ProgramKernel]:
    """List a program's kernels by cuobjdump, confined like the program itself, which may be made to attack it."""
    search = os.pathsep.join(
        [os.environ.get("PATH", os.defpath), f"{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/bin"]
    )
    tool = shutil.which("cuobjdump", path=search)
    if tool is None or not is_compiled(program):
        return []
    folder = scratch.new_folder("look")
    command = ["/bin/sh", "-c", LOOK, tool, program]
    try:
        done = confined(supervision, command, folder, replace(rules, launcher=()), SECONDS, own=[Path(program)])
    except OSError:
        return []
    finally:
        scratch.remove(folder)
    return parsed(done.printed)


def parsed(printed: str) -> list[ProgramKernel]:
    """The kernels in what cuobjdump prints; one of an architecture that is there twice is told of once."""
    found: dict[tuple[str, str], ProgramKernel] = {}
    arch = name = ""
    for line in printed.splitlines():
        if match := re.match(r"arch = (\w+)", line):
            arch = match[1]
        elif match := re.match(r"\s*Function (.+):$", line):
            name = printable(match[1].removeprefix("void "))[:LONGEST]
        elif match := re.match(r"\s*REG:(\d{1,4}) STACK:(\d{1,9}) SHARED:(\d{1,9}) LOCAL:(\d{1,9})\b", line):
            registers, stack, shared, local = map(int, match.groups())
            share = _occupancy(arch, registers, shared)
            found.setdefault((name, arch), ProgramKernel(name, arch, registers, shared, stack + local, share))
    return list(found.values())[:MOST]


def _occupancy(arch: str, registers: int, shared: int) -> float | None:
    """The occupancy of blocks of `THREADS`, in %; ``shared`` includes what the system reserves for each block."""
    if (has := MULTIPROCESSORS.get(arch.rstrip("af"))) is None:
        return None
    return occupancy(has._replace(reserved=0), THREADS, registers, shared).percent


HEADINGS = ("kernel", "arch", "registers", "shared", "local", "occupancy")


def cells(kernel: ProgramKernel) -> list[str]:
    """A line of a table, below `HEADINGS`."""
    share = "-" if kernel.occupancy is None else f"{kernel.occupancy:.0f} %"
    numbers = (str(kernel.registers), f"{kernel.shared} bytes", f"{kernel.local} bytes")
    return [kernel.name, kernel.arch, *numbers, share]
