"""A call of `flashcli.decode` beside one of PyTorch's attention: what the host takes to queue it, and its replay in a
CUDA graph."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from bench.clocks import BESIDE
from bench.rows import Called
from flashcli.measure.decode_arrays import Drawn
from flashcli.measure.decode_shapes import SHAPES
from flashcli.measure.decode_times import RUNS, about
from flashcli.measure.rows import Row, over_all

OURS, PYTORCHS = "flashcli.decode", "PyTorch SDPA"
CALLED = dict(itertools.islice(SHAPES.items(), 2))


def calls(layout: str) -> Iterator[Row]:
    """A row for each of `CALLED`, clock and function, which take turns."""
    for name, case in CALLED.items():
        given = Drawn(name, replace(case, layout=layout))
        ways = _ways(given)
        for clock, race in BESIDE.items():
            found = race([[call] for call in ways.values()], RUNS)
            for way, seconds in zip(ways, found, strict=True):
                start = about(name, given.asked, way)
                sizes: dict[str, Any] = {"H": given.asked.H, "layout": layout, "bytes": given.asked.used_bytes()}
                yield Called(**start, **sizes, **over_all(seconds), clock=clock)


def _ways(given: Drawn) -> dict[str, Callable[[], Any]]:
    """Calls to time, by name; PyTorch's attention has keys and values without pages, and its own choice of how."""
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    from flashcli.api import decode, write_kv

    asked, tensors, plain = given.asked, given.tensors, given.without_pages()
    assert plain
    caches = tensors["key_cache"], tensors["value_cache"]
    rows = torch.zeros(asked.S, asked.Hkv, asked.D, dtype=tensors["query"].dtype, device="cuda")
    slots = torch.arange(asked.S, device="cuda")
    return {
        OURS: functools.partial(
            decode, tensors["query"][:, 0], *caches, tensors["block_tables"], tensors["seq_lens"], layout=asked.layout
        ),
        "flashcli.write_kv": functools.partial(write_kv, rows, rows, *caches, slots, layout=asked.layout),
        PYTORCHS: functools.partial(scaled_dot_product_attention, *plain, enable_gqa=True),
    }
