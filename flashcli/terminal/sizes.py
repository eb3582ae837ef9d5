"""Sizes in bytes, as people write and read them: 2G, 512 MiB."""

from __future__ import annotations

import re

LETTERS = " KMGT"  # of powers of 1024, however their units are written: in memory, GB and GiB mean the same
MIB, GIB = 2**20, 2**30


def parse(text: str) -> int:
    """The bytes that a text such as "2G", "512 MiB" or "4096" stands for. ValueError if it is no size above 0."""
    match = re.fullmatch(r"(\d+)\s*([KMGT]?)(i?B)?", text, re.IGNORECASE)
    if not match or int(match[1]) == 0:
        raise ValueError(f"{text!r} is not a number of bytes, such as 2G or 512 MiB")
    return int(match[1]) * 1024 ** LETTERS.index(match[2].upper() or " ")


def text(size: int) -> str:
    """A number of bytes in a unit that suits it."""
    if size < MIB:
        return f"{size} bytes"
    return f"{size / MIB:.1f} MiB" if size < 10 * GIB else f"{size / GIB:.2f} GiB"
