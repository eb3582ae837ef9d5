"""The keys that queries see, beside masks: windows, ALiBi's slopes and packed sequences, of PyTorch's tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashcli.asked.attention import NO_WINDOW, Operand, type_name

HALVES = (torch.float16, torch.bfloat16)  # the second of which NumPy alone has not


class Sight(NamedTuple):
    """Arguments of `flashcli.attention` of these names: the last ones of operators' schemas, in this order."""

    window: Sequence[int] = NO_WINDOW
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None

    @property
    def tensors(self) -> list[torch.Tensor]:
        return [x for x in self[1:] if isinstance(x, torch.Tensor)]

    def by_name(self) -> dict[str, Any]:
        """The tensors by the names of their arguments, None where one is not given."""
        return dict(zip(self._fields[1:], self[1:], strict=True))

    @property
    def packed(self) -> bool:
        return self.cu_seqlens_q is not None

    def key(self) -> tuple:
        """A hashable key of all that decides the plan of a call."""
        if self.alibi_slopes is None and self.cu_seqlens_q is None and self.cu_seqlens_k is None:
            return tuple(self.window)
        return tuple(self.window), *(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in self[1:])

    def operands(self, **others: Any) -> dict[str, Any]:
        """The arguments of `flashcli.asked.attention` of these names, and ``others``, with outlines for tensors."""
        outlines = {name: None if x is None else operand(x) for name, x in (others | self.by_name()).items()}
        return {**outlines, "window": self.window}

    def addresses(self) -> tuple[int, int, int]:
        """The addresses of slopes and starts, 0 where there are none; keys start where queries do, if nobody says."""
        if self.alibi_slopes is None and self.cu_seqlens_q is None:  # as in most calls, and looking takes time
            return 0, 0, 0
        slopes, q_starts, k_starts = (0 if x is None else x.data_ptr() for x in self[1:])
        return slopes, q_starts, k_starts or q_starts

    def change(self, scores: torch.Tensor, causal: bool, q_start: int, group: int) -> torch.Tensor:
        """Scores [.., M, N] with ALiBi's biases, and -inf where a query sees no key; ``group`` heads share an axis."""
        left, right = self.window
        if not causal and left == right == -1 and not self.tensors:
            return scores
        i, j = (torch.arange(n, device=scores.device) for n in scores.shape[-2:])
        slopes, hidden = self.alibi_slopes, None
        if self.cu_seqlens_q is None:
            i = i + q_start
        else:
            starts = [self.cu_seqlens_q, self.cu_seqlens_q if self.cu_seqlens_k is None else self.cu_seqlens_k]
            of_i, of_j = (torch.searchsorted(x, y, right=True) - 1 for x, y in zip(starts, (i, j), strict=True))
            i, j = i - starts[0][1:][of_i], j - starts[1][1:][of_j]  # both from the sequence's end
            hidden = of_i[:, None] != of_j
            if slopes is not None and slopes.ndim == 2:
                slopes = slopes[of_i].T[None]
        far = i[:, None] - j  # how far a key is behind a query
        for limited, beyond in ((causal or right >= 0, far < -(0 if causal else right)), (left >= 0, far > left)):
            if limited:
                hidden = beyond if hidden is None else hidden | beyond
        if slopes is not None:
            scores = scores - _by_heads(slopes, scores.ndim, group) * far.abs()
        return scores if hidden is None else scores.masked_fill(hidden, -torch.inf)


def _by_heads(slopes: torch.Tensor, axes: int, group: int) -> torch.Tensor:
    """Slopes [H], [B, H] or [1, H, M] as factors of scores, [B, M, N], [B, H, M, N] or [B, Hkv, group, M, N]."""
    if slopes.ndim == 1:
        slopes = slopes[None]
    if axes == 3:
        return slopes[..., None]
    of_rows = slopes[..., None, None] if slopes.ndim == 2 else slopes[..., None]
    return of_rows if group == 1 else of_rows.unflatten(1, (-1, group))


def operand(tensor: torch.Tensor) -> Operand:
    """The outline of a tensor: shape, strides in elements, and type."""
    return Operand(tuple(tensor.shape), tensor.stride(), type_name(tensor.dtype))
