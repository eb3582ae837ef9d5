"""Paged decode spelled out once more, in float64 and a token at a time, so that nothing is checked against itself."""

from __future__ import annotations

import itertools
import math

import numpy as np

from flashcli.cpu.pages import DecodeArrays


def key_and_value(asked: DecodeArrays, s: int, token: int, kv_head: int) -> tuple[np.ndarray, np.ndarray]:
    page, slot = int(asked.block_tables[s, token // asked.page]), token % asked.page
    assert page >= 0
    if asked.layout == "vllm":
        x = asked.key_cache.shape[4]
        key = [asked.key_cache[page, kv_head, i // x, slot, i % x] for i in range(asked.D)]
        value = [asked.value_cache[page, kv_head, i, slot] for i in range(asked.D)]
    else:
        where = (page, slot, kv_head) if asked.layout == "nhd" else (page, kv_head, slot)
        key, value = asked.key_cache[where], asked.value_cache[where]
    return np.asarray(key, np.float64) * asked.k_scale, np.asarray(value, np.float64) * asked.v_scale


def queries(asked: DecodeArrays) -> list[tuple[int, int]]:
    """Each query token's sequence, and which of its query tokens it is."""
    if asked.query_starts is None:
        return [(s, t) for s in range(asked.S) for t in range(asked.T)]
    starts = asked.query_starts.tolist()
    return [(s, t) for s in range(asked.S) for t in range(starts[s + 1] - starts[s])]


def place(asked: DecodeArrays, s: int, t: int) -> int:
    """The place of a query token in its sequence."""
    if not asked.causal:
        return int(asked.seq_lens[s]) - 1
    return int(asked.seq_lens[s]) - sum(1 for of, _ in queries(asked) if of == s) + t


def sees(asked: DecodeArrays, s: int, t: int, head: int, token: int) -> bool:
    position = place(asked, s, t)
    if token > position or (asked.window and token <= position - asked.window):
        return False
    if (sparse := asked.sparse) is None:
        return True
    query_block, block = position // sparse.block_size, token // sparse.block_size
    if sparse.head_sliding_step >= 0:
        offset = (sparse.tp_rank * asked.H + head) * sparse.head_sliding_step + 1
    else:
        offset = (sparse.tp_rank * asked.Hkv + head // (asked.H // asked.Hkv)) * -sparse.head_sliding_step + 1
    return (block + offset) % sparse.vert_stride == 0 or block > query_block - sparse.local_blocks


def oracle(asked: DecodeArrays) -> tuple[np.ndarray, np.ndarray]:
    """O and LSE: [S, T, H, D] and [S, T, H], or [tokens, H, D] and [tokens, H] of ragged queries."""
    flat = asked.query.reshape(-1, asked.H, asked.D).astype(np.float64)
    out, lse = np.zeros(flat.shape), np.full(flat.shape[:-1], -np.inf)
    for (row, (s, t)), head in itertools.product(enumerate(queries(asked)), range(asked.H)):
        position = place(asked, s, t)
        sink = -math.inf if asked.sinks is None else float(asked.sinks[head])
        lse[row, head] = sink
        tokens = [token for token in range(position + 1) if sees(asked, s, t, head, token)]
        if not tokens:
            continue
        keys, values = zip(
            *(key_and_value(asked, s, token, head // (asked.H // asked.Hkv)) for token in tokens), strict=True
        )
        query = flat[row, head]
        slope = 0.0 if asked.alibi_slopes is None else float(asked.alibi_slopes[head])
        scores = [asked.scale * (query @ key) for key in keys]
        if asked.softcap:
            scores = [asked.softcap * math.tanh(score / asked.softcap) for score in scores]
        scores = [score + slope * (token - position) for score, token in zip(scores, tokens, strict=True)]
        largest = max(*scores, sink)
        weights = np.array([math.exp(score - largest) for score in scores])
        total = weights.sum() + math.exp(sink - largest)
        out[row, head] = weights @ np.array(values) / total
        lse[row, head] = largest + math.log(total)
    shape = asked.query.shape if asked.query_starts is None else flat.shape
    return out.reshape(shape), lse.reshape(shape[:-1])
