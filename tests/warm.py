"""Processes of Python that start warm: forked off one that has imported what most of them import.

A start of flashcli computes for 0.15 s, most of it NumPy's import, and the tests start flashcli many hundreds of times.
What is forked is a process in its own right: arguments, environment, folder, standard streams, signals and end are its
own. What it cannot show is what a cold start imports, and what an interpreter or a library does once, when it starts.

`Nursery` is the side of the tests. The other side is this file as a program. It never uses a GPU, for what is forked
off a process with a CUDA context can use none.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import types
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

AT_START = ("PYTHON", "LC_", "LANG", "LD_", "MALLOC_", "OPENBLAS_", "OMP_", "MKL_")  # read once, when a process starts
DEPENDENCIES = (
    "click", "click.shell_completion", "concurrent.futures.thread", "json", "matplotlib.backends.backend_agg",
    "matplotlib.figure", "numpy.random", "threadpoolctl",
)  # fmt: skip
NOT_BEFORE = (  # to be run as a program; want a GPU's libraries; take PyTorch's 6 s, and then TMPDIR as it is
    "flashcli.__main__", "flashcli.measure.peer", "flashcli.torch",
)  # fmt: skip


class Nursery:
    """The process that others are forked off; it ends with the one that made it."""

    def __init__(self, env: dict[str, str]) -> None:
        self._at_start = _at_start(env)
        self._door, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())], env=env, pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,  # of the kind that others get
            )  # fmt: skip
        for pipe in (process.stdout, process.stderr):  # which nobody reads
            pipe.close()

    def has(self, env: dict[str, str]) -> bool:
        """Whether what is forked here is what would start with this environment."""
        return _at_start(env) == self._at_start

    def run(self, arguments: list[str], env: dict[str, str], cwd: object, timeout: float) -> tuple[int, bytes, bytes]:
        """Exit code, stdout and stderr of ``python ARGUMENTS``, which begin with -m MODULE or -c PROGRAM."""
        connection, theirs = socket.socketpair()
        (stdout, out), (stderr, err) = os.pipe(), os.pipe()
        socket.send_fds(self._door, [b"!"], [theirs.fileno(), out, err])
        for end in (theirs.detach(), out, err):
            os.close(end)
        with (
            connection, connection.makefile("rwb") as talk, open(stdout, "rb") as stdout, open(stderr, "rb") as stderr,
        ):  # fmt: skip
            pickle.dump((arguments, env, os.path.abspath(cwd)), talk)
            talk.flush()
            limit = threading.Timer(timeout, os.kill, [pickle.load(talk), signal.SIGKILL])
            limit.start()
            with ThreadPoolExecutor(1) as pool:
                errors = pool.submit(stderr.read)
                printed, errors = stdout.read(), errors.result()
            code = pickle.load(talk)
            if limit.finished.is_set():
                raise subprocess.TimeoutExpired(arguments, timeout, printed, errors)
            limit.cancel()
        return code, printed, errors


def _at_start(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(AT_START) and name != "PYTHONPATH"}


# The program


def serve(door: socket.socket) -> tuple[list[str], dict[str, str], str]:
    """Fork for everyone who comes to the door; returns what to run in the process that is to run it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    while True:
        note, received, *_ = socket.recv_fds(door, 1, 3)
        if not note:
            os._exit(0)
        if os.fork() == 0:
            door.close()
            return attend(*received)
        for end in received:
            os.close(end)


def attend(connection: int, out: int, err: int) -> tuple[list[str], dict[str, str], str]:
    """Fork once more, and tell how that process ends; returns in that process."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    with socket.socket(fileno=connection).makefile("rwb") as talk:
        job = pickle.load(talk)
        if pid := os.fork():
            os.closerange(out, err + 1)
            pickle.dump(pid, talk)
            talk.flush()
            pickle.dump(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), talk)
            talk.flush()
            os._exit(0)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.closerange(3, err + 1)
    return job


def become(arguments: list[str], env: dict[str, str], cwd: str) -> None:
    """Do what ``python ARGUMENTS`` does; how that ends is how this process is to end."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    (option, what), sys.argv[:] = arguments[:2], [arguments[0], *arguments[2:]]
    named = env["PYTHONPATH"].split(os.pathsep) if env.get("PYTHONPATH") else []
    sys.path[:] = [cwd if option == "-m" else "", *named, *sys.path]
    importlib.invalidate_caches()
    if option == "-m":
        if not hasattr(sys.modules.get(what), "__path__"):  # no package, whose __main__ is what is run
            sys.modules.pop(what, None)  # or runpy warns that it is imported already
        runpy.run_module(what, run_name="__main__", alter_sys=True)
    else:
        main = sys.modules["__main__"] = types.ModuleType("__main__")
        exec(compile(what, "<string>", "exec"), vars(main))


def prepare() -> None:
    """Import what most processes will, and forget where it was found."""
    import flashcli

    top = Path(flashcli.__file__).parent
    modules = (path.relative_to(top.parent).with_suffix("").parts for path in sorted(top.rglob("*.py")))
    for name in [*DEPENDENCIES, *(".".join(parts).removesuffix(".__init__") for parts in modules)]:
        if not name.startswith(NOT_BEFORE):
            with contextlib.suppress(ImportError):
                importlib.import_module(name)
    named = {os.path.abspath(folder) for folder in os.environ["PYTHONPATH"].split(os.pathsep)}  # some twice, perhaps
    sys.path[:] = [folder for folder in sys.path[1:] if os.path.abspath(folder) not in named]


if __name__ == "__main__":
    prepare()
    gc.freeze()  # or each copy would look through all of it, and so have memory of its own for it
    become(*serve(socket.socket(fileno=int(sys.argv[1]))))
