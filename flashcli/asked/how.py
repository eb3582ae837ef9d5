"""How an operation is to be computed, beside what: one record of the options that go through to a plan."""

from __future__ import annotations

from typing import NamedTuple

PRECISIONS = {"fp32": 3, "fp16": 1}  # how many fp16 products make one of the inputs, where a kernel splits numbers


class How(NamedTuple):
    """Options of that name of `flashcli.attention` and its siblings.

    ``kernel`` is the name of the one that computes, the fastest if None.
    """

    kernel: str | None = None
    precision: str = "fp32"
    batch_invariant: bool = True
    return_lse: bool = False


def check_precision(name: object) -> None:
    """Raise ValueError for a precision that there is not, or what is no name."""
    if name not in tuple(PRECISIONS):  # which a list can be looked for in
        raise ValueError(f"precision must be one of {', '.join(PRECISIONS)}, not {name!r}")
