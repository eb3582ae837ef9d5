"""`flashcli.attention` for PyTorch's tensors: it takes the shortest way to kernels, gradients or the operator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flashcli.asked.attention import NO_WINDOW
from flashcli.run.request import BACKENDS
from flashcli.torch import in_place, on_cpu, operator, transforms
from flashcli.torch.sight import Sight


def attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    q_start: int = 0,
    window: Sequence[int] = NO_WINDOW,
    alibi_slopes: torch.Tensor | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    kernel: str | None = None,
    precision: str = "fp32",
    batch_invariant: bool = True,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(scale · Q Kᵀ + bias) V of tensors where they lie, accurate to fp32; with gradients, if they are wanted.

    Parameters, the answer and errors are those of `flashcli.attention`. ``out`` must not be given where gradients are
    wanted. The memory for gradients grows with M + N, and on a GPU that for gradients of gradients of float32, too.
    """
    given = in_place.Options(
        causal, scale, q_start, False, kernel, precision, batch_invariant, window, alibi_slopes, cu_seqlens_q,
        cu_seqlens_k, out_dtype,
    )  # fmt: skip
    if torch.compiler.is_compiling() or not in_place.is_quiet(q, k, v, bias, mask):
        return _by_operator(q, k, v, bias, mask, out, backend, return_lse, given)
    wanted = in_place.wants_gradients(q, k, v, bias)
    if out is not None:
        in_place.refuse_mixed(given.sight, q=q, k=k, v=v, bias=bias, mask=mask, out=out)
        _refuse_gradients(wanted, out)
        if out.is_neg():
            raise ValueError("out must not be a lazily negated view (out.is_neg()): call out.resolve_neg() first")
    if wanted:
        if not q.is_cuda or backend not in ("auto", "cuda"):
            return _by_operator(q, k, v, bias, mask, out, backend, return_lse, given)
        both = operator.in_place_with_gradients(q, k, v, bias, mask, given)
        return both if return_lse else both[0]
    if q.is_cuda:
        o, lse = in_place.compute(q, k, v, bias, mask, given, return_lse, out, backend)
        answer = o if lse is None else (o, lse)
    else:
        in_place.refuse_mixed(given.sight, q=q, k=k, v=v, bias=bias, mask=mask, out=out)
        answer = on_cpu.compute(
            q, k, v, bias, mask, out, given.sight, causal=causal, scale=scale, backend=backend, q_start=q_start,
            return_lse=return_lse, kernel=kernel, precision=precision, batch_invariant=batch_invariant,
            out_dtype=out_dtype,
        )  # fmt: skip
    if out is not None and not out.is_inference():  # whoever has kept it for gradients is to know
        torch.autograd.graph.increment_version(out)
    return answer


def _refuse_gradients(wanted: bool, out: torch.Tensor) -> None:
    """Raise ValueError if ``out`` would need gradients."""
    if wanted or (torch.is_grad_enabled() and out.requires_grad):
        raise ValueError("out must not be given where gradients are wanted: leave it out, or use torch.no_grad()")


def _by_operator(
    q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, backend: str, return_lse: bool, options: in_place.Options
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    # PyTorch 2.9's compiler knows no property of a tuple, such as options.sight.
    in_place.refuse_mixed(Sight(*options[7:11]), q=q, k=k, v=v, bias=bias, mask=mask, out=out)
    wanted = BACKENDS if q.is_meta else ("auto", "cpu" if q.is_cpu else "cuda")
    if backend not in wanted:
        names = " or ".join(map(repr, wanted))
        raise ValueError(f"backend must be {names} for tensors on {q.device}, not {backend!r}")
    causal, scale, q_start, window = transforms.checked(*options[:3], options.window)
    options = options._replace(
        causal=causal, scale=scale, q_start=q_start, window=window, out_dtype=in_place.answer_type(q, options.out_dtype)
    )
    if out is not None:
        _refuse_gradients(in_place.wants_gradients(q, k, v, bias), out)
    # Here, too: in transformations of torch.func, autocast is as it was where an operator is called.
    with transforms.without_autocast(q.device.type):
        o, lse = operator.attention(q, k, v, bias, mask, *options)
    if out is not None:
        if out.shape != o.shape or out.dtype != o.dtype:
            raise ValueError(f"out must be {o.dtype} and have the shape of q, {list(q.shape)}, not {list(out.shape)}")
        o = out.copy_(o)
    return (o, lse) if return_lse else o
