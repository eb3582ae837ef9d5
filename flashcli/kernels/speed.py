"""The speed of a GPU's parts beside an H200's, whose constants `tuning.cost` has: as the driver tells, or as measured.

`flashcli bench --tune` measures how many times as long kernels take as the model of an H200 has it, and keeps that in
the cache's folder, by the GPU's name. Elsewhere rates follow from the clock and from what makers tell of each
architecture: nobody has timed kernels there, and docs/gpus.md says which one is then chosen.
"""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import NamedTuple

MEASURED = "tuned.json"  # in the cache's folder: {GPU's name: {kernel: {longest head: factor}}}
HOPPER = (9, 0)
HALF_AS_MANY_LANES = ((6, 0), (7, 0), (7, 2), (7, 5), (8, 0))  # have 64 for fp32, all others since Pascal 128
# Multiplications of fp16 and additions in fp32 of a multiprocessor in a clock, by mma.sync.
PRODUCTS = {(7, 0): 512, (7, 2): 512, (7, 5): 512, (8, 0): 1024, (8, 6): 512, (8, 7): 512, (8, 9): 512, (12, 0): 512}
OTHERS_PRODUCTS = 1024  # of architectures that are not listed
HALVED = "GeForce"  # in a name: adds fp16 products in fp32 at half of this rate
# An H200: its multiprocessors, its clock in MHz, what mma.sync reaches of 2048 products a clock, its memory's bytes a
# second.
MULTIPROCESSORS, CLOCK, H200_PRODUCTS, H200_BYTES = 132, 1980, 1270, 4.9e12


class Speed(NamedTuple):
    """Times of work on a multiprocessor, as multiples of an H200's: by FFMA, by tensor cores, to move a byte.

    With ``halved``, tensor cores that add fp16 products in fp32 take twice as long as those that add in fp16.
    ``measured`` has factors on a kernel's whole time for a pair of tiles, which count instead: its name, the longest
    head that the factor is for, the factor.
    """

    ffma: float = 1.0
    products: float = 1.0
    byte: float = 1.0
    measured: tuple[tuple[str, int, float], ...] = ()
    halved: bool = False

    def factor(self, kernel: str, head: int) -> float | None:
        """The factor measured for a kernel and a class of heads; None if it was not."""
        return next((factor for name, d, factor in self.measured if (name, d) == (kernel, head)), None)


H200 = Speed()


def lanes(capability: tuple[int, int]) -> int:
    """The lanes for fp32 of a multiprocessor."""
    return 64 if capability in HALF_AS_MANY_LANES else 128


def products(capability: tuple[int, int], name: str) -> int:
    """The fp16 products of a multiprocessor in a clock that tensor cores add in fp32; 0 where there are none."""
    if capability < (7, 0) or (capability == (7, 5) and "GTX" in name):
        return 0
    return PRODUCTS.get(capability, OTHERS_PRODUCTS) // (2 if HALVED in name else 1)


def speed(capability: tuple[int, int], name: str, sms: int, mhz: float, bytes_a_second: float) -> Speed:
    """The speed of a GPU, from its clock and its memory's rate as the driver tells them; Hopper's is the H200's."""
    found = H200
    if capability != HOPPER and mhz and bytes_a_second:
        clock = CLOCK / mhz
        tensor = products(capability, name)
        found = Speed(
            clock * lanes(HOPPER) / lanes(capability),
            clock * H200_PRODUCTS / tensor if tensor else 1.0,
            H200_BYTES / MULTIPROCESSORS * sms / bytes_a_second,
            halved=HALVED in name and tensor > 0,
        )
    return found._replace(measured=measured(name))


def path() -> Path:
    """The file that `flashcli bench --tune` writes."""
    from flashcli.compiler import cache  # here: imports are most of a small run's time

    return cache.folder() / MEASURED


def measured(name: str) -> tuple[tuple[str, int, float], ...]:
    """The factors kept for a GPU, of the first of the cache's folders that has some; a damaged file has none."""
    import json

    from flashcli.compiler import cache

    for folder in cache.folders():
        with contextlib.suppress(OSError, ValueError, AttributeError, KeyError, TypeError):
            found = json.loads((folder / MEASURED).read_text())[name]
            return tuple(
                (kernel, int(head), float(factor)) for kernel, of in found.items() for head, factor in of.items()
            )
    return ()
