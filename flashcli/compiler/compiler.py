"""Machine code from a kernel's source: a search for a compiler, and compilation of what the cache has not.

Cubins are made by nvcc, or by NVRTC where there is none; the sequential program's shared library by the host's C
compiler. All are cached under a hash of everything they depend on, so that a warm start compiles nothing and starts no
process.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from flashcli.compiler import cache, nvrtc
from flashcli.compiler.architecture import architecture as architecture
from flashcli.errors import BackendUnavailable, KernelFailure, explained

# `cuda/` is the package flashcli.cuda once installed, and a folder beside flashcli/ in a checkout.
SOURCES = next(
    folder
    for folder in (Path(__file__).parents[1] / "cuda", Path(__file__).parents[2] / "cuda")
    if (folder / "common.cuh").exists()
)
OPTIONS = ("-std=c++17", "-O3")
# At this level hardly anything is inlined, so that other products and sums would be joined than in a full build: none
# is, which leaves the sources' own fmaf. ptxas shares out functions, of which there are many then, among 8 threads.
# What sources then have to do by themselves, they do where QUICK is defined.
QUICK = ("-Ofc=max", "-fmad=false", "-split-compile=8", "-DQUICK")
C_OPTIONS = ("-std=c99", "-O3", "-fPIC", "-shared")  # the arithmetic as it is written: no -ffast-math


class Compilable(Protocol):
    """The attributes of a build that the compiler reads; `kernels.operation.Build` has them."""

    @property
    def kernel(self) -> Any: ...  # with its ``name``, ``file``, and whether it runs ``on_host``

    @property
    def problem(self) -> Any: ...  # with its ``d``

    def macros(self) -> dict[str, int]: ...


def find_nvcc() -> Path | None:
    """The CUDA compiler: $NVCC (empty: none, use what is cached), $CUDA_HOME, the PATH, then the usual folder.

    $NVCC may also be `nvrtc.NAME`: then the answer is None, and NVRTC compiles what is not cached.
    """
    if (named := os.environ.get("NVCC")) is not None:
        found = shutil.which(named) if named else None
        return Path(found) if found else None
    homes = [os.environ[name] for name in ("CUDA_HOME", "CUDA_PATH") if name in os.environ]
    candidates = [f"{home}/bin/nvcc" for home in homes] + ["nvcc", "/usr/local/cuda/bin/nvcc"]
    return next((Path(path) for candidate in candidates if (path := shutil.which(candidate))), None)


def find_cc() -> list[str] | None:
    """The host's C compiler, with its options: $CC (empty: none, use what is cached), else cc, gcc or clang."""
    return _host_compiler("CC", "cc", "gcc", "clang")


def find_cxx() -> list[str] | None:
    """The host's C++ compiler, with its options: $CXX (empty: none), else c++, g++ or clang++."""
    return _host_compiler("CXX", "c++", "g++", "clang++")


def _host_compiler(variable: str, *usual: str) -> list[str] | None:
    named = os.environ.get(variable)
    candidates = usual if named is None else [named]
    commands = [candidate.split() for candidate in candidates]
    return next((command for command in commands if command and shutil.which(command[0])), None)


def options(build: Compilable) -> list[str]:
    given = C_OPTIONS if build.kernel.on_host else OPTIONS
    return [*given, *(f"-D{name}={value}" for name, value in build.macros().items())]


def _include(build: Compilable) -> list[Path]:
    """The folders of the headers: the one that all operations share, and that of the kernel's source."""
    return [SOURCES, (SOURCES / build.kernel.file).parent]


def _stem(build: Compilable, arch: str) -> str:
    """The first part of a build's file name in the cache, for an architecture: a hash of source, headers, options."""
    headers = sorted(path for folder in _include(build) for path in folder.glob("*.*h"))
    texts = [(SOURCES / build.kernel.file).read_text("utf-8"), *(path.read_text("utf-8") for path in headers)]
    return f"{build.kernel.name}-{arch}-d{build.problem.d}-{_hash(*texts, *options(build))}"


def cubin(build: Compilable, arch: str) -> bytes:
    """Machine code of a build for one architecture, from the cache if it is there.

    Without nvcc, a cubin of the same source and options that any compiler made will do, and NVRTC makes what is
    missing, unless $NVCC says otherwise.
    """
    if code := kept(build, arch):
        return code
    with cache.alone(_stem(build, arch)):
        return kept(build, arch) or _made(build, arch)


def kept(build: Compilable, arch: str) -> bytes | None:
    """Machine code of a build for one architecture if it is in the cache; None else."""
    nvcc = find_nvcc()
    pattern = f"{_stem(build, arch)}-{_identity(nvcc) if nvcc else '*'}.cubin"
    return next((code for _, code in cache.kept(pattern)), None)


def _made(build: Compilable, arch: str) -> bytes:
    """Machine code of a build, compiled and put into the cache."""
    if (nvcc := find_nvcc()) is not None:
        code, made_by = _compile(build, nvcc, arch), _identity(nvcc)
    elif not (problem := nvrtc_problem()):
        (code, _), made_by = _nvrtc(build, arch), nvrtc.NAME
    else:
        missing = f"nvcc (the CUDA compiler), no NVRTC in its place ({problem})"
        hint = "install the CUDA toolkit, load its module, or set CUDA_HOME (or use --backend cpu)."
        raise _nothing(build, missing, hint)
    cache.store(cache.folder() / f"{_stem(build, arch)}-{made_by}.cubin", code)
    return code


def nvrtc_problem() -> str:
    """The reason why NVRTC does not compile, in words; empty if it does. Whoever names a compiler gets no other."""
    named = os.environ.get("NVCC", nvrtc.NAME)
    return nvrtc.problem() if named == nvrtc.NAME else f"NVCC is {named!r}"


def _nothing(build: Compilable, missing: str, hint: str) -> BackendUnavailable:
    """The error for a build that nobody can compile, and that the cache has not."""
    return BackendUnavailable(
        f"there is no {missing}, and no cached {build.kernel.name} for d = {build.problem.d}.", hint
    )


def quick_cubin(build: Compilable, arch: str) -> bytes:
    """Machine code of a build that NVRTC makes in a fourth of the time, by `QUICK`; the cache does not keep it."""
    if problem := nvrtc_problem():
        raise BackendUnavailable(f"there are no quick builds: {problem}.", "wait for the full one.")
    return _nvrtc(build, arch, *QUICK)[0]


def _nvrtc(build: Compilable, arch: str, *more: str) -> tuple[bytes, str]:
    """Machine code by NVRTC, and its log."""
    source = (SOURCES / build.kernel.file).read_text("utf-8")
    try:
        return nvrtc.cubin(source, build.kernel.file, arch, [*options(build), *more], _include(build))
    except nvrtc.CompileError as error:
        raise compile_failure(str(error), arch, "NVRTC") from error


def library(build: Compilable) -> ctypes.CDLL:
    """The shared library of a kernel for the host, loaded: from the cache, or compiled by the host's C compiler."""
    stem, cc = _stem(build, os.uname().machine), find_cc()
    if cc is None:
        for path, _ in cache.kept(f"{stem}-*.so"):
            return _loaded(path)
        sought = os.environ.get("CC") or "cc, gcc or clang"
        raise _nothing(build, f"C compiler ({sought})", "install gcc (build-essential), or set CC.")
    name = f"{stem}-{_identity(Path(shutil.which(cc[0]) or cc[0]), *cc[1:])}.so"
    for path, _ in cache.kept(name):
        with contextlib.suppress(OSError):
            return ctypes.CDLL(str(path))  # which does not mind the checksum at its end
    return _compile_library(build, cc, cache.folder() / name)


def _hash(*texts: str) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:20]


def _identity(compiler: Path, *arguments: str) -> str:
    """A hash that changes when another compiler is installed; a stat is much faster than `nvcc --version`."""
    status = compiler.resolve().stat()
    return _hash(str(compiler.resolve()), str(status.st_size), str(status.st_mtime_ns), *arguments)[:8]


def _nvcc(build: Compilable, nvcc: Path, arch: str, made: str, *more: str) -> str:
    """Run nvcc, which leaves the cubin in the file ``made``; return what it says on stderr."""
    import subprocess  # here, because a warm start compiles nothing

    include = [f"-I{folder}" for folder in _include(build)]
    source = str(SOURCES / build.kernel.file)
    command = [str(nvcc), "-cubin", f"-arch={arch}", *more, *include, *options(build), source, "-o", made]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
    except OSError as error:
        raise BackendUnavailable(f"{nvcc} cannot be run: {error}.", "repair the CUDA toolkit, or set NVCC.") from error
    if done.returncode:
        raise compile_failure(done.stderr or done.stdout or f"exit code {done.returncode}", arch)
    return done.stderr


def _compile(build: Compilable, nvcc: Path, arch: str) -> bytes:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "kernel.cubin")
        _nvcc(build, nvcc, arch, made)
        with explained("read", made, KernelFailure):
            return Path(made).read_bytes()


def _compile_library(build: Compilable, cc: list[str], path: Path) -> ctypes.CDLL:
    """Compile a host kernel, store it under ``path`` if that can be written, and load it."""
    import subprocess  # here, because a warm start compiles nothing
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        made = os.path.join(folder, "library.so")
        command = [*cc, *options(build), str(SOURCES / build.kernel.file), "-o", made, "-lm"]
        try:
            result = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        except OSError as error:
            raise BackendUnavailable(f"{cc[0]} cannot be run: {error}.", "repair the C compiler, or set CC.") from error
        if result.returncode or not os.path.exists(made):
            silent = f"exit code {result.returncode}" if result.returncode else "it has written nothing"
            complaint = next(iter(result.stderr.strip().splitlines()), silent)
            raise BackendUnavailable(f"{cc[0]} does not compile {build.kernel.file}: {complaint}.", "is CC right?")
        cache.store(path, Path(made).read_bytes())
        return _loaded(Path(made))  # stays loaded when the file is gone


def _loaded(library: Path) -> ctypes.CDLL:
    try:
        return ctypes.CDLL(str(library))
    except OSError as error:
        hint = "is its folder mounted noexec? set FLASHCLI_CACHE_DIR and TMPDIR to folders on other file systems."
        raise BackendUnavailable(f"the compiled kernel cannot be loaded: {error}.", hint) from error


def compile_failure(output: str, arch: str, compiler: str = "nvcc") -> BackendUnavailable | KernelFailure:
    """The error for a complaint of nvcc or NVRTC, in the user's words: no host compiler, unknown GPU, or a fault."""
    first = next((line.strip() for line in output.splitlines() if "error" in line or "fatal" in line), output.strip())
    missing = r"cannot find compiler|cc1plus|g(cc|\+\+): (not found|no such file)|host compiler|unsupported GNU"
    if re.search(missing, output, re.IGNORECASE):
        return BackendUnavailable(f"nvcc has no host compiler it can use: {first}.", "install g++ (build-essential).")
    unknown = r"Unsupported gpu architecture|not defined for option 'gpu-architecture'|invalid value for --gpu-arch"
    if re.search(unknown, output):
        return BackendUnavailable(
            f"this CUDA toolkit cannot compile for {arch}.", "install a toolkit that knows the GPU."
        )
    return KernelFailure(f"{compiler} could not compile the kernel: {first}.", "run again with --debug, and report it.")


class Resources(NamedTuple):
    """Resources of one function by ptxas: registers a thread, bytes spilled, static shared bytes; and warnings."""

    registers: int
    spilled: int
    shared: int
    warnings: list[str]


def resources(build: Compilable, arch: str) -> dict[str, Resources]:
    """The resources of a build's functions, by name, from ptxas's report (no GPU needed), which the cache keeps."""
    if problem := reporting_problem():
        raise BackendUnavailable(f"{problem}.", "install the CUDA toolkit, or set CUDA_HOME.")
    nvcc = find_nvcc()
    name = f"{_stem(build, arch)}-{_identity(nvcc) if nvcc else nvrtc.NAME}.ptxas"
    for _, report in cache.kept(name):
        return parse_ptxas(report.decode())
    report = _report(build, nvcc, arch).encode()
    cache.store(cache.folder() / name, report)
    return parse_ptxas(report.decode())


def reporting_problem() -> str:
    """The reason why no compiler can tell `resources`, in words; empty if one can."""
    return "" if find_nvcc() or not nvrtc_problem() else "the CUDA compiler, nvcc, was not found"


def _report(build: Compilable, nvcc: Path | None, arch: str) -> str:
    if nvcc is None:
        return _nvrtc(build, arch, "--ptxas-options=-v")[1]
    return _nvcc(build, nvcc, arch, os.devnull, "-Xptxas", "-v")


def parse_ptxas(report: str) -> dict[str, Resources]:
    lines = [line for line in report.splitlines() if "deprecated" not in line]  # architectures, in NVRTC of CUDA 12
    warning_lines = [line for line in lines if re.search(r"warning|\(C75\d\d\)", line, re.IGNORECASE)]
    found = {}
    for part in re.split(r"Compiling entry function '", report)[1:]:
        number = {
            name: int(match[1]) if (match := re.search(pattern, part)) else 0
            for name, pattern in {
                "registers": r"Used (\d+) registers",
                "stores": r"(\d+) bytes spill stores",
                "shared": r"(\d+) bytes smem",
            }.items()
        }
        found[part.split("'")[0]] = Resources(number["registers"], number["stores"], number["shared"], warning_lines)
    return found
