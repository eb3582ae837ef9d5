"""torch.vmap of flashcli's operators: its calls become one call of a larger batch, whose answers are independent."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch

from flashcli.torch import backward, operator

Optional: TypeAlias = torch.Tensor | None
Answer: TypeAlias = tuple[tuple[torch.Tensor, ...], tuple[int, ...]]  # of all calls, and where the calls' axes are


def _of_attention(
    info: Any, in_dims: Sequence[int | None], q: Any, k: Any, v: Any, bias: Any = None, mask: Any = None, *rest: Any
) -> Answer:
    if _has_tensors(rest):
        return _one_by_one(operator.attention, info.batch_size, in_dims, (q, k, v, bias, mask, *rest))
    calls = info.batch_size
    folded = [_folded(x, at, calls) for x, at in zip((q, k, v), in_dims, strict=False)]
    at = (*in_dims, None, None)[3:5]
    bias, mask = (_bias_folded(x, at_x, calls, q, in_dims[0]) for x, at_x in zip((bias, mask), at, strict=True))
    return _apart(operator.attention(*folded, bias, mask, *rest), calls, _batches(q, in_dims[0]))


def _of_gradients(info: Any, in_dims: Sequence[int | None], *arguments: Any) -> Answer:
    (do, dlse, q, k, v, bias, mask, o, lse), rest = arguments[:9], arguments[9:]
    if _has_tensors(rest):
        return _one_by_one(backward.operator, info.batch_size, in_dims, arguments)
    calls, at_bias = info.batch_size, in_dims[5]
    given = None if bias is None else _calls_first(bias, at_bias, calls)
    bias, mask = (_bias_folded(x, at, calls, q, in_dims[2]) for x, at in ((bias, at_bias), (mask, in_dims[6])))
    B = _batches(q, in_dims[2])
    do, dlse, q, k, v, _, _, o, lse = (
        _folded(x, at, calls) for x, at in zip((do, dlse, q, k, v, None, None, o, lse), in_dims, strict=False)
    )
    (*of_qkv, dbias), dims = _apart(backward.operator(do, dlse, q, k, v, bias, mask, o, lse, *rest), calls, B)
    if given is not None and dbias.ndim > 2:  # summed over the axes along which it was broadcast
        padded = given.reshape(calls, *[1] * (dbias.ndim - given.ndim), *given.shape[1:])
        dbias = dbias.sum_to_size(padded.shape).reshape(given.shape)
    return (*of_qkv, dbias), dims


def _has_tensors(options: Sequence[Any]) -> bool:
    """Whether options hold slopes, or starts of packed sequences, which calls may not share in a larger batch."""
    return any(isinstance(x, torch.Tensor) for x in options)


def _one_by_one(function: Any, calls: int, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> Answer:
    """The answers of calls, one after the other."""
    dims = (*in_dims, *[None] * (len(arguments) - len(in_dims)))
    pairs = list(zip(arguments, dims, strict=True))
    each = [
        function(*(x.movedim(at, 0)[i] if isinstance(x, torch.Tensor) and at is not None else x for x, at in pairs))
        for i in range(calls)
    ]
    found = tuple(torch.stack(answers) for answers in zip(*each, strict=True))
    return found, (0,) * len(found)


def _folded(x: Optional, at: int | None, calls: int) -> Optional:
    """A tensor [B, ..] of each call as one tensor [calls · B, ..]."""
    return None if x is None else _calls_first(x, at, calls).flatten(0, 1)


def _calls_first(x: torch.Tensor, at: int | None, calls: int) -> torch.Tensor:
    """A tensor with the axis of calls first: ``at`` is where it is now, None where all calls share the tensor."""
    return x.expand(calls, *x.shape) if at is None else x.movedim(at, 0)


def _batches(q: torch.Tensor, at: int | None) -> int:
    """B of a call's Q, also if there are no calls."""
    return _calls_first(q, at, 1).shape[1]


def _bias_folded(bias: Optional, at: int | None, calls: int, q: torch.Tensor, at_q: int | None) -> Optional:
    """A bias or mask, which may lack axes on the left or be broadcast along them, for a Q of all calls."""
    if bias is None:
        return None
    bias, of_q = _calls_first(bias, at, calls), _calls_first(q, at_q, calls)
    bias = bias.reshape(calls, *[1] * (of_q.ndim - bias.ndim), *bias.shape[1:])
    return bias.expand(*of_q.shape[:2], *bias.shape[2:]).flatten(0, 1)


def _apart(found: Sequence[torch.Tensor], calls: int, B: int) -> Answer:
    """Answers [calls · B, ..] as [calls, B, ..]; an answer that is not wanted, [0], becomes [calls, 0]."""
    return tuple(x.unflatten(0, (calls, B if x.ndim > 1 else 0)) for x in found), (0,) * len(found)


torch.library.register_vmap("flashcli::attention", _of_attention, lib=operator.library)
torch.library.register_vmap("flashcli::attention_backward", _of_gradients, lib=backward.library)
