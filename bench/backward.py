"""Gradients of attention on PyTorch's tensors, timed on the training page's cases.

``python -m bench.backward [--json FILE]`` needs PyTorch and a GPU; ``flashcli bench-tensors --backward`` times any
other shape.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench import scripts
from bench.targets import BACKWARD
from flashcli.measure import backward, in_place
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Row


def measured(conditions: Conditions) -> Iterator[Row]:
    """A row for each contender, ours and PyTorch's, of each case."""
    problems = {str(target.problem): target.problem for target in BACKWARD}
    contenders = backward.contenders(["register_tiled"], ["torch"])
    yield from in_place.bench(problems, contenders, conditions, contest=backward.GRADIENTS)


main = scripts.of_tensors(
    "backward", measured, 20, "Time the gradients of the training page's cases on this machine's first GPU."
)


if __name__ == "__main__":
    scripts.run(main)
