"""Threads that compute with NumPy, and how many BLAS has meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from threadpoolctl import threadpool_info, threadpool_limits

import flashcli
from flashcli.cpu import workers
from flashcli.cpu.workers import for_each, one_blas_thread


def blas_threads() -> list[int]:
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


@pytest.fixture
def before() -> Iterator[list[int]]:
    """The numbers of BLAS's threads: two, though tests beside others begin with one."""
    with threadpool_limits(2):
        if not (found := blas_threads()):
            pytest.skip("NumPy uses a BLAS that threadpoolctl does not know")
        yield found


def test_blas_has_one_thread_whichever_thread_asks_for_it(before):
    """The main thread first: threadpoolctl then heeds no other."""

    def inside() -> list[int]:
        with one_blas_thread():
            return blas_threads()

    with ThreadPoolExecutor(1) as pool:
        assert set(inside()) == set(pool.submit(inside).result()) == {1}
    assert blas_threads() == before


def test_blas_has_one_thread_until_the_last_has_left_and_then_its_own_number(before):
    entered, leave = threading.Event(), threading.Event()

    def stay() -> None:
        with one_blas_thread():
            entered.set()
            leave.wait(60)

    with one_blas_thread():
        other = threading.Thread(target=stay)
        other.start()
        assert entered.wait(60)
    assert set(blas_threads()) == {1}
    leave.set()
    other.join()
    assert blas_threads() == before


def test_few_multiplications_start_no_thread(monkeypatch):
    started: list[threading.Thread] = []
    monkeypatch.setattr(workers, "usable_cores", lambda: frozenset(range(3)))
    monkeypatch.setattr(threading.Thread, "start", lambda self: started.append(self))
    monkeypatch.setattr(threading.Thread, "join", lambda self: None)
    for M, others in ((8, 0), (512, 2)):
        q = np.ones((4, M, 16), np.float32)
        assert (flashcli.attention(q, q, q, backend="cpu") == 1).all()
        assert len(set(started)) >= others and (others or not started)


def test_blas_has_one_thread_during_tasks_of_any_thread(before):
    seen: list[int] = []
    for_each(lambda _: seen.extend(blas_threads()), range(20), 2)
    assert set(seen) == {1} and blas_threads() == before


@pytest.mark.parametrize("threads", [1, 3, None])
def test_each_task_is_done_once(threads):
    done: list[int] = []
    for_each(done.append, range(100), threads)
    assert sorted(done) == list(range(100))


@pytest.mark.parametrize("threads", [1, 3])
def test_an_error_is_raised_and_drops_what_has_not_begun(threads):
    begun: list[int] = []

    def work(task: int) -> None:
        begun.append(task)
        raise ValueError(task)

    with pytest.raises(ValueError, match=r"^[012]$"):
        for_each(work, range(100), threads)
    assert len(begun) <= threads
