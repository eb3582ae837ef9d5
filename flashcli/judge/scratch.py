"""The judge's own folder for what it needs for a while, which programs of others may have damaged when they end."""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
import threading
from pathlib import Path

from flashcli.errors import CannotCreate, explained

PREFIX = "flashcli-judging-"


class Scratch:
    """A folder that nobody else may enter, made anew where the old one is not as it was. Use as a context manager.

    Every folder in it has a name that was not known before and is new when it is made: no file that a program has put
    there, link or FIFO, is ever opened, written or followed.
    """

    def __init__(self) -> None:
        self._made: dict[Path, int] = {}  # folder -> its lock
        self._lock = threading.Lock()
        _remove_abandoned()
        self._renew()

    def _renew(self) -> None:
        with explained("create a folder in", tempfile.gettempdir(), CannotCreate):
            new = Path(tempfile.mkdtemp(prefix=f".{PREFIX}"))
            lock = os.open(new, os.O_RDONLY)
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.folder = new.rename(new.with_name(new.name[1:]))  # now that it is locked
        self._made[self.folder] = lock
        self._stamp = stamp(self.folder)

    def intact(self) -> bool:
        return stamp(self.folder) == self._stamp

    def mend(self) -> None:
        """Go on in a new folder, if the old one was damaged."""
        with self._lock:
            if not self.intact():
                self._renew()

    def new_folder(self, prefix: str) -> Path:
        with explained("create a folder in", self.folder, CannotCreate):
            return Path(tempfile.mkdtemp(prefix=f"{prefix}-", dir=self.folder))

    def remove(self, folder: Path) -> None:
        """Remove a folder made here; but not by way of what may have taken this one's place."""
        if self.intact():
            remove(folder)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *exc: object) -> None:
        for folder, lock in self._made.items():
            remove(folder)
            os.close(lock)


def _remove_abandoned() -> None:
    """Remove the folders of this user's judges that were killed, which no longer lock them."""
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if os.fstat(fd).st_uid == os.geteuid():
                    fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    remove(folder)
            finally:
                os.close(fd)


def stamp(path: Path) -> tuple[int, ...] | None:
    """Which folder this is, whose, and who may enter it; None if there is nothing. Links are not followed."""
    with contextlib.suppress(OSError):
        status = os.lstat(path)
        return status.st_dev, status.st_ino, status.st_mode, status.st_uid
    return None


def remove(folder: Path) -> None:
    """Remove whatever a program may have made of a folder; what cannot be removed stays."""
    with contextlib.suppress(OSError):
        _remove_files(folder)
        return
    # rm gets through any depth of folders, or says that it does not.
    rm = ["rm", "-rf", "--", str(folder)]
    if subprocess.run(rm, stderr=subprocess.DEVNULL, check=False).returncode:
        # Folders that their owner may not enter; chmod -R follows no link that it finds.
        subprocess.run(["chmod", "-R", "u+rwX", "--", str(folder)], stderr=subprocess.DEVNULL, check=False)
        subprocess.run(rm, stderr=subprocess.DEVNULL, check=False)


def _remove_files(folder: Path) -> None:
    """Remove a folder with nothing but files, which is what most are: at once, and through no link. Else, OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for name in os.listdir(fd):
            os.unlink(name, dir_fd=fd)
    finally:
        os.close(fd)
    os.rmdir(folder)
