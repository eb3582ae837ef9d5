"""NVIDIA's compiler as a library, for machines without a toolkit: it comes with the wheels of PyTorch."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import glob
import itertools
import os
import sys
from collections.abc import Callable, Collection, Iterable, Sequence
from pathlib import Path

NAME = "nvrtc"
LIBRARIES = ("libnvrtc.so.13", "libnvrtc.so.12")
UNKNOWN_OPTIONS = ("-O3",)  # of nvcc; here it is what is done anyway
# Nothing of the host's headers is there; of them, the kernels use these names.
HEADERS = {
    "stdint.h": """#pragma once
typedef signed char int8_t;
typedef unsigned char uint8_t;
typedef short int16_t;
typedef unsigned short uint16_t;
typedef int int32_t;
typedef unsigned int uint32_t;
typedef long long int64_t;
typedef unsigned long long uint64_t;
typedef unsigned long long uintptr_t;
"""
}


class CompileError(Exception):
    """Raised when NVRTC refuses a source; the text is its log."""


def problem() -> str:
    """The reason why NVRTC cannot be used, in words; empty if it can."""
    try:
        version()
    except (OSError, CompileError) as error:
        return str(error)
    return ""


def cubin(source: str, name: str, arch: str, options: Sequence[str], include: Iterable[Path]) -> tuple[bytes, str]:
    """Compile a source to a cubin for one architecture, and return it with the log: warnings, and what ptxas reports.

    ``name`` is the file's name in error messages, ``options`` are those of nvcc, ``include`` the folders of the
    headers. Raises CompileError.
    """
    given = [option for option in options if option not in UNKNOWN_OPTIONS]
    given += ["-default-device", f"-arch={arch}", *(f"-I{folder}" for folder in include)]
    library, program = _library(), ctypes.c_void_p()
    headers = len(HEADERS), _strings(HEADERS.values()), _strings(HEADERS)
    _ask(library.nvrtcCreateProgram, ctypes.byref(program), source.encode(), name.encode(), *headers)
    try:
        code = library.nvrtcCompileProgram(program, len(given), _strings(given))
        log = _text(program, "ProgramLog").rstrip(b"\0").decode().strip()
        if code:
            raise CompileError(log)
        return _text(program, "CUBIN"), log
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def version() -> tuple[int, int]:
    """NVRTC's version, major and minor; OSError if there is no library."""
    major, minor = ctypes.c_int(), ctypes.c_int()
    _ask(_library().nvrtcVersion, ctypes.byref(major), ctypes.byref(minor))
    return major.value, minor.value


@functools.cache
def _library() -> ctypes.CDLL:
    """The first one of NVIDIA's wheels, the system's, and those of toolkits; OSError if there is none.

    NVIDIA's package ``cuda-bindings`` would find it, too: its import takes longer than all else before a compilation.
    """
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{folder}/nvidia/{wheel}/lib/" for folder in sys.path for wheel in ("cu13", "cuda_nvrtc")]
    folders += ["", f"{sys.prefix}/lib/", *(f"{home}/lib64/" for home in homes if home)]
    for folder, name in itertools.product(folders, LIBRARIES):
        if not folder or os.path.exists(folder + name):
            with contextlib.suppress(OSError):
                for builtins in glob.glob(f"{folder}libnvrtc-builtins.so.*") if folder else ():
                    ctypes.CDLL(builtins)  # which the library would not find there
                return ctypes.CDLL(folder + name)
    raise OSError("its library is not found")


def _ask(function: Callable[..., int], *arguments: object) -> None:
    """Call a function of NVRTC; CompileError if it fails."""
    if code := function(*arguments):
        raise CompileError(f"error: it fails with code {code}")


def _strings(texts: Collection[str]) -> ctypes.Array[ctypes.c_char_p]:
    return (ctypes.c_char_p * len(texts))(*(text.encode() for text in texts))


def _text(program: ctypes.c_void_p, what: str) -> bytes:
    """Bytes that a program has after its compilation: its "ProgramLog", or its "CUBIN"."""
    size = ctypes.c_size_t()
    _ask(getattr(_library(), f"nvrtcGet{what}Size"), program, ctypes.byref(size))
    found = ctypes.create_string_buffer(size.value)
    _ask(getattr(_library(), f"nvrtcGet{what}"), program, found)
    return found.raw
