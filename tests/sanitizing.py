"""The way of each program that compute-sanitizer runs: cases, one after the other, told before what the tool says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from typing import Any

from flashcli.compiler import compiler
from flashcli.errors import MISMATCH, BackendUnavailable, FlashError
from flashcli.gpu.place import Place
from flashcli.kernels.operation import Build
from flashcli.measure.builds import compile_for


def takes(plan: Callable[[], Any]) -> bool:
    """Whether a kernel takes a case: ``plan()``, which plans it, is not refused."""
    try:
        plan()
    except BackendUnavailable:
        return False
    return True


def compile_all(place: Place, builds: Iterable[Build]) -> None:
    """Leave the code of these builds in the cache, each once."""
    each = {(build.kernel.file, *build.macros().items()): build for build in builds}
    compile_for(compiler.architecture(place.gpu.capability), each.values())


def run(cases: list[tuple[str, str]], check: Callable[[str, str], None]) -> int:
    """``check(kernel, name)`` each, which raises AssertionError if its answer is wrong; returns the exit code."""
    wrong = 0
    for kernel, name in cases:
        print(f"{kernel}: {name}", flush=True)  # before what the tool says of it
        try:
            check(kernel, name)
        except AssertionError as error:
            wrong += 1
            print(f"WRONG, {kernel}: {name}: {' '.join(str(error).split())}", flush=True)
    print(f"{len(cases) - wrong} of {len(cases)} cases are right")
    return MISMATCH if wrong else 0


def end(main: Callable[[list[str]], int]) -> None:
    """``main`` with what the command line says, to the end of the process."""
    try:
        sys.exit(main(sys.argv[1:]))
    except FlashError as error:
        print(f"{error}\n{error.hint}", file=sys.stderr)
        sys.exit(error.exit_code)
