"""Keys and values that a GPT-2 of given sizes has computed: in one tensor a layer, or in pages."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from flashcli.asked.shape import ceil_div

PAGE = 16  # tokens
HEAD = 64  # numbers, in every GPT-2
# Attention of q [B, H, M, d] to k and v [B, H, N, d], of which the last M tokens are the queries: [B, H, M, d].
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


class Config(NamedTuple):
    """The sizes of a model; those of GPT-2 small if nothing is said."""

    layers: int = 12
    heads: int = 12
    context: int = 1024
    vocabulary: int = 50257

    @property
    def head(self) -> int:
        return HEAD

    @property
    def width(self) -> int:
        return self.heads * HEAD


class Cache(Protocol):
    """Keeps keys and values, and attends to them."""

    def attend(self, layer: int, start: int | Tensor, qkv: Tensor) -> Tensor:
        """Attention of the M tokens from ``start`` on, qkv [1, M, 3, H, d], to all up to each: [1, M, H, d].

        ``start`` may be on their device, [1], where the host does not see it, if M is 1.
        """
        ...


class Dense:
    """A cache with room for all positions, [layers, 1, context, 2, H, d]; attention reads views of it."""

    def __init__(self, config: Config, like: Tensor, attend: Attend) -> None:
        self._kv = like.new_empty(config.layers, 1, config.context, 2, config.heads, config.head)
        self._attend = attend

    def attend(self, layer: int, start: int | Tensor, qkv: Tensor) -> Tensor:
        assert isinstance(start, int)
        stop = start + qkv.shape[1]
        self._kv[layer, :, start:stop] = qkv[:, :, 1:]
        kv = self._kv[layer, :, :stop]
        q, k, v = (rows.transpose(1, 2) for rows in (qkv[:, :, 0], kv[:, :, 0], kv[:, :, 1]))
        return self._attend(q, k, v).transpose(1, 2)


class Pages:
    """Pages in random order, as a server hands them out, filled by `flashcli.write_kv` and read by `flashcli.decode`.

    Numbers are kept and multiplied in ``kind``. At most 8 tokens are computed at a time.
    """

    def __init__(self, config: Config, like: Tensor, kind: torch.dtype = torch.float32) -> None:
        count = ceil_div(config.context, PAGE)
        self._caches = torch.zeros(
            config.layers, 2, count, PAGE, config.heads, config.head, dtype=kind, device=like.device
        )
        order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
        positions = torch.arange(config.context)
        self._table = order[None].int().to(like.device)
        self._slots = (order[positions // PAGE] * PAGE + positions % PAGE).to(like.device)  # of each position
        self._lengths = (positions + 1).int().to(like.device)  # up to each position

    def attend(self, layer: int, start: int | Tensor, qkv: Tensor) -> Tensor:
        from flashcli.api import decode, write_kv

        keys, values = self._caches[layer]
        rows, M = qkv.to(keys.dtype), qkv.shape[1]
        write_kv(rows[0, :, 1], rows[0, :, 2], keys, values, at(self._slots, start, M), layout="nhd")
        lengths = at(self._lengths, start, M)[-1:]
        return decode(rows[:, :, 0], keys, values, self._table, lengths, layout="nhd").to(qkv.dtype)


def at(rows: Tensor, start: int | Tensor, count: int) -> Tensor:
    """The rows of ``count`` positions: a view, or the one of a position on the device."""
    return rows[start : start + count] if isinstance(start, int) else rows[start]
