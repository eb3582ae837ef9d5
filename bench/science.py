"""Attention as scientific models ask for it, and its gradients: a pair bias that all rows share, and a mask beside it.

``python -m bench.science [--json FILE]`` needs PyTorch and a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from bench import scripts
from flashcli.measure import backward, in_place, peers
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Row
from flashcli.measure.tensors import Problem
from flashcli.terminal import as_json


def problems() -> dict[str, Problem]:
    """Triangle attention's shapes: rows, heads, and as many queries and keys of 32 numbers as there are rows."""
    found: dict[str, Problem] = {}
    for N in (256, 768):
        plain = Problem(N, 4, 4, N, N, 32)
        biased = Problem(N, 4, 4, N, N, 32, bias=(1, 4, N, N))
        both = Problem(N, 4, 4, N, N, 32, bias=(1, 4, N, N), mask=(N, 1, 1, N))
        found |= {f"{N} rows": plain, f"{N} rows, bias": biased, f"{N} rows, bias and mask": both}
    return found


def measured(conditions: Conditions) -> Iterator[Row]:
    """The rows of each problem: forward, then gradients, with the bias's and without."""
    forward = [in_place.ours(), *(x for x in in_place.pytorchs() if x.name == peers.EFFICIENT)]
    for case, problem in problems().items():
        yield from in_place.race(case, [(contender, problem) for contender in forward], "gpu", conditions)
        ours = [backward.ours(), *([] if problem.bias is None else [backward.ours(dbias=False)])]
        theirs = [x for x in backward.pytorchs() if x.name == peers.EFFICIENT]
        yield from backward.race(case, [(contender, problem) for contender in [*ours, *theirs]], "gpu", conditions)


@click.command()
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Time each contender so often.")
@as_json.json_option
def main(runs: int, json_path: str | None) -> None:
    """Time triangle attention and its gradients on this machine's first GPU, beside PyTorch's."""
    scripts.measure("science", measured(Conditions(runs, False, 0)), json_path)


if __name__ == "__main__":
    scripts.run(main)
