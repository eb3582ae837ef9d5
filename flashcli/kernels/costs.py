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
TILINGS = "3479eeb51aff"
COSTS = {
    "mma": Cost(
        10.1443,
        0.7158,
        0.3996,
        1.5,
        {
            16: 2.6446,
            32: 2.3766,
            64: 3.7154,
            96: 6.4696,
            128: 8.5619,
            192: 20.5236,
            256: 40.7511,
        },
    ),
    "register_tiled": Cost(
        6.0634,
        0.8827,
        0.1585,
        2.25,
        {
            16: 5.558,
            32: 6.8739,
            64: 14.256,
            96: 26.8883,
            128: 32.8865,
            192: 58.635,
            256: 89.3037,
        },
    ),
    "wgmma": Cost(
        9.4701,
        1.915,
        0.3619,
        1.0,
        {
            16: 1.453,
            32: 1.5456,
            64: 2.254,
            96: 3.3462,
            128: 3.8994,
            192: 11.1195,
            256: 14.5451,
        },
    ),
    "wgmma_short": Cost(
        7.4708,
        0.4324,
        0.082,
        1.0,
        {
            16: 2.4566,
            32: 2.6534,
            64: 4.6651,
        },
    ),
}
