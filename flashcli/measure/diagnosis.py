"""Findings on what this machine can run, one for each part."""

from __future__ import annotations

import platform
import shutil
from importlib import metadata
from typing import NamedTuple

import numpy as np

from flashcli.asked.shape import Shape
from flashcli.compiler import cache, compiler
from flashcli.cpu.workers import blas_text, usable_cores
from flashcli.errors import BackendUnavailable, FlashError
from flashcli.files.distributions import draw
from flashcli.files.verify import Comparison, reference
from flashcli.gpu import driver as cuda_driver
from flashcli.gpu.place import bindings
from flashcli.kernels import speed
from flashcli.measure import device
from flashcli.measure.machine import gpus
from flashcli.run.arrays import forward
from flashcli.run.ranks import load_mpi
from flashcli.run.request import Request, open_backend

CC_HINT = "install gcc, or set CC; kernel sequential needs it."
NVCC_HINT = "install the CUDA toolkit, load its module, or set CUDA_HOME."


class Finding(NamedTuple):
    name: str
    ok: bool
    text: str
    hint: str = ""
    properties: device.Properties = {}  # noqa: RUF012 (never changed)


def diagnose() -> list[Finding]:
    return [
        Finding("Python", True, f"{platform.python_version()}, NumPy {np.__version__}"),
        Finding("CPU backend", True, f"{len(usable_cores())} usable cores, BLAS: {blas_text()}"),
        _program("C compiler", " ".join(compiler.find_cc() or ()), CC_HINT),
        _program("nvcc", compiler.find_nvcc(), NVCC_HINT),
        _program("nvcc's host compiler", shutil.which("g++"), "install g++; nvcc and the emulator need it."),
        _cache(),
        _mpi(),
        _driver(),
        *_devices(),
        *_gpus(),
        _in_place(),
        *_tuned(),
    ]


def _program(name: str, found: object, hint: str) -> Finding:
    """The finding on a program, by where it was ``found``, if it was."""
    return Finding(name, True, str(found)) if found else Finding(name, False, "not found", hint)


def _cache() -> Finding:
    folder = cache.folder()
    kept = [cache.load(path) for path in folder.glob("*") if path.suffix in (".cubin", ".so")]
    text = f"{folder}, {sum(code is not None for code in kept)} kernels"
    if None in kept:
        text += f"; {kept.count(None)} more are damaged, or from an older version"
    try:
        cache.try_to_write()
    except OSError as error:
        hint = "set FLASHCLI_CACHE_DIR to a folder you can write; until then every start compiles."
        return Finding("kernel cache", False, f"{text}; not writable: {(error.strerror or str(error)).lower()}", hint)
    return Finding("kernel cache", True, text)


def _mpi() -> Finding:
    try:
        library = load_mpi().Get_library_version()  # which may be asked before MPI is started
        return Finding("MPI", True, f"mpi4py {metadata.version('mpi4py')}, {library.splitlines()[0].partition(',')[0]}")
    except BackendUnavailable as error:
        return Finding("MPI", False, str(error), error.hint)


def _in_place() -> Finding:
    """Whether there is all that arrays on a GPU need to be computed where they lie."""
    name, nvcc = "arrays on a GPU", compiler.find_nvcc()
    try:
        bindings()
    except FlashError as error:
        return Finding(name, False, str(error), error.hint)
    problem = "" if nvcc else compiler.nvrtc_problem()
    if problem:
        return Finding(name, False, f"there is no nvcc, nor NVRTC: {problem}", "pip install 'cuda-bindings[all]'.")
    found = f"cuda-bindings {metadata.version('cuda-bindings')}, compiled by {nvcc or 'NVRTC'}"
    return Finding(name, True, found)


def _tuned() -> list[Finding]:
    """The GPUs on which `flashcli bench --tune` has timed kernels, by which those for arrays are chosen."""
    names = {name for name, _ in device.gpus()}
    return [
        Finding("choice of kernels", True, f"on {name} by what `flashcli bench --tune` has measured")
        for name in sorted(names)
        if speed.measured(name)
    ]


def _driver() -> Finding:
    if problem := cuda_driver.problem():
        return Finding("GPU driver", False, problem, "is there a GPU in this machine, and allocated to this job?")
    return Finding("GPU driver", True, f"NVIDIA {cuda_driver.version()}")


def _devices() -> list[Finding]:
    """The GPUs as the driver describes them, which is more than PyCUDA needs."""
    found = enumerate(device.gpus())
    return [Finding(f"device {index}", True, name, properties=properties) for index, (name, properties) in found]


def _gpus() -> list[Finding]:
    try:
        return [_gpu(index, *device) for index, device in enumerate(gpus())]
    except BackendUnavailable as error:
        return [Finding("CUDA backend", False, str(error), error.hint)]


def _gpu(index: int, name: str, capability: tuple[int, int], memory: int) -> Finding:
    text = f"{name}, {compiler.architecture(capability)}, {memory / 2**30:.0f} GiB"
    if index > 0:
        return Finding(f"GPU {index}", True, text)
    try:
        kernel, comparison = _try_kernel()
    except FlashError as error:
        return Finding("GPU 0", False, f"{text}: {error}", error.hint)
    if comparison.matches:
        return Finding("GPU 0", True, f"{text}; kernel {kernel} ran and its answer is right")
    return Finding("GPU 0", False, f"{text}; kernel {kernel} ran and its answer is WRONG", "run `make test-gpu`.")


def _try_kernel() -> tuple[str, Comparison]:
    """The kernel that `flashcli run` would take for an ordinary input, and how its answer compares with float64."""
    qkv = draw(Shape(2, 300, 64), range(2), seed=0)
    out = np.full((2, 300, 64), np.nan, np.float32)
    with open_backend(Request("cuda"), Shape(*out.shape)) as backend:
        forward(backend, qkv, out)
        kernel = str(backend.details()["kernel"])
    comparison = Comparison()
    for batch in range(2):
        comparison.add(out[batch], reference(qkv[batch]), batch, range(300))
    return kernel, comparison
