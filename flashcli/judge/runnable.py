"""Why a file cannot be run as a program, and how it can be: compiled, or as a script with a line #!."""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import shutil
import stat
from pathlib import Path

from flashcli.compiler import compiler

COMPILERS = {".c": "cc -O2", ".cc": "c++ -O2", ".cpp": "c++ -O2", ".cxx": "c++ -O2", ".cu": "nvcc -O2"}  # of sources
INTERPRETERS = {".py": "/usr/bin/env python3", ".sh": "/bin/sh"}  # of scripts
LONGEST_LINE = 256  # bytes that Linux reads of a script's first line


def complaint(place: str, path: str) -> tuple[str, str] | None:
    """Why the program that --exe names cannot be run, and a hint; None if nothing speaks against it."""
    suffix = Path(place).suffix
    if not os.path.exists(path):
        return "no such file or directory", _by_its_interpreter(place) or "check --exe."
    if suffix in COMPILERS and not _first_line(path).startswith((b"\x7fELF", b"#!")):
        emulated = suffix == ".cu" and compiler.find_nvcc() is None
        return "it is source, to be compiled", _to_compile(place, "flashcli emulate" if emulated else COMPILERS[suffix])
    wanted = suffix in INTERPRETERS and not _first_line(path).startswith(b"#!")
    line = f"write #!{INTERPRETERS[suffix]} as its first line" if wanted else ""
    if not os.access(path, os.X_OK):
        return "permission denied", f"{line} and chmod +x it." if line else "chmod +x it."
    return ("it does not say what interprets it", f"{line}.") if line else None


def _by_its_interpreter(place: str) -> str:
    """A hint where a whole command is named, such as 'python3 solve.py', in the place of one file; else ""."""
    words = place.split()
    if len(words) < 2 or not shutil.which(words[0]):
        return ""
    return f"name one file: {words[1]} with #!/usr/bin/env {words[0]} as its first line, after chmod +x {words[1]}."


def _to_compile(place: str, command: str) -> str:
    made, source = os.path.splitext(place)[0], os.path.basename(place)
    libraries = "" if source.endswith(".cu") else " -lm"
    command = shlex.quote(f"{command} -o {os.path.basename(made)} {source}{libraries}")
    return f"have it built by --exe {made} --build {command}."


def why_not_run(program: str, number: int | None) -> str:
    """Why the system did not start a program, by its error's number, in words that the author can act on."""
    line = _first_line(program)
    if number == errno.ENOEXEC:
        return (
            "it is neither a program for this machine nor a script that begins with #!, such as #!/usr/bin/env python3"
        )
    if number == errno.ENOENT and line.startswith(b"#!"):
        words = line[2:].split(b"\n")[0].strip(b" \t").split(b" ")
        return f"there is no {words[0].decode(errors='replace')!r}, which its line #! names"
    return os.strerror(number or 0).lower()


def not_started_inside(printed: str) -> int | None:
    """The error's number where bubblewrap says that it could not start a program; None where it says nothing."""
    said = printed.startswith("bwrap: execvp ") and printed.endswith(os.strerror(errno.ENOENT))
    return errno.ENOENT if said else None


def is_compiled(program: str) -> bool:
    return _first_line(program).startswith(b"\x7fELF")


def _first_line(program: str) -> bytes:
    """The first bytes of a regular file, by which Linux finds out what runs it; nothing of any other file."""
    with contextlib.suppress(OSError), open(os.open(program, os.O_RDONLY | os.O_NONBLOCK), "rb", buffering=0) as file:
        return (file.read(LONGEST_LINE) or b"") if stat.S_ISREG(os.fstat(file.fileno()).st_mode) else b""
    return b""
