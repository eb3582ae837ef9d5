"""Calls of decode and write_kv on NumPy's arrays: the records of `flashcli.asked` with numbers, and their checks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import numpy as np

from flashcli.asked import decode as decoding
from flashcli.asked.attention import outline
from flashcli.asked.decode import ARRAYS, Decode, Queries, one_factor
from flashcli.asked.shape import ceil_div
from flashcli.asked.write_kv import Rows, WriteKv


@dataclass(frozen=True, eq=False)
class DecodeArrays(Queries[np.ndarray]):
    """A call of decode with NumPy's arrays, which may be mapped from a file."""

    @property
    def outline(self) -> Decode:
        """The `Decode` of this call: outlines in place of arrays."""
        arrays = {name: None if x is None else outline(x) for name, x in vars(self).items() if name in ARRAYS}
        return Decode(**{**vars(self), **arrays})

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max())

    @property
    def starts(self) -> np.ndarray:
        """The first query token of each sequence among all of them, and behind these how many there are: [S + 1]."""
        return np.arange(self.S + 1) * self.T if self.query_starts is None else self.query_starts.astype(np.int64)

    @property
    def counts(self) -> np.ndarray:
        """The number of query tokens of each sequence."""
        return np.diff(self.starts)

    def shape_of(self, sequences: range) -> tuple[int, ...]:
        """The shape of the answer of some sequences: [s, T, H, D], or [tokens, H, D] of ragged queries."""
        if not self.is_ragged:
            return len(sequences), *self.query.shape[1:]
        first, last = self.starts[[sequences.start, sequences.stop]]
        return int(last - first), self.H, self.D

    def part(self, sequences: range) -> DecodeArrays:
        """The call of some sequences alone, with the cache as it is."""
        some = slice(sequences.start, sequences.stop)
        of, starts = some, None
        if self.query_starts is not None:
            starts = self.query_starts[sequences.start : sequences.stop + 1]
            of, starts = slice(int(starts[0]), int(starts[-1])), starts - starts[0]
        return replace(
            self, query=self.query[of], block_tables=self.block_tables[some], seq_lens=self.seq_lens[some],
            query_starts=starts,
        )  # fmt: skip

    def token(self, s: int, t: int) -> DecodeArrays:
        """The call of query token t of sequence s alone, which gives the same answer: [1, 1, H, D]."""
        return replace(
            self, query=self.query_of(s, t)[None, None], block_tables=self.block_tables[s : s + 1], query_starts=None,
            seq_lens=np.maximum(0, [self.position(s, t) + 1]).astype(np.int32), causal=True,
        )  # fmt: skip

    def query_of(self, s: int, t: int) -> np.ndarray:
        """Query token t of sequence s: [H, D]."""
        return self.query[s, t] if self.query_starts is None else self.query[self.query_starts[s] + t, 0]

    def position(self, s: int, t: int) -> int:
        """The place in sequence s of its query token t; negative if there are more of them than tokens."""
        if not self.causal:
            return int(self.seq_lens[s]) - 1
        count = self.T if self.query_starts is None else int(self.query_starts[s + 1]) - int(self.query_starts[s])
        return int(self.seq_lens[s]) - count + t

    def used(self) -> tuple[np.ndarray, np.ndarray]:
        """The first token of each sequence that any of its query tokens may see, and the one after the last."""
        counts = self.counts
        lengths = np.where(counts > 0, self.seq_lens.astype(np.int64), 0)
        first = (
            np.maximum(0, lengths - (counts if self.causal else 1) - self.window + 1) if self.window else lengths * 0
        )
        return np.minimum(first, lengths), lengths

    def used_bytes(self) -> int:
        """The bytes of keys and values of the tokens that may be seen, each read once."""
        return int(self.used_bytes_each().sum())

    def used_bytes_each(self) -> np.ndarray:
        """The bytes of keys and values that each sequence uses."""
        first, last = self.used()
        return (last - first) * (2 * self.Hkv * self.D * self.cache_itemsize)

    def tokens_seen(self, s: int, t: int, head: int) -> np.ndarray | slice:
        """The tokens of sequence s that a head of query token t sees: a slice, or their numbers where it is sparse."""
        position = self.position(s, t)
        first = max(0, position - self.window + 1) if self.window else 0
        if not self.sparse:
            return slice(first, max(first, position + 1))
        size, stride = self.sparse.block_size, self.sparse.vert_stride
        blocks = np.arange(first // size, position // size + 1)
        offset = self.sparse.offset(head, self.H, head // self.group, self.Hkv) % stride
        kept = ((blocks + offset) % stride == 0) | (blocks > position // size - self.sparse.local_blocks)
        tokens = (blocks[kept, None] * size + np.arange(min(size, position + 1))).reshape(-1)
        return tokens[(tokens >= first) & (tokens <= position)]


@dataclass(frozen=True, eq=False)
class WriteKvArrays(Rows[np.ndarray]):
    """A call of write_kv with NumPy's arrays."""

    @property
    def outline(self) -> WriteKv:
        """The `WriteKv` of this call: outlines in place of arrays."""
        arrays = {name: outline(x) for name, x in vars(self).items() if isinstance(x, np.ndarray)}
        return WriteKv(**{**vars(self), **arrays})


def one_number(name: str, scale: Any) -> float:
    """The number in a scale, which may be an array of one float32; ValueError for anything else."""
    array = np.asarray(scale)
    if not isinstance(scale, Real):
        one_factor(name, outline(array))
    return array.item()


def decode_problem(asked: DecodeArrays) -> str:
    """The fault in a call of decode, lengths and pages included, such as "query is ..."; empty if there is none."""
    return decoding.outer_problem(asked.outline) or page_problem(asked)


def page_problem(asked: DecodeArrays) -> str:
    """The fault in the numbers of a call of decode beside its cache and queries; empty if there is none."""
    return _start_problem(asked) or _slope_problem(asked) or _table_problem(asked)


def _start_problem(asked: DecodeArrays) -> str:
    """The fault in the numbers of query_starts, empty if there is none."""
    if asked.query_starts is None:
        return ""
    if (first := int(asked.query_starts[0])) != 0:
        return f"query_starts[0] is {first}, not 0"
    if (bad := asked.counts < 0).any():
        s = int(bad.argmax())
        return f"query_starts[{s + 1}] is {asked.query_starts[s + 1]}, below {asked.query_starts[s]} before it"
    if (last := int(asked.query_starts[-1])) != asked.total:
        return f"query_starts[{asked.S}], the last, is {last}, not {asked.total}, the number of query tokens"
    if asked.max_query_len is not None and (most := int(asked.counts.max())) > asked.max_query_len:
        s = int(asked.counts.argmax())
        return f"query_starts give sequence {s} {most} query tokens, more than max_query_len = {asked.max_query_len}"
    return ""


def _slope_problem(asked: DecodeArrays) -> str:
    for name in ("alibi_slopes", "sinks"):
        if (numbers := getattr(asked, name)) is not None and not np.isfinite(numbers).all():
            return f"{name} hold a number that is not finite"
    return ""


def _table_problem(asked: DecodeArrays) -> str:
    """The fault in lengths or pages, empty if there is none; pages that no query token sees are not looked at."""
    lengths, room = asked.seq_lens.astype(np.int64), asked.block_tables.shape[1] * asked.page
    if (bad := (lengths < 0) | (lengths > room)).any():
        s = int(bad.argmax())
        return (
            f"seq_lens[{s}] is {lengths[s]}, not from 0 to the {room} tokens that its row of block_tables has room for"
        )
    first, last = asked.used()
    first, last = first // asked.page, ceil_div(last, asked.page)
    for s in range(asked.S):
        used = asked.block_tables[s, first[s] : last[s]]
        if (bad := (used < 0) | (used >= asked.pages)).any():
            j = int(bad.argmax())
            return f"block_tables[{s}, {first[s] + j}] is {used[j]}, not from 0 to {asked.pages - 1}, the cache's pages"
    return ""


def slot_problem(asked: WriteKvArrays) -> str:
    """The fault in the slots of a call of write_kv; empty if there is none."""
    slots = asked.pages * asked.page
    if (bad := asked.slot_mapping >= slots).any():
        i = int(bad.argmax())
        return f"slot_mapping[{i}] is {asked.slot_mapping[i]}, not below {slots}, the cache's slots"
    return ""
