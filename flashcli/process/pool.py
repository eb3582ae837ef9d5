"""Threads for work beside the main thread, which can wait for them while a signal may be raised in it.

What a signal raises comes between any two steps of Python code: also when a lock of the library's has just been taken,
and nobody knows yet that it is to be given back. Who wants that lock next waits for ever. So nothing is raised while
the library takes locks, and waiting is done on a queue, which is not written in Python.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from flashcli.process.signals import held

T = TypeVar("T")
LOOK_UP = 0.1  # seconds after which who waits looks whether there is a signal


class Pool(ThreadPoolExecutor):
    """A ThreadPoolExecutor for use with signals; `awaited` gives what a future of it brings."""

    def submit(self, fn: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        with held():
            return super().submit(fn, *args, **kwargs)

    def results(self, work: Callable[..., T], *arguments: Iterable) -> Iterator[T]:
        """Call ``work`` on each set of arguments, all begun at once; the results come in the arguments' order.

        When one raises, those that have not begun are dropped.
        """
        return _results(deque(self.submit(work, *given) for given in zip(*arguments, strict=False)))


def _results(futures: deque[Future[T]]) -> Iterator[T]:
    try:
        yield from (awaited(futures.popleft()) for _ in range(len(futures)))
    finally:
        with held():
            for future in futures:
                future.cancel()


def awaited(future: Future[T]) -> T:
    """Wait for a future; returns its result, or raises its error."""
    arrived: SimpleQueue[Future[T]] = SimpleQueue()
    with held():
        future.add_done_callback(arrived.put)
    next_of(arrived)
    with held():
        return future.result()


def next_of(queue: SimpleQueue[T]) -> T:
    """Wait for the next item of a queue, and take it.

    A signal that comes just before a thread goes to sleep does not wake it: so it sleeps for short times.
    """
    while True:
        with contextlib.suppress(Empty):
            return queue.get(timeout=LOOK_UP)
