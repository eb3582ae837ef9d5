"""Quick builds, which answer first calls: another process makes one in half a second, and then the full build.

A quick build has the full one's bytes where the source leaves no product and sum for the compiler to join: such kernels
say that they are ``explicit``. It is slow. So it answers small problems only, and each call waits for its answer. A
loop of calls then goes on at full speed as soon as the full build is there: it has no queue of slow launches to wait
for.

The other process is on its own: whether this one ends or is killed, the cache is filled. And what ptxas has to say of
quick builds, which it writes to the standard error from several threads, nobody reads there.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from flashcli.compiler import cache, compiler

if TYPE_CHECKING:
    import subprocess

MOST = 2**26  # products of Q Kᵀ on a multiprocessor: an H100 takes some 0.2 s for them, and full builds 1 to 3 s longer
ROOM = 2**31  # bytes of a GPU's memory that should be free: its threads' stacks take 2.5 KB each, 0.7 GB on an H200
MAKE = "from flashcli.compiler.quick import make; make()"


class Source(NamedTuple):
    """A build as far as a compiler reads it, which another process can be told."""

    arch: str
    name: str
    file: str
    d: int
    given: tuple[tuple[str, int], ...]
    on_host: bool = False

    @property
    def kernel(self) -> Source:
        return self

    @property
    def problem(self) -> Source:
        return self

    def macros(self) -> dict[str, int]:
        return dict(self.given)


_begun: dict[Source, tuple[subprocess.Popen[bytes], bytes | None]] = {}  # what makes builds, and the quick ones
_beginning = threading.Lock()


def first_cubin(build: Any, arch: str) -> tuple[bytes, bool]:
    """Machine code to answer a first call with, and whether it is quick, while another process makes the full one.

    None is quick where FLASHCLI_QUICK is 0, where no NVRTC knows how, or where the cache cannot be filled; nor in a
    program that Python is built into, which is no command to begin another process with.
    """
    may = os.environ.get("FLASHCLI_QUICK") != "0" and Path(sys.executable or "").name.startswith("python")
    if may and build.kernel.explicit and build.problem.work <= MOST:
        if code := compiler.kept(build, arch):
            return code, False
        with contextlib.suppress(OSError):
            if code := _begin(_source(build, arch)):
                return code, True
    return compiler.cubin(build, arch), False


def is_under_way(build: Any, arch: str) -> bool:
    """Whether another process, begun by this one, still makes the full build."""
    return _is_at_work(_source(build, arch))


def _is_at_work(source: Source) -> bool:
    return source in _begun and _begun[source][0].poll() is None


def _source(build: Any, arch: str) -> Source:
    return Source(arch, build.kernel.name, build.kernel.file, build.problem.d, tuple(build.macros().items()))


def _begin(source: Source) -> bytes | None:
    """Have a process make both builds, unless one does, and wait for the quick one; OSError if it cannot be started."""
    import json  # here, because a warm start compiles nothing
    import subprocess

    from flashcli.process import detached

    with _beginning:
        if not _is_at_work(source):
            process = detached.begin(["-c", MAKE, json.dumps(source)], stdout=subprocess.PIPE)
            assert process.stdout
            with process.stdout as pipe:
                _begun[source] = process, cache.unsealed(pipe.read())
        return _begun[source][1]


def make() -> None:
    """Write the quick build to the standard output, and put the full one into the cache, as the process begun above.

    A child makes the quick build. NVRTC would make less of the full one in the process that has made it: the options of
    quick builds stay in force there.
    """
    import json

    arch, name, file, d, given, *_ = json.loads(sys.argv[1])
    source = Source(arch, name, file, d, tuple(map(tuple, given)))
    cache.try_to_write()
    if not (child := os.fork()):
        with open(1, "wb") as pipe:
            pipe.write(cache.sealed(compiler.quick_cubin(source, arch)))
        return
    os.close(1)  # as the child does: whoever reads goes on
    if os.waitpid(child, 0)[1] == 0:
        compiler.cubin(source, arch)
