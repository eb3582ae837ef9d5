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
TILINGS = "88cf75a1c871"
COSTS = {
    "mma": Cost(
        7.3079, 0.5471, 0.4092, 1.5,
        {16: 2.6561, 32: 2.3664, 64: 3.7083, 96: 6.3028, 128: 8.3992, 192: 20.1325, 256: 40.2671},
    ),
    "mma_short": Cost(
        3.3923, 0.8778, 0.1268, 0.8,
        {16: 1.7637, 32: 2.1608, 64: 3.9409},
    ),
    "register_tiled": Cost(
        5.8134, 0.5126, 0.1987, 2.25,
        {16: 5.4739, 32: 6.9306, 64: 14.1757, 96: 26.1841, 128: 32.5388, 192: 57.4741, 256: 92.9868},
    ),
    "wgmma": Cost(
        3.5176, 1.8622, 0.3585, 1.1,
        {16: 1.3904, 32: 1.4112, 64: 2.0984, 96: 2.7751, 128: 3.9464, 192: 6.2618, 256: 8.8883},
    ),
    "wgmma_short": Cost(
        6.1637, 1.0078, 0.1674, 1.0,
        {16: 1.2492, 32: 1.3304, 64: 1.8727},
    ),
}  # fmt: skip
