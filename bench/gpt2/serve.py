"""A server's loop: chunks of prompts, single tokens and drafts to be verified, of all requests, in one call a step.

A step takes of each request what is not in the cache yet: up to `CHUNK` tokens of its prompt, or its last token and
drafts of the next ones. Logits of the last token and of the drafts say which drafts were right, and what comes behind
them. Keys and values of wrong ones stay in their slots until the right tokens' overwrite them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from bench.gpt2.cache import PAGE, new_caches
from bench.gpt2.library import Array, Library
from bench.gpt2.model import GPT2
from flashcli.api import decode, write_kv

CHUNK, DRAFTS = 64, 4  # tokens of a request in a step, at most
Drafter = Callable[[Sequence[int], int], list[int]]


@dataclass
class Request:
    """A text to be continued by ``count`` tokens: ``tokens`` so far, and how many of them are in the cache."""

    tokens: list[int]
    count: int
    kept: int = 0
    logits: list[np.ndarray] = field(default_factory=list)  # of each new token

    def __post_init__(self) -> None:
        self.tokens, self.end = list(self.tokens), len(self.tokens) + self.count

    @property
    def is_done(self) -> bool:
        return len(self.tokens) >= self.end


class Together:
    """A cache in pages that takes tokens of several requests at once, [1, tokens]: a `Cache` for `GPT2`."""

    def __init__(self, library: Library, caches: Array, table: np.ndarray) -> None:
        self._library, self._caches, self._numpys_table, self._table = library, caches, table, library.put(table)

    def expect(self, kept: list[int], counts: list[int]) -> np.ndarray:
        """Prepare for ``counts`` more tokens of each request behind those kept; return the positions of all of them."""
        positions = np.concatenate([np.arange(first, first + n) for first, n in zip(kept, counts, strict=True)])
        which = np.repeat(np.arange(len(counts)), counts)
        slots = self._numpys_table[which, positions // PAGE].astype(np.int64) * PAGE + positions % PAGE
        self._slot_mapping = self._library.put(slots)
        self._starts = self._library.put(np.cumsum([0, *counts], dtype=np.int32))
        self._seq_lens = self._library.put(np.add(kept, counts).astype(np.int32))
        return positions

    def turn(self, positions: Array) -> None:
        """Do nothing: `expect` has made room."""

    def attend(self, layer: int, qkv: Array) -> Array:
        """Attention of the tokens, qkv [1, tokens, 3, H, d], to all up to each of its request: [1, tokens, H, d]."""
        (keys, values), rows = self._caches[layer], qkv[0]
        write_kv(rows[:, 1], rows[:, 2], keys, values, self._slot_mapping, layout="nhd")
        o = decode(rows[:, 0], keys, values, self._table, self._seq_lens, query_starts=self._starts, layout="nhd")
        return o[None]


def seen_before(tokens: Sequence[int], most: int) -> list[int]:
    """Drafts of the next tokens: those behind the last token where it stood before."""
    for at in range(len(tokens) - 2, -1, -1):
        if tokens[at] == tokens[-1]:
            return list(tokens[at + 1 : at + 1 + most])
    return []


def step(model: GPT2, cache: Together, requests: list[Request], drafter: Drafter, chunk: int, drafts: int) -> None:
    """Have the model take the next tokens of all requests, and give them what they gain."""
    given: list[list[int]] = []
    for request in requests:
        some = request.tokens[request.kept : request.kept + chunk] if not request.is_done else []
        if some and request.kept + len(some) == len(request.tokens):
            some += drafter(request.tokens, min(drafts, request.end - len(request.tokens) - 1))
        given.append(some)
    positions = cache.expect([request.kept for request in requests], [len(some) for some in given])
    tokens, library = np.concatenate([np.array(some, np.int64) for some in given]), model.library
    x = model.hidden(library.put(tokens[None]), library.put(positions[None]), cache)[0]
    last = 0
    for request, some in zip(requests, given, strict=True):
        last += len(some)
        if some and request.kept + len(some) >= len(request.tokens):  # all of its text has been seen
            known = len(request.tokens) - request.kept  # of its tokens; behind them are drafts
            logits = library.take(model.head(x[last - len(some) + known - 1 : last]))
            _verify(request, some[known:], logits)
        else:
            request.kept += len(some)


def _verify(request: Request, drafts: list[int], logits: np.ndarray) -> None:
    """Give a request the most likely tokens behind its text, as far as drafts before them were right."""
    for row, draft in zip(logits, [*drafts, None], strict=True):
        request.kept = len(request.tokens)  # what this row has seen
        request.tokens.append(int(row.argmax()))
        request.logits.append(row)
        if request.tokens[-1] != draft:
            break


def serve(
    model: GPT2, requests: list[Request], drafter: Drafter = seen_before, chunk: int = CHUNK, drafts: int = DRAFTS
) -> int:
    """Continue all requests, in as many steps as it takes; return how many these were."""
    room = max(request.end for request in requests)
    cache = Together(model.library, *new_caches(model.config, len(requests), room, model.library))
    steps = 0
    while not all(request.is_done for request in requests):
        step(model, cache, requests, drafter, chunk, drafts)
        steps += 1
    return steps
