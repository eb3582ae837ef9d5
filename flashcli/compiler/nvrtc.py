"""NVIDIA's compiler as a library, for machines without a toolkit: it comes with the wheels of PyTorch.

It is reached through NVIDIA's own package, ``cuda-bindings``, which looks for the library itself.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

NAME = "nvrtc"
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
        code, *_ = version()
    except ImportError:
        return "cuda-bindings is not installed"
    except (RuntimeError, OSError) as error:  # what NVIDIA's package raises where the library is missing
        return f"its library is not found: {str(error).strip().splitlines()[0]}"
    return f"it fails with {code.name}" if code else ""


def cubin(source: str, name: str, arch: str, options: Sequence[str], include: Iterable[Path]) -> tuple[bytes, str]:
    """Compile a source to a cubin for one architecture, and return it with the log: warnings, and what ptxas reports.

    ``name`` is the file's name in error messages, ``options`` are those of nvcc, ``include`` the folders of the
    headers. Raises CompileError.
    """
    given = [option for option in options if option not in UNKNOWN_OPTIONS]
    given += ["-default-device", f"-arch={arch}", *(f"-I{folder}" for folder in include)]
    texts, names = [text.encode() for text in HEADERS.values()], [header.encode() for header in HEADERS]
    nvrtc = _library()
    program = _ask(nvrtc.nvrtcCreateProgram, source.encode(), name.encode(), len(names), texts, names)
    try:
        [code] = nvrtc.nvrtcCompileProgram(program, len(given), [option.encode() for option in given])
        log = _text(program, nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog).decode().strip()
        if code:
            raise CompileError(log)
        return _text(program, nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def version() -> tuple[Any, int, int]:
    """NVRTC's error code, which is 0, and its version, major and minor."""
    return _library().nvrtcVersion()


@functools.cache
def _library() -> ModuleType:
    from cuda.bindings import nvrtc

    return nvrtc


def _ask(function: Any, *arguments: object) -> Any:
    """Call a function of NVRTC and return its result without the error code; CompileError if it fails."""
    code, *found = function(*arguments)
    if code:
        raise CompileError(f"error: {code.name}")
    return found[0] if found else None


def _text(program: object, size: Any, fill: Any) -> bytes:
    found = b" " * _ask(size, program)
    _ask(fill, program, found)
    return found.rstrip(b"\0") if fill.__name__.endswith("Log") else found
