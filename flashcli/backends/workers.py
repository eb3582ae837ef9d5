"""Threads that compute with NumPy: it lets go of the interpreter lock inside its loops."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from threadpoolctl import threadpool_limits

from flashcli.backends.cores import usable_cores


class Workers:
    """A pool of ``count`` threads, all usable cores by default; BLAS is held to one thread for each until `close`."""

    def __init__(self, name: str, count: int | None = None) -> None:
        self.count = count or len(usable_cores())
        self._pool = ThreadPoolExecutor(self.count, thread_name_prefix=name)
        self._blas = threadpool_limits(limits=1, user_api="blas")
        self.map = self._pool.map

    def close(self) -> None:
        """Work that has not begun is dropped, and BLAS has its own number of threads again."""
        self._pool.shutdown(cancel_futures=True)
        self._blas.restore_original_limits()

    def __str__(self) -> str:
        return f"cpu, NumPy {np.__version__}, {self.count} thread{'s' if self.count > 1 else ''}"
