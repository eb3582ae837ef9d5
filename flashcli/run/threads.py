"""Jobs on a thread each, which all succeed or stop together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait

from flashcli.errors import Stopped


def together(jobs: list[Callable[[Callable[[], None]], object]]) -> list:
    """What each of the jobs returns; if any fails, or this thread is interrupted, the others stop.

    Each is called with a function that it has to call now and then, and that raises once it is to stop. The error
    raised here is the first.
    """
    stopping, errors = threading.Event(), []

    def check() -> None:
        if stopping.is_set():
            raise Stopped

    def work(job: Callable[[Callable[[], None]], object]) -> object:
        try:
            return job(check)
        except BaseException as error:
            errors.append(error)
            raise

    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(work, job) for job in jobs]
        try:
            wait(running, return_when=FIRST_EXCEPTION)
        finally:
            stopping.set()
    if errors:
        raise errors[0]
    return [job.result() for job in running]
