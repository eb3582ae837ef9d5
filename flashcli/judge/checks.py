"""Checks of values that anybody may have written: in a rules file, or in a file of results."""

from __future__ import annotations

from typing import TypeVar

Value = TypeVar("Value")


def kept(value: Value, good: bool) -> Value:
    """Return a value that is good; ValueError for any other."""
    if not good:
        raise ValueError
    return value
