"""The constants of `flashcli.kernels.tuning.cost`, as ``python -m bench.fit`` has written them."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Microseconds of a kernel: for its launches, and for each unit that `flashcli.kernels.tuning.cost.Work` counts.

    ``pair`` is the time of a pair of tiles, by the longest head it is for; ``path`` is the factor on `Work.longest`.
    """

    launch: float
    start: float
    megabyte: float
    path: float
    pair: dict[int, float]


# TILINGS is a hash of how the kernels cut the shapes that they were timed on: `bench.fit.tilings`.
# ---- fitted: what follows is written anew by each fit
TILINGS = "3f61f61ce66b"
COSTS = {
    "mma": Cost(
        7.994, 0.0, 0.4606, 1.5,
        {16: 2.7048, 32: 2.47, 64: 3.6847, 96: 6.2447, 128: 8.4051, 192: 20.0278, 256: 40.3175},
    ),
    "mma_short": Cost(
        3.7263, 0.0, 0.1406, 0.8,
        {16: 1.9194, 32: 2.4864, 64: 4.0108},
    ),
    "register_tiled": Cost(
        6.1521, 0.504, 0.2011, 2.25,
        {16: 5.4559, 32: 6.9128, 64: 14.1688, 96: 26.026, 128: 32.4507, 192: 57.1931, 256: 92.7819},
    ),
    "wgmma": Cost(
        3.3965, 2.2373, 0.3443, 0.8,
        {16: 1.3944, 32: 1.4394, 64: 2.1165, 96: 3.0764, 128: 3.8815, 192: 7.2689, 256: 6.3999},
    ),
    "wgmma_short": Cost(
        6.3235, 0.7088, 0.1695, 1.0,
        {16: 1.1994, 32: 1.2968, 64: 1.8778, 128: 5.0959},
    ),
}  # fmt: skip
