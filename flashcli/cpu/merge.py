"""Answers to parts of the keys as the answer to all of them, in NumPy: the readable statement of the algorithm."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def merge(outs: Sequence[np.ndarray], lses: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """O [.., H, D], of the type of ``outs``, and LSE [.., H] of all parts; zeros and -inf where none has seen a key.

    A part counts exp(its LSE), as one key would whose score that is, with its O as value. Of a part that has seen
    nothing O may be anything.
    """
    m = np.maximum.reduce(list(lses))
    shift = np.where(m == -np.inf, np.float32(0), m)
    O, l = np.zeros(outs[0].shape, np.float32), np.zeros(m.shape, np.float32)
    with np.errstate(all="ignore"):
        for out, lse in zip(outs, lses, strict=True):
            weight = np.exp(lse - shift)
            l += weight
            O += np.where(weight[..., None] == 0, np.float32(0), weight[..., None] * out.astype(np.float32))
        nothing = l == 0
        l[nothing] = 1
        return (O / l[..., None]).astype(outs[0].dtype), np.where(nothing, -np.inf, m + np.log(l)).astype(np.float32)
