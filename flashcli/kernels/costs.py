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
TILINGS = "6822fc1bd09a"
COSTS = {
    "mma": Cost(
        8.6759,
        0.5836,
        0.406,
        1.5,
        {
            16: 2.6148,
            32: 2.3758,
            64: 3.7146,
            96: 6.5208,
            128: 8.5082,
            192: 20.2069,
            256: 40.9257,
        },
    ),
    "register_tiled": Cost(
        5.5258,
        0.916,
        0.2276,
        2.5,
        {
            16: 5.2249,
            32: 6.5612,
            64: 13.4565,
            96: 26.3687,
            128: 31.0754,
            192: 56.6905,
            256: 85.8398,
        },
    ),
    "wgmma": Cost(
        6.4012,
        2.0605,
        0.3354,
        1.25,
        {
            16: 1.3002,
            32: 1.2342,
            64: 1.9042,
            96: 2.6926,
            128: 3.4933,
            192: 10.0859,
            256: 12.7593,
        },
    ),
    "wgmma_short": Cost(
        6.6473,
        1.5234,
        0.1434,
        1.0,
        {
            16: 1.6014,
            32: 1.3892,
            64: 2.0033,
        },
    ),
}
