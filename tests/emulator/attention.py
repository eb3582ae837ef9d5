"""Attention by a kernel of its ladder, emulated on the CPU: batches as files have them, or as arrays in place."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from flashcli.emulator.machine import Emulated
from flashcli.kernels.arguments import of_batches
from flashcli.kernels.attention import KERNELS, chunk_tiles
from flashcli.kernels.operation import Build
from flashcli.kernels.problem import Problem
from flashcli.kernels.speed import H200, Speed


def attend(
    kernel: str,
    Q: np.ndarray,
    K: np.ndarray,
    V: np.ndarray,
    folder: Path,
    causal: bool = False,
    backwards: bool = False,
    speed: Speed = H200,
    **of_arrays: Any,
) -> np.ndarray | tuple[np.ndarray, np.ndarray]:
    """O [B, M, d] of Q [B, M, d], K and V [B, N, d], float32; and the LSE, if ``lse=True``.

    What is to be written is NaN before. With the causal mask, the last query sees the last key.
    """
    B, M, d = Q.shape
    N = K.shape[1]
    build = Build(KERNELS[kernel], Problem(B, M, N, d, causal=causal, speed=speed, **of_arrays))
    O, lse = np.full_like(Q, np.nan), np.full(Q.shape[:2], np.nan, np.float32)
    workspace = np.full(build.workspace(), 0xFF, np.uint8)
    addresses, apart = zip(*((x.ctypes.data, x[0].size) for x in (Q, K, V, O)), strict=True)
    numbers = {"B": B, "M": M, "N": N, "scale": d**-0.5, "q_start": N - M, "workspace": workspace.ctypes.data}
    given = of_batches(addresses, d, apart=apart, **numbers)
    given.lse = lse.ctypes.data
    given.chunk = chunk_tiles(build.tiling, build.problem) if kernel == "wgmma" else 0
    machine = Emulated(build, folder)
    for launch in build.launches():
        given.tile_i, given.tile_j = launch.tile
        machine.launch(launch, given, backwards=backwards)
    return (O, lse) if of_arrays.get("lse") else O
