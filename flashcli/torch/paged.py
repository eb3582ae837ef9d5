"""`flashcli.decode` for PyTorch's tensors: on a GPU where they lie, on the CPU as NumPy's arrays of the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from flashcli.arrays.numpys import decode as decode_numpy
from flashcli.asked.attention import ALIGNMENT, check_backend_on_gpu
from flashcli.asked.decode import ARRAYS, OPTIONS, BlockSparse, ask, check_option_types
from flashcli.asked.how import How
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import Prepared, prepare
from flashcli.kernels.decode import DECODE
from flashcli.torch import private
from flashcli.torch.in_place import refuse_sharing, remember, scratch
from flashcli.torch.paged_tensors import (
    address,
    described,
    named,
    numbers,
    refuse,
    refuse_no_tensor,
    refuse_without_numbers,
    tensor,
    uncompiled,
)
from flashcli.torch.sight import operand

_ready: dict[tuple, Prepared] = {}


def decode(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    query_starts: torch.Tensor | None = None,
    alibi_slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    softcap: float = 0.0,
    causal: bool = True,
    k_scale: float | torch.Tensor = 1.0,
    v_scale: float | torch.Tensor = 1.0,
    layout: str = "vllm",
    scale: float | None = None,
    sliding_window: int = 0,
    block_sparse: BlockSparse | None = None,
    return_lse: bool = False,
    backend: str = "auto",
    cache_dtype: str | None = None,
    one_result: bool = False,
    max_query_len: int | None = None,
    kernel: str | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """`flashcli.decode` of PyTorch's tensors, with its parameters, answer and errors; without gradients.

    ``out``, contiguous, on 16 bytes, and of the query's shape and type, gets the answer if it is given.
    """
    if torch.compiler.is_compiling():
        return _uncompiled(
            query, key_cache, value_cache, block_tables, seq_lens, query_starts=query_starts, alibi_slopes=alibi_slopes,
            sinks=sinks, softcap=softcap, causal=causal, k_scale=k_scale, v_scale=v_scale, layout=layout, scale=scale,
            sliding_window=sliding_window, block_sparse=block_sparse, return_lse=return_lse, backend=backend,
            cache_dtype=cache_dtype, one_result=one_result, max_query_len=max_query_len, kernel=kernel, out=out,
        )  # fmt: skip
    # The time of a call counts where shapes are small. So whatever follows from shapes, strides and options is found in
    # one look into a dictionary; left are the addresses, the answer's memory, and the launch.
    options = layout, scale, sliding_window, block_sparse, cache_dtype, softcap, causal, one_result, max_query_len
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
            None if alibi_slopes is None else described(alibi_slopes),
            None if query_starts is None else described(query_starts), None if sinks is None else described(sinks),
            k_scale if k_scale.__class__ is float else described(k_scale),
            v_scale if v_scale.__class__ is float else described(v_scale),
            options, backend, kernel, graded and torch.is_grad_enabled(),
            query.is_neg() or key_cache.is_neg() or value_cache.is_neg(),
        )  # fmt: skip
        prepared = _ready.get(key)
    except (AttributeError, TypeError, RuntimeError):  # something is no tensor, or not in memory, or no number
        key, prepared, at_query = (), None, 0
    if prepared is None or not (at_query and at_keys and at_values and at_lengths):
        others = alibi_slopes, query_starts, sinks, k_scale, v_scale
        by_name, given = named(ARRAYS, (query, key_cache, value_cache, block_tables, seq_lens, *others))
        refuse(by_name)
        given |= zip(OPTIONS, options, strict=True)
        if not query.is_cuda:
            return _on_cpu(by_name, given | {"backend": backend, "kernel": kernel}, out, return_lse)
        check_backend_on_gpu(backend)
        check_option_types(given | {"kernel": kernel})
        asked = ask(**{name: operand(tensor) for name, tensor in by_name.items()}, **given)
        prepared = prepare(place_of_device(query.get_device()), DECODE, asked.at(lowest), How(kernel))
        remember(_ready, key, prepared)
    stream = private.current_stream(prepared.place.device)
    if out is None:
        out = torch.empty_like(query, memory_format=torch.contiguous_format)
    else:
        _refuse_out(out, query)
    if not (at_out := out.data_ptr()):
        refuse_without_numbers("out", out)
    if at_out % ALIGNMENT:
        raise ValueError(f"out must start on a multiple of {ALIGNMENT} bytes")
    lse = query.new_empty(query.shape[:-1], dtype=torch.float32) if return_lse else None
    memory = scratch(query, prepared.workspace, stream)
    prepared.launch(
        stream, at_query, at_keys, at_values, at_tables, at_lengths,
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        0 if k_scale.__class__ is float else address(k_scale),
        0 if v_scale.__class__ is float else address(v_scale),
        0 if query_starts is None else query_starts.data_ptr(), 0 if sinks is None else sinks.data_ptr(),
        at_out, 0 if lse is None else lse.data_ptr(), memory.data_ptr(),
    )  # fmt: skip
    return out if lse is None else (out, lse)


@uncompiled
def check(*tensors: Any, **given: Any) -> None:
    """Raise what `decode` raises for its first five tensors, and others and options by name, but compute nothing."""
    others = [given.pop(name, None) for name in ARRAYS[len(tensors) :]]
    by_name, factors = named(ARRAYS, (*tensors, *others, 1.0, 1.0))
    refuse(by_name)
    check_option_types(given)
    ask(**{name: operand(tensor) for name, tensor in by_name.items()}, **factors, **given)


def _refuse_out(out: torch.Tensor, query: torch.Tensor) -> None:
    refuse_no_tensor("out", out)
    for what in ("shape", "dtype", "device"):
        if (found := getattr(out, what)) != (wanted := getattr(query, what)):
            raise ValueError(f"out must have the {what} of query, {wanted}, not {found}")
    if not out.is_contiguous() or out.is_neg():
        raise ValueError("out must be contiguous, and no lazily negated view (out.is_neg())")
    refuse_sharing(out, query=query)


def _on_cpu(
    tensors: Mapping[str, torch.Tensor], options: dict[str, Any], out: torch.Tensor | None, return_lse: bool
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    if out is not None:
        _refuse_out(out, tensors["query"])
    arrays: dict[str, Any] = {name: numbers(x) for name, x in tensors.items()}
    found, lse = decode_numpy(**arrays, **options, return_lse=True)
    answer = tensor(found, tensors["query"].dtype)
    answer = answer if out is None else out.copy_(answer)
    return (answer, torch.from_numpy(lse)) if return_lse else answer


_uncompiled = uncompiled(decode)
