"""The operator `torch.ops.flashcli.attention`: on GPUs, on CPUs, on tensors without numbers, and with gradients.

The operator always gives the LSE, which gradients need. Its outputs' strides do not depend on the inputs', so that a
compiler may change those. (The option is ``kernel_name``, as PyTorch's compiler has a parameter ``kernel`` itself.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch.autograd import forward_ad

from flashcli.asked.attention import call
from flashcli.asked.how import How
from flashcli.kernels.plan import check
from flashcli.torch import backward, gradients, in_place, on_cpu, tangents, transforms
from flashcli.torch.in_place import Options

SCHEMA = (
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? mask=None, bool causal=False, "
    "float? scale=None, SymInt q_start=0, bool rows_first=False, str? kernel_name=None, str precision='fp32', "
    "bool batch_invariant=True, int[2] window=[-1, -1], Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None, "
    "Tensor? cu_seqlens_k=None, ScalarType? out_dtype=None) -> (Tensor, Tensor)"
)
Both = tuple[torch.Tensor, torch.Tensor]
Optional: TypeAlias = torch.Tensor | None

library = torch.library.Library("flashcli", "DEF")
library.define(SCHEMA)
attention = torch.ops.flashcli.attention.default


def _on_gpu(q: Any, k: Any, v: Any, bias: Optional = None, mask: Optional = None, *options: Any, **named: Any) -> Both:
    return _at_once(q, k, v, bias, mask, Options(*options, **named))


def _at_once(q: Any, k: Any, v: Any, bias: Optional, mask: Optional, given: Options) -> Any:
    return in_place.compute(q, k, v, bias, mask, given, True)


def _on_cpu(q: Any, k: Any, v: Any, bias: Optional = None, mask: Optional = None, *options: Any, **named: Any) -> Both:
    given = Options(*options, **named)
    out, _ = _empty(q, given)
    backend = "cpu" if given.kernel_name is None else "auto"
    return on_cpu.compute(
        q, k, v, bias, mask, out, given.sight, causal=given.causal, scale=given.scale, backend=backend,
        q_start=given.q_start, return_lse=True, kernel=given.kernel_name, precision=given.precision,
        batch_invariant=given.batch_invariant, out_dtype=given.out_dtype,
    )  # fmt: skip


def _empty(q: torch.Tensor, given: Options) -> Both:
    """New, uninitialised O and LSE for a Q; O [B, H, M, d] lies as [B, M, H, d] with ``rows_first``."""
    shape = q.shape[1::-1] if given.sight.packed and q.ndim == 3 else q.shape[:-1]
    return backward.empty_like(q, given.rows_first, given.out_dtype), q.new_empty(shape, dtype=torch.float32)


def _without_numbers(
    q: Any, k: Any, v: Any, bias: Optional = None, mask: Optional = None, *options: Any, **named: Any
) -> Both:
    given = Options(*options, **named)
    causal, scale, q_start, _, kernel, precision, batch_invariant = given[:7]
    if not q.is_cpu:
        check(How(kernel, precision, batch_invariant))
    tensors = [*(x for x in (q, k, v, bias, mask) if x is not None), *given.sight.tensors]
    if all(isinstance(n, int) for x in tensors for n in (*x.shape, *x.stride(), q_start)):
        matrices = map(in_place.rows_contiguous, (q, k, v)) if q.is_cpu else (q, k, v)
        of = given.sight.operands(**dict(zip("qkv", matrices, strict=True)), bias=bias, mask=mask)
        call(**of, causal=causal, scale=scale, q_start=q_start, out_dtype=given.out_dtype)
    return _empty(q, given)


class _Attention(torch.autograd.Function):
    """Attention with gradients; the function in ``how`` computes O and the LSE, with the options there.

    ``how`` holds all arguments that are no tensors in one, as PyTorch spends time on each argument.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, how: tuple[Callable[..., Both], Options]
    ) -> Both:
        compute, ctx.options = how
        out, lse = compute(q, k, v, bias, mask, ctx.options)
        ctx.save_for_backward(q, k, v, bias, mask, out, lse)
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Any, d_lse: Any) -> tuple:
        if d_out is None and d_lse is None:
            return None, None, None, None, None, None
        q, k, v, bias, mask, out, lse = ctx.saved_tensors
        (causal, scale, q_start, rows_first), sight = ctx.options[:4], ctx.options.sight
        d_out = torch.zeros_like(out) if d_out is None else d_out
        of_bias = bias is not None and bias.dtype != torch.bool and ctx.needs_input_grad[3]
        given = d_out, d_lse, q, k, v, bias, mask, out, lse, causal, scale, q_start, of_bias, rows_first, None, *sight
        if backward.is_for_gpu(*given[:9]):
            return *backward.on_gpu(*given), None, None
        with transforms.without_autocast(q.device.type):  # gradients are as exact as what they are of
            dq, dk, dv, dbias = backward.operator(*given)
        return dq, dk, dv, dbias if of_bias else None, None, None


# Past torch.autograd.Function, which looks at every call whether a transformation of functions is going on.
_apply_at_once = super(torch.autograd.Function, _Attention).apply


def in_place_with_gradients(q: Any, k: Any, v: Any, bias: Any, mask: Any, given: Options) -> Both:
    """O and the LSE, with gradients, of tensors on a GPU, past PyTorch's dispatch, which takes time.

    No transformation of torch.func may be going on.
    """
    return _apply_at_once(q, k, v, bias, mask, (_at_once, given))


def _below_autograd(q: Any, k: Any, v: Any, bias: Optional, mask: Optional, given: Options) -> Both:
    return transforms.below_autograd(attention, q, k, v, bias, mask, *given)


def _may_be_fused(q: Any, k: Any, v: Any, bias: Optional, given: Options) -> bool:
    """Whether options allow that kernels compute tangents: those of Q, K and V alone, at fp32, without gradients."""
    of_options = given.precision == "fp32" and given.kernel_name is None and not given.rows_first
    return of_options and not transforms.has_tangent(bias) and not in_place.wants_gradients(q, k, v, bias)


def _with_gradients(
    q: Any, k: Any, v: Any, bias: Optional = None, mask: Optional = None, *options: Any, **named: Any
) -> Both:
    given = Options(*options, **named)
    if transforms.is_left_to_pytorch() or transforms.has_tangent(q, k, v, bias):
        _without_numbers(q, k, v, bias, mask, *given)  # which refuses what cannot be computed
        if _may_be_fused(q, k, v, bias, given) and tangents.fit((q, k, v, bias, mask), given.sight, True):
            (q, tq), (k, tk), (v, tv) = map(forward_ad.unpack_dual, (q, k, v))
            out, lse = _below_autograd(q, k, v, bias, mask, given)
            options = *given[:3], *given.sight[:2]
            of_out, of_lse = tangents.forward(tq, tk, tv, q, k, v, lse, bias, mask, *options)
            return forward_ad.make_dual(out, of_out), forward_ad.make_dual(lse, of_lse)
        with transforms.without_autocast(q.device.type):
            out, lse = gradients.attention(q, k, v, gradients.Scores(bias, mask, *given[:3], given.sight))
            out = out.to(given.out_dtype or q.dtype)
        return (out.transpose(1, 2).contiguous().transpose(1, 2) if given.rows_first and q.ndim == 4 else out), lse
    if in_place.wants_gradients(q, k, v, bias):
        return transforms.apply(_Attention, q, k, v, bias, mask, (_below_autograd, given))
    return _below_autograd(q, k, v, bias, mask, given)


library.impl("attention", _on_gpu, "CUDA")
library.impl("attention", _on_cpu, "CPU")
library.impl("attention", _with_gradients, "Autograd")
torch.library.register_fake("flashcli::attention", _without_numbers, lib=library)
