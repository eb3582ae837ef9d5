"""Where arrays are that are to be computed together."""

from __future__ import annotations

from collections.abc import Mapping

from flashcli.arrays.protocols import Found
from flashcli.gpu.launcher import Place, place_of_memory


def common_place(found: Mapping[str, Found]) -> Place | None:
    """Where all arrays are; those without elements are nowhere. ValueError names one that is somewhere else."""
    places = {}
    for name, x in found.items():
        if 0 not in x.operand.shape:
            place = place_of_memory(x.address)
            if place is None:
                raise ValueError(f"{name} must be in the memory of a GPU")
            places[name] = place
    if not places:
        return None
    first, place = next(iter(places.items()))
    for name, other in places.items():
        if other is not place:
            raise ValueError(f"{name} must be on GPU {place.device}, as {first} is, not on GPU {other.device}")
    return place
