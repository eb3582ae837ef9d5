"""A copy of a submission's folder, to build in: no more than its bounds, no link followed, nothing but files."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from flashcli.terminal import sizes

MOST_ENTRIES = 100_000
BLOCK = 2**20


class NotCopied(Exception):
    """The error that a folder is not copied; its text says why."""


def copy_folder(source: Path, target: Path, most_bytes: int) -> None:
    """Copy what is in a folder into another, an empty one. NotCopied if it holds too much, or what is no file."""
    waiting, entries, left = [(source, target)], 0, most_bytes
    while waiting:
        here, there = waiting.pop()
        for entry in os.scandir(here):
            entries += 1
            if entries > MOST_ENTRIES:
                raise NotCopied(f"it has more than {MOST_ENTRIES} files")
            mode = entry.stat(follow_symlinks=False).st_mode
            made = there / entry.name
            if stat.S_ISLNK(mode):
                made.symlink_to(os.readlink(entry.path))
            elif stat.S_ISDIR(mode):
                made.mkdir()
                waiting.append((Path(entry.path), made))
            elif stat.S_ISREG(mode):
                left -= _copy_file(entry.path, made, left, most_bytes)
            else:
                raise NotCopied(f"{os.path.relpath(entry.path, source)} is neither a file nor a folder")


def _copy_file(source: str, target: Path, left: int, most: int) -> int:
    """Copy at most ``left`` bytes; returns how many there were. Holes count: they may not be holes in the copy."""
    with (
        open(os.open(source, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb", buffering=0) as old,
        open(os.open(target, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb", buffering=0) as new,
    ):
        status = os.fstat(old.fileno())
        copied = 0
        if status.st_size <= left:
            while copied <= left and (block := old.read(BLOCK)):
                copied += len(block)
                new.write(block)
        if max(status.st_size, copied) > left:
            raise NotCopied(f"it is larger than {sizes.text(most)}: give the program one of its own")
        os.fchmod(new.fileno(), stat.S_IMODE(status.st_mode) & 0o777)
        return copied
