"""torch.vmap of our operators: the calls become one, of a larger batch. No answer depends on the others in a batch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from flashcli.torch import backward, operator

Optional: TypeAlias = torch.Tensor | None
Answer: TypeAlias = tuple[tuple[torch.Tensor, ...], tuple[int, ...]]  # of all calls, and where the calls' axes are


def _of_attention(
    info: Any, in_dims: Sequence[int | None], q: Any, k: Any, v: Any, bias: Any = None, *rest: Any
) -> Answer:
    calls = info.batch_size
    folded = [_folded(x, at, calls) for x, at in zip((q, k, v), in_dims, strict=False)]
    if bias is not None:
        bias = _bias_folded(bias, in_dims[3], calls, folded[0])
    return _apart(operator.attention(*folded, bias, *rest), calls)


def _of_gradients(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Answer:
    (do, dlse, q, k, v, bias, o, lse), rest = arguments[:8], arguments[8:]
    calls, at_bias = info.batch_size, in_dims[5]
    do, dlse, q, k, v, _, o, lse = (
        _folded(x, at, calls) for x, at in zip((do, dlse, q, k, v, None, o, lse), in_dims, strict=False)
    )
    given = None if bias is None else _calls_first(bias, at_bias, calls)
    bias = None if bias is None else _bias_folded(bias, at_bias, calls, q)
    (*of_qkv, dbias), dims = _apart(backward.operator(do, dlse, q, k, v, bias, o, lse, *rest), calls)
    if given is not None and dbias.numel():  # summed over the axes along which it was broadcast
        padded = given.reshape(calls, *[1] * (dbias.ndim - given.ndim), *given.shape[1:])
        dbias = dbias.sum_to_size(padded.shape).reshape(given.shape)
    return (*of_qkv, dbias), dims


def _folded(x: Optional, at: int | None, calls: int) -> Optional:
    """[B, ..] of each call as [calls · B, ..]."""
    return None if x is None else _calls_first(x, at, calls).flatten(0, 1)


def _calls_first(x: torch.Tensor, at: int | None, calls: int) -> torch.Tensor:
    """``at`` is where the calls lie, None where they share x."""
    return x.expand(calls, *x.shape) if at is None else x.movedim(at, 0)


def _bias_folded(bias: torch.Tensor, at: int | None, calls: int, q: torch.Tensor) -> torch.Tensor:
    """A bias, which may lack axes on the left or be broadcast along them, for a Q of all calls."""
    bias = _calls_first(bias, at, calls)
    bias = bias.reshape(calls, *[1] * (q.ndim + 1 - bias.ndim), *bias.shape[1:])
    return bias.expand(calls, len(q) // calls, *bias.shape[2:]).flatten(0, 1)


def _apart(found: Sequence[torch.Tensor], calls: int) -> Answer:
    return tuple(x.unflatten(0, (calls, len(x) // calls)) for x in found), (0,) * len(found)


torch.library.register_vmap("flashcli::attention", _of_attention, lib=operator.library)
torch.library.register_vmap("flashcli::attention_backward", _of_gradients, lib=backward.library)
