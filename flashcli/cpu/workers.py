"""Threads that compute with NumPy: it lets go of the interpreter lock inside its loops."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
from threadpoolctl import ThreadpoolController, threadpool_info

from flashcli.cpu.cores import usable_cores
from flashcli.process.pool import Pool


class SingleBlas:
    """NumPy's BLAS is held to one thread as long as anybody in this process wants that, and then has its own number."""

    _lock = threading.Lock()
    _wanted = 0
    _limits: Any

    @classmethod
    def want(cls) -> None:
        with cls._lock:
            cls._wanted += 1
            if cls._wanted == 1:
                cls._limits = _libraries().limit(limits=1, user_api="blas")

    @classmethod
    def no_more(cls) -> None:
        with cls._lock:
            cls._wanted -= 1
            if cls._wanted == 0:
                cls._limits.restore_original_limits()


@functools.cache  # looking for them takes a millisecond, more than a small call
def _libraries() -> ThreadpoolController:
    return ThreadpoolController()


class Workers:
    """A pool of ``count`` threads, all usable cores by default; BLAS is held to one thread for each until `close`."""

    def __init__(self, name: str, count: int | None = None) -> None:
        self.count = count or len(usable_cores())
        self._pool = Pool(self.count, thread_name_prefix=name)
        SingleBlas.want()
        self.map = self._pool.results

    def close(self) -> None:
        """Work that has not begun is dropped, and BLAS has its own number of threads again."""
        self._pool.shutdown(cancel_futures=True)
        SingleBlas.no_more()

    def __str__(self) -> str:
        return f"cpu, NumPy {np.__version__}, {self.count} thread{'s' if self.count > 1 else ''}"


def blas_text() -> str:
    """The BLAS that NumPy uses and the kind of core it computes for, such as "openblas 0.3.31 (SkylakeX)"."""
    pools = [pool for pool in threadpool_info() if pool["user_api"] == "blas"]
    return (
        ", ".join(f"{p['internal_api']} {p['version']} ({p.get('architecture', 'unknown')})" for p in pools)
        or "unknown"
    )
