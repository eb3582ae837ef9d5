"""Is an answer of paged decode right? Its error beside that of plain arithmetic in the same type, and void cases.

Golden is float64 on the numbers as they are stored. The base is the same mathematics with nothing clever, in the
compute type: float32 throughout for a float32 query; else scores and P are rounded to the query's type. An answer is
right if it is about as near to the golden one as the base is. A case in which nonsense would pass counts for nothing.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import numpy as np

from flashcli.cpu.decode import attend_group, gather
from flashcli.cpu.pages import DecodeArrays

EPSILON = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}  # half a unit in the last place of 1


class Answer(NamedTuple):
    """``out`` [S, T, H, D] and ``lse`` [S, T, H]; of ragged queries [tokens, H, D] and [tokens, H]."""

    out: np.ndarray
    lse: np.ndarray


class Errors(NamedTuple):
    """Largest and mean absolute error, and relative L2."""

    largest: float
    mean: float
    l2: float


def golden(asked: DecodeArrays) -> Answer:
    """The answer in float64."""
    shape, starts = asked.shape_of(range(asked.S)), asked.starts
    out, lse = np.zeros((asked.total, asked.H, asked.D)), np.full((asked.total, asked.H), -np.inf)
    for s, kv_head in np.ndindex(asked.S, asked.Hkv):
        rows = slice(starts[s], starts[s + 1])
        attend_group(asked, s, kv_head, out[rows], lse[rows], np.float64)
    return Answer(out.reshape(shape), lse.reshape(shape[:-1]))


@np.errstate(all="ignore")
def base(asked: DecodeArrays) -> np.ndarray:
    """The answer of plain arithmetic in the query's type, all of a row's scores at once."""
    kind = asked.query.dtype
    out = np.zeros((asked.total, asked.H, asked.D), kind)
    rows = [(s, t) for s, count in enumerate(asked.counts) for t in range(count)]
    for (row, (s, t)), head in itertools.product(enumerate(rows), range(asked.H)):
        tokens = asked.tokens_seen(s, t, head)
        tokens = np.arange(tokens.start, tokens.stop) if isinstance(tokens, slice) else tokens
        if len(tokens):
            K, V = gather(asked, s, head // asked.group, tokens, np.float32)
            products = K * np.float32(asked.k_scale) * asked.query_of(s, t)[head].astype(np.float32)
            scores = np.cumsum(products, axis=1)[:, -1].astype(kind)  # one after the other, as a loop adds them up
            S = scores.astype(np.float32) * np.float32(asked.scale)
            if asked.softcap:
                S = np.float32(asked.softcap) * np.tanh(S / np.float32(asked.softcap))
            if asked.alibi_slopes is not None:
                S += asked.alibi_slopes[head] * (tokens - asked.position(s, t)).astype(np.float32)
            sink = np.float32(-np.inf if asked.sinks is None else asked.sinks[head])
            m = max(S.max(), sink)
            P = np.exp(S - m)
            P = (P / (np.cumsum(P)[-1] + np.exp(sink - m))).astype(kind).astype(np.float32)
            out[row, head] = np.cumsum(P[:, None] * (V * np.float32(asked.v_scale)), axis=0)[-1]
    return out.reshape(asked.shape_of(range(asked.S)))


def errors(got: np.ndarray, want: np.ndarray) -> Errors:
    difference = np.abs(got.astype(np.float64) - want)
    return Errors(
        float(difference.max()), float(difference.mean()),
        float(np.linalg.norm(difference)) / max(float(np.linalg.norm(want)), 1e-300),
    )  # fmt: skip


class Judge:
    """A judge of answers to one request of paged decode: knows the right one, and how far off plain arithmetic is."""

    def __init__(self, asked: DecodeArrays) -> None:
        self.want, self._kind = golden(asked), asked.query.dtype.name
        self.base = errors(base(asked), self.want.out)
        self._swapped = _with_two_pages_swapped(asked)

    def problem(self, got: Answer) -> str:
        """The fault of an answer, in words; empty if there is none."""
        out = np.asarray(got.out, np.float64)
        if not np.isfinite(out).all():
            return f"{(~np.isfinite(out)).sum()} numbers are not finite"
        found = errors(out, self.want.out)
        for name, is_, most in zip(Errors._fields, found, self._limits(), strict=True):
            if not is_ <= most:
                return f"{name} error {is_:.2e}, allowed {most:.2e}"
        return self._lse_problem(np.asarray(got.lse, np.float64))

    def share(self, got: Answer) -> float:
        """The largest of an answer's three errors, each as a share of what is allowed; NaN if it is not finite."""
        found = errors(np.asarray(got.out, np.float64), self.want.out)
        return max(is_ / most for is_, most in zip(found, self._limits(), strict=True))

    def _limits(self) -> Errors:
        unit = EPSILON[self._kind] * float(np.abs(self.want.out).max())
        factor = 1.5 if self._kind == "float32" else 2.0
        return Errors(
            factor * self.base.largest + unit, 1.5 * self.base.mean + unit / 4, factor * self.base.l2 + unit / 4
        )

    def _lse_problem(self, lse: np.ndarray) -> str:
        empty = np.isneginf(self.want.lse)
        if not np.array_equal(np.isneginf(lse), empty):
            return "LSE is -inf elsewhere than it should be"
        off = np.abs(np.where(empty, 0, lse) - np.where(empty, 0, self.want.lse))
        allowed = 1e-5 * (1 + np.abs(np.where(empty, 0, self.want.lse)))
        if self._kind != "float32":
            allowed = 8 * allowed  # queries are the same numbers, but tensor cores may carry their products in less
        return f"LSE is off by {off.max():.2e}" if (off > allowed).any() else ""

    def void(self) -> str:
        """The nonsense that would pass, in words; empty if none does, and so the case counts."""
        zeros, mean = np.zeros_like(self.want.out), np.full_like(self.want.out, self.want.out.mean())
        nonsense = {"zeros": zeros, "a uniform mean": mean}
        if self._swapped is not None:
            nonsense["an answer with two pages swapped"] = self._swapped
        passed = [name for name, out in nonsense.items() if not self.problem(Answer(out, self.want.lse))]
        return ", ".join(passed)


def _with_two_pages_swapped(asked: DecodeArrays) -> np.ndarray | None:
    """The golden answer to tables in which two sequences' last full pages have changed places; None if no two have.

    Of small pages, as many as hold 16 tokens: a token among hundreds may not matter.
    """
    count = max(1, 16 // asked.page)
    full = asked.seq_lens // asked.page
    rows = [s for s in range(asked.S) if full[s] >= count and asked.counts[s] > 0]
    if len(rows) < 2:
        return None
    one, other = ((s, slice(full[s] - count, full[s])) for s in rows[:2])
    tables = asked.block_tables.copy()
    tables[one], tables[other] = asked.block_tables[other], asked.block_tables[one]
    if np.array_equal(tables, asked.block_tables):
        return None
    return golden(dataclasses.replace(asked, block_tables=tables)).out
