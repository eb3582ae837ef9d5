"""Steps of a model that NumPy and PyTorch have under different names: all else of GPT-2 is written once for both."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

Array = Any  # NumPy's, or PyTorch's tensor


class Library(Protocol):
    """Computation with arrays of one library, in one place; ``kind`` is the name of a type, such as "float16"."""

    def put(self, array: np.ndarray) -> Array:
        """An array of this library with these numbers."""

    def take(self, array: Array) -> np.ndarray:
        """NumPy's array with the numbers of one of this library."""

    def empty(self, shape: Sequence[int], kind: str) -> Array: ...
    def cast(self, array: Array, kind: str) -> Array: ...

    def product(self, x: Array, weight: Array) -> Array:
        """x [.., inputs] · weight [inputs, outputs]."""

    def linear(self, x: Array, weight: Array, bias: Array) -> Array:
        """x [.., inputs] · weight [inputs, outputs] + bias."""

    def norm(self, x: Array, weight: Array, bias: Array) -> Array:
        """x with each row's mean 0 and variance 1, times weight, plus bias."""

    def gelu(self, x: Array) -> Array:
        """x · Φ(x), by the tanh that GPT-2 was trained with."""


class OfNumPy:
    """Arrays of NumPy."""

    def put(self, array: np.ndarray) -> np.ndarray:
        return array

    def take(self, array: np.ndarray) -> np.ndarray:
        return array

    def empty(self, shape: Sequence[int], kind: str) -> np.ndarray:
        return np.empty(shape, kind)

    def cast(self, array: np.ndarray, kind: str) -> np.ndarray:
        return array.astype(kind, copy=False)

    def product(self, x: np.ndarray, weight: np.ndarray) -> np.ndarray:
        return x @ weight

    def linear(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        return self.product(x, weight) + bias

    def norm(self, x: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
        x = x - x.mean(-1, keepdims=True)
        return x / np.sqrt(np.square(x).mean(-1, keepdims=True) + np.float32(1e-5)) * weight + bias

    def gelu(self, x: np.ndarray) -> np.ndarray:
        return x / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


class OfPyTorch:
    """Tensors of PyTorch on a device, such as "cuda"."""

    def __init__(self, device: str) -> None:
        import torch
        from torch.nn import functional

        self._torch, self._functional, self._device = torch, functional, device

    def put(self, array: np.ndarray) -> Array:
        return self._torch.from_numpy(array).to(self._device)

    def take(self, array: Array) -> np.ndarray:
        return array.cpu().numpy()

    def empty(self, shape: Sequence[int], kind: str) -> Array:
        return self._torch.empty(*shape, dtype=getattr(self._torch, kind), device=self._device)

    def cast(self, array: Array, kind: str) -> Array:
        return array.to(getattr(self._torch, kind))

    def product(self, x: Array, weight: Array) -> Array:
        return x @ weight

    def linear(self, x: Array, weight: Array, bias: Array) -> Array:
        return self._torch.addmm(bias, x.view(-1, x.shape[-1]), weight).view(*x.shape[:-1], -1)

    def norm(self, x: Array, weight: Array, bias: Array) -> Array:
        return self._functional.layer_norm(x, x.shape[-1:], weight, bias)

    def gelu(self, x: Array) -> Array:
        return self._functional.gelu(x, approximate="tanh")
