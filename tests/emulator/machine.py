"""Kernels compiled for the CPU, and launched there."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from emulator import translate
from flashcli.compiler.compiler import SOURCES, Compilable
from flashcli.kernels.operation import Launch

# No two rounded as one, unless a kernel says so; no `thread_local` of one library taken for that of another.
OPTIONS = ("-std=c++17", "-w", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")
BLOCK = translate.CUDA.with_name("block.cpp")


@functools.cache
def why_not() -> str:
    """Why nothing can be emulated on this machine, in words; empty if it can."""
    if sys.platform != "linux":
        return "the emulator's fibers are made as Linux has them"
    if not shutil.which("c++"):
        return "there is no C++ compiler here"
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder, "half.cpp")
        source.write_text("_Float16 half = 1;")
        done = subprocess.run(["c++", "-c", source, "-o", f"{folder}/half.o"], capture_output=True)
    return "the C++ compiler knows no _Float16" if done.returncode else ""


class Emulated:
    """A build's kernels, whose libraries are kept in ``folder``. `backwards`: the last thread of a block begins."""

    def __init__(self, build: Compilable, folder: Path) -> None:
        self._library = library_of(build, folder)

    def launch(self, launch: Launch, argument: ctypes.Structure, backwards: bool = False) -> None:
        function = getattr(self._library, f"launch_{launch.function}")
        function(ctypes.byref(argument), launch.grid, launch.threads, launch.shared, backwards)


def library_of(build: Compilable, folder: Path) -> ctypes.CDLL:
    source = SOURCES / build.kernel.file
    return library(source, [SOURCES, source.parent], build.macros(), folder)


def library(source: Path, include: list[Path], macros: Mapping[str, object], folder: Path) -> ctypes.CDLL:
    """With a ``launch_NAME`` for each kernel, see translate.write; compiled, if it is not in ``folder`` yet."""
    headers = [path for there in include for path in sorted(there.glob("*.*h"))]

    def make(fresh: Path) -> None:
        written = translate.write(source, headers, macros, fresh.parent)
        _compile("-O1", "-shared", f"-I{fresh.parent}", written, block, "-o", fresh)

    block = _made(folder, ".o", [BLOCK, translate.CUDA], "", lambda fresh: _compile("-O2", "-c", BLOCK, "-o", fresh))
    sources = [source, *headers, BLOCK, translate.CUDA, Path(translate.__file__)]
    return ctypes.CDLL(str(_made(folder, ".so", sources, repr(macros), make)))


def _compile(*arguments: object) -> None:
    subprocess.run(["c++", *OPTIONS, f"-I{translate.CUDA.parent}", *map(str, arguments)], check=True)


def _made(folder: Path, suffix: str, sources: list[Path], options: str, make: Callable[[Path], None]) -> Path:
    """The file in ``folder`` for these sources and options, which ``make`` leaves at a path where it is not yet."""
    texts = [path.read_text() for path in sources]
    made = folder / (hashlib.sha256("\0".join([*texts, options]).encode()).hexdigest()[:20] + suffix)
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may be making it, too
            fresh = Path(own, "made")
            make(fresh)
            fresh.replace(made)
    return made
