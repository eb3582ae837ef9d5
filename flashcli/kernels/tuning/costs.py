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
TILINGS = "b1b772f726c1"
COSTS = {
    "mma": Cost(
        7.6167,
        0.5263,
        0.4048,
        1.5,
        {
            16: 2.6458,
            32: 2.375,
            64: 3.715,
            96: 6.3416,
            128: 8.468,
            192: 20.1112,
            256: 40.1748,
        },
    ),
    "register_tiled": Cost(
        5.8262,
        0.4577,
        0.208,
        2.25,
        {
            16: 5.4704,
            32: 6.9112,
            64: 14.1531,
            96: 26.1916,
            128: 32.3136,
            192: 57.5111,
            256: 92.8119,
        },
    ),
    "wgmma": Cost(
        3.6086,
        1.8634,
        0.3563,
        1.1,
        {
            16: 1.361,
            32: 1.3949,
            64: 2.0926,
            96: 2.815,
            128: 3.9117,
            192: 6.2623,
            256: 8.8421,
        },
    ),
    "wgmma_short": Cost(
        6.1939,
        0.8772,
        0.1815,
        1.0,
        {
            16: 1.3204,
            32: 1.3533,
            64: 1.8333,
        },
    ),
}
