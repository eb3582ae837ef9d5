"""Attention of halves and its gradients, right to fp32, beside ours of float32 and PyTorch's of halves.

``python -m bench.halves [--json FILE]`` needs PyTorch and a GPU.
"""

from __future__ import annotations

from collections.abc import Iterator

from bench import scripts
from flashcli.measure import backward, in_place
from flashcli.measure.bench import Conditions
from flashcli.measure.in_place import Contender
from flashcli.measure.rows import Row
from flashcli.measure.tensors import Problem

FORWARD = Problem(2, 1, 1, 16384, 16384, 128), Problem(2, 1, 1, 32768, 32768, 64)
GRADIENTS = Problem(2, 1, 1, 32768, 32768, 64)
KINDS = ("float16", "bfloat16")


def of_halves(ours: Contender, dtype: str) -> Contender:
    """Ours of halves, rounded to the same type."""
    return ours._replace(name=f"flashcli, {dtype} in", dtype=dtype, takes=dtype)


def measured(conditions: Conditions) -> Iterator[Row]:
    """A row for each contender: answers, then gradients."""
    _, *theirs = in_place.pytorchs()
    for problem in FORWARD:
        contenders = [in_place.ours(), *(of_halves(in_place.ours(), kind) for kind in KINDS), *theirs]
        yield from in_place.bench({str(problem): problem}, contenders, conditions)
    theirs_too = [x for x in backward.pytorchs() if x.dtype == "float16"]
    of_ours = [backward.ours(), *(of_halves(backward.ours(), kind) for kind in KINDS)]
    problems = {f"gradients {GRADIENTS}": GRADIENTS}
    yield from in_place.bench(problems, [*of_ours, *theirs_too], conditions, contest=backward.GRADIENTS)


main = scripts.of_tensors(
    "halves", measured, 20, "Time attention of halves and its gradients on this machine's first GPU."
)


if __name__ == "__main__":
    scripts.run(main)
