"""The way of each program that compute-sanitizer runs: cases, one after the other, told before what the tool says."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashcli.compiler import compiler
from flashcli.errors import MISMATCH, BackendUnavailable, FlashError
from flashcli.gpu.place import Place, ask, bindings, place_of_device
from flashcli.gpu.prepared import Prepared
from flashcli.kernels.operation import Build, Plan
from flashcli.measure.builds import compile_for


@dataclass(frozen=True)
class Program:
    """Cases by name and the kernels that they are for: ``check(place, kernel, case)`` computes one and compares it.

    ``plans(place, kernel, case)`` has what is launched for it; it is refused, or empty, if the kernel does not take it.
    """

    kernels: Iterable[str]
    cases: Mapping[str, Any]
    plans: Callable[[Place, str, Any], Iterable[Plan]]
    check: Callable[[Place, str, Any], None]

    def takes(self, place: Place, kernel: str, name: str) -> bool:
        """Whether a kernel takes a case on this GPU."""
        try:
            return any(self.plans(place, kernel, self.cases[name]))
        except BackendUnavailable:
            return False

    def compile_all(self, place: Place, chosen: Iterable[tuple[str, str]]) -> None:
        """Leave the code of all of these kernels and cases in the cache."""
        plans = (plan for kernel, name in chosen for plan in self.plans(place, kernel, self.cases[name]))
        compile_all(place, (build for plan in plans for build in plan.builds()))

    def main(self, arguments: list[str]) -> int:
        """Check the cases of all kernels that take them, or as ``[KERNEL [TEXT]]`` says; returns the exit code."""
        place, text = place_of_device(0), " ".join(arguments[1:])
        chosen = [
            (kernel, name)
            for kernel in arguments[:1] or self.kernels
            for name in self.cases
            if text in name and self.takes(place, kernel, name)
        ]
        self.compile_all(place, chosen)
        return run(chosen, lambda kernel, name: self.check(place, kernel, self.cases[name]))


def compile_all(place: Place, builds: Iterable[Build]) -> None:
    """Leave the code of these builds in the cache, each once."""
    each = {(build.kernel.file, *build.macros().items()): build for build in builds}
    compile_for(compiler.architecture(place.gpu.capability), each.values())


def compute(
    place: Place,
    prepared: Prepared,
    pointers: Iterable[str],
    whole: Mapping[str, np.ndarray],
    view: Mapping[str, np.ndarray],
    answers: Mapping[str, np.ndarray],
) -> None:
    """Launch on copies of ``whole`` arrays, of which the ``view`` is given, and read ``answers`` back; all by name.

    An answer that is no whole array lies where nobody has written yet, for initcheck to see who reads it.
    """
    with place.current():
        memory = {name: put(x) for name, x in whole.items()}
        memory |= {name: allocate(x.nbytes) for name, x in answers.items() if name not in whole}
        memory["workspace"] = allocate(prepared.workspace)
        at = {name: memory[name] + offset(whole[name], x) for name, x in view.items()}
        prepared.launch(0, *((memory | at).get(name, 0) for name in pointers))
        for name, x in answers.items():
            get(x, memory[name])
        free(memory.values())


def offset(whole: np.ndarray, view: np.ndarray) -> int:
    """Bytes from the start of an array to that of a view of it."""
    return view.ctypes.data - whole.ctypes.data


def allocate(size: int) -> int:
    return int(ask(bindings().cuMemAlloc, size)) if size else 0


def put(array: np.ndarray) -> int:
    address = allocate(array.nbytes)
    ask(bindings().cuMemcpyHtoD, address, array.ctypes.data, array.nbytes)
    return address


def get(array: np.ndarray, address: int) -> None:
    """Wait for what has been launched, and copy from the GPU."""
    ask(bindings().cuMemcpyDtoH, array.ctypes.data, address, array.nbytes)


def free(addresses: Iterable[int]) -> None:
    for address in filter(None, addresses):
        ask(bindings().cuMemFree, address)


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
