"""Nothing is imported before it is needed: help is quick, and the CPU path works without CUDA and the extras."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
from support import ROOT, environment, flashcli, random_qkv, write_input, write_output

import flashcli as flashcli_package

EXTRAS = {"pycuda", "torch", "triton", "rich", "matplotlib", "mpi4py", "scipy", "pandas"}
TRACE = """
import atexit, sys
atexit.register(lambda: open(LISTING, "w").write(" ".join(sys.modules)))
from flashcli.cli import main
main()
"""


def imported(tmp_path: Path, *arguments: object) -> set[str]:
    """Top-level modules, and modules of flashcli, that a command has loaded by its end."""
    listing = tmp_path / "modules"
    program = TRACE.replace("LISTING", repr(str(listing)))
    done = subprocess.run([sys.executable, "-c", program, *map(str, arguments)], env=environment(), capture_output=True)
    assert done.returncode == 0, done.stderr
    return top_level(listing.read_text().split())


# What `flashcli run` loads beyond the modules that its dependencies load anyway. Each of these takes well below 1 ms.
LIGHT = {"signal", "locale", "_locale"}
DEPENDENCIES = """
import sys
import numpy, click, threadpoolctl, concurrent.futures.thread, dataclasses
print(*sys.modules)
"""


def top_level(names: Iterable[str]) -> set[str]:
    return {name if name.startswith("flashcli") else name.partition(".")[0] for name in names}


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["judge", "--help"], ["kernels"]])
def test_help_loads_nothing_that_computes(tmp_path, arguments):
    modules = imported(tmp_path, *arguments)
    assert not modules & (EXTRAS | {"numpy", "threadpoolctl", "flashcli.api", "flashcli.files.fileformat"})


def test_run_on_the_cpu_loads_no_extras(tmp_path):
    given = write_input(tmp_path / "x.in", random_qkv(1, 8, 8))
    modules = imported(tmp_path, "run", given, tmp_path / "x.out", "--backend", "cpu")
    assert "numpy" in modules
    assert not modules & (EXTRAS | {"flashcli.run.slots_cuda", "flashcli.compiler.compiler"})


def test_run_on_the_cpu_loads_little_of_its_own(tmp_path):
    """Not tempfile (with random and lzma), pathlib (with urllib), subprocess or json, a millisecond or more each."""
    given = write_input(tmp_path / "x.in", random_qkv(1, 8, 8))
    modules = imported(tmp_path, "run", given, tmp_path / "x.out", "--backend", "cpu")
    done = subprocess.run([sys.executable, "-c", DEPENDENCIES], env=environment(), capture_output=True, text=True)
    own = {name for name in modules - top_level(done.stdout.split()) if not name.startswith("flashcli")}
    assert own - {"atexit"} <= LIGHT


def test_a_warm_start_on_a_gpu_prepares_to_start_no_process(fake_gpu, tmp_path):
    given = write_input(tmp_path / "x.in", random_qkv(1, 8, 8))
    arguments = "run", given, tmp_path / "x.out", "--backend", "cuda"
    flashcli(*arguments)
    modules = imported(tmp_path, *arguments)
    assert "flashcli.compiler.compiler" in modules
    assert not modules & (EXTRAS - {"pycuda"} | {"subprocess", "tempfile", "threadpoolctl", "json"})


def test_compare_loads_no_backend(tmp_path):
    path = write_output(tmp_path / "x.out", random_qkv(1, 2, 3))
    modules = imported(tmp_path, "compare", path, path)
    assert not modules & (EXTRAS | {"flashcli.cpu.workers", "threadpoolctl"})


def test_the_package_itself_loads_nothing():
    program = "import sys, flashcli; assert 'numpy' not in sys.modules and 'click' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], env=environment(), check=True)


def test_what_the_package_offers():
    from flashcli.errors import FlashError

    assert flashcli_package.FlashError is FlashError and callable(flashcli_package.attention)
    with pytest.raises(AttributeError, match="nonesuch"):
        flashcli_package.nonesuch  # noqa: B018


def test_the_entry_point_imports_nothing_before_it_listens_to_signals():
    """Until then an interrupt is told of by a traceback, and to load a module takes time."""
    program = "import os, sys; before = set(sys.modules); import flashcli.__main__; print(*set(sys.modules) - before)"
    command = [sys.executable, "-S", "-c", program]  # without site, in which an installed checkout imports more
    done = subprocess.run(command, env=environment(), cwd=ROOT, capture_output=True, text=True)
    assert set(done.stdout.split()) == {"flashcli", "flashcli.__main__"}


def test_where_pytorch_is_missing_its_module_says_so():
    program = "import sys; sys.modules['torch'] = None; import flashcli.torch"
    done = subprocess.run([sys.executable, "-c", program], env=environment(), capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "ModuleNotFoundError: flashcli.torch needs PyTorch: pip install torch"
