"""Options that decide how an operation is computed, not what: one record that goes through to a plan."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

PRECISIONS = {"fp32": 3, "fp16": 1}  # how many fp16 products make one of the inputs, where a kernel splits numbers


class How(NamedTuple):
    """Options of `flashcli.attention` and its siblings that are passed on unread, by their public names.

    ``kernel`` is the name of the kernel that computes; None takes the fastest.
    """

    kernel: str | None = None
    precision: str = "fp32"
    batch_invariant: bool = True
    return_lse: bool = False


def check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    """Raise ValueError for an option that has none of the values that it may have."""
    if value not in tuple(choices):  # which a list can be looked for in
        raise ValueError(f"{name} must be one of {', '.join(choices)}, not {value!r}")
