"""Paged decode in NumPy: the default where there is no GPU, and the readable statement of the algorithm.

Each query token is computed alone, so that it has the same bytes by itself, as one of eight, and in a whole prompt. For
it and each head of the cache, the keys and values of the tokens that it sees are gathered from their pages, some at a
time. They meet the heads of the group together, with the running maximum m, sum l and unnormalised output O of
FlashAttention-2 (arXiv 2307.08691, algorithm 1). Tokens that are not seen are left out, so that the rest of the cache
cannot reach an answer. (Sequence, cache head) pairs run in threads.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator

import numpy as np

from flashcli.cpu.attention import packed
from flashcli.cpu.pages import DecodeArrays
from flashcli.cpu.workers import description, for_each, usable_cores

TOKENS = 1024  # gathered at a time: keys and values of 256 float32 are then 2 MiB
KEPT = 2**15  # tokens of a sequence that are gathered once for several query tokens: 64 MiB of these


class DecodeCpu:
    """A backend for paged decode, which computes in a float type; use as a context manager."""

    def __init__(self, threads: int | None = None, compute: type = np.float32) -> None:
        self._threads, self._compute = threads or len(usable_cores()), compute

    def __enter__(self) -> DecodeCpu:
        return self

    def __exit__(self, *exc: object) -> None:
        """Do nothing: there is nothing to close."""

    @property
    def description(self) -> str:
        return description(self._threads)

    def details(self) -> dict[str, object]:
        return {"backend": "cpu", "threads": self._threads}

    def decode(self, asked: DecodeArrays, sequences: range) -> tuple[np.ndarray, np.ndarray]:
        """The answer of some sequences in the query's type, as `DecodeArrays.shape_of` says, and their LSE, float32."""
        starts = asked.starts - asked.starts[sequences.start]
        out = np.zeros((starts[sequences.stop], asked.H, asked.D), asked.query.dtype)
        lse = np.full(out.shape[:-1], -np.inf, np.float32)

        def work(task: tuple[int, int]) -> None:
            s, kv_head = task
            rows = slice(starts[s], starts[s + 1])
            attend_group(asked, s, kv_head, out[rows], lse[rows], self._compute)

        for_each(work, list(itertools.product(sequences, range(asked.Hkv))), self._threads)
        shape = asked.shape_of(sequences)
        return out.reshape(shape), lse.reshape(shape[:-1])


@np.errstate(all="ignore")  # exp(-inf) is wanted; NaN and Inf in the data give what IEEE arithmetic gives
def attend_group(
    asked: DecodeArrays, s: int, kv_head: int, out: np.ndarray, lse: np.ndarray, compute: type = np.float32
) -> None:
    """Compute the heads of one group of sequence s into ``out`` [T, H, D] and ``lse`` [T, H], in a float type."""
    of_group = range(kv_head * asked.group, (kv_head + 1) * asked.group)
    keys_and_values = gathered(asked, s, kv_head, len(out), compute)
    for t in range(len(out)):
        # A head of block-sparse attention sees tokens of its own.
        for heads in [range(head, head + 1) for head in of_group] if asked.sparse else [of_group]:
            rows = slice(heads.start, heads.stop)
            tokens = asked.tokens_seen(s, t, heads.start)
            out[t, rows], lse[t, rows], finite = _attend(asked, s, t, rows, tokens, keys_and_values, compute)
            for head in heads.start + np.flatnonzero(~finite):  # of numbers that may be finite, but huge
                row, exact = slice(head, head + 1), gathered(asked, s, kv_head, 1, np.float64)
                out[t, row], lse[t, row], _ = _attend(asked, s, t, row, tokens, exact, np.float64)


Gather = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]  # keys and values [tokens, D] by the tokens' numbers


def _attend(
    asked: DecodeArrays, s: int, t: int, rows: slice, tokens: np.ndarray | slice, gather: Gather, compute: type
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """O and LSE of some heads of one query token that see the same tokens: zeros and -inf if all scores are -inf.

    Products of matrices are computed in ``compute``, the D times fewer numbers between them in float64. The third array
    says of each head whether all of its scores and all of O are finite.
    """
    Q = packed(asked.query_of(s, t)[rows], compute)
    scale = asked.scale * asked.k_scale
    position = asked.position(s, t)
    m: np.ndarray = np.full((len(Q), 1), -np.inf)
    l, O, lowest = np.zeros_like(m), np.zeros_like(Q, np.float64), np.zeros_like(m)
    if asked.sinks is not None:  # a score without a key, whose value is zero
        m, l = asked.sinks[rows, None].astype(np.float64), np.ones_like(m)
    for some in pieces(tokens):
        K, V = gather(some)
        S = (Q @ K.T).astype(np.float64)
        S *= scale
        if asked.softcap:
            S = asked.softcap * np.tanh(S / asked.softcap)
        if asked.alibi_slopes is not None:
            S += asked.alibi_slopes[rows, None].astype(np.float64) * (some - position)
        lowest = np.minimum(lowest, S.min(axis=1, keepdims=True))
        m_new = np.maximum(m, S.max(axis=1, keepdims=True))
        shift = np.where(m_new == -np.inf, 0, m_new)  # -inf - -inf would be NaN where exp(-inf) = 0 is meant
        P = np.exp(S - shift)
        rescale = np.exp(m - shift)
        l = l * rescale + P.sum(axis=1, keepdims=True)
        O = O * rescale + P.astype(compute) @ V
        m = m_new
    nothing = l == 0
    O[nothing[:, 0]], l[nothing] = 0, 1
    finite = np.isfinite(lowest[:, 0] + O.sum(axis=1))  # where a score is NaN or infinite, so is O
    return O / l * asked.v_scale, (m + np.log(l))[:, 0], finite


def gathered(asked: DecodeArrays, s: int, kv_head: int, count: int, compute: type) -> Gather:
    """Return the function that gathers for the ``count`` query tokens of a sequence: many see the same keys.

    Where they are not too many, they are taken out of their pages once, which changes no byte.
    """
    first, last = (int(x[s]) for x in asked.used())
    if count < 2 or last - first > KEPT:
        return lambda tokens: gather(asked, s, kv_head, tokens, compute)
    K, V = gather(asked, s, kv_head, np.arange(first, last), compute)
    return lambda tokens: (K[tokens - first], V[tokens - first])


def pieces(tokens: np.ndarray | slice) -> Iterator[np.ndarray]:
    """The numbers of the tokens, `TOKENS` at a time: all keys of a long sequence at once would be gigabytes."""
    if isinstance(tokens, slice):
        for first in range(tokens.start, tokens.stop, TOKENS):
            yield np.arange(first, min(first + TOKENS, tokens.stop))
    else:
        yield from (tokens[i : i + TOKENS] for i in range(0, len(tokens), TOKENS))


def gather(
    asked: DecodeArrays, s: int, kv_head: int, tokens: np.ndarray, compute: type
) -> tuple[np.ndarray, np.ndarray]:
    """Keys and values [tokens, D] of one head of the cache, as the cache has them, without its scales."""
    pages, slots = asked.block_tables[s, tokens // asked.page], tokens % asked.page
    if asked.layout == "vllm":  # keys [pages, Hkv, D / x, page, x], values [pages, Hkv, D, page]
        keys = asked.key_cache[pages, kv_head, :, slots].reshape(len(tokens), asked.D)
        values = asked.value_cache[pages, kv_head, :, slots]
    elif asked.layout == "nhd":  # [pages, page, Hkv, D]
        keys, values = (cache[pages, slots, kv_head] for cache in (asked.key_cache, asked.value_cache))
    else:  # [pages, Hkv, page, D]
        keys, values = (cache[pages, kv_head, slots] for cache in (asked.key_cache, asked.value_cache))
    return packed(keys, compute), packed(values, compute)
