"""NaN and Inf in a paged decode file or its answer, told in words that follow the name of the file."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashcli.cpu.decode import gather, pieces
from flashcli.cpu.pages import DecodeArrays

HELD = "holds a value that is not finite, first {}; IEEE rules apply."
LOST = "has an answer that is not finite, first {}, though all it sees is: {} has no room for its scores or sums."


def in_query(asked: DecodeArrays) -> str:
    """A NaN or Inf of the query; empty if there is none."""
    found = _not_finite(asked.query)
    return HELD.format(_place("query", asked.query[tuple(found[0])], *found[0])) if len(found) else ""


def behind_answer(asked: DecodeArrays, sequences: range, out: np.ndarray) -> str:
    """Say what made a number of the answer of some sequences not finite; empty if all are finite.

    The cache may be larger than memory: only the tokens that the first such answer sees are looked at.
    """
    if not len(found := _not_finite(out)):
        return ""
    place = tuple(map(int, found[0]))
    row, head, number = np.ravel_multi_index(place[:-2], out.shape[:-2]), *place[-2:]
    starts = asked.starts[sequences.start : sequences.stop + 1] - asked.starts[sequences.start]
    s = int(np.searchsorted(starts, row, "right")) - 1
    t, kv_head, of = int(row - starts[s]), head // asked.group, sequences.start + s
    for tokens in pieces(asked.tokens_seen(of, t, head)):
        for name, rows in zip(
            ("key_cache", "value_cache"), gather(asked, of, kv_head, tokens, np.float32), strict=True
        ):
            if len(bad := _not_finite(rows)):
                row, column = bad[0]
                return HELD.format(_place(name, rows[row, column], of, tokens[row], kv_head, column))
    return LOST.format(_place("out", out[place], of, t, head, number), out.dtype)


def _not_finite(array: np.ndarray) -> np.ndarray:
    """The places of all numbers that are not finite."""
    return np.argwhere(~np.isfinite(array))


def _place(name: str, value: Any, s: int, token: int, head: int, number: int) -> str:
    return f"{float(value)} in {name} at (sequence, token, head, number) = ({s}, {token}, {head}, {number})"
