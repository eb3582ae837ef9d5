"""`flashcli.write_kv` for PyTorch's tensors: on a GPU where they lie, on the CPU as NumPy's arrays of their memory."""

from __future__ import annotations

import torch

from flashcli.arrays.numpys import write_kv as write_numpy
from flashcli.asked.attention import ALIGNMENT
from flashcli.asked.decode import check_option_types
from flashcli.asked.write_kv import ARRAYS, ask
from flashcli.gpu.place import place_of_device
from flashcli.gpu.prepared import Prepared, prepare
from flashcli.kernels.write_kv import WRITE_KV
from flashcli.torch import private
from flashcli.torch.in_place import remember
from flashcli.torch.paged_tensors import address, described, named, numbers, refuse, uncompiled
from flashcli.torch.sight import operand

_ready: dict[tuple, Prepared] = {}


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
    """`flashcli.write_kv` of PyTorch's tensors, with its parameters and errors."""
    if torch.compiler.is_compiling():
        return _uncompiled(
            key, value, key_cache, value_cache, slot_mapping, k_scale=k_scale, v_scale=v_scale, layout=layout,
            cache_dtype=cache_dtype,
        )  # fmt: skip
    try:
        at_key, at_value, at_slots = key.data_ptr(), value.data_ptr(), slot_mapping.data_ptr()
        at_keys, at_values = key_cache.data_ptr(), value_cache.data_ptr()
        lowest = (at_key | at_value | at_keys | at_values) % ALIGNMENT
        graded = key.requires_grad or value.requires_grad or key_cache.requires_grad or value_cache.requires_grad
        looked_at: tuple = (
            key.shape, key.stride(), key.dtype, key.get_device(), value.shape, value.stride(), value.dtype,
            value.get_device(), key_cache.shape, key_cache.stride(), key_cache.dtype, key_cache.get_device(),
            value_cache.shape, value_cache.stride(), value_cache.dtype, value_cache.get_device(), slot_mapping.shape,
            slot_mapping.stride(), slot_mapping.dtype, slot_mapping.get_device(), lowest,
            k_scale if k_scale.__class__ is float else described(k_scale),
            v_scale if v_scale.__class__ is float else described(v_scale),
            layout, cache_dtype, graded and torch.is_grad_enabled(),
            key.is_neg() or value.is_neg() or key_cache.is_neg() or value_cache.is_neg(),
        )  # fmt: skip
        prepared = _ready.get(looked_at)
    except (AttributeError, TypeError, RuntimeError):
        looked_at, prepared, at_key = (), None, 0
    if prepared is None or not (at_key and at_value and at_slots and at_keys and at_values):
        tensors = key, value, key_cache, value_cache, slot_mapping, k_scale, v_scale
        by_name, given = named(ARRAYS, tensors)
        refuse(by_name)
        given |= {"layout": layout, "cache_dtype": cache_dtype}
        if not key.is_cuda:
            return write_numpy(**{name: numbers(x) for name, x in by_name.items()}, **given)
        check_option_types(given)
        asked = ask(**{name: operand(tensor) for name, tensor in by_name.items()}, **given)
        prepared = prepare(place_of_device(key.get_device()), WRITE_KV, asked.at(lowest))
        remember(_ready, looked_at, prepared)
    prepared.launch(
        private.current_stream(prepared.place.device), at_key, at_value, at_keys, at_values, at_slots,
        0 if k_scale.__class__ is float else address(k_scale), 0 if v_scale.__class__ is float else address(v_scale),
    )  # fmt: skip


_uncompiled = uncompiled(write_kv)
