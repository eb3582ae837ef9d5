"""Packages that flashcli is measured against, PyTorch and Triton: whether they are there, and PyTorch's clock."""

from __future__ import annotations

import contextlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from flashcli.errors import BackendUnavailable
from flashcli.measure import machine


def installed(name: str) -> bool:
    return importlib.util.find_spec(name) is not None


def check_installed(*packages: str, gpu: bool = False) -> None:
    """Raise BackendUnavailable where one of the packages is missing, or where PyTorch finds no ``gpu``."""
    for name in packages:
        if not installed(name):
            raise BackendUnavailable(f"{name} is not installed.", f"pip install {name}.")
    if gpu:
        machine.pytorchs_gpu()


def reach_gpu() -> bool:
    """Whether there is a PyTorch that can use a GPU."""
    if not installed("torch"):
        return False
    import torch

    return torch.cuda.is_available()


def event_seconds(before: Callable, work: Callable) -> tuple[float, Any]:
    """Seconds on the GPU of ``work``, by CUDA events, and its answer.

    It is queued behind something else, so that the GPU need not wait for the host between the two events.
    """
    import torch

    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    before()
    start.record()
    answer = work()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3, answer


def release() -> None:
    """Give PyTorch's cached GPU memory back, for the next contender; it has none before somebody imports it."""
    torch = sys.modules.get("torch")
    with contextlib.suppress(RuntimeError):  # a peer that broke the context has had its error told
        if torch is not None and torch.cuda.is_available():
            torch.cuda.empty_cache()


def ceilings() -> dict[str, float]:
    """The best rates of this GPU, measured with PyTorch.

    Operations a second of 8192³ matrix products, and bytes a second of a copy (read plus written).
    """
    import torch

    size = 8192
    found = {}
    for name, dtype in {"fp32": torch.float32, "fp16": torch.float16}.items():
        a, b = (torch.randn(size, size, device="cuda", dtype=dtype) for _ in range(2))
        found[name] = 2 * size**3 / _median_seconds(lambda a=a, b=b: a @ b)
    source = torch.randn(2**28, device="cuda")
    target = torch.empty_like(source)
    found["bytes"] = 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))
    return found


def _median_seconds(work: Callable) -> float:
    seconds = [event_seconds(work, work)[0] for _ in range(12)]
    return float(np.median(seconds[2:]))  # without those that warm up
