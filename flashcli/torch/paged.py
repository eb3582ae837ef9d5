"""`flashcli.decode` and `flashcli.write_kv` for PyTorch's tensors.

Those on a GPU are read and written where they lie, those on the CPU as NumPy's arrays of the same memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flashcli.gpu.launcher import PreparedDecode, PreparedWrite, place_of_device
from flashcli.interop import paged, paged_write
from flashcli.interop.prepared import ALIGNMENT
from flashcli.paged import BlockSparse
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
    layout: str = "vllm",
    scale: float | None = None,
    sliding_window: int = 0,
    block_sparse: BlockSparse | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    cache_dtype: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Parameters, the answer and errors are those of `flashcli.decode`. There are no gradients.

    ``out``, contiguous and like the query, is where the answer goes.
    """
    if out is not None:
        _refuse_out(out, query)
    options = layout, scale, sliding_window, block_sparse, backend, cache_dtype
    if query.is_cuda:
        return compute(
            query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, k_scale, v_scale, options, out,
            return_lse,
        )  # fmt: skip
    tensors = query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, k_scale, v_scale
    named, scales = _named(paged.Arrays, tensors)
    _refuse(named)
    answer, lse = _on_cpu(named, paged.Options(*options, **scales))
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
    layout: str = "vllm",
    cache_dtype: str | None = None,
) -> None:
    """Parameters and errors are those of `flashcli.write_kv`."""
    if key.is_cuda:
        return write(key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale, (layout, cache_dtype))
    named, scales = _named(paged_write.Arrays, (key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale))
    _refuse(named)
    arrays: dict[str, Any] = {name: _numbers(tensor) for name, tensor in named.items()}
    write_numpy(**arrays, **scales, layout=layout, cache_dtype=cache_dtype)


def _named(kind: Any, tensors: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors by the names of the arguments, and by theirs the scales that are numbers."""
    named = {name: x for name, x in zip(kind._fields, tensors, strict=True) if x is not None}
    scales = {name: named.pop(name) for name in ("k_scale", "v_scale") if not isinstance(named[name], torch.Tensor)}
    return named, scales


# ---- on a GPU

# The time of a call counts where shapes are small. So whatever follows from shapes, strides and options is found in one
# look into a dictionary; left are the addresses, the answer's memory, and the launch.


def compute(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    alibi_slopes: torch.Tensor | None,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    options: tuple,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """The answer, and its LSE if that is wanted, queued on the current stream of PyTorch's on the tensors' GPU.

    ``options`` are those of `paged.Options`, but for the scales.
    """
    try:
        at_query, at_keys, at_values = query.data_ptr(), key_cache.data_ptr(), value_cache.data_ptr()
        at_tables, at_lengths = block_tables.data_ptr(), seq_lens.data_ptr()
        lowest = (at_query | at_keys | at_values) % ALIGNMENT
        graded = query.requires_grad or key_cache.requires_grad or value_cache.requires_grad
        key: tuple = (
            query.shape, query.stride(), query.dtype, query.get_device(), key_cache.shape, key_cache.stride(),
            key_cache.dtype, key_cache.get_device(), value_cache.shape, value_cache.stride(), value_cache.dtype,
            value_cache.get_device(), block_tables.shape, block_tables.stride(), block_tables.dtype,
            block_tables.get_device(), seq_lens.shape, seq_lens.stride(), seq_lens.dtype, seq_lens.get_device(), lowest,
            None if alibi_slopes is None else _described(alibi_slopes),
            k_scale if k_scale.__class__ is float else _described(k_scale),
            v_scale if v_scale.__class__ is float else _described(v_scale),
            options, graded and torch.is_grad_enabled(),
        )  # fmt: skip
        prepared = _ready.get(key)
    except (AttributeError, TypeError, RuntimeError):  # something is no tensor, or not in memory, or no number
        key, prepared = (), None
    if prepared is None:
        tensors = query, key_cache, value_cache, block_tables, seq_lens, alibi_slopes, k_scale, v_scale
        named, scales = _named(paged.Arrays, tensors)
        _refuse(named)
        arrays = paged.Arrays(**{name: operand(tensor) for name, tensor in named.items()})
        asked = paged.Options(*options, **scales)
        prepared = paged.prepare(place_of_device(query.get_device()), arrays, lowest, asked)
        remember(_ready, key, prepared)
    stream = torch._C._cuda_getCurrentRawStream(prepared.place.device)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
    memory = scratch(query, prepared.workspace, stream)
    prepared.launch(
        stream, at_query, at_keys, at_values, at_tables, at_lengths,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        0 if k_scale.__class__ is float else _address(k_scale),
        0 if v_scale.__class__ is float else _address(v_scale),
        out.data_ptr(), 0 if lse is None else lse.data_ptr(), memory.data_ptr(),
    )  # fmt: skip
    return out if lse is None else (out, lse)


def write(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    k_scale: float | torch.Tensor,
    v_scale: float | torch.Tensor,
    options: tuple,
) -> None:
    """Write, queued on the current stream of PyTorch's on the tensors' GPU.

    ``options`` are those of `paged_write.Options`, but for the scales.
    """
    try:
        at_key, at_value, at_slots = key.data_ptr(), value.data_ptr(), slot_mapping.data_ptr()
        at_keys, at_values = key_cache.data_ptr(), value_cache.data_ptr()
        lowest = (at_key | at_value | at_keys | at_values) % ALIGNMENT
        graded = key.requires_grad or value.requires_grad or key_cache.requires_grad or value_cache.requires_grad
        described: tuple = (
            key.shape, key.stride(), key.dtype, key.get_device(), value.shape, value.stride(), value.dtype,
            value.get_device(), key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.get_device(),
            value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.get_device(), slot_mapping.shape,
            slot_mapping.stride(), slot_mapping.dtype, slot_mapping.get_device(), lowest,
            k_scale if k_scale.__class__ is float else _described(k_scale),
            v_scale if v_scale.__class__ is float else _described(v_scale),
            options, graded and torch.is_grad_enabled(),
        )  # fmt: skip
        prepared = _ready_to_write.get(described)
    except (AttributeError, TypeError, RuntimeError):
        described, prepared = (), None
    if prepared is None:
        tensors = key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
        named, scales = _named(paged_write.Arrays, tensors)
        _refuse(named)
        arrays = paged_write.Arrays(**{name: operand(tensor) for name, tensor in named.items()})
        asked = paged_write.Options(*options, **scales)
        prepared = paged_write.prepare(place_of_device(key.get_device()), arrays, lowest, asked)
        remember(_ready_to_write, described, prepared)
    prepared.launch(
        torch._C._cuda_getCurrentRawStream(prepared.place.device), at_key, at_value, at_keys, at_values, at_slots,
        0 if k_scale.__class__ is float else _address(k_scale), 0 if v_scale.__class__ is float else _address(v_scale),
    )  # fmt: skip


def _described(x: Any) -> Any:
    """A number as it is; of a tensor, all but the address."""
    return (x.shape, x.stride(), x.dtype, x.get_device()) if isinstance(x, torch.Tensor) else x


def _address(x: Any) -> int:
    """0 of a number."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else 0


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


def _on_cpu(tensors: Tensors, options: paged.Options) -> tuple[torch.Tensor, torch.Tensor]:
    arrays = {name: _numbers(tensor) for name, tensor in tensors.items()}
    asked: dict[str, Any] = {**options._asdict(), **arrays}
    out, lse = decode_numpy(**asked, return_lse=True)
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
