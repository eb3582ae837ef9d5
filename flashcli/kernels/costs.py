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
        8.6728,
        0.5829,
        0.4056,
        1.5,
        {
            16: 2.6158,
            32: 2.3743,
            64: 3.7152,
            96: 6.5222,
            128: 8.5096,
            192: 20.2086,
            256: 40.9302,
        },
    ),
    "register_tiled": Cost(
        5.5349,
        0.9167,
        0.2263,
        2.5,
        {
            16: 5.225,
            32: 6.5635,
            64: 13.4578,
            96: 26.3706,
            128: 31.08,
            192: 56.6937,
            256: 85.8503,
        },
    ),
    "wgmma": Cost(
        6.3391,
        2.0719,
        0.3429,
        1.25,
        {
            16: 1.2968,
            32: 1.2596,
            64: 1.8984,
            96: 2.6804,
            128: 3.483,
            192: 10.0704,
            256: 12.7311,
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
