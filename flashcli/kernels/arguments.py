"""What an attention kernel is told: one struct, passed by value. Its twin is ``cuda/attention/arguments.h``."""

from __future__ import annotations

import ctypes
from typing import NamedTuple, SupportsInt


class Strides(ctypes.Structure):
    """How many floats apart the batches, the heads and the rows of a matrix [B, H, rows, d] are."""

    _fields_ = (("batch", ctypes.c_longlong), ("head", ctypes.c_longlong), ("row", ctypes.c_longlong))


class Attention(ctypes.Structure):
    """The arguments of every function of every attention kernel; the header says what each means."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("Q", "K", "V", "O", "lse", "bias", "workspace", "nonfinite")),
        *((name, Strides) for name in (*"qkvo", "bias_strides")),
        ("bias_column", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("B", "H", "Hkv", "M", "N", "q_start")),
        ("scale", ctypes.c_float),
        ("tile_i", ctypes.c_int),
        ("tile_j", ctypes.c_int),
        ("chunk", ctypes.c_int),
    )


class Matrix(NamedTuple):
    """Where a matrix [B, H, rows, d] of float32 lies: the address of its first number, and its strides in floats."""

    address: int
    batch: int
    head: int
    row: int

    @classmethod
    def of_batches(cls, address: SupportsInt, batch: int, d: int) -> Matrix:
        """Batches of a single head, ``batch`` floats apart, whose rows of ``d`` numbers follow one another."""
        return cls(int(address), batch, 0, d)


class Bias(NamedTuple):
    """Where a bias [B, H, M, N] lies: the address of its first element, and its strides in elements."""

    address: int
    batch: int
    head: int
    row: int
    column: int


NOWHERE = Matrix(0, 0, 0, 0)
NO_BIAS = Bias(0, 0, 0, 0, 0)


def attention(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    *,
    B: int,
    M: int,
    N: int,
    scale: float = 0.0,
    H: int = 1,
    Hkv: int = 1,
    q_start: int = 0,
    bias: Bias = NO_BIAS,
    lse: int = 0,
    workspace: SupportsInt = 0,
    nonfinite: int = 0,
    chunk: int = 0,
) -> Attention:
    """The arguments for M query rows at position ``q_start`` and N keys, of B batches of H heads, Hkv of K and V."""
    given = Attention(
        Q=q.address, K=k.address, V=v.address, O=o.address, lse=lse, bias=bias.address,
        workspace=int(workspace), nonfinite=nonfinite,
        bias_strides=Strides(bias.batch, bias.head, bias.row), bias_column=bias.column,
        B=B, H=H, Hkv=Hkv, M=M, N=N, q_start=q_start, scale=scale, chunk=chunk,
    )  # fmt: skip
    for name, matrix in {"q": q, "k": k, "v": v, "o": o}.items():
        setattr(given, name, Strides(*matrix[1:]))
    return given
