"""Keys and values that a GPT-2 has computed: in one tensor a layer, or in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np

from bench.gpt2.library import Array, Library
from bench.gpt2.weights import Config
from flashcli.api import attention, decode, write_kv
from flashcli.asked.shape import ceil_div

PAGE = 16  # tokens
# Attention of q [B, H, M, d] to k and v [B, H, N, d], of which the last M tokens are the queries: [B, H, M, d].
Attend = Callable[[Array, Array, Array], Array]


class Cache(Protocol):
    """Keeps keys and values, and attends to them: those of a prompt, M > 1 tokens from the first, then of single ones.

    Each of B sequences may be at a place of its own, if the cache is in pages.
    """

    def turn(self, positions: Array) -> None:
        """Make room for tokens at these positions [B, M], of which then every layer has its queries, keys and values.

        The host does not look at the positions.
        """

    def attend(self, layer: int, qkv: Array) -> Array:
        """Attention of the tokens, qkv [B, M, 3, H, d], to all up to each: [B, M, H, d]."""


class Dense:
    """A cache of PyTorch's with room for all positions, [layers, B, context, 2, H, d]; attention reads views of it.

    All sequences are as long as each other.
    """

    def __init__(self, config: Config, B: int, library: Library, attend: Attend) -> None:
        shape = config.layers, B, config.context, 2, config.heads, config.head
        self._kv, self._attend, self._stop = library.empty(shape, "float32"), attend, 0

    def turn(self, positions: Array) -> None:
        M = positions.shape[1]
        self._start = 0 if M > 1 else self._stop
        self._stop = self._start + M

    def attend(self, layer: int, qkv: Array) -> Array:
        self._kv[layer, :, self._start : self._stop] = qkv[:, :, 1:]
        kv = self._kv[layer, :, : self._stop]
        q, k, v = (rows.swapaxes(1, 2) for rows in (qkv[:, :, 0], kv[:, :, 0], kv[:, :, 1]))
        return self._attend(q, k, v).swapaxes(1, 2)


class Pages:
    """Pages in random order, as a server hands them out, filled by `flashcli.write_kv`.

    The tokens of a prompt attend to each other by `flashcli.attention`, a single one to the pages by `flashcli.decode`.
    """

    def __init__(self, library: Library, caches: Array, table: np.ndarray, kind: str = "float32") -> None:
        """Take pages [layers, 2, pages, PAGE, H, d] of numbers of a ``kind``, and for each sequence which are its own.

        ``table`` is int32 [B, pages of a sequence].
        """
        self._library, self._caches, self._numpys_table, self._kind = library, caches, table, kind
        each = np.arange(table.shape[1] * PAGE)
        self._table = library.put(table)
        self._slots = library.put(table[:, each // PAGE].astype(np.int64) * PAGE + each % PAGE)  # of each position
        self._sequences = library.put(np.arange(len(table))[:, None])
        self._lengths = library.put((each + 1).astype(np.int32))  # up to each position

    def of(self, sequence: int) -> Pages:
        """A view of the pages that has one of the sequences alone."""
        return Pages(self._library, self._caches, self._numpys_table[sequence : sequence + 1], self._kind)

    def turn(self, positions: Array) -> None:
        self._slot_mapping = self._slots[self._sequences, positions].reshape(-1)
        self._seq_lens = self._lengths[positions[:, -1]]

    def attend(self, layer: int, qkv: Array) -> Array:
        keys, values = self._caches[layer]
        rows = self._library.cast(qkv, self._kind)
        tokens = rows.reshape(-1, *rows.shape[2:])
        write_kv(tokens[:, 1], tokens[:, 2], keys, values, self._slot_mapping, layout="nhd")
        if qkv.shape[1] > 1:
            q, k, v = (qkv[:, :, which].swapaxes(1, 2) for which in range(3))
            return attention(q, k, v, causal=True).swapaxes(1, 2)
        o = decode(rows[:, :, 0], keys, values, self._table, self._seq_lens, layout="nhd")
        return self._library.cast(o, "float32")


def new_pages(config: Config, B: int, room: int, library: Library, kind: str = "float32") -> Pages:
    """Pages for B sequences of up to ``room`` tokens."""
    return Pages(library, *new_caches(config, B, room, library, kind), kind)


def new_caches(config: Config, B: int, room: int, library: Library, kind: str = "float32") -> tuple[Array, np.ndarray]:
    """Pages [layers, 2, pages, PAGE, H, d] for B sequences of up to ``room`` tokens, and the table of each one's."""
    table = np.random.default_rng(0).permutation(B * ceil_div(room, PAGE)).reshape(B, -1).astype(np.int32)
    return library.empty((config.layers, 2, table.size, PAGE, config.heads, config.head), kind), table
