"""`flashcli.decode` for PyTorch's tensors: on a GPU where they lie, on the CPU as NumPy's arrays of the same memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from flashcli.gpu.launcher import place_of_device
from flashcli.interop.paged import Arrays, Options, prepare
from flashcli.interop.prepared import ALIGNMENT
from flashcli.run.decode import decode as decode_numpy
from flashcli.torch.in_place import operand, scratch

BITS = {1: torch.uint8, 2: torch.int16}  # types that NumPy has, by the bytes of one that it has not


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
    **options: Any,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """Parameters, the answer and errors are those of `flashcli.decode`. There are no gradients."""
    tensors: dict[str, Any] = {
        "query": query, "key_cache": key_cache, "value_cache": value_cache, "block_tables": block_tables,
        "seq_lens": seq_lens,
    }  # fmt: skip
    if alibi_slopes is not None:
        tensors["alibi_slopes"] = alibi_slopes
    for name, scale in {"k_scale": k_scale, "v_scale": v_scale}.items():
        (tensors if isinstance(scale, torch.Tensor) else options)[name] = scale
    _refuse(tensors)
    if query.is_cuda:
        out, lse = compute(tensors, Options(**options))
    elif query.is_cpu:
        out, lse = _on_cpu(tensors, options)
    else:
        raise ValueError(f"query must be on a GPU or the CPU, not on {query.device}")
    return (out, lse) if return_lse else out


def compute(tensors: dict[str, torch.Tensor], options: Options) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer and its LSE, queued on the current stream of PyTorch's on the tensors' GPU."""
    query = tensors["query"]
    at = {name: tensor.data_ptr() for name, tensor in tensors.items()}
    arrays = Arrays(**{name: operand(tensor) for name, tensor in tensors.items()})
    addresses = (at["query"] | at["key_cache"] | at["value_cache"]) % ALIGNMENT
    prepared = prepare(place_of_device(query.get_device()), arrays, addresses, options)
    stream = torch._C._cuda_getCurrentRawStream(query.get_device())
    out = query.new_empty(query.shape)
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32)
    memory = scratch(query, prepared.workspace, stream)
    prepared.launch(stream, at | {"out": out.data_ptr(), "lse": lse.data_ptr(), "workspace": memory.data_ptr()})
    return out, lse


def _refuse(tensors: dict[str, Any]) -> None:
    query = tensors["query"]
    for name, tensor in tensors.items():
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} must be a PyTorch tensor, as query is, not {type(tensor).__name__}")
        if tensor.device != query.device:
            raise ValueError(f"{name} must be on {query.device}, as query is, not on {tensor.device}")
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require gradients, which decode does not have: use torch.no_grad()")


def _on_cpu(tensors: dict[str, torch.Tensor], options: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
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
