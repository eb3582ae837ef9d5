"""The gradients of attention on PyTorch's tensors: on a GPU where they lie, on the CPU as NumPy's arrays.

`flashcli.attention_backward` and the gradients of `torch.ops.flashcli.attention` call the operator
`torch.ops.flashcli.attention_backward`. It has gradients itself, by PyTorch's own operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

import torch

from flashcli.arrays.numpys import attention_backward as of_numpy
from flashcli.asked.attention import ALIGNMENT, NO_WINDOW, Backward, backward, check_backend_on_gpu, refuse_half
from flashcli.asked.how import How
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import Prepared, prepare
from flashcli.kernels.backward import BACKWARD, check_name
from flashcli.torch import in_place, on_cpu, private, tangents, transforms
from flashcli.torch.gradients import Scores, gradients
from flashcli.torch.sight import HALVES, Sight

SCHEMA = (
    "attention_backward(Tensor do, Tensor? dlse, Tensor q, Tensor k, Tensor v, Tensor? bias, Tensor? mask, Tensor o, "
    "Tensor lse, bool causal=False, float? scale=None, SymInt q_start=0, bool return_dbias=False, "
    "bool rows_first=False, str? kernel_name=None, int[2] window=[-1, -1], Tensor? alibi_slopes=None, "
    "Tensor? cu_seqlens_q=None, Tensor? cu_seqlens_k=None, ScalarType? out_dtype=None) "
    "-> (Tensor, Tensor, Tensor, Tensor)"
)
BIAS = 5  # its place among the operator's tensors
Optional: TypeAlias = torch.Tensor | None
Four: TypeAlias = tuple[
    torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor
]  # dQ, dK, dV, and dbias, which may be empty


class Options(NamedTuple):
    """Options of the operator, in the order of its schema; PyTorch leaves out trailing ones at their defaults."""

    causal: bool = False
    scale: float | None = None
    q_start: int = 0
    return_dbias: bool = False
    rows_first: bool = False
    kernel_name: str | None = None
    window: Sequence[int] = NO_WINDOW
    alibi_slopes: Optional = None
    cu_seqlens_q: Optional = None
    cu_seqlens_k: Optional = None
    out_dtype: torch.dtype | None = None

    @property
    def sight(self) -> Sight:
        return Sight(*self[6:10])


class Ready(NamedTuple):
    """Results of planning a call, which depend on shapes and strides alone; ``prepared`` is None for an empty call."""

    prepared: Prepared | None
    dbias_shape: tuple[int, ...] | None


_ready: dict[tuple, Ready] = {}


def attention_backward(
    do: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: Optional = None,
    mask: Optional = None,
    q_start: int = 0,
    window: Sequence[int] = NO_WINDOW,
    alibi_slopes: Optional = None,
    cu_seqlens_q: Optional = None,
    cu_seqlens_k: Optional = None,
    o: Optional = None,
    lse: Optional = None,
    dlse: Optional = None,
    return_dbias: bool = False,
    kernel: str | None = None,
    out_dtype: torch.dtype | None = None,
) -> tuple[torch.Tensor, ...]:
    """`flashcli.attention_backward` of tensors, with its parameters, its answer and its errors."""
    sight = Sight(window, alibi_slopes, cu_seqlens_q, cu_seqlens_k)
    in_place.refuse_mixed(sight, q=q, do=do, k=k, v=v, o=o, lse=lse, dlse=dlse, bias=bias, mask=mask)
    if q.is_cuda:
        check_backend_on_gpu(backend)
        check_name(kernel)
    elif backend not in ("auto", "cpu") or kernel is not None:
        raise ValueError(f"backend must be 'auto' or 'cpu', and kernel None, for tensors on {q.device}")
    refuse_half(o, lse)
    causal, scale, q_start, window = transforms.checked(causal, scale, q_start, window)
    sight = sight._replace(window=window)
    if o is None or lse is None:
        named = sight._asdict() | {"out_dtype": None if do.dtype == q.dtype else torch.float32}
        o, lse = torch.ops.flashcli.attention(q, k, v, bias, mask, causal, scale, q_start, **named)
    options = causal, scale, q_start, bool(return_dbias), False, kernel, *sight, in_place.answer_type(q, out_dtype)
    tensors = do, dlse, q, k, v, bias, mask, o, lse
    compiling = torch.compiler.is_compiling()
    found = (operator if compiling or not is_for_gpu(*tensors) else compute)(*tensors, *options)
    return found if return_dbias else found[:3]


def _asked(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, o: Any, lse: Any, *options: Any
) -> Backward:
    causal, scale, q_start, return_dbias, rows_first, sight, out_dtype = options
    return backward(
        **sight.operands(do=do, q=q, k=k, v=v, o=o, lse=lse, dlse=dlse, bias=bias, mask=mask), causal=causal,
        scale=scale, q_start=q_start, return_dbias=return_dbias, rows_first=rows_first, out_dtype=out_dtype,
    )  # fmt: skip


def empty_like(x: torch.Tensor, rows_first: bool, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A new matrix of this shape, without numbers; with ``rows_first``, [B, H, rows, d] lies as [B, rows, H, d]."""
    if not rows_first or x.ndim != 4:
        return x.new_empty(x.shape, dtype=dtype)
    B, H, rows, d = x.shape
    return x.new_empty((B, rows, H, d), dtype=dtype).transpose(1, 2)


def is_for_gpu(do: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, o: Any, lse: Any) -> bool:
    """Whether gradients can be computed past PyTorch's dispatch: on a GPU, and with no gradients of gradients."""
    if not q.is_cuda or not in_place.is_quiet(q, k, v, bias, mask) or not in_place.is_quiet(do, o, lse, dlse):
        return False
    return not in_place.wants_gradients(do, dlse, q, k, v, bias, mask, o, lse)


def on_gpu(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, o: Any, lse: Any, *options: Any, **named: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, Optional]:
    """Queue the gradients of tensors on a GPU on PyTorch's current stream; return dQ, dK, dV, and dbias or None."""
    given = Options(*options, **named)
    rows_first, kernel_name, sight = given.rows_first, given.kernel_name, given.sight
    do, o = in_place.rows_contiguous(do), in_place.rows_contiguous(o)
    dq, dk, dv = (empty_like(x, rows_first, given.out_dtype) for x in (q, k, v))
    at_do, at_q, at_k, at_v, at_o = do.data_ptr(), q.data_ptr(), k.data_ptr(), v.data_ptr(), o.data_ptr()
    at_dq, at_dk, at_dv = dq.data_ptr(), dk.data_ptr(), dv.data_ptr()
    lowest = (at_do | at_q | at_k | at_v | at_o | at_dq | at_dk | at_dv) % ALIGNMENT
    key = (
        do.shape, do.stride(), do.dtype, q.shape, q.stride(), q.dtype, k.shape, k.stride(), k.dtype, v.shape,
        v.stride(), v.dtype, o.shape, o.stride(), o.dtype, lse.shape, lse.stride(), lse.dtype,
        None if dlse is None else (dlse.shape, dlse.stride(), dlse.dtype),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, in_place.lowest_bits(bias)),
        None if mask is None else (mask.shape, mask.stride(), mask.dtype, in_place.lowest_bits(mask)),
        q.device, lowest, given[:6], sight.key(), given.out_dtype,
    )  # fmt: skip
    if (ready := _ready.get(key)) is None:
        asked = _asked(do, dlse, q, k, v, bias, mask, o, lse, *given[:5], sight, given.out_dtype)
        prepared = None
        if not asked.of.empty:
            place = place_of_device(q.get_device())
            prepared = prepare(
                place, BACKWARD, asked.at(lowest, *in_place.score_addresses(bias, mask)), How(kernel_name)
            )
        ready = Ready(prepared, asked.dbias_shape)
        in_place.remember(_ready, key, ready)
    prepared, dbias_shape = ready
    dbias = None if dbias_shape is None else lse.new_empty(dbias_shape)
    if prepared is None:
        return dq.zero_(), dk.zero_(), dv.zero_(), None if dbias is None else dbias.zero_()
    at_bias, at_mask = in_place.score_addresses(bias, mask)
    stream = private.current_stream(prepared.place.device)
    memory = in_place.scratch(q, prepared.workspace, stream)
    prepared.launch(
        stream, at_do, at_q, at_k, at_v, at_o, lse.data_ptr(), 0 if dlse is None else dlse.data_ptr(),
        at_bias, at_dq, at_dk, at_dv, 0 if dbias is None else dbias.data_ptr(),
        memory.data_ptr(), 0, at_mask, *sight.addresses(),
    )  # fmt: skip
    return dq, dk, dv, dbias


def compute(do: torch.Tensor, dlse: Optional, q: torch.Tensor, *others: Any, **named: Any) -> Four:
    """The operator's answer for tensors on a GPU: dQ, dK, dV, and dbias, which is empty where it is not wanted."""
    dq, dk, dv, dbias = on_gpu(do, dlse, q, *others, **named)
    return dq, dk, dv, _no_dbias(q) if dbias is None else dbias


def _no_dbias(q: torch.Tensor) -> torch.Tensor:
    return q.new_empty(0, dtype=torch.float32)


def _on_cpu(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, o: Any, lse: Any, *options: Any, **named: Any
) -> Four:
    given = Options(*options, **named)
    (causal, scale, q_start, return_dbias, rows_first), sight = given[:5], given.sight
    tensors = {"do": do, "q": q, "k": k, "v": v, "o": o, "lse": lse, "dlse": dlse, "bias": bias, "mask": mask}
    tensors |= sight.by_name()
    if q.dtype in HALVES:
        do, q, k, v, o = map(in_place.rows_contiguous, (do, q, k, v, o))
        _asked(do, dlse, q, k, v, bias, mask, o, lse, *given[:5], sight, given.out_dtype)
        tensors |= {"do": do.float(), "q": q.float(), "k": k.float(), "v": v.float(), "o": o.float()}
    numbers: dict[str, Any] = {name: on_cpu.numbers(name, x) for name, x in tensors.items() if x is not None}
    named = {"causal": causal, "scale": scale, "q_start": q_start, "window": sight.window}
    found = of_numpy(**numbers, **named, return_dbias=return_dbias)
    dq, dk, dv = (
        empty_like(x, rows_first, given.out_dtype).copy_(torch.from_numpy(y))
        for x, y in zip((q, k, v), found[:3], strict=True)
    )
    return dq, dk, dv, torch.from_numpy(found[3]) if return_dbias else _no_dbias(q)


def _without_numbers(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, o: Any, lse: Any, *options: Any, **named: Any
) -> Four:
    given = Options(*options, **named)
    (causal, scale, q_start, return_dbias, rows_first), sight = given[:5], given.sight
    tensors = [*(x for x in (do, dlse, q, k, v, bias, mask, o, lse) if x is not None), *sight.tensors]
    if all(isinstance(n, int) for x in tensors for n in (*x.shape, *x.stride(), q_start)):
        do, o = map(in_place.rows_contiguous, (do, o))
        matrices = map(in_place.rows_contiguous, (q, k, v)) if q.is_cpu else (q, k, v)
        of_call = do, dlse, *matrices, bias, mask, o, lse
        _asked(*of_call, causal, scale, q_start, return_dbias, rows_first, sight, given.out_dtype)
    shape = bias.shape if bias is not None and return_dbias else (0,)
    dq, dk, dv = (empty_like(x, rows_first, given.out_dtype) for x in (q, k, v))
    return dq, dk, dv, q.new_empty(shape, dtype=torch.float32)


class _Gradients(torch.autograd.Function):
    """Gradients that have gradients themselves: those of the formulas in `flashcli.torch.gradients`."""

    @staticmethod
    def forward(ctx: Any, options: Options, *tensors: Any) -> Four:
        found = _below_autograd(*tensors, *options)
        ctx.save_for_backward(*tensors)
        ctx.options = options
        ctx.set_materialize_grads(False)
        return found

    @staticmethod
    def backward(ctx: Any, *of_found: Any) -> tuple:
        if all(x is None for x in of_found):
            return (None,) * len(ctx.needs_input_grad)
        saved, (causal, scale, q_start, *_), sight = ctx.saved_tensors, ctx.options, ctx.options.sight
        at = [i for i, wanted in enumerate(ctx.needs_input_grad[1:]) if wanted]
        fused = not torch.is_grad_enabled() and BIAS not in at and of_found[3] is None
        if fused and tangents.fit([*saved, *of_found], sight):
            do, dlse, q, k, v, bias, mask, _, lse = saved
            options = causal, scale, q_start, sight
            found = tangents.compute(of_found[:3], q, k, v, lse, do, dlse, bias, mask, *options)
            return None, *(found[i] if i in at and i < len(found) else None for i in range(len(saved)))

        def wanted_of(*changed: torch.Tensor) -> tuple[torch.Tensor, ...]:
            by_index = dict(enumerate(saved)) | dict(zip(at, changed, strict=True))
            do, dlse, q, k, v, bias, mask, o, lse = by_index.values()
            found = gradients(do, dlse, q, k, v, o, lse, Scores(bias, mask, causal, scale, q_start, sight))
            return tuple(x for x, y in zip(found, of_found, strict=True) if x is not None and y is not None)

        with transforms.without_autocast(saved[0].device.type):
            # Whatever O was made of is not gone through here. (torch.func keeps a graph even of saved tensors whose
            # own transformation is over.)
            found, pull, *_ = torch.func.vjp(wanted_of, *(saved[i] for i in at))
            slopes = pull(tuple(y for y in of_found if y is not None)[: len(found)])
        by_index = dict(zip(at, slopes, strict=True))
        return None, *(by_index.get(i) for i in range(len(saved)))


def _with_gradients(
    do: Any, dlse: Any, q: Any, k: Any, v: Any, bias: Any, mask: Any, o: Any, lse: Any, *options: Any, **named: Any
) -> Four:
    tensors, given = (do, dlse, q, k, v, bias, mask, o, lse), Options(*options, **named)
    # Gradients that are to be transformed themselves.
    if transforms.is_left_to_pytorch() or transforms.levels() > 1 or transforms.has_tangent(*tensors):
        with transforms.without_autocast(q.device.type):
            by = Scores(bias, mask, *given[:3], given.sight)
            dq, dk, dv, dbias = gradients(do, dlse, q, k, v, o, lse, by)
        dq, dk, dv = (x.to(given.out_dtype or x.dtype) for x in (dq, dk, dv))
        return dq, dk, dv, _no_dbias(q) if dbias is None or not given.return_dbias else dbias
    if in_place.wants_gradients(*tensors):
        return transforms.apply(_Gradients, given, *tensors)
    return _below_autograd(*tensors, *given)


def _below_autograd(*arguments: Any) -> Four:
    return transforms.below_autograd(operator, *arguments)


library = torch.library.Library("flashcli", "FRAGMENT")
library.define(SCHEMA)
operator = torch.ops.flashcli.attention_backward.default
library.impl("attention_backward", compute, "CUDA")
library.impl("attention_backward", _on_cpu, "CPU")
library.impl("attention_backward", _with_gradients, "Autograd")
torch.library.register_fake("flashcli::attention_backward", _without_numbers, lib=library)
