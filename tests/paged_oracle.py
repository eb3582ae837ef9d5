"""Paged decode spelled out once more, in float64 and a token at a time, so that nothing is checked against itself."""

from __future__ import annotations

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


def sees(asked: DecodeArrays, s: int, t: int, head: int, token: int) -> bool:
    position = int(asked.seq_lens[s]) - asked.T + t
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
    out = np.zeros((asked.S, asked.T, asked.H, asked.D))
    lse = np.full((asked.S, asked.T, asked.H), -np.inf)
    for s, t, head in np.ndindex(lse.shape):
        position = int(asked.seq_lens[s]) - asked.T + t
        tokens = [token for token in range(position + 1) if sees(asked, s, t, head, token)]
        if not tokens:
            continue
        keys, values = zip(
            *(key_and_value(asked, s, token, head // (asked.H // asked.Hkv)) for token in tokens), strict=True
        )
        query = asked.query[s, t, head].astype(np.float64)
        slope = 0.0 if asked.alibi_slopes is None else float(asked.alibi_slopes[head])
        scores = [
            asked.scale * (query @ key) + slope * (token - position) for key, token in zip(keys, tokens, strict=True)
        ]
        largest = max(scores)
        weights = np.array([math.exp(score - largest) for score in scores])
        out[s, t, head] = weights @ np.array(values) / weights.sum()
        lse[s, t, head] = largest + math.log(weights.sum())
    return out, lse
