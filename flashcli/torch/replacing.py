"""flashcli's attention in the place of PyTorch's fp32 attention, for programs that call PyTorch's.

`torch.nn.functional.scaled_dot_product_attention` sends fp32 tensors on a GPU to the operator
``aten::_scaled_dot_product_efficient_attention``, and their gradients to one of that name with ``_backward``. Their
implementations for GPUs are what is replaced. Both give the same LSE, so that either may be followed by the other's
gradients. Halves go there, too, where PyTorch may use neither its FlashAttention nor cuDNN's.
"""

from __future__ import annotations

import threading
import warnings
from types import TracebackType
from typing import Any

import torch

from flashcli.asked.shape import round_up
from flashcli.torch import backward, in_place
from flashcli.torch.sdpa import added_in_float32, supported

NAME = "_scaled_dot_product_efficient_attention"
BIAS_COLUMNS = 16
LSE_ROWS = 32  # the LSE's rows are rounded up to a multiple of it
WARNING = "(?s).*Overriding a previously registered kernel"  # of PyTorch's, which is what is meant here

_lock = threading.Lock()
_wanted = _of_halves = 0  # by how many, and by how many for halves, too
_others: tuple[bool, ...] = ()  # whether PyTorch might use its other fused kernels, before
_library: Any = None


class Replacement:
    """A replacement of PyTorch's attention by flashcli's, until `remove` or the end of a ``with`` block."""

    def __init__(self, halves: bool) -> None:
        self._removed, self._halves = False, bool(halves)
        _add(self._halves)

    def remove(self) -> None:
        """Give PyTorch its own attention back, once all who have replaced it have called this."""
        if not self._removed:
            self._removed = True
            _take_back(self._halves)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.remove()


def replacing_sdpa(halves: bool = False) -> Replacement:
    """Replace PyTorch's fused fp32 attention on GPUs by flashcli's kernels, in the whole process.

    With ``halves``, float16 and bfloat16 tensors are computed right to fp32, too, which takes longer than by cuDNN.
    PyTorch's FlashAttention and cuDNN's are switched off meanwhile (``torch.backends.cuda.enable_flash_sdp``).

    The replacement ends with the ``with`` block, or with ``remove()`` of the object returned. PyTorch still computes
    other types, dropout, heads of more than 256 numbers, gradients of gradients, and calls that it does not send to its
    memory-efficient attention (grouped heads, for one). Modules compiled meanwhile are right before and after. A build
    of PyTorch without CUDA has nothing to replace, and stays as it is.
    """
    return Replacement(halves)


def _use_others(*allowed: bool) -> None:
    """Let PyTorch use its FlashAttention, and cuDNN's, or not."""
    cuda = torch.backends.cuda
    for allow, value in zip((cuda.enable_flash_sdp, cuda.enable_cudnn_sdp), allowed, strict=True):
        allow(value)


def _add(halves: bool) -> None:
    global _wanted, _of_halves, _others, _library
    with _lock:
        if halves:
            if _of_halves == 0:
                _others = torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.cudnn_sdp_enabled()
                _use_others(False, False)
            _of_halves += 1
        if _wanted == 0 and torch.backends.cuda.is_built():
            library = torch.library.Library("aten", "IMPL")
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message=WARNING)
                for name, ours_or in {NAME: _forward_or, f"{NAME}_backward": _backward_or}.items():
                    original = torch.library.get_kernel(f"aten::{name}", "CUDA")
                    library.impl(name, ours_or(original), "CUDA", with_keyset=True)
            _library = library
        _wanted += 1


def _take_back(halves: bool) -> None:
    global _wanted, _of_halves, _library
    with _lock:
        _of_halves -= halves
        if halves and _of_halves == 0:
            _use_others(*_others)
        _wanted -= 1
        if _wanted == 0 and _library is not None:
            _library._destroy()
            _library = None


def _is_ours(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_bias: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
) -> bool:
    """Whether flashcli computes a call, or its gradients."""
    contiguous = all(x.stride(-1) == 1 for x in (query, key, value))
    return contiguous and supported(query, key, value, attn_bias, dropout_p, is_causal, halves=_of_halves > 0)


def _forward_or(original: Any) -> Any:
    """flashcli's implementation of the operator, which calls the original for arguments it does not support."""

    def forward(
        keys: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        compute_log_sumexp: bool,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        if not _is_ours(query, key, value, attn_bias, dropout_p, is_causal):
            return original.call_boxed(
                keys, query, key, value, attn_bias, compute_log_sumexp, dropout_p, is_causal, scale=scale
            )
        given = in_place.Options(is_causal, scale, rows_first=True)
        bias = added_in_float32(attn_bias)
        out, lse = in_place.compute(query, key, value, bias, None, given, return_lse=compute_log_sumexp)
        seed, offset = (torch.empty((), dtype=torch.int64, device=query.device) for _ in range(2))
        none = query.new_empty((*query.shape[:2], 0), dtype=torch.float32)
        return out, none if lse is None else _as_theirs(lse), seed, offset

    return forward


def _backward_or(original: Any) -> Any:
    """flashcli's implementation of the gradients' operator; it calls the original for arguments it does not support."""

    def gradients(
        keys: Any,
        grad_out: torch.Tensor | None,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_bias: torch.Tensor | None,
        out: torch.Tensor,
        logsumexp: torch.Tensor,
        philox_seed: torch.Tensor,
        philox_offset: torch.Tensor,
        dropout_p: float,
        grad_input_mask: list[bool],
        is_causal: bool = False,
        *,
        scale: float | None = None,
    ) -> tuple[torch.Tensor | None, ...]:
        has_lse = logsumexp.shape[-1] >= query.shape[-2]
        if grad_out is None or not has_lse or not _is_ours(query, key, value, attn_bias, dropout_p, is_causal):
            return original.call_boxed(
                keys, grad_out, query, key, value, attn_bias, out, logsumexp, philox_seed, philox_offset, dropout_p,
                grad_input_mask, is_causal, scale=scale,
            )  # fmt: skip
        of_bias = grad_input_mask[3] and attn_bias is not None and attn_bias.dtype != torch.bool
        dq, dk, dv, dbias = backward.compute(
            grad_out, None, query, key, value, added_in_float32(attn_bias), None, out,
            logsumexp[..., : query.shape[-2]], is_causal, scale, 0, of_bias, True,
        )  # fmt: skip
        return dq, dk, dv, _bias_as_theirs(dbias.to(query.dtype)) if of_bias else None

    return gradients


def _bias_as_theirs(dbias: torch.Tensor) -> torch.Tensor:
    """A bias's gradient with the strides of PyTorch's, whose rows start on multiples of `BIAS_COLUMNS`."""
    *rows, N = dbias.shape
    if N % BIAS_COLUMNS == 0:
        return dbias
    return dbias.new_empty((*rows, round_up(N, BIAS_COLUMNS)))[..., :N].copy_(dbias)


def _as_theirs(lse: torch.Tensor) -> torch.Tensor:
    """The LSE [B, H, M] as PyTorch's gradients want it: M padded to `LSE_ROWS`; inf for padding and empty rows."""
    B, H, M = lse.shape
    theirs = lse.new_full((B, H, round_up(M, LSE_ROWS)), torch.inf)
    theirs[..., :M] = lse.masked_fill(lse == -torch.inf, torch.inf)
    return theirs
