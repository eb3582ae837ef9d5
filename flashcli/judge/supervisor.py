"""A small process that runs commands for the judge, one after another, each within bounds and contained.

It reads requests, a line of JSON each, from its standard input, and answers on its standard output with lines of JSON.
When its input ends, because the judge has no more for it or has been killed, everything that it started is ended.
It stands wherever a launcher puts it, so that time and limits are those of the machine where the command runs; and it
needs nothing but Python's own modules, so that it is there at once.

judge -> supervisor -> first process (see containment.py) -> command
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import resource
import select
import signal
import time
from typing import NoReturn

from flashcli.judge import bubblewrap, containment
from flashcli.process.signals import ENDING

KIB = 1024
CAPTURED = 64 * KIB  # bytes of what a command prints that are kept, the last ones
TICK = 0.02  # seconds between looks at the number of processes
LOOK = 1.0  # seconds between counts of them, if nothing tells that they have become more
PROMPT = 0.05  # seconds that the kernel gets to end what is contained, before that is looked for
KILL_PATIENCE = 10.0  # seconds to wait for killed processes to be gone
NAP = 0.0005  # seconds between looks whether they are
HANDLED = (*ENDING, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ)  # here otherwise than a command expects
REQUESTS, ANSWERS = 0, 1  # descriptors


def main() -> None:
    load_gpu_driver()
    containment.hide()
    containment.adopt_orphans()
    for number in ENDING:  # it ends when its input does
        signal.signal(number, signal.SIG_IGN)
    ways = list(containment.WAYS)
    requests = open(REQUESTS, "rb", closefd=False, buffering=0)  # noqa: SIM115 (as long as this process)
    while line := requests.readline():
        request = json.loads(line)
        found = Run(request, ways if request["containment"] == "auto" else [request["containment"]]).serve()
        _answer(found)
        if found.get("stopped") in ("cancelled", "never"):
            return  # something may be left, which must not be taken for the next one's


def load_gpu_driver(device: str = "/dev/nvidia-uvm") -> None:
    """Load the GPU's driver where nobody has used the GPU since the machine was started.

    A program does it by itself, through a setuid program of the driver, which gains no rights in a user namespace.
    """
    if not os.path.exists(device):
        with contextlib.suppress(OSError):
            words = ["nvidia-modprobe", "-u", "-c=0"]
            os.waitpid(os.posix_spawnp(words[0], words, os.environ), 0)


def _answer(content: dict[str, object]) -> None:
    data = memoryview(json.dumps(content).encode() + b"\n")
    while data:
        data = data[os.write(ANSWERS, data) :]


class Tail:
    """The last `CAPTURED` bytes of a stream."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> None:
        self._data += data
        if len(self._data) > 2 * CAPTURED:
            del self._data[:-CAPTURED]

    def text(self) -> str:
        return self._data[-CAPTURED:].decode(errors="replace").strip()


class Crowd:
    """Whether there are too many processes and threads below this one; cheap enough to be asked at every tick."""

    def __init__(self, most: int | None) -> None:
        self._most, self._next_look = most, time.perf_counter() + LOOK
        self._before = containment.tasks_of_system()

    def too_large(self) -> bool:
        """Whether there are too many; counts all only now and then, or if the system's number of tasks has grown."""
        if self._most is None:
            return False
        now = time.perf_counter()
        if containment.tasks_of_system() - self._before <= self._most and now < self._next_look:
            return False
        self._next_look = now + LOOK
        return sum(containment.descendants(os.getpid()).values()) > self._most + 1  # the first process is not one


class Run:
    """One command, from its request to the answer."""

    def __init__(self, request: dict, ways: list[str]) -> None:
        """``ways`` of containment, the best first; those that cannot be gone here are taken out."""
        self._request, self._ways = request, ways
        self._tail, self._rest = Tail(), b""
        self._deadline = math.inf
        self._began: float | None = None
        self._ended: tuple[int, float, bool] | None = None  # status, when, whether nothing else was left
        self._stopped = ""
        self._memory = 0  # bytes, of the largest of its processes
        self._over = False
        self._problem: int | None = None  # why the command could not be started
        self._refused = ""  # why the first process was not contained

    def serve(self) -> dict[str, object]:
        while self._ways:
            self._over, self._refused = False, ""
            try:
                way = containment.WAYS[self._ways[0]]()
            except OSError as error:  # no control group can be made
                self._refused = error.strerror or str(error)
            else:
                self._begin(way)
                self._watch()
                gone = self._finish(way)
            if not self._refused:
                return self._found(gone)
            refused = f"{self._ways.pop(0)}: {self._refused.lower()}"
        return {"refused": refused}

    def _begin(self, way: containment.Freezing) -> None:
        self._status, tell = os.pipe()
        control, self._control = os.pipe()
        self._output, printed = os.pipe()
        self._crowd = Crowd(self._request["processes"])
        limits = _limits(self._request)
        if os.fork() == 0:
            try:
                os.close(self._control)  # or the first process would not notice this one's end
                _first_process(way, self._request, limits, control, tell, printed)
            finally:
                os._exit(0)  # whatever happens
        for fd in (tell, control, printed):
            os.close(fd)
        self._poller = select.poll()
        for fd in (REQUESTS, self._status, self._output):
            self._poller.register(fd, select.POLLIN)

    def _watch(self) -> None:
        """Watch the command until it has ended, or is given up."""
        while not self._over:
            left = self._deadline - time.perf_counter()
            if left <= 0:
                self._time_is_up()
                continue
            for fd, _ in self._poller.poll(1000 * min(left, TICK)):
                self._read(fd)
            if self._crowd.too_large():
                self._give_up("processes")  # no grace: every moment makes more of them

    def _time_is_up(self) -> None:
        grace = self._request["grace"]
        if self._stopped or not grace:
            self._give_up("time")
            return
        self._stopped, self._deadline = "time", self._deadline + grace
        with contextlib.suppress(BrokenPipeError):
            os.write(self._control, b"T")

    def _give_up(self, why: str) -> None:
        if not self._over:
            self._stopped, self._over = why, True

    def _read(self, fd: int) -> None:
        data = os.read(fd, CAPTURED)
        if fd == REQUESTS:  # the judge asks for nothing meanwhile: this is the end of it
            self._give_up("cancelled")
        elif fd == self._output:
            self._tail.add(data)
            if not data:
                self._poller.unregister(fd)
        elif not data:
            self._give_up("lost")  # the first process was killed
        else:
            *lines, self._rest = (self._rest + data).split(b"\n")
            for line in lines:
                self._hear(line.decode().split())

    def _hear(self, words: list[str]) -> None:
        """Take in one message of the contained command's first process: began, refused, failed, or ended."""
        match words:
            case ["began", moment]:
                self._began = float(moment)
                self._deadline = self._began + self._request["time_limit"]
                with contextlib.suppress(BrokenPipeError):  # the judge has gone, as its requests will tell
                    _answer({"began": True})
                return
            case ["refused", number]:
                self._refused = os.strerror(int(number))
            case ["failed", number]:
                self._problem = int(number)
            case ["ended", status, moment, alone, most]:
                self._memory = int(most)
                self._ended = int(status), float(moment), alone == "True"
        self._over = True

    def _finish(self, way: containment.Freezing) -> float:
        """End whatever is left; returns when the last of it was gone."""
        if self._stopped == "time":
            self._memory = containment.most_memory(os.getpid())  # in a namespace, none that is killed is counted
        os.close(self._control)
        if not (self._ended and self._ended[2]):
            way.kill()
        start = time.perf_counter()
        while self._reap():
            waited = time.perf_counter() - start
            if waited > KILL_PATIENCE:
                self._stopped = "never"  # a driver may hold it in the kernel: give up, go on
                break
            if waited > PROMPT:
                containment.freeze_and_kill(os.getpid())
            time.sleep(NAP)
        gone = time.perf_counter()
        way.close()
        self._drain()
        os.close(self._status)
        return self._ended[1] if self._ended and self._ended[2] else gone

    def _reap(self) -> bool:
        """Reap what has ended below this process; whether anything goes on. The kernel tells how much memory it had."""
        try:
            while (ended := os.wait4(-1, os.WNOHANG))[0]:
                self._memory = max(self._memory, KIB * ended[2].ru_maxrss)
        except ChildProcessError:
            return False
        return True

    def _drain(self) -> None:
        """Read the rest of the output's pipe without waiting: something unkillable may hold its other end."""
        os.set_blocking(self._output, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(self._output, CAPTURED):
                self._tail.add(data)
        os.close(self._output)

    def _found(self, gone: float) -> dict[str, object]:
        if self._problem is not None:
            return {"failed": self._problem}
        seconds, limit = gone - (self._began or gone), self._request["time_limit"]
        if seconds > limit and not self._stopped:
            self._stopped = "time"
        return {
            "seconds": min(seconds, limit),
            "returncode": self._returncode(),
            "stopped": self._stopped,
            "printed": self._tail.text(),
            "containment": self._ways[0],
            "memory": self._memory,
        }

    def _returncode(self) -> int | None:
        """The program's exit code as `subprocess` has it: -n if signal n killed it, told by bubblewrap as 128 + n."""
        if self._ended is None:
            return None
        code = os.waitstatus_to_exitcode(self._ended[0])
        return 128 - code if self._request["sandbox"] and code > 128 else code


def _limits(request: dict) -> dict[str, int]:
    """The resource limits of a command, by the names of `resource`, none above what the system allows."""
    wanted = request["limits"]
    if wanted is None:
        return {}
    wanted["cpu"] = math.ceil(request["time_limit"] + request["grace"]) * (os.cpu_count() or 1)
    # A wall behind the bound that is watched.
    wanted["nproc"] = 2 * request["processes"] + containment.tasks_of_user()
    allowed = {}
    for name, value in wanted.items():
        _, most = resource.getrlimit(getattr(resource, f"RLIMIT_{name.upper()}"))
        if value is not None:
            allowed[name] = value if most == resource.RLIM_INFINITY else min(value, most)
    return allowed


def _first_process(
    way: containment.Freezing, request: dict, limits: dict[str, int], control: int, tell: int, printed: int
) -> None:
    """Contain, start the command, wait for its end, tell of it; and return at the end of ``control``."""
    os.setsid()  # what is sent to its parent's group leaves it to clean up
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, REQUESTS)
    os.dup2(nothing, ANSWERS)
    try:
        way.enter()
    except OSError as error:
        os.write(tell, f"refused {error.errno}\n".encode())
        return
    containment.hide()  # a namespace may have shown it
    containment.adopt_orphans()
    children, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    os.write(tell, f"began {time.perf_counter()!r}\n".encode())
    command = os.fork()
    if command == 0:
        _become(request, limits, tell, printed)
    os.close(printed)
    poller = select.poll()
    poller.register(control, select.POLLIN)
    poller.register(children, select.POLLIN)
    while True:
        for fd, _ in poller.poll():
            heard = os.read(fd, 4096)
            if fd == control and heard:
                _terminate(command, bool(request["sandbox"]))
            elif fd == control:  # closed by its parent, or because that was killed
                _signal_group(command, signal.SIGKILL)
                way.kill()
                return
            elif end := _reap(command, PROMPT if request["sandbox"] else 0.0):
                most = 0 if end[2] else containment.most_memory(os.getpid())  # of what is about to be killed
                os.write(tell, "ended {} {!r} {} {}\n".format(*end, most).encode())
                return


def _reap(command: int, patience: float) -> tuple[int, float, bool] | None:
    """Reap all children that have ended; the command's status, when that was, and whether no other child is left.

    ``patience`` is for what bubblewrap leaves for a moment, without which nobody would know how much memory it had.
    """
    end = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return end and (*end, True)
        if pid == 0:
            if end is None or time.perf_counter() > end[1] + patience:
                return end and (*end, False)
            time.sleep(NAP)
        if pid == command:
            end = status, time.perf_counter()


def _become(request: dict, limits: dict[str, int], tell: int, printed: int) -> NoReturn:
    """Become the command, in the child process."""
    try:
        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in HANDLED:
            signal.signal(number, signal.SIG_DFL)
        os.dup2(printed, 1)
        os.dup2(printed, 2)
        folder, words = request["folder"], request["command"]
        environment = os.environ if request["environment"] is None else request["environment"]
        if folder is not None:
            os.chdir(folder)
        if request["sandbox"]:
            # Which needs powers to make the sandbox, and leaves none in it.
            words = [*bubblewrap.command(folder, request["own"], request["readable"], environment), *words]
        elif limits:
            containment.give_up_powers()
        for name, value in limits.items():
            resource.setrlimit(getattr(resource, f"RLIMIT_{name.upper()}"), (value, value))
        os.execvpe(words[0], words, environment)
    except OSError as error:
        os.write(tell, f"failed {error.errno}\n".encode())
    finally:
        os._exit(127)


def _terminate(command: int, sandboxed: bool) -> None:
    """Ask the command to end: SIGTERM to its group; but not to bubblewrap, which would let nothing end in peace."""
    if not sandboxed:
        _signal_group(command, signal.SIGTERM)
        return
    for pid, _, _, group in containment.processes():
        if group == command and pid != command:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGTERM)


def _signal_group(group: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, number)
