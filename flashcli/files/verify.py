"""Is an output right? The float64 reference, and the report of a comparison."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from flashcli.asked.shape import Shape
from flashcli.files.fileformat import FLOAT, read_output
from flashcli.files.tolerance import TOLERANCE

MAX_PLACES = 5
ROWS_AT_ONCE = 256
ELEMENTS_AT_ONCE = 2**20  # compared at a time: each takes some fifty bytes meanwhile


def reference(
    qkv: np.ndarray, causal: bool = False, scale: float | None = None, rows: np.ndarray | None = None
) -> np.ndarray:
    """Attention of one batch, float32 [3, N, d], in float64: all rows, or the given ones; [rows, d].

    Plain softmax(scale Q Kᵀ) V, some rows at a time so that memory stays bounded.
    """
    Q, K, V = qkv.astype(np.float64)
    scale = Q.shape[1] ** -0.5 if scale is None else scale
    rows = np.arange(len(Q)) if rows is None else rows
    out = np.empty((len(rows), Q.shape[1]))
    with np.errstate(all="ignore"):
        for start in range(0, len(rows), ROWS_AT_ONCE):
            some = rows[start : start + ROWS_AT_ONCE]
            S = scale * (Q[some] @ K.T)
            if causal:
                S[np.arange(len(K)) > some[:, None]] = -np.inf
            P = np.exp(S - S.max(axis=1, keepdims=True))
            out[start : start + ROWS_AT_ONCE] = P @ V / P.sum(axis=1, keepdims=True)
    return out


@dataclass
class Comparison:
    """The result of comparing two outputs, gathered piece by piece.

    An element matches if |got - want| <= tolerance + tolerance |want|, or if both are the same NaN or infinity. Where
    outputs are of a type with a ``unit`` in `UNITS`, this times the largest |want| of the row is allowed, too.
    ``max_rel`` is the largest |got - want| / (1 + |want|), which the tolerance is a limit of: relative to |want| alone,
    errors would look alarming where the right answer is close to 0. ``worst`` is where that is, or the first NaN or
    infinity where something else should be; None if there is no error at all.
    """

    tolerance: float = TOLERANCE
    unit: float = 0.0
    count: int = 0
    mismatches: int = 0
    max_abs: float = 0.0
    max_rel: float = 0.0
    got_nonfinite: int = 0
    want_nonfinite: int = 0
    places: list[dict[str, object]] = field(default_factory=list)
    worst: dict[str, object] | None = None
    _worst_error: float = 0.0
    _error_squares: float = 0.0
    _want_squares: float = 0.0

    @property
    def matches(self) -> bool:
        return self.mismatches == 0 and self.count > 0

    @property
    def relative_l2(self) -> float:
        """‖got - want‖ / ‖want‖ over the elements where both are finite."""
        if self._want_squares == 0:
            return 0.0 if self._error_squares == 0 else float("inf")
        return (self._error_squares / self._want_squares) ** 0.5

    def add(self, got: np.ndarray, want: np.ndarray, batch: int, rows: np.ndarray | range) -> None:
        """Compare some rows, [rows, d], of one batch."""
        want = want.astype(np.float64)
        with np.errstate(all="ignore"):
            error = np.abs(got - want)
            same = (got == want) | (np.isnan(got) & np.isnan(want))
            finite = np.isfinite(got) & np.isfinite(want)
            magnitude = np.where(finite, np.abs(want), 0)
            limit = self.tolerance + self.tolerance * magnitude
            if self.unit:
                limit += self.unit * magnitude.max(axis=1, keepdims=True)
            wrong = ~same & ~(finite & (error <= limit))
            error = np.where(finite, error, 0)
            relative = error / (1 + magnitude)
        self.count += want.size
        self.mismatches += int(wrong.sum())
        self.max_abs = max(self.max_abs, float(error.max(initial=0)))
        self.max_rel = max(self.max_rel, float(relative.max(initial=0)))
        self.got_nonfinite += int((~np.isfinite(got)).sum())
        self.want_nonfinite += int((~np.isfinite(want)).sum())
        self._error_squares += float((error**2).sum())
        self._want_squares += float((magnitude**2).sum())

        def place(row: int, column: int) -> dict[str, object]:
            where = {"batch": batch, "row": int(rows[row]), "column": int(column)}
            return where | {"got": float(got[row, column]), "want": float(want[row, column])}

        self.places += [place(*where) for where in np.argwhere(wrong)[: MAX_PLACES - len(self.places)]]
        relative[wrong & ~finite] = np.inf
        if (largest := relative.max(initial=0)) > self._worst_error:
            self._worst_error = float(largest)
            self.worst = place(*np.unravel_index(relative.argmax(), relative.shape))

    def record(self) -> dict[str, object]:
        names = (
            "count", "mismatches", "max_abs", "max_rel", "relative_l2", "got_nonfinite", "want_nonfinite", "places",
            "worst", "tolerance", "unit",
        )  # fmt: skip
        return {"matches": self.matches, **{name: getattr(self, name) for name in names}}

    def first_place(self) -> str:
        return place_text(self.places[0], digits=7)


def place_text(place: dict[str, object], digits: int = 9) -> str:
    axes = {name: index for name, index in place.items() if name not in ("got", "want")}
    where = f"({', '.join(axes)}) = ({', '.join(map(str, axes.values()))})"
    return f"{where}: got {place['got']:.{digits}g}, want {place['want']:.{digits}g}"


def compare_files(got: str, want: str, shape: Shape, tolerance: float = TOLERANCE) -> Comparison:
    """Every element of two output files: some batches at a time, of a long one some rows at a time."""
    comparison = Comparison(tolerance)
    step = max(1, ELEMENTS_AT_ONCE // shape.d)
    for batches in shape.batch_ranges(3 * FLOAT.itemsize * ELEMENTS_AT_ONCE):
        for start in range(0, shape.N, step):  # once, if these are several batches
            rows = range(start, min(start + step, shape.N))
            pieces = (read_output(path, shape, batches, rows) for path in (got, want))
            for batch, some_got, some_want in zip(batches, *pieces, strict=True):
                comparison.add(some_got, some_want, batch, rows)
    return comparison
