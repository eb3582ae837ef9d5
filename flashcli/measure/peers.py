"""Peers that flashcli is measured against: PyTorch's attention on CPU and GPU, and a Triton kernel.

PyTorch and Triton are imported when a peer is made; where they are not installed there are no peers.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import sys
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import numpy as np

from flashcli.errors import BackendUnavailable
from flashcli.measure import machine

EFFICIENT = "PyTorch efficient"
PRODUCTS = ("tf32x3", "bf16x6")  # of the Triton kernel: how it makes one fp32 product of several shorter ones


class Peer(NamedTuple):
    """``attend(q, k, v)`` on PyTorch tensors [B, 1, N, d] of type ``dtype`` gives another."""

    name: str
    dtype: str
    attend: Callable


def cpu_peers(threads: int, causal: bool) -> list[Peer]:
    import torch

    torch.set_num_threads(threads)
    attend = functools.partial(torch.nn.functional.scaled_dot_product_attention, is_causal=causal)
    return [Peer(f"PyTorch {torch.__version__} SDPA", "float32", attend)]


def gpu_peers(names: Collection[str], causal: bool) -> list[Peer]:
    """The peers of the given packages, "torch" and "triton"."""
    peers = []
    if "torch" in names:
        peers += [peer._replace(attend=functools.partial(peer.attend, is_causal=causal)) for peer in pytorchs()]
    if "triton" in names:
        from flashcli.measure.peer_triton import attend

        peers += [
            Peer(f"Triton {products}", "float32", functools.partial(attend, products=products, causal=causal))
            for products in PRODUCTS
        ]
    return peers


def pytorchs() -> list[Peer]:
    """PyTorch's attention on a GPU by each of its ways, with all of its parameters."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    def attend(backend: Any, *tensors: Any, **options: Any) -> Any:
        with sdpa_kernel(backend):
            return scaled_dot_product_attention(*tensors, **options)

    ways = {
        "PyTorch math": ("float32", SDPBackend.MATH),
        EFFICIENT: ("float32", SDPBackend.EFFICIENT_ATTENTION),
        "PyTorch flash fp16": ("float16", SDPBackend.FLASH_ATTENTION),
        "PyTorch cuDNN fp16": ("float16", SDPBackend.CUDNN_ATTENTION),
    }
    return [Peer(name, dtype, functools.partial(attend, way)) for name, (dtype, way) in ways.items()]


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


def measure(peer: Peer, inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
    """Seconds on the GPU of each run, by CUDA events, in the same way as `flashcli.gpu.pycuda`."""
    import torch

    dtype = getattr(torch, peer.dtype)
    seconds: list[float] = []
    tensors = [[torch.from_numpy(x[:, i, None]).to("cuda", dtype).contiguous() for i in range(3)] for x in inputs]
    turns = [functools.partial(peer.attend, *qkv) for qkv in tensors]
    for index in range(runs + 1, -1, -1):
        before, work = turns[(index + 1) % len(turns)], turns[index % len(turns)]
        taken, answer = event_seconds(before, work)
        seconds.append(taken)
    out[...] = answer[:, 0].float().cpu().numpy()
    return seconds[2:]


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
