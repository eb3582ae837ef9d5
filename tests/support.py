"""What the tests share: files made without flashcli's own writer, and the command line as a user types it."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import shlex
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import hypothesis
import numpy as np
import pytest
import warm

from flashcli.asked.shape import Shape
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.problem import Problem
from flashcli.run import arrays
from flashcli.run.request import Request, open_backend

T = TypeVar("T")
ROOT = Path(__file__).resolve().parent.parent
FAKE_PYCUDA = Path(__file__).resolve().parent / "fake_pycuda"
FAKE_NVCC = """#!/bin/sh
for made; do :; done
echo "$@" > "$made"
"""  # gives its options as the machine code

# Seconds in which what is told to end does, though eight others share its core; what it is stopped in takes longer.
SOON = 30.0
# Open MPI's transport over libfabric looks for networks for a second whenever a process starts.
ON_ONE_MACHINE = {"OMPI_MCA_btl": "^ofi"}
THOROUGH = bool(os.environ.get("CI"))  # what takes long, and seldom finds more than its sample, is left to CI


def sampled(cases: Sequence[T], step: int = 2) -> Sequence[T]:
    """A test's cases: all in CI, elsewhere one of each ``step``."""
    return cases if THOROUGH else cases[::step]


def python_in(page: Path) -> list[str]:
    """The blocks of Python that a page of the documentation shows."""
    return re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


drawing = pytest.mark.usefixtures("matplotlib")  # of a test that draws


def can_draw() -> bool:
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


GPU_KERNELS = [name for name, kernel in KERNELS.items() if not kernel.on_host]
IN_USE = GPU_KERNELS[GPU_KERNELS.index("o_in_registers") :]  # for more than to learn from
ENGINES = ["cpu", "sequential", *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_KERNELS)]
# For tests of what cannot go wrong in one of the first rungs alone: fewer engines than the fixture has by itself.
engines_in_use = pytest.mark.parametrize(
    "engine", ["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in IN_USE)], indirect=True, scope="module"
)
first_rungs = pytest.mark.parametrize(
    "engine",
    ["sequential", *(pytest.param(name, marks=pytest.mark.gpu) for name in GPU_KERNELS if name not in IN_USE)],
    indirect=True,
    scope="module",
)


def reasons_of(skipped: Sequence[pytest.TestReport]) -> list[str]:
    """How many tests, or modules, were skipped for each reason, the most frequent first."""
    reasons = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in skipped)
    return [f"skipped {times:4}: {reason}" for reason, times in reasons.most_common()]


def random_qkv(B: int, N: int, d: int, seed: int = 0) -> np.ndarray:
    """Q, K, V of B batches, float32 [B, 3, N, d], uniform in [-3, 3]."""
    return np.random.default_rng(seed).uniform(-3, 3, (B, 3, N, d)).astype(np.float32)


def input_bytes(qkv: np.ndarray, order: str = "<") -> bytes:
    """An input file, spelled out once more so that fileformat.py is not checked against itself."""
    B, _, N, d = qkv.shape
    return struct.pack(order + "3i", B, N, d) + qkv.astype(order + "f4").tobytes()


def write_input(path: Path, qkv: np.ndarray) -> Path:
    path.write_bytes(input_bytes(qkv))
    return path


def write_output(path: Path, values: np.ndarray) -> Path:
    path.write_bytes(np.asarray(values, "<f4").tobytes())
    return path


def read_floats(path: Path, shape: tuple[int, ...]) -> np.ndarray:
    return np.frombuffer(path.read_bytes(), "<f4").reshape(shape)


def sparse_input(path: Path, B: int, N: int, d: int) -> Path:
    """An input file of zeros that takes no disk space."""
    path.write_bytes(struct.pack("<3i", B, N, d))
    os.truncate(path, 12 + 12 * B * N * d)
    return path


def script(path: Path, text: str) -> Path:
    """An executable file."""
    path.write_text(text)
    path.chmod(0o755)
    return path


def python_path(*folders: Path | str) -> str:
    given = os.environ.get("PYTHONPATH")
    return os.pathsep.join([*map(str, folders), *([given] if given else []), str(ROOT)])


FAULTY = """
import os, signal, sys, threading, time

def nth(n, fault, function):
    "The function, except that its nth call finds the fault."
    calls, lock = [], threading.Lock()
    def patched(*args):
        with lock:
            calls.append(args)
            if len(calls) == n:
                fault()
        return function(*args)
    return patched

def throw(error):
    raise error
"""  # the beginning of programs that put faults into a run


@dataclass
class Finished:
    code: int
    out: str
    err: str

    def assert_error(self, code: int, *parts: str) -> None:
        """One sentence that says what is wrong, with these parts, then the way out; nothing else went wrong."""
        assert self.code == code, self.err
        lines = self.err.splitlines()
        [error] = [line for line in lines if line.startswith("Error: ")]
        [hint] = [line for line in lines if line.startswith("Hint: ")]
        assert lines.index(hint) > lines.index(error)
        assert error.endswith(".") and hint.endswith((".", "?")) and len(hint) > len("Hint: .")
        assert "Traceback" not in self.err and "internal error" not in self.err
        for part in parts:
            assert part in error, f"{part!r} is not in {error!r}"


def command(*args: object) -> list[str]:
    return [sys.executable, "-m", "flashcli", *map(str, args)]


def environment(**changes: str) -> dict[str, str]:
    """This process's, except that a RuntimeWarning (NumPy's way to mumble about NaN) counts as a failure."""
    strict = {"PYTHONPATH": python_path(), "PYTHONWARNINGS": "error::RuntimeWarning", "PYTHONDONTWRITEBYTECODE": "1"}
    return {**os.environ, **strict, **changes}


WITHOUT_UTF_8 = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}  # as in a locale of other bytes
BEFORE_ALL_TESTS = environment()
nursery = functools.cache(lambda: warm.Nursery(BEFORE_ALL_TESTS))


def flashcli(*args: object, env: dict[str, str] | None = None, **options: object) -> Finished:
    """Run ``flashcli ARGS`` in a process of its own; ``options`` are those of `python`."""
    return python("-m", "flashcli", *args, env=env, **options)


def _first_of_its_kind(arguments: list[str]) -> bool:
    """Whether this process has not started that command or module before; programs of the tests' own do not count."""
    kind = tuple(arguments[: 3 if arguments[1] == "flashcli" else 2])
    known = kind in _kinds or arguments[0] != "-m"
    _kinds.add(kind)
    return not known


_kinds: set[tuple[str, ...]] = set()


def python(*args: object, env: dict[str, str] | None = None, cold: bool = False, **options: object) -> Finished:
    """Run ``python ARGS``, which begin with -m MODULE or -c PROGRAM, in a process of its own, without stdin.

    It starts warm unless it is to be ``cold``. In CI the first of each command or module is cold, too: a module that
    uses another without importing it fails only there. So is one with ``options`` of subprocess.run beyond ``cwd`` and
    ``timeout``.
    """
    arguments, variables = list(map(str, args)), environment(**(env or {}))
    cold = cold or (THOROUGH and _first_of_its_kind(arguments))
    options = {"timeout": 120} | options
    if not cold and options.keys() <= {"cwd", "timeout"} and nursery().has(variables):
        code, out, err = nursery().run(arguments, variables, options.get("cwd", "."), options["timeout"])
    else:
        options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "stdin": subprocess.DEVNULL} | options
        done = subprocess.run([sys.executable, *arguments], env=variables, **options)
        code, out, err = done.returncode, done.stdout or b"", done.stderr or b""
    return Finished(code, out.decode(), err.decode())


def flashcli_in(folder: Path) -> Path:
    """flashcli as a program, for a folder on a PATH."""
    return script(folder / "flashcli", f'#!/bin/sh\nexec {shlex.join(command())} "$@"\n')


def give_up_roots_powers() -> None:
    """To be called in a child before it runs a program: that program cannot override permissions. Linux only."""
    PR_CAPBSET_DROP, CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH = 24, 1, 2
    for capability in (CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH):
        ctypes.CDLL(None).prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)


def open_engine(name: str, shape: tuple[int, int, int], causal: bool = False, scale: float | None = None, **more):
    """The cpu backend or a kernel, by name, for inputs of shape (B, N, d)."""
    kernel = None if name == "cpu" else name
    backend = "cuda" if kernel in GPU_KERNELS else "cpu"
    return open_backend(Request(backend, causal, scale, kernel, **more), Shape(*shape))


def forward(backend, qkv: np.ndarray) -> np.ndarray:
    """Attention of float32 [B, 3, N, d] into an output that was full of NaN."""
    out = np.full(np.delete(qkv.shape, 1), np.nan, np.float32)
    arrays.forward(backend, np.ascontiguousarray(qkv), out)
    return out


def refusal(name: str, d: int, N: int = 1) -> str:
    """The reason why a kernel does not take N rows of ``d`` numbers; empty for those that it takes, and for "cpu"."""
    return "" if name == "cpu" else KERNELS[name].refuses(Problem(1, N, N, d))


def pass_over_if_refused(name: str, d: int, N: int = 1) -> None:
    """Skips the test, or has Hypothesis take another example, where a kernel does not take N rows of ``d`` numbers."""
    if reason := refusal(name, d, N):
        if hypothesis.currently_in_test_context():
            hypothesis.reject()
        pytest.skip(f"{name}: {reason}")


class Engine:
    """Attention by the cpu backend or a kernel, by name, built for each input's shape as `flashcli run` does it.

    Keeps the last backend open and takes it again for what it was built for: opening one costs more than a small run.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self._built_for: object = None

    @property
    def splits(self) -> bool:
        return self.name != "cpu" and KERNELS[self.name].splits

    def __call__(self, qkv: np.ndarray, causal: bool = False, scale: float | None = None) -> np.ndarray:
        B, _, N, d = qkv.shape
        pass_over_if_refused(self.name, d, N)
        tiling = None if self.name == "cpu" else KERNELS[self.name].tiling(Problem(B, N, N, d, causal))
        if self._built_for != (d, causal, scale, tiling):
            self.close()
            self._backend = open_engine(self.name, (B, N, d), causal, scale).__enter__()
            self._built_for = d, causal, scale, tiling
        return forward(self._backend, qkv)

    def close(self) -> None:
        if self._built_for:
            self._built_for = None
            self._backend.__exit__(None, None, None)


def supervisors() -> list[int]:
    """The judge's helpers below this process, where other tests may have a Slurm."""
    from flashcli.judge import containment

    own = [pid for pid, parent, *_ in containment.processes() if parent == os.getpid()]
    return [pid for pid in own if b"flashcli.judge.supervisor" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def leftovers(folder: Path) -> list[str]:
    """Temporary files of an output."""
    return [path.name for path in folder.iterdir() if path.name.endswith(".tmp")]
