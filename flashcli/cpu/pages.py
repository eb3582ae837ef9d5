"""Calls of decode and write_kv on NumPy's arrays: the records of `flashcli.asked` with numbers, and their checks."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from flashcli.asked import decode as decoding
from flashcli.asked.attention import outline
from flashcli.asked.decode import ARRAYS, BlockSparse, Decode, Queries, one_factor
from flashcli.asked.shape import ceil_div
from flashcli.asked.write_kv import Rows, WriteKv


@dataclass(frozen=True, eq=False)
class DecodeArrays(Queries):
    """A call of decode with NumPy's arrays, which may be mapped from a file, and the options of `Decode`."""

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray
    seq_lens: np.ndarray
    alibi_slopes: np.ndarray | None = None
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"
    scale: float = 1.0
    window: int = 0
    sparse: BlockSparse | None = None

    @property
    def outline(self) -> Decode:
        """The `Decode` of this call: outlines in place of arrays."""
        arrays = {name: None if x is None else outline(x) for name, x in vars(self).items() if name in ARRAYS}
        return Decode(**{**vars(self), **arrays})

    @property
    def longest(self) -> int:
        return int(self.seq_lens.max())

    def first_used(self, length: np.ndarray) -> np.ndarray:
        """The first token of a sequence that any of its query tokens may see."""
        return np.maximum(0, length - self.T - self.window + 1) if self.window else length * 0

    def used_bytes(self) -> int:
        """The bytes of keys and values of the tokens that may be seen, each read once."""
        tokens = int((self.seq_lens.astype(np.int64) - self.first_used(self.seq_lens.astype(np.int64))).sum())
        return 2 * tokens * self.Hkv * self.D * self.cache_itemsize

    def tokens_seen(self, s: int, t: int, head: int) -> np.ndarray | slice:
        """The tokens of sequence s that a head of query token t sees: a slice, or their numbers where it is sparse."""
        position = int(self.seq_lens[s]) - self.T + t
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
class WriteKvArrays(Rows):
    """A call of write_kv with NumPy's arrays, and the options of `WriteKv`."""

    key: np.ndarray
    value: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    slot_mapping: np.ndarray
    k_scale: float = 1.0
    v_scale: float = 1.0
    layout: str = "vllm"

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
    """The fault in the slopes, lengths or pages of a call of decode; empty if there is none."""
    return _slope_problem(asked) or _table_problem(asked)


def _slope_problem(asked: DecodeArrays) -> str:
    if asked.alibi_slopes is not None and not np.isfinite(asked.alibi_slopes).all():
        return "alibi_slopes hold a number that is not finite"
    return ""


def _table_problem(asked: DecodeArrays) -> str:
    """The fault in lengths or pages, empty if there is none; pages that no query token sees are not looked at."""
    lengths, room = asked.seq_lens.astype(np.int64), asked.block_tables.shape[1] * asked.page
    if (bad := (lengths < 0) | (lengths > room)).any():
        s = int(bad.argmax())
        return (
            f"seq_lens[{s}] is {lengths[s]}, not from 0 to the {room} tokens that its row of block_tables has room for"
        )
    first, last = asked.first_used(lengths) // asked.page, ceil_div(lengths, asked.page)
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
