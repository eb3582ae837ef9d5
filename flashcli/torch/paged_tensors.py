"""PyTorch's tensors of decode and write_kv: keys for a look-up of earlier calls, refusals, and NumPy's view of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from flashcli.asked.decode import FACTORS, OPTIONAL
from flashcli.torch import private
from flashcli.torch.in_place import refuse_other, refuse_sparse

BITS = {1: torch.uint8, 2: torch.int16}  # types that NumPy has, by the bytes of one that it has not


def named(names: Sequence[str], tensors: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The tensors by their arguments' names, scales among them, and the scales that are numbers by theirs."""
    given = dict(zip((*names, *FACTORS), tensors, strict=True))
    factors = {name: given.pop(name) for name in FACTORS if not isinstance(given[name], torch.Tensor)}
    return {name: x for name, x in given.items() if x is not None or name not in OPTIONAL}, factors


def described(x: Any) -> Any:
    """The part of an argument that a prepared call depends on: a number itself; all of a tensor but its address."""
    return (x.shape, x.stride(), x.dtype, x.get_device(), x.is_neg()) if isinstance(x, torch.Tensor) else x


def address(x: Any) -> int:
    """The address of a tensor; 0 for a number."""
    return x.data_ptr() if isinstance(x, torch.Tensor) else 0


def refuse(tensors: Mapping[str, Any]) -> None:
    first = next(iter(tensors))
    refuse_no_tensor(first, tensors[first])
    device = tensors[first].device
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"{first} must be on a GPU or the CPU, not on {device}")
    for name, tensor in tensors.items():
        refuse_other(name, tensor, tensors[first], first)
        if tensor.requires_grad and torch.is_grad_enabled():
            raise ValueError(f"{name} must not require gradients, which there are none of here: use torch.no_grad()")
        if tensor.is_neg():
            raise ValueError(
                f"{name} must not be a lazily negated view ({name}.is_neg()): call {name}.resolve_neg() first"
            )
        refuse_without_numbers(name, tensor)


def refuse_no_tensor(name: str, x: Any) -> None:
    """Raise TypeError for what is no dense tensor."""
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name} must be a PyTorch tensor, not {type(x).__name__}")
    refuse_sparse(name, x)


def refuse_without_numbers(name: str, tensor: torch.Tensor) -> None:
    """Raise TypeError for a tensor without memory: a fake one has address 0, one of torch.func has no address."""
    try:
        somewhere = tensor.numel() == 0 or tensor.data_ptr() != 0
    except RuntimeError:
        somewhere = False
    if not somewhere:
        raise TypeError(f"{name} must be a tensor whose numbers are in memory: no fake one, nor one of torch.func")


def numbers(tensor: torch.Tensor) -> np.ndarray:
    tensor = tensor.detach()
    if tensor.dtype not in foreign():
        return tensor.numpy()
    from flashcli.files.decode.tensors import dtype

    return tensor.view(BITS[tensor.element_size()]).numpy().view(dtype(foreign()[tensor.dtype]))


def tensor(array: np.ndarray, kind: torch.dtype) -> torch.Tensor:
    """A NumPy array of type ``kind`` as a tensor of the same memory."""
    return torch.from_numpy(array.view(np.int16)).view(kind) if kind in foreign() else torch.from_numpy(array)


def foreign() -> dict[torch.dtype, str]:
    """The types that NumPy has from ml_dtypes alone, and their names there."""
    names = "bfloat16", "float8_e4m3fn", "float8_e5m2"
    return {getattr(torch, name): name for name in names}


def uncompiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """Make a function a break in the graph of torch.compile, which is not to follow what is below.

    PyTorch's own decorator imports the compiler, for seconds; its private one does so when a graph is made.
    """
    return (private.disable_dynamo or torch.compiler.disable)(function)
