"""How arrays may lie, and which bias they may have: what Hypothesis chooses for attention and for its gradients."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

# What is drawn, [B, H, N, d], lies in one of these, and is the same numbers.
LAYOUTS = {
    "rows of heads": lambda x: np.ascontiguousarray(x.swapaxes(1, 2)).swapaxes(1, 2),
    "a slice of a fused projection": lambda x: np.stack([x.swapaxes(1, 2)] * 3, axis=2)[:, :, 1].swapaxes(1, 2),
    "padded": lambda x: np.pad(x, ((0, 0), (0, 1), (0, 2), (0, 3)))[:, :-1, :-2, :-3],
    "backwards": lambda x: np.ascontiguousarray(x[:, :, ::-1])[:, :, ::-1],
    "columns first": lambda x: np.ascontiguousarray(x.swapaxes(2, 3)).swapaxes(2, 3),
    "not aligned": lambda x: np.frombuffer(b"?" + x.tobytes(), np.float32, x.size, 1).reshape(x.shape),
}


def laid(choose: Callable[[Any], Any], arrays: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Each as it is, or in one of `LAYOUTS`; ``choose`` is what Hypothesis gives a composite strategy."""
    layouts = st.sampled_from(["as it is", *LAYOUTS])
    return [LAYOUTS.get(choose(layouts), np.asarray)(x) for x in arrays]


def some_bias(
    choose: Callable[[Any], Any], shape: tuple[int, ...], random: Callable[..., np.ndarray]
) -> np.ndarray | None:
    """None, numbers or a mask, for scores [B, H, M, N] of this shape: axes may have length 1, or be left out."""
    if not (kind := choose(st.sampled_from(["", "float32", "bool"]))):
        return None
    lengths = [length if choose(st.booleans()) else 1 for length in shape]
    bias = random(*lengths[choose(st.integers(0, 4)) :])
    bias = bias if kind == "float32" else np.asarray(bias > choose(st.sampled_from([-2, 2.9])))
    return np.ascontiguousarray(bias.T).T if choose(st.booleans()) else bias
