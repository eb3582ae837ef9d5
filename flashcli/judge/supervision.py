"""The judge's end of its supervisors: starts them, asks them to run commands, and ends them.

A supervisor on this machine serves one command after another; behind a launcher, such as srun, each has its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import flashcli
from flashcli.errors import BackendUnavailable
from flashcli.judge.supervisor import CAPTURED, KILL_PATIENCE, Tail
from flashcli.judge.texts import last_line

# -I and -S: neither the environment nor what is installed has a say in it.
BOOT = "import sys; sys.path.append({!r}); from flashcli.judge.supervisor import main; main()"
START = 60.0  # seconds within which a supervisor on this machine should have started the command
POLITE = 0.5  # seconds that a supervisor gets to end which runs nothing, or that its launcher has not started
LEAVE = 20.0  # seconds that a launcher gets to end its job


@dataclass
class Request:
    """A command to run. Without ``limits`` there are none; without an ``environment`` it is that of the launcher."""

    command: list[str]
    folder: str | None
    environment: dict[str, str] | None
    time_limit: float
    grace: float = 0.0
    processes: int | None = None
    limits: dict[str, int | None] | None = None  # by the names of `resource`
    containment: str = "auto"
    sandbox: str = ""
    own: list[str] = field(default_factory=list)  # what of the program's is seen in the sandbox
    readable: tuple[str, ...] = ()  # and what of others


class Finished(NamedTuple):
    """How a command ended, and the most ``memory`` that one of its processes had, in bytes; 0 where nobody knows.

    ``stopped`` says why it was ended before its time, or "":
    "time", "processes" (too many), "lost" (whoever watched it was killed), "never" (some of it could not be ended).
    """

    seconds: float
    returncode: int | None
    stopped: str
    printed: str
    containment: str
    memory: int = 0


class Supervision:
    """All supervisors of a judging. Use as a context manager; `run` may be called from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._started: set[Supervisor] = set()  # and not ended
        self._idle: list[Supervisor] = []
        self._closed = False
        # Signals interrupt the main thread only: one that is started by another is never lost sight of.
        self._starter = ThreadPoolExecutor(1)

    def run(
        self, request: Request, launcher: tuple[str, ...] = (), began: Callable[[], None] = lambda: None
    ) -> Finished:
        """Run a command. OSError if it cannot be started; ``began`` is called when it is.

        A ``launcher`` gets the environment of the command, and adds to it, such as the GPU to use.
        """
        environment = request.environment
        if launcher:
            request = replace(request, environment=None)
        supervisor = self._take(launcher, environment)
        try:
            return supervisor.run(request, began)
        finally:
            self._give_back(supervisor)

    def _take(self, launcher: tuple[str, ...], environment: dict[str, str] | None) -> Supervisor:
        with self._lock:
            if self._closed:
                raise BackendUnavailable("the judging is over.")
            if self._idle and not launcher:
                return self._idle.pop()
        return self._starter.submit(self._start, launcher, environment).result()

    def _start(self, launcher: tuple[str, ...], environment: dict[str, str] | None) -> Supervisor:
        supervisor = Supervisor(launcher, environment)
        self._started.add(supervisor)
        return supervisor

    def _give_back(self, supervisor: Supervisor) -> None:
        with self._lock:
            if supervisor.usable and not self._closed:
                self._idle.append(supervisor)
                return
        supervisor.close()
        self._started.discard(supervisor)

    def __enter__(self) -> Supervision:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        with self._lock:
            self._closed = True
        self._starter.shutdown()
        supervisors = list(self._started)
        for supervisor in supervisors:
            supervisor.hang_up()
        for supervisor in supervisors:
            supervisor.close()


class Supervisor:
    def __init__(self, launcher: tuple[str, ...], environment: dict[str, str] | None) -> None:
        self._launcher, self._name = launcher, f"flashcli-{uuid.uuid4().hex[:12]}"
        self.usable = True  # for another command
        self._began = False
        self._rest, self._said = b"", Tail()
        program = [sys.executable, "-I", "-S", "-c", BOOT.format(str(Path(flashcli.__file__).parent.parent))]
        # A submission might find what is in this environment; slurm's name for the job makes it one to be found.
        own = {"PATH": os.defpath} if not launcher else {"SLURM_JOB_NAME": self._name, **(environment or os.environ)}
        # Any, for Popen's type cannot say that its streams are pipes.
        self._process: Any = subprocess.Popen(
            [*launcher, *program], env=own, bufsize=0, start_new_session=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        )  # fmt: skip
        self._lock = threading.Lock()

    def run(self, request: Request, began: Callable[[], None]) -> Finished:
        with contextlib.suppress(BrokenPipeError):  # it has ended, which is told below
            self._process.stdin.write(json.dumps(asdict(request)).encode() + b"\n")
        self.usable = self._began = False  # until it has answered
        deadline = None if self._launcher else time.perf_counter() + START
        while (answer := self._next(deadline)) is not None:
            match answer:
                case {"began": _}:
                    self._began, deadline = (
                        True,
                        time.perf_counter() + request.time_limit + request.grace + 2 * KILL_PATIENCE,
                    )
                    began()
                case {"failed": number}:
                    self.usable = not self._launcher
                    raise OSError(number, os.strerror(number))
                case {"refused": why}:
                    raise BackendUnavailable(
                        f"its processes cannot be contained: {why}.", 'choose another "containment" in the rules.'
                    )
                case {"stopped": "cancelled"}:
                    break
                case _:
                    self.usable = not self._launcher and answer["stopped"] != "never"
                    return Finished(**answer)
        if self._began:
            return Finished(request.time_limit, None, "lost", last_line(self._said.text()).removeprefix(": "), "")
        who = f"the launcher {self._launcher[0]!r}" if self._launcher else "the judge's supervisor"
        raise BackendUnavailable(
            f"{who} started nothing{last_line(self._said.text()).removesuffix('.')}.",
            "try its command by itself." if self._launcher else "see whether this machine starts any processes.",
        )

    def _next(self, deadline: float | None) -> dict | None:
        """Wait for the supervisor's next answer; None if none comes. Its launcher's own output is kept meanwhile."""
        answers, said = self._process.stdout.fileno(), self._process.stderr.fileno()
        poller = select.poll()
        poller.register(answers, select.POLLIN)
        poller.register(said, select.POLLIN)
        while b"\n" not in self._rest:
            left = None if deadline is None else max(0, 1000 * (deadline - time.perf_counter()))
            if not (ready := dict(poller.poll(left))):
                return None
            if said in ready:
                data = os.read(said, CAPTURED)
                self._said.add(data)
                if not data:
                    poller.unregister(said)
            elif not (data := os.read(answers, CAPTURED)):
                return None
            else:
                self._rest += data
        line, _, self._rest = self._rest.partition(b"\n")
        return json.loads(line)

    def hang_up(self) -> None:
        """Let the supervisor end all that it has started, and itself."""
        with contextlib.suppress(OSError):
            self._process.stdin.close()

    def close(self) -> None:
        """Have the supervisor ended, and its launcher's job too."""
        with self._lock:
            self.hang_up()
            if not self._ends_within(KILL_PATIENCE if self._began else POLITE):
                self._signal(signal.SIGTERM)  # a launcher passes it on to its job
                if not self._ends_within(LEAVE if self._launcher else POLITE):
                    self._signal(signal.SIGKILL)
                    self._process.wait()
                    self._cancel()
            for stream in (self._process.stdout, self._process.stderr):
                stream.close()

    def _ends_within(self, seconds: float) -> bool:
        deadline = time.perf_counter() + seconds
        while self._process.poll() is None and time.perf_counter() < deadline:
            ready, _, _ = select.select([self._process.stdout, self._process.stderr], [], [], 0.01)
            for stream in ready:  # or it might wait for its reader
                os.read(stream.fileno(), CAPTURED)
            time.sleep(0.001)
        return self._process.poll() is not None

    def _signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, number)

    def _cancel(self) -> None:
        """Cancel the Slurm job that a launcher may have left when it had to be killed."""
        if self._launcher and shutil.which("scancel"):
            command = ["scancel", f"--name={self._name}"]
            with contextlib.suppress(OSError, subprocess.TimeoutExpired):
                subprocess.run(command, timeout=LEAVE, capture_output=True, stdin=subprocess.DEVNULL, check=False)
