"""Threads that compute with NumPy, which lets go of the interpreter lock inside its loops; and BLAS's own threads."""

from __future__ import annotations

import functools
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, TypeVar

import numpy as np

from flashcli.asked.attention import Call
from flashcli.process.signals import held

T = TypeVar("T")
FEW = 2**22  # multiplications that one thread has done, about, before another has begun and taken the interpreter lock


def usable_cores() -> frozenset[int]:
    """The ids of the CPU cores that this process may use: not all under a launcher, taskset or in a container."""
    usable = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    return frozenset(usable)


def threads_for(call: Call) -> int:
    """The number of threads that pay for a call: one for each usable core, or one where there is little to multiply."""
    return 1 if call.B * call.H * call.M * call.N * call.d < FEW else len(usable_cores())


class _Blas:
    """The number of threads inside `one_blas_thread`, and the numbers of BLAS's threads before the first entered."""

    lock = threading.Lock()
    inside = 0
    before: ClassVar[list[int]] = []


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Give NumPy's BLAS one thread during a ``with`` block or a decorated function: with more it rounds otherwise.

    The number holds for the whole process. So it is 1 while any thread is in such a block, and afterwards as before.
    """
    with held(), _Blas.lock:
        _Blas.inside += 1
        for library, set_threads in _libraries() if _Blas.inside == 1 else ():
            _Blas.before.append(library.num_threads)
            set_threads(1)
    try:
        yield
    finally:
        with held(), _Blas.lock:
            _Blas.inside -= 1
            if _Blas.inside == 0:
                for (_, set_threads), count in zip(_libraries(), _Blas.before, strict=True):
                    set_threads(count)
                _Blas.before.clear()


@functools.cache  # looking for them takes a millisecond, more than a small call
def _libraries() -> list[tuple[Any, Callable[[int], object]]]:
    """NumPy's BLAS, and whatever else is there, each with what sets its threads."""
    from threadpoolctl import ThreadpoolController  # which a run on a GPU does not need

    found = ThreadpoolController().select(user_api="blas").lib_controllers
    # Since threadpoolctl 3.8, `set_num_threads` silently does nothing but in the first thread that called it.
    return [(library, getattr(library, "_real_set_num_threads", library.set_num_threads)) for library in found]


@one_blas_thread()
def for_each(work: Callable[[T], object], tasks: Sequence[T], threads: int | None = None) -> None:
    """Do all tasks, in this thread and in others beside it, on all usable cores by default; BLAS has one thread then.

    Raises the first error, once all threads have ended; tasks that have not begun are dropped then.
    """
    left, errors = iter(tasks), []

    def take_part() -> None:
        try:
            for task in left:
                work(task)
        except BaseException as error:
            errors.append(error)
            deque(left, maxlen=0)

    count = min(threads or len(usable_cores()), len(tasks))
    others: list[threading.Thread] = []
    try:
        for _ in range(1, count):
            others.append(threading.Thread(target=take_part, name="flashcli", daemon=True))
            with held():
                others[-1].start()
        take_part()
    finally:
        deque(left, maxlen=0)
        with held():
            for thread in others:
                if thread.ident is not None:
                    thread.join()
    if errors:
        raise errors[0]


def description(threads: int) -> str:
    """A line for people that says who computes, such as "cpu, NumPy 2.3.5, 2 threads"."""
    return f"cpu, NumPy {np.__version__}, {threads} thread{'s' if threads > 1 else ''}"


def blas_text() -> str:
    """The BLAS that NumPy uses and the kind of core it computes for, such as "openblas 0.3.31 (SkylakeX)"."""
    from threadpoolctl import threadpool_info

    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return (
        ", ".join(f"{p['internal_api']} {p['version']} ({p.get('architecture', 'unknown')})" for p in pools)
        or "unknown"
    )
