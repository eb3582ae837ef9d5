"""The constants of `flashcli.kernels.cost`, as ``python -m flashcli.measure.fit`` has written them."""

from __future__ import annotations

from typing import NamedTuple


class Cost(NamedTuple):
    """Microseconds of a kernel: for its launches; for each of what `flashcli.kernels.cost.Work` counts.

    ``pair`` has those for a pair, by the longest head that they are for; ``path`` is a factor on it for ``path``.
    """

    launch: float
    start: float
    megabyte: float
    path: float
    pair: dict[int, float]


# TILINGS is a hash of how the kernels cut the shapes that they were timed on: `flashcli.measure.fit.tilings`.
# ---- fitted: what follows is written anew by each fit
TILINGS = "b1b772f726c1"
COSTS = {
    "mma": Cost(
        8.6713,
        0.5844,
        0.4048,
        1.5,
        {
            16: 2.6156,
            32: 2.3747,
            64: 3.7159,
            96: 6.5237,
            128: 8.5111,
            192: 20.2936,
            256: 40.9813,
        },
    ),
    "register_tiled": Cost(
        5.533,
        0.9173,
        0.2261,
        2.5,
        {
            16: 5.225,
            32: 6.5639,
            64: 13.4584,
            96: 26.3711,
            128: 31.0813,
            192: 56.4264,
            256: 86.0277,
        },
    ),
    "wgmma": Cost(
        6.3725,
        2.1,
        0.3389,
        1.1,
        {
            16: 1.467,
            32: 1.3807,
            64: 2.0938,
            96: 2.9673,
            128: 3.8469,
            192: 6.2321,
            256: 8.7639,
        },
    ),
    "wgmma_short": Cost(
        6.6501,
        1.5165,
        0.1427,
        1.0,
        {
            16: 1.6073,
            32: 1.4011,
            64: 2.0114,
        },
    ),
}
