"""Are two answers of paged decode alike? Their files compared, `out` and `lse`."""

from __future__ import annotations

import os

import numpy as np

from flashcli.errors import BadInput
from flashcli.files.decode_file import Tensors
from flashcli.files.tolerance import TOLERANCE
from flashcli.files.verify import Comparison

ANSWER = ("out", "lse")
HINT = "name two files that `flashcli decode` has written for the same input."


def compare_answers(
    got: str | os.PathLike, want: str | os.PathLike, tolerance: float = TOLERANCE
) -> dict[str, Comparison]:
    """Every number of each of `ANSWER`: a batch is a sequence, a row one of its query tokens and heads."""
    mine, theirs = Tensors(got), Tensors(want)
    return {name: _compared(mine, theirs, name, tolerance) for name in ANSWER}


def _compared(mine: Tensors, theirs: Tensors, name: str, tolerance: float) -> Comparison:
    for tensors in (mine, theirs):
        if name not in tensors:
            raise BadInput(f"{tensors.path!r} has no tensor {name}.", HINT)
    got, want = mine[name], theirs[name]
    if got.shape != want.shape or want.ndim < 2:
        raise BadInput(f"{name} has shape {got.shape} in {mine.path!r}, {want.shape} in {theirs.path!r}.", HINT)
    comparison, columns = Comparison(tolerance), want.shape[-1] if name == "out" else 1
    for s in range(len(want)):
        some_got, some_want = (x[s].reshape(-1, columns).astype(np.float64) for x in (got, want))
        comparison.add(some_got, some_want, s, range(len(some_want)))
    return comparison
