"""Fit the constants of `tuning.cost` to a record of the grid: none below 0, and the least relative errors.

A time counts by the square of its share that the fastest kernel takes, of those for the same GPUs: what is slower by
far is not chosen anyway.

``python -m bench.fit RECORD.json`` writes ``flashcli/kernels/tuning/costs.py``, and marks in the record which
kernel is chosen with them.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import click
import numpy as np

from bench import scripts
from bench.records import load_record
from bench.rows import Gridded
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.choice import choose, refusal
from flashcli.kernels.problem import Problem
from flashcli.kernels.tuning import cost, costs
from flashcli.measure.records import by_case, of_kind
from flashcli.measure.rows import Row
from flashcli.terminal import as_json

WRITTEN = Path(costs.__file__)
HOPPER = (9, 0)
FIXED = 3  # of a kernel's constants those that do not depend on the head: launch, start, megabyte
PATHS = (0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0)
SWEEPS = 20_000
MARK = "# ---- fitted"


def problem_of(row: Gridded) -> Problem:
    return Problem(row.B, row.N, row.N, row.d, bool(row.causal), in_place=True, batch_invariant=True)


def may_be_chosen(row: Gridded) -> bool:
    """Whether a row is of one of our kernels, and not of one that is never chosen for such a shape."""
    return row.contender in KERNELS and not refusal(row.contender, HOPPER, problem_of(row))


def fitted(rows: Iterable[Row]) -> dict[str, costs.Cost]:
    """The constants of each kernel that was timed, from its times in single calls, where it might be chosen."""
    able = [row for row in of_kind(Gridded, rows) if may_be_chosen(row)]
    by_kernel: dict[str, list[tuple[Gridded, float]]] = {}
    for some in by_case(able).values():
        for row in some:
            by_kernel.setdefault(row.contender, []).append((row, _weight(row, some)))
    return {name: _fit(weighted) for name, weighted in sorted(by_kernel.items())}


def _weight(row: Gridded, beside: Iterable[Gridded]) -> float:
    """How much a time counts beside those of the shape's other kernels, of which a GPU has those that need no more."""
    needs = KERNELS[row.contender].needs
    fastest = min(other.seconds for other in beside if KERNELS[other.contender].needs <= needs)
    return (fastest / row.seconds) ** 2


def _fit(weighted: Sequence[tuple[Gridded, float]]) -> costs.Cost:
    """Fit a kernel's cost to its rows: linear least squares with each of `PATHS`, the best of them taken."""
    return min((_linear(weighted, path) for path in PATHS), key=lambda found: found[0])[1]


def _linear(weighted: Sequence[tuple[Gridded, float]], path: float) -> tuple[float, costs.Cost]:
    """The constants for a factor on paths, and the norm of the relative errors with them, each by its weight."""
    rows = [row for row, _ in weighted]
    kernel = KERNELS[rows[0].contender]
    heads = sorted({cost.head_class(row.d) for row in rows})
    table = np.zeros((len(rows), FIXED + len(heads)))
    for line, row in zip(table, rows, strict=True):
        todo = cost.work(kernel, problem_of(row))
        line[:FIXED] = 1, todo.rounds, todo.megabytes
        line[FIXED + heads.index(cost.head_class(row.d))] = max(path * todo.longest, todo.pairs)
        line /= row.seconds * 1e6
    weights = np.array([weight for _, weight in weighted])
    table *= weights[:, None]
    found = nonnegative(table, weights)
    launch, start, megabyte, *pair = (round(float(x), 4) for x in found)
    error = float(np.linalg.norm(table @ found - weights))
    return error, costs.Cost(launch, start, megabyte, path, dict(zip(heads, pair, strict=True)))


def nonnegative(table: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """The x >= 0 with the least ‖table x - wanted‖, by one coordinate after the other."""
    scale = np.linalg.norm(table, axis=0)
    scale[scale == 0] = 1
    squares, target = (table / scale).T @ (table / scale), (table / scale).T @ wanted
    found = np.zeros(len(scale))
    for _ in range(SWEEPS):
        before = found.copy()
        for i in np.flatnonzero(squares.diagonal()):
            found[i] = max(0.0, found[i] + (target[i] - squares[i] @ found) / squares[i, i])
        if np.abs(found - before).max() < 1e-9:
            break
    return found / scale


def tilings(rows: Iterable[Row]) -> str:
    """Changes when a kernel cuts a shape of the record in another way: then its times are not those of the kernel."""
    shapes = [row for row in of_kind(Gridded, rows) if row.contender in KERNELS]
    work = [cost.work(KERNELS[row.contender], problem_of(row)) for row in shapes]
    return hashlib.sha256(repr(work).encode()).hexdigest()[:12]


def source(found: dict[str, costs.Cost], fitted_to: str) -> str:
    """The text of `flashcli.kernels.tuning.costs` with other constants."""
    kept = WRITTEN.read_text().partition(MARK)[0]
    lines = [f"{kept}{MARK}: what follows is written anew by each fit", f'TILINGS = "{fitted_to}"', "COSTS = {"]
    for name, one in found.items():
        *numbers, pairs = one
        lines += [f'    "{name}": Cost(', f"        {', '.join(map(str, numbers))},", f"        {pairs},", "    ),"]
    return "\n".join([*lines, "}  # fmt: skip", ""])


class Regret(NamedTuple):
    """On a shape, how many times as long as the fastest of our kernels the chosen one takes."""

    case: str
    chosen: str
    fastest: str
    times: float


def regrets(rows: Iterable[Row], batch_invariant: bool) -> list[Regret]:
    """The regret on every shape of a record of the grid, in single calls, with the constants that there are."""
    found = []
    for case, some in by_case(of_kind(Gridded, rows)).items():
        if seconds := {row.contender: row.seconds for row in some if row.contender in KERNELS}:
            problem = problem_of(some[0])._replace(batch_invariant=batch_invariant)
            chosen, fastest = choose(HOPPER, problem).name, min(seconds, key=lambda name: seconds[name])
            found.append(Regret(case, chosen, fastest, seconds.get(chosen, math.inf) / seconds[fastest]))
    return found


def marked(rows: Iterable[Row]) -> list[Row]:
    """The rows, ours with whether the kernel is the one that is chosen with the constants that there are."""
    return [
        replace(row, chosen=row.contender == choose(HOPPER, problem_of(row)).name)
        if isinstance(row, Gridded) and row.contender in KERNELS
        else row
        for row in rows
    ]


@click.command()
@click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--check", is_flag=True, help="Write nothing.")
def main(record: Path, check: bool) -> None:
    """Fit the model of kernels' times to a RECORD of `python -m bench.grid`, and mark there what is chosen.

    Tells on which shapes another kernel than the chosen one is faster.
    """
    found = load_record(record, "python -m bench.grid", Gridded)
    if not check:
        constants = fitted(found.rows)
        WRITTEN.write_text(source(constants, tilings(found.rows)))
        cost.COSTS.clear()
        cost.COSTS.update(constants)
        found.rows = marked(found.rows)
        as_json.write(found.written(), str(record))
    for batch_invariant in (True, False):
        told = regrets(found.rows, batch_invariant=batch_invariant)
        slower = [one for one in told if one.times > 1]
        click.echo(f"batch_invariant={batch_invariant}: {len(slower)} of {len(told)} shapes have a faster kernel")
        for one in sorted(slower, key=lambda one: -one.times):
            click.echo(f"  {one.case}: {one.chosen} takes {one.times:.2f} times as long as {one.fastest}")


if __name__ == "__main__":
    scripts.run(main)
