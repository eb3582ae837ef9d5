"""Claims about the kernels' headers, checked by the C++ compiler: where fields are, what constants are."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from pathlib import Path

from flashcli.compiler.compiler import SOURCES
from flashcli.emulator import machine, translate


def check(folder: Path, header: str, claims: Iterable[str], macros: Mapping[str, object] | None = None) -> None:
    """Compile claims, constant expressions, behind a header of ``cuda/``; KernelFailure names one that is not so."""
    source = folder / "claims.cu"
    asserted = (f"static_assert({claim});" for claim in claims)
    source.write_text("\n".join(["#include <cstddef>", f'#include "{header}"', *asserted]))
    found = translate.sources(source, [SOURCES, SOURCES / Path(header).parent])
    machine.run("-fsyntax-only", f"-I{folder}", translate.write(found, folder / "translated", macros or {}))


def of_fields(struct: type[ctypes.Structure], name: str = "") -> list[str]:
    """Claims that the struct of that name, or of the class's, is in C++ as ctypes has it."""
    name = name or struct.__name__
    claims = [f"sizeof({name}) == {ctypes.sizeof(struct)}"]
    for field, _ in struct._fields_:
        there = getattr(struct, field)
        claims += [f"offsetof({name}, {field}) == {there.offset}", f"sizeof({name}::{field}) == {there.size}"]
    return claims
