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
        7.3144,
        0.5609,
        0.4029,
        1.5,
        {
            16: 2.6489,
            32: 2.3529,
            64: 3.6824,
            96: 6.3288,
            128: 8.441,
            192: 20.2784,
            256: 40.3257,
        },
    ),
    "register_tiled": Cost(
        5.7195,
        0.4911,
        0.2017,
        2.25,
        {
            16: 5.4712,
            32: 6.9173,
            64: 14.1655,
            96: 26.3623,
            128: 32.3207,
            192: 57.7688,
            256: 92.8527,
        },
    ),
    "wgmma": Cost(
        3.7508,
        1.9225,
        0.3515,
        1.1,
        {
            16: 1.3691,
            32: 1.3802,
            64: 2.0679,
            96: 2.8277,
            128: 3.8227,
            192: 6.2446,
            256: 8.7169,
        },
    ),
    "wgmma_short": Cost(
        5.9987,
        0.9438,
        0.1681,
        1.0,
        {
            16: 1.3363,
            32: 1.3711,
            64: 1.855,
        },
    ),
}
