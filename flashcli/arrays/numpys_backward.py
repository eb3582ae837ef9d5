"""attention_backward(do, q, k, v) of NumPy's arrays."""

from __future__ import annotations

import numpy as np

from flashcli.arrays.numpys import as_it_lies, operand
from flashcli.asked.attention import backward
from flashcli.cpu.attention import Matrices, attend_arrays
from flashcli.cpu.backward import Gradients, backward_arrays
from flashcli.errors import UsageError
from flashcli.run.request import check_backend

Answer = tuple[np.ndarray, ...]


def attention_backward(
    do: np.ndarray,
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    causal: bool = False,
    scale: float | None = None,
    backend: str = "auto",
    *,
    bias: np.ndarray | None = None,
    q_start: int = 0,
    o: np.ndarray | None = None,
    lse: np.ndarray | None = None,
    dlse: np.ndarray | None = None,
    return_dbias: bool = False,
    kernel: str | None = None,
) -> Answer:
    """`flashcli.attention_backward` of NumPy's arrays: on the CPU, whatever their strides."""
    check_backend(backend)
    if backend == "cuda" or kernel is not None:
        raise UsageError(
            "gradients of arrays on the CPU are computed by the cpu backend.",
            'leave out backend="cuda" and kernel, or give arrays that are on a GPU.',
        )
    do, q, k, v = (as_it_lies(name, x) for name, x in {"do": do, "q": q, "k": k, "v": v}.items())
    others = {
        name: as_it_lies(name, x)
        for name, x in {"o": o, "lse": lse, "dlse": dlse, "bias": bias}.items()
        if x is not None
    }
    of = {name: operand(x) for name, x in others.items()}
    asked = backward(
        operand(do), operand(q), operand(k), operand(v), of.get("o"), of.get("lse"), of.get("dlse"), of.get("bias"),
        causal, scale, q_start, return_dbias,
    )  # fmt: skip
    dq, dk, dv = (np.zeros(x.shape, np.float32) for x in (q, k, v))
    dbias = None if asked.dbias_shape is None else np.zeros(asked.dbias_shape, np.float32)
    if not asked.of.empty:
        o = others.get("o")
        given = Matrices(q, k, v, np.empty(q.shape, np.float32) if o is None else o, others.get("bias"))
        if o is None:
            attend_arrays(asked.of, given)
        backward_arrays(asked, do, others.get("dlse"), given, Gradients(dq, dk, dv, dbias))
    return (dq, dk, dv) if dbias is None else (dq, dk, dv, dbias)
