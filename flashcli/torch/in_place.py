"""Attention of PyTorch's tensors on a GPU, read and written where they lie, without gradients.

The time of a call before the kernels start counts where shapes are small. So whatever follows from shapes, strides and
options is found in one look into a dictionary; left are the addresses, an allocation, and a launch for each step.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from flashcli.asked.attention import (
    ALIGNMENT,
    NO_WINDOW,
    call,
    check_backend_on_gpu,
    contiguous,
    contiguous_rows_first,
    result_type,
    type_name,
)
from flashcli.asked.how import How
from flashcli.gpu.overlap import refuse_overlap
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import SHAPES, Prepared, prepare
from flashcli.kernels.plan import ATTENTION, check
from flashcli.torch import private
from flashcli.torch.sight import Sight, operand

KEPT = 2**20  # bytes of scratch that a thread keeps for PyTorch's default stream, instead of allocating it each time
DEFAULT_STREAM = 0
ORDINARY = (torch.Tensor, torch.nn.Parameter)

Answer = tuple[torch.Tensor, torch.Tensor | None]


class Ready(NamedTuple):
    """Results of planning a call, which depend on shapes and strides alone; ``prepared`` is None for an empty call."""

    prepared: Prepared | None
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # of an answer that is allocated
    lse_shape: tuple[int, ...]
    lse_strides: tuple[int, ...]
    out_dtype: torch.dtype


class Options(NamedTuple):
    """Options of attention, in the order of the operator's schema. PyTorch leaves out trailing ones at defaults."""

    causal: bool = False
    scale: float | None = None
    q_start: int = 0
    rows_first: bool = False
    kernel_name: str | None = None
    precision: str = "fp32"
    batch_invariant: bool = True
    window: Sequence[int] = NO_WINDOW
    alibi_slopes: torch.Tensor | None = None
    cu_seqlens_q: torch.Tensor | None = None
    cu_seqlens_k: torch.Tensor | None = None
    out_dtype: torch.dtype | None = None

    @property
    def sight(self) -> Sight:
        return Sight(*self[7:11])


_ready: dict[tuple, Ready] = {}
_remembering = threading.Lock()
_kept = threading.local()


def compute(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    bias: torch.Tensor | None = None,
    mask: torch.Tensor | None = None,
    given: Options = Options(),  # noqa: B008  never changed
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    backend: str = "auto",
) -> Answer:
    """Queue attention of tensors on one GPU on PyTorch's current stream there; return O, and the LSE or None.

    The arguments are those of `flashcli.attention`. With ``rows_first``, O [B, H, M, d] is laid out as [B, M, H, d].
    """
    sight = given.sight
    try:
        at_q, at_k, at_v = q.data_ptr(), k.data_ptr(), v.data_ptr()
        key: tuple = (
            q.shape, q.stride(), q.dtype, q.device, k.shape, k.stride(), k.dtype, k.get_device(), v.shape, v.stride(),
            v.dtype, v.get_device(), (at_q | at_k | at_v) % ALIGNMENT,
            None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device(), lowest_bits(bias)),
            None if mask is None else (mask.shape, mask.stride(), mask.dtype, mask.get_device(), lowest_bits(mask)),
            None if out is None else (out.shape, out.stride(), out.dtype, out.get_device(), out.data_ptr() % ALIGNMENT),
            given[:7], sight.key(), given.out_dtype, return_lse, backend,
        )  # fmt: skip
        ready = _ready.get(key)
    except (AttributeError, TypeError, RuntimeError):  # something is no tensor, or not in memory, or no number
        refuse_mixed(sight, q=q, k=k, v=v, bias=bias, mask=mask, out=out)
        key, ready = (), None
    if ready is None:
        check_backend_on_gpu(backend)
        ready = _make_ready(q, k, v, bias, mask, out, given, return_lse)
        remember(_ready, key, ready)
    prepared, shape, strides, lse_shape, lse_strides, kind = ready
    o = _new(q, shape, strides, kind) if out is None else out
    lse = _new(q, lse_shape, lse_strides, torch.float32) if return_lse else None
    if out is not None:
        refuse_sharing(out, q=q, k=k, v=v, bias=bias, mask=mask, **sight.by_name())
    if prepared is None:
        o.zero_()
        return o, None if lse is None else lse.fill_(-torch.inf)
    at_bias, at_mask = score_addresses(bias, mask)
    stream = private.current_stream(prepared.place.device)
    memory = scratch(q, prepared.workspace, stream) if prepared.workspace else None
    prepared.launch(
        stream, at_q, at_k, at_v, o.data_ptr(), 0 if lse is None else lse.data_ptr(),
        at_bias, 0 if memory is None else memory.data_ptr(), at_mask, *sight.addresses(),
    )  # fmt: skip
    return o, lse


def _new(q: torch.Tensor, shape: tuple[int, ...], strides: tuple[int, ...], kind: torch.dtype) -> torch.Tensor:
    """A new tensor beside ``q``, without numbers; to name the type takes time, so q's own is not named."""
    return q.new_empty_strided(shape, strides) if kind is q.dtype else q.new_empty_strided(shape, strides, dtype=kind)


def is_quiet(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None, mask: torch.Tensor | None = None
) -> bool:
    """Whether the tensors are plain ones in memory, and no mode or transformation of PyTorch watches operations."""
    return (
        type(q) in ORDINARY
        and type(k) in ORDINARY
        and type(v) in ORDINARY
        and (bias is None or (type(bias) in ORDINARY and not bias.is_neg()))
        and (mask is None or type(mask) in ORDINARY)
        and not (q.is_neg() or k.is_neg() or v.is_neg())  # as views of conjugates are: their numbers have another sign
        and (q.is_cuda or q.is_cpu)
        and not private.is_watched()
    )


def wants_gradients(*tensors: torch.Tensor | None) -> bool:
    """Whether gradients with respect to some of these tensors have to be recorded."""
    for x in tensors:  # any() of a generator takes twice as long
        if x is not None and x.requires_grad:
            return torch.is_grad_enabled()
    return False


def scratch(q: torch.Tensor, size: int, stream: int) -> torch.Tensor:
    """Scratch of at least ``size`` bytes for one call, until its kernels have run; later work may reuse it.

    The default stream is never destroyed and no part of a graph, so that a thread can keep its scratch there.
    """
    if stream != DEFAULT_STREAM or size > KEPT:
        return q.new_empty(size, dtype=torch.uint8)
    kept: dict[Any, torch.Tensor] = _kept.__dict__
    found = kept.get(q.device)
    if found is None or found.numel() < size:
        found = kept[q.device] = q.new_empty(size, dtype=torch.uint8)
    return found


def _make_ready(q: Any, k: Any, v: Any, bias: Any, mask: Any, out: Any, given: Options, return_lse: bool) -> Ready:
    """Plan a call."""
    how, sight = How(given.kernel_name, given.precision, given.batch_invariant, return_lse), given.sight
    check(how)
    refuse_mixed(sight, q=q, k=k, v=v, bias=bias, mask=mask, out=out)
    to = None if out is None else operand(out)
    if given.rows_first and out is None and q.ndim == 4:
        to = contiguous_rows_first(tuple(q.shape), type_name(given.out_dtype or q.dtype))
    of = sight.operands(q=q, k=k, v=v, bias=bias, mask=mask)
    what = call(**of, causal=given.causal, scale=given.scale, q_start=given.q_start, out=to, out_dtype=given.out_dtype)
    o, lse = to or contiguous(what.shape, what.out_dtype), contiguous(what.lse_shape, "float32")
    layout = o.shape, o.strides, lse.shape, lse.strides, getattr(torch, what.out_dtype)
    if what.empty:
        return Ready(None, *layout)
    addresses = q.data_ptr() | k.data_ptr() | v.data_ptr() | (0 if out is None else out.data_ptr())
    prepared = prepare(
        place_of_device(q.get_device()), ATTENTION, what.at(addresses, *score_addresses(bias, mask)), how
    )
    return Ready(prepared, *layout)


def lowest_bits(x: torch.Tensor) -> int:
    """The part of the address of a bias or a mask that decides how many of its numbers are read together."""
    return x.data_ptr() % ALIGNMENT


def score_addresses(bias: torch.Tensor | None, mask: torch.Tensor | None) -> tuple[int, int]:
    """The addresses of a bias of numbers and of a mask, which a bias of bools is; 0 where there is none."""
    if bias is None and mask is None:  # as in most calls, and looking takes time
        return 0, 0
    at_bias, at_mask = (0 if x is None else x.data_ptr() for x in (bias, mask))
    return (0, at_bias) if bias is not None and bias.dtype is torch.bool else (at_bias, at_mask)


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """The matrix, copied if its last axis is not contiguous: dO of a sum is one number with strides of 0."""
    return x if x.ndim == 0 or x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def remember(ready: dict[tuple, Any], key: tuple, value: Any) -> None:
    """Store a value under a key for later calls, dropping the oldest of `SHAPES`; an empty key stores nothing."""
    if not key:
        return
    with _remembering:
        if len(ready) >= SHAPES:
            del ready[next(iter(ready))]
        ready[key] = value


def refuse_mixed(sight: Sight, **tensors: Any) -> None:
    """Raise TypeError for an argument that is no dense PyTorch tensor, ValueError for one that is not on Q's device."""
    for name, tensor in {**tensors, **sight.by_name()}.items():
        if tensor is not None or name in ("do", "q", "k", "v"):
            refuse_other(name, tensor, tensors["q"])


def refuse_other(name: str, tensor: Any, q: Any, called: str = "q") -> None:
    """Raise TypeError if the argument ``name`` is no dense PyTorch tensor, ValueError if it is not on ``q``'s device.

    ``called`` is the name of ``q`` in the message.
    """
    if not isinstance(tensor, torch.Tensor):
        raise TypeError(f"{name} must be a PyTorch tensor, as {called} is, not {type(tensor).__name__}")
    refuse_sparse(name, tensor)
    if tensor.device != q.device:
        raise ValueError(f"{name} must be on {q.device}, as {called} is, not on {tensor.device}")


def refuse_sparse(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor that is not dense."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.")
        raise TypeError(f"{name} must be a dense tensor, not {kind}")


def answer_type(q: torch.Tensor, out_dtype: Any) -> torch.dtype | None:
    """PyTorch's type of an answer to ``q`` for an ``out_dtype``, which may be a name; TypeError if it cannot be one."""
    if out_dtype is None or isinstance(out_dtype, torch.dtype):
        return out_dtype
    found: torch.dtype = getattr(torch, result_type(operand(q), type_name(out_dtype)))
    return found


def refuse_sharing(out: torch.Tensor, **tensors: torch.Tensor | None) -> None:
    """Raise ValueError if ``out`` shares memory with one of the tensors."""
    first, end = _storage(out)
    inputs = {}
    for name, x in tensors.items():
        if x is not None:
            other_first, other_end = _storage(x)
            if first < other_end and other_first < end:
                inputs[name] = x.data_ptr(), operand(x)
    if inputs:
        refuse_overlap(out.data_ptr(), operand(out), inputs)


def _storage(tensor: torch.Tensor) -> tuple[int, int]:
    """The first address of a tensor's storage and the address behind its last byte."""
    storage = tensor.untyped_storage()
    first = storage.data_ptr()
    return first, first + storage.nbytes()
