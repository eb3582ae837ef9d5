"""Jobs on a thread each, which all succeed or stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue

from flashcli.errors import Stopped
from flashcli.process.pool import Pool, awaited, next_of
from flashcli.process.signals import held


def together(jobs: list[Callable[[Callable[[], None]], object]]) -> list:
    """Run each job on a thread, and return their results; if one fails, or this thread is interrupted, all others stop.

    Each is called with a function that it has to call now and then, and that raises once it is to stop. The first error
    of a job is raised here.
    """
    stopping = threading.Event()
    errors: list[BaseException] = []

    def check() -> None:
        if stopping.is_set():
            raise Stopped

    def work(job: Callable[[Callable[[], None]], object]) -> object:
        try:
            return job(check)
        except BaseException as error:
            errors.append(error)
            raise

    ended: SimpleQueue[object] = SimpleQueue()
    with Pool(len(jobs)) as pool:
        running = [pool.submit(work, job) for job in jobs]
        with held():
            for job in running:
                job.add_done_callback(ended.put)
        try:
            _until_error(ended, len(running), errors)
        finally:
            with held():
                stopping.set()
    if errors:
        raise errors[0]
    return [awaited(job) for job in running]


def _until_error(ended: SimpleQueue[object], count: int, errors: list[BaseException]) -> None:
    """Wait until ``count`` jobs have ended, or one has failed."""
    while count and not errors:
        next_of(ended)
        count -= 1
