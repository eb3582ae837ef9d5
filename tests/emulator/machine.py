"""Kernels compiled for the CPU, and launched there."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

from emulator import translate
from flashcli.compiler.compiler import SOURCES, Compilable
from flashcli.kernels.types import Launch

# No two rounded as one, unless a kernel says so; no `thread_local` of one library taken for that of another.
OPTIONS = ("-std=c++17", "-O1", "-w", "-fPIC", "-shared", "-pthread", "-ffp-contract=off", "-fvisibility=hidden")


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
    texts = [path.read_text() for path in (source, *headers, translate.CUDA, Path(translate.__file__))]
    made = folder / (hashlib.sha256("\0".join([*texts, repr(macros)]).encode()).hexdigest()[:20] + ".so")
    if not made.exists():
        with tempfile.TemporaryDirectory(dir=folder) as own:  # another process may be making it, too
            written = translate.write(source, headers, macros, Path(own))
            fresh = Path(own, "kernel.so")
            found = (f"-I{translate.CUDA.parent}", f"-I{own}")
            subprocess.run(["c++", *OPTIONS, *found, written, "-o", fresh], check=True)
            fresh.replace(made)
    return ctypes.CDLL(str(made))
