"""Answers of paged decode: what is in the file of one, and whether two are alike, `out` and `lse`."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from flashcli.errors import BadInput
from flashcli.files.decode.tensors import FIRST_AXIS, Tensors
from flashcli.files.tolerance import TOLERANCE, UNITS
from flashcli.files.verify import Comparison

ANSWER = ("out", "lse")
AXES = {3: ("sequence", "head", "number"), 4: ("sequence", "token", "head", "number")}  # of `out`; `lse` has no numbers
HINT = "name two files that `flashcli decode` has written for the same input."


def summarise_answer(path: str | os.PathLike) -> dict[str, object] | None:
    """Summarise an answer's file: shape, type, ranges of its finite numbers; None if the file is no answer."""
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
    """Compare every number of each of `ANSWER`, of which one head of one query token has a row."""
    mine, theirs = Tensors(got), Tensors(want)
    return {name: _compared(mine, theirs, name, tolerance) for name in ANSWER}


def _compared(mine: Tensors, theirs: Tensors, name: str, tolerance: float) -> Comparison:
    for tensors in (mine, theirs):
        if name not in tensors:
            raise BadInput(f"{tensors.path!r} has no tensor {name}.", HINT)
    got, want = mine[name], theirs[name]
    if name == "lse":
        got, want = got[..., None], want[..., None]
    if got.shape != want.shape or want.ndim not in AXES or want.size == 0:
        shapes = mine[name].shape, theirs[name].shape
        raise BadInput(f"{name} has shape {shapes[0]} in {mine.path!r}, {shapes[1]} in {theirs.path!r}.", HINT)
    comparison = Comparison(tolerance, max(UNITS.get(x.dtype.name, 0) for x in (got, want)))
    for s in range(len(want)):
        some_got, some_want = (x[s].reshape(-1, x.shape[-1]).astype(np.float64) for x in (got, want))
        comparison.add(some_got, some_want, s, range(len(some_want)))
    first = theirs.metadata.get(FIRST_AXIS, "sequence")
    axes = (first, *(AXES[want.ndim] if name == "out" else AXES[want.ndim][:-1])[1:])
    comparison.places = [_named(place, want.shape, axes) for place in comparison.places]
    comparison.worst = comparison.worst and _named(comparison.worst, want.shape, axes)
    return comparison


def _named(place: dict[str, Any], shape: tuple[int, ...], axes: tuple[str, ...]) -> dict[str, Any]:
    """A place by the axes of an answer, in the place of batch, row and column."""
    index = place.pop("batch"), *np.unravel_index(place.pop("row"), shape[1:-1]), place.pop("column")
    return {name: int(i) for name, i in zip(axes, index, strict=False)} | place
