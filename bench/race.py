"""Whole commands raced in turn."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import TypeVar

from flashcli.measure.race import Command, Ended, succeed

Name = TypeVar("Name", bound=Hashable)


def compete(
    commands: Mapping[Name, Command], runs: int, environment: Mapping[str, str] | None = None
) -> dict[Name, list[Ended]]:
    """Run each command ``runs`` times, in turns; returns how each run ended."""
    taken: dict[Name, list[Ended]] = {name: [] for name in commands}
    for turn in range(runs):
        for name in rotated(list(commands), turn):  # what a command leaves for the system to do slows down the next
            taken[name].append(succeed(commands[name], environment=environment))
    return taken


def rotated(names: list[Name], turn: int) -> list[Name]:
    """Rotate names so that another one begins in each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]
