"""Kernels compiled for the CPU, and launched there."""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from flashcli.compiler import cache
from flashcli.compiler.compiler import SOURCES, Compilable, find_cxx
from flashcli.emulator import translate
from flashcli.errors import BackendUnavailable, KernelFailure
from flashcli.kernels.operation import Launch

HERE = Path(__file__).parent
# No two rounded as one, unless a kernel says so; no jump from fiber to fiber taken for an attack; no variable of a
# thread's in one library taken for that of another; no memory taken for another because of its type.
OPTIONS = (
    "-std=c++17", "-w", "-fPIC", "-pthread", "-ffp-contract=off", "-fvisibility=hidden", "-U_FORTIFY_SOURCE",
    "-fno-strict-aliasing",
)  # fmt: skip
BLOCK = HERE / "block.cpp"
LEVEL = "-O1"  # of optimisation: more takes longer to compile than it saves


def compiler() -> list[str]:
    """The C++ compiler with its options; BackendUnavailable where there is none."""
    if sys.platform != "linux":
        raise BackendUnavailable("the emulator needs Linux: its threads are made as Linux has them.", "use Linux.")
    found = find_cxx()
    if found is None:
        raise BackendUnavailable(
            "the emulator needs a C++ compiler, and there is none.", "install g++ (build-essential), or set CXX."
        )
    return found


class Emulated:
    """A build's kernels, whose libraries are kept in ``folder``."""

    def __init__(self, build: Compilable, folder: Path) -> None:
        self._library = library_of(build, folder)

    def launch(
        self, launch: Launch, argument: ctypes.Structure, blocks: range | None = None, backwards: bool = False
    ) -> None:
        """Run ``blocks`` of a launch, by default all, one after another; ``backwards``, with the last thread first."""
        some = range(launch.grid) if blocks is None else blocks
        function = getattr(self._library, f"launch_{launch.function}")
        shape = launch.grid, launch.threads, launch.shared
        function(ctypes.byref(argument), *shape, ctypes.c_long(some.start), ctypes.c_long(some.stop), backwards)


def library_of(build: Compilable, folder: Path) -> ctypes.CDLL:
    """The shared library of a build's kernels."""
    source = SOURCES / build.kernel.file
    return library(source, [SOURCES, source.parent], build.macros(), folder)


def library(source: Path, include: list[Path], macros: Mapping[str, object], folder: Path) -> ctypes.CDLL:
    """A library with a ``launch_NAME`` for each kernel, see `translate`; compiled, if it is not in ``folder`` yet."""
    found = translate.sources(source, include)

    def make(fresh: Path) -> None:
        written = translate.write(found, fresh.parent, macros)
        with block(folder) as together:
            run(LEVEL, "-shared", f"-I{fresh.parent}", written, together, "-o", fresh)

    sources = [*found, BLOCK, translate.CUDA, Path(translate.__file__), Path(__file__)]
    with made(folder, ".so", sources, LEVEL + repr(macros), make) as path:
        return ctypes.CDLL(str(path))  # stays loaded when the file is gone


def block(folder: Path) -> contextlib.AbstractContextManager[Path]:
    """The object file of what threads of a block do together, which takes longer to compile than most kernels."""
    return made(folder, ".o", [BLOCK, translate.CUDA], "", lambda to: run("-O3", "-c", BLOCK, "-o", to))


def run(*arguments: object) -> None:
    """Have the C++ compiler do something; KernelFailure, with its first complaint, if it does not."""
    command = [*compiler(), *OPTIONS, f"-I{HERE}", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    if done.returncode:
        complaint = next((line for line in done.stderr.splitlines() if "error" in line), f"exit code {done.returncode}")
        raise KernelFailure(f"{command[0]} does not compile the translated kernel: {complaint}.", "is CXX right?")


@contextlib.contextmanager
def made(folder: Path, suffix: str, sources: list[Path], options: str, make: Callable[[Path], None]) -> Iterator[Path]:
    """The file for these sources and options: from ``folder``, or made, and kept there if that can be."""
    texts = [path.read_text(errors="replace") for path in sources]
    key = "\0".join([*texts, options, os.uname().machine])
    path = folder / ("emulated-" + hashlib.sha256(key.encode()).hexdigest()[:20] + suffix)
    if cache.load(path):
        yield path
        return
    with tempfile.TemporaryDirectory() as own:
        fresh = Path(own, "made")
        make(fresh)
        cache.store(path, fresh.read_bytes())
        yield path if path.exists() else fresh
