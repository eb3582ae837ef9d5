"""What the programs of `make torture` share: a tally of what was tried and what went wrong, and their command lines."""

from __future__ import annotations

import argparse
import collections
import itertools
import random
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

Choose = random.Random


class Wrong(Exception):
    """The error that something is not as it should be; its text says what."""


class Tally:
    """What came of each thing that was tried, and a line for each that went wrong."""

    def __init__(self) -> None:
        self.outcomes: collections.Counter[str] = collections.Counter()
        self.wrong: list[str] = []

    def summary(self) -> str:
        outcomes = (f"  {outcome}: {count}" for outcome, count in sorted(self.outcomes.items()))
        return "\n".join([*outcomes, f"{len(self.wrong)} went wrong.", *self.wrong])


Trial = Callable[[Choose, np.random.Generator], str]  # it chooses what to do, and says what came of it


def tried(trials: Mapping[str, Trial], times: int, seconds: float, seed: int) -> Tally:
    """Do each trial so often, or until the time is over; what it chooses follows from its name, number and seed."""
    tally, end = Tally(), time.monotonic() + seconds
    for number, (name, trial) in itertools.product(range(times), trials.items()):
        if time.monotonic() > end:
            break
        try:
            outcome = trial(random.Random(f"{seed} {name} {number}"), np.random.default_rng([seed, number]))
            tally.outcomes[f"{name}: {outcome}"] += 1
        except Wrong as error:
            tally.wrong.append(f"{name} {number}: {error}")
        except Exception:
            tally.wrong.append(f"{name} {number}: {traceback.format_exc(limit=-4)}")
    return tally


def demand(condition: Any, otherwise: str) -> None:
    if not condition:
        raise Wrong(otherwise)


def near(got: np.ndarray, want: np.ndarray, tolerance: float, what: str) -> None:
    """Demand numbers that are as near to the right ones as that; what is not finite has to be the same."""
    got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
    demand(got.shape == want.shape, f"{what} has shape {got.shape}, not {want.shape}")
    with np.errstate(all="ignore"):
        same = (got == want) | (np.isnan(got) & np.isnan(want))
        off = np.where(np.isfinite(want), np.abs(got - want), np.where(same, 0, np.inf)).max(initial=0)
    demand(off <= tolerance, f"{what} is off by {off:.3g}, allowed {tolerance:.3g}")


def end(main: Callable[..., Tally], about: str, **counts: int) -> None:
    """Call ``main`` with what the command line says of these counts, and of a ``seed``; print its tally, and exit."""
    parser = argparse.ArgumentParser(description=about)
    for name, count in {**counts, "seed": 0}.items():
        parser.add_argument(f"--{name}", type=int, default=count, help=f"default: {count}")
    tally = main(**vars(parser.parse_args()))
    print(tally.summary())
    sys.exit(bool(tally.wrong))
