"""Attention as scientific models ask for it, and its gradients: a pair bias that all rows share, and a mask beside it.

``python -m bench.science [--json FILE]`` needs PyTorch and a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import click

from bench import scripts
from flashcli.measure import backward, in_place
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Row
from flashcli.measure.tensors import Problem
from flashcli.terminal import as_json

SIZES = (256, 768)
TRITON = "Triton bf16x6"


def problems(N: int) -> dict[str, Problem]:
    """Triangle attention's shapes: N rows, 4 heads, and as many queries and keys of 32 numbers as there are rows."""
    plain, bias, mask = Problem(N, 4, 4, N, N, 32), (1, 4, N, N), (N, 1, 1, N)
    return {
        f"{N} rows": plain,
        f"{N} rows, bias": replace(plain, bias=bias),
        f"{N} rows, bias and mask": replace(plain, bias=bias, mask=mask),
    }


def measured(sizes: Iterable[int], conditions: Conditions) -> Iterator[Row]:
    """The rows of each problem: forward, then gradients, with the bias's and without."""
    for case, problem in (one for N in sizes for one in problems(N).items()):
        changed = problem.bias is not None
        tritons = [] if changed else [x for x in in_place.tritons() if x.name == TRITON]  # it has no bias and no mask
        theirs = [x for x in in_place.pytorchs() if x.name == in_place.EFFICIENT]
        forward = [in_place.ours(), *theirs, in_place.flex(), *tritons]
        yield from in_place.race(case, [(contender, problem) for contender in forward], "gpu", conditions)
        ours = [backward.ours(), *([backward.ours(dbias=False)] if changed else [])]
        theirs_too = [*(x for x in backward.pytorchs() if x.name == in_place.EFFICIENT), backward.flex()]
        yield from backward.race(case, [(contender, problem) for contender in [*ours, *theirs_too]], "gpu", conditions)


@click.command()
@click.option("--rows", type=click.Choice([*map(str, SIZES)]), help="Of the triangle; without it both.")
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Time each contender so often.")
@as_json.json_option
def main(rows: str | None, runs: int, json_path: str | None) -> None:
    """Time triangle attention and its gradients on this machine's first GPU, beside PyTorch's."""
    scripts.measure("science", measured([int(rows)] if rows else SIZES, Conditions(runs, False, 0)), json_path)


if __name__ == "__main__":
    scripts.run(main)
