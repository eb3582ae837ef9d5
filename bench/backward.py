"""Gradients of attention on PyTorch's tensors, timed on the training page's cases.

``python -m bench.backward [--json FILE]`` needs PyTorch and a GPU; ``flashcli bench-tensors --backward`` times any
other shape.
"""

from __future__ import annotations

from collections.abc import Iterator

import click

from bench import scripts
from bench.targets import BACKWARD
from flashcli.measure import backward, in_place
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Row
from flashcli.terminal import as_json


def measured(conditions: Conditions) -> Iterator[Row]:
    """A row for each contender, ours and PyTorch's, of each case."""
    problems = {str(target.problem): target.problem for target in BACKWARD}
    contenders = backward.contenders(["register_tiled"], ["torch"])
    yield from in_place.bench(problems, contenders, conditions, contest=backward.GRADIENTS)


@click.command()
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Time each contender so often.")
@as_json.json_option
def main(runs: int, json_path: str | None) -> None:
    """Time the gradients of the training page's cases on this machine's first GPU."""
    scripts.measure("backward", measured(Conditions(runs, False, 0)), json_path)


if __name__ == "__main__":
    scripts.run(main)
