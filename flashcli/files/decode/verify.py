"""Answers of paged decode: what is in the file of one, and whether two are alike, `out` and `lse`."""

from __future__ import annotations

import os

import numpy as np

from flashcli.errors import BadInput
from flashcli.files.decode.tensors import Tensors
from flashcli.files.tolerance import TOLERANCE
from flashcli.files.verify import Comparison

ANSWER = ("out", "lse")
HINT = "name two files that `flashcli decode` has written for the same input."


def summarise_answer(path: str | os.PathLike) -> dict[str, object] | None:
    """Of a file with an answer, and no question: its shape and type, and the ranges of its finite numbers."""
    tensors = Tensors(path)
    if "query" in tensors or any(name not in tensors for name in ANSWER):
        return None
    out, lse = (tensors[name] for name in ANSWER)
    record: dict[str, object] = {"shape": list(out.shape), "type": out.dtype.name}
    for name, array in (("out", out.astype(np.float32)), ("lse", lse)):
        finite = array[np.isfinite(array)]
        low, high = (float(finite.min()), float(finite.max())) if finite.size else (0.0, 0.0)
        record |= {f"{name}_min": low, f"{name}_max": high}
    empty = np.isneginf(lse)
    nonfinite = out.size - int(np.isfinite(out).sum()) + int((~np.isfinite(lse) & ~empty).sum())
    return record | {"nonfinite": nonfinite, "see_nothing": int(empty.sum())}


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
    if got.shape != want.shape or want.ndim < 2 or want.size == 0:
        raise BadInput(f"{name} has shape {got.shape} in {mine.path!r}, {want.shape} in {theirs.path!r}.", HINT)
    comparison, columns = Comparison(tolerance), want.shape[-1] if name == "out" else 1
    for s in range(len(want)):
        some_got, some_want = (x[s].reshape(-1, columns).astype(np.float64) for x in (got, want))
        comparison.add(some_got, some_want, s, range(len(some_want)))
    return comparison
