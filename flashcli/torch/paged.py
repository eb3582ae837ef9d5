"""`flashcli.decode` and `flashcli.write_kv` for PyTorch's tensors.

Those on a GPU are read and written where they lie, those on the CPU as NumPy's arrays of the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import torch

from flashcli.gpu.launcher import PreparedDecode, PreparedWrite, place_of_device
from flashcli.interop import paged, paged_write
from flashcli.interop.prepared import ALIGNMENT
from flashcli.run.decode import decode as decode_numpy
from flashcli.run.write_kv import write_kv as write_numpy
from flashcli.torch.in_place import operand, remember, scratch

BITS = {1: torch.uint8, 2: torch.int16}  # types that NumPy has, by the bytes of one that it has not
Tensors = Mapping[str, torch.Tensor]

_ready: dict[tuple, PreparedDecode] = {}
_ready_to_write: dict[tuple, PreparedWrite] = {}


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    alibi_slopes: torch.Tensor | None = None,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    return_lse: bool = False,
    out: torch.Tensor | None = None,
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Parameters, the answer and errors are those of `flashcli.decode`. There are no gradients.

    ``out``, contiguous and like the query, is where the answer goes.
    """
    if out is not None:
        _refuse_out(out, query)
    tensors = query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, k_scale, v_scale
    if query.is_cuda:
        return compute(tensors, options, out, return_lse)
    named = _named(paged.Arrays, tensors, options)
    _refuse(named)
    answer, lse = _on_cpu(named, options)
    out = answer if out is None else out.copy_(answer)
    return (out, lse) if return_lse else out


def write_kv(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    *,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    **options: Any,
) -> None:
    """Parameters and errors are those of `flashcli.write_kv`."""
    tensors = key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
    if key.is_cuda:
        return write(tensors, options)
    named = _named(paged_write.Arrays, tensors, options)
    _refuse(named)
    arrays: dict[str, Any] = {name: _numbers(tensor) for name, tensor in named.items()}
    write_numpy(**arrays, **options)


def _named(kind: Any, tensors: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """The tensors by the names of the arguments; a scale that is a number is put to the options."""
    named = dict(zip(kind._fields, tensors, strict=True))
    for name in ("k_scale", "v_scale"):
        if not isinstance(named[name], torch.Tensor):
            options[name] = named.pop(name)
    return {name: tensor for name, tensor in named.items() if tensor is not None}


# ---- on a GPU


def compute(
    tensors: Sequence[Any], options: dict[str, Any], out: torch.Tensor | None = None, return_lse: bool = False
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The answer, and its LSE if that is wanted, queued on the current stream of PyTorch's on the tensors' GPU.

    ``tensors`` are those of `paged.Arrays`, in that order; scales may be numbers.
    """
    query, at = tensors[0], _addresses(tensors)
    lowest = (at[0] | at[1] | at[2]) % ALIGNMENT
    described = _described(lowest, tensors, options)
    prepared = _ready.get(described)
    if prepared is None:
        named = _named(paged.Arrays, tensors, options)
        _refuse(named)
        arrays = paged.Arrays(**{name: operand(tensor) for name, tensor in named.items()})
        prepared = paged.prepare(place_of_device(query.get_device()), arrays, lowest, paged.Options(**options))
        remember(_ready, described, prepared)
    stream = torch._C._cuda_getCurrentRawStream(prepared.place.device)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
    memory = scratch(query, prepared.workspace, stream)
    prepared.launch(stream, *at, out.data_ptr(), 0 if lse is None else lse.data_ptr(), memory.data_ptr())
    return out if lse is None else (out, lse)


def write(tensors: Sequence[Any], options: dict[str, Any]) -> None:
    """Write, queued on the current stream of PyTorch's on the tensors' GPU.

    ``tensors`` are those of `paged_write.Arrays`, in that order; scales may be numbers.
    """
    at = _addresses(tensors)
    lowest = (at[0] | at[1] | at[2] | at[3]) % ALIGNMENT
    described = _described(lowest, tensors, options)
    prepared = _ready_to_write.get(described)
    if prepared is None:
        named = _named(paged_write.Arrays, tensors, options)
        _refuse(named)
        arrays = paged_write.Arrays(**{name: operand(tensor) for name, tensor in named.items()})
        place = place_of_device(tensors[0].get_device())
        prepared = paged_write.prepare(place, arrays, lowest, paged_write.Options(**options))
        remember(_ready_to_write, described, prepared)
    prepared.launch(torch._C._cuda_getCurrentRawStream(prepared.place.device), *at)


# The time of a call counts where shapes are small. So of each tensor a few things are looked at, which are the key of a
# dictionary, and all that follows from them is found there.


def _addresses(tensors: Sequence[Any]) -> list[int]:
    """0 of what is no tensor, or in no memory: there is something else to say of that."""
    try:
        return [x.data_ptr() if isinstance(x, torch.Tensor) else 0 for x in tensors]
    except RuntimeError:
        return [0] * len(tensors)


def _described(lowest: int, tensors: Sequence[Any], options: dict[str, Any]) -> tuple:
    """All that a launch depends on, with the ``lowest`` bits of addresses; () if something is no tensor."""
    graded = torch.is_grad_enabled()
    found: list[Any] = [lowest, *options.items()]
    for x in tensors:
        if isinstance(x, torch.Tensor):
            found += x.shape, x.stride(), x.dtype, x.get_device(), graded and x.requires_grad
        elif x is None or isinstance(x, Real):
            found.append(x)
        else:
            return ()
    return tuple(found)


# ---- what is refused


def _refuse(tensors: Mapping[str, Any]) -> None:
    first = next(iter(tensors))
    device = tensors[first].device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{first} must be on a GPU or the CPU, not on {device}")
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a PyTorch tensor, as {first} is, not {type(tensor).__name__}")
        if tensor.device != device:
            raise ValueError(f"{name} must be on {device}, as {first} is, not on {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require gradients, which there are none of here: use torch.no_grad()")


def _refuse_out(out: torch.Tensor, query: torch.Tensor) -> None:
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"out must be a PyTorch tensor, as query is, not {type(out).__name__}")
    for what in ("shape", "dtype", "device"):
        if (found := getattr(out, what)) != (wanted := getattr(query, what)):
            raise ValueError(f"out must have the {what} of query, {wanted}, not {found}")
    if not out.is_contiguous():
        raise ValueError("out must be contiguous")


# ---- on the CPU


def _on_cpu(tensors: Tensors, options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    arrays: dict[str, Any] = {name: _numbers(tensor) for name, tensor in tensors.items()}
    out, lse = decode_numpy(**arrays, **options, return_lse=True)
    kind = tensors["query"].dtype
    out = torch.from_numpy(out) if kind not in _foreign() else torch.from_numpy(out.view(np.int16)).view(kind)
    return out, torch.from_numpy(lse)


def _foreign() -> dict[torch.dtype, str]:
    """Types that NumPy has from ml_dtypes, and their names there."""
    names = "bfloat16", "float8_e4m3fn", "float8_e5m2"
    return {getattr(torch, name): name for name in names}


def _numbers(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype not in _foreign():
        return tensor.numpy()
    from flashcli.files.decode_file import dtype

    return tensor.view(BITS[tensor.element_size()]).numpy().view(dtype(_foreign()[tensor.dtype]))
