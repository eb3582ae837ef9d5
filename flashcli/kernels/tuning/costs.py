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
TILINGS = "251c0eeee1ad"
COSTS = {
    "mma": Cost(
        7.635, 0.5558, 0.4032, 1.5,
        {16: 2.6622, 32: 2.3659, 64: 3.7108, 96: 6.2826, 128: 8.4715, 192: 20.0717, 256: 40.5043},
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
        3.3774, 1.841, 0.3664, 0.8,
        {16: 1.4515, 32: 1.4511, 64: 2.1266, 96: 2.9254, 128: 3.834, 192: 7.2305, 256: 6.4588},
    ),
    "wgmma_short": Cost(
        5.9384, 0.9023, 0.1669, 1.0,
        {16: 1.1312, 32: 1.2794, 64: 1.8028, 128: 5.0337},
    ),
}  # fmt: skip
