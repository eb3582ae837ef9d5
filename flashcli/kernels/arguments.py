"""The argument of attention kernels: one struct, passed by value, as in ``cuda/attention/arguments.h``."""

from __future__ import annotations

import ctypes
from typing import Any, NamedTuple, SupportsInt

from flashcli.asked.attention import Call

SIGHT_POINTERS = "slopes", "q_starts", "k_starts"  # ALiBi's, and where packed sequences start
# What arrays' calls give; 0 where there is none.
POINTERS = ("Q", "K", "V", "O", "lse", "bias", "workspace", "mask", *SIGHT_POINTERS)


class Strides(ctypes.Structure):
    """Strides of batches, heads and rows of a matrix [B, H, rows, d], in floats."""

    _fields_ = (("batch", ctypes.c_longlong), ("head", ctypes.c_longlong), ("row", ctypes.c_longlong))


# Masks, and what says which keys are seen, are behind all else: kernels without find their arguments where they were.
MASK = ("mask", ctypes.c_void_p), ("mask_strides", Strides), ("mask_column", ctypes.c_longlong)
SIGHT: tuple[tuple[str, Any], ...] = (
    ("slopes", ctypes.c_void_p), ("slopes_batch", ctypes.c_longlong), ("slopes_head", ctypes.c_longlong),
    ("q_starts", ctypes.c_void_p), ("k_starts", ctypes.c_void_p),
    *((name, ctypes.c_int) for name in ("first", "position", "S", "tokens", "key_tokens")),
    *((name, ctypes.c_int) for name in ("sequence", "first_row", "first_key", "tile")),
)  # fmt: skip


def numbers(call: Call) -> dict[str, float]:
    """The fields that all arguments of a call have, but for addresses, strides of matrices, and what blocks find."""
    return {
        "bias_column": call.bias_strides[3], "mask_column": call.mask_strides[3], "B": call.B, "H": call.H,
        "Hkv": call.Hkv, "M": call.M, "N": call.N, "q_start": call.q_start, "scale": call.scale,
        "slopes_batch": call.slopes[0], "slopes_head": call.slopes[1], "first": call.first, "position": call.position,
        "S": call.sequences, "tokens": call.M, "key_tokens": call.N,
    }  # fmt: skip


class Attention(ctypes.Structure):
    """The argument of every attention kernel; cuda/attention/arguments.h says what each field means."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*POINTERS[:7], "nonfinite")),
        *((name, Strides) for name in (*"qkvo", "bias_strides")),
        ("bias_column", ctypes.c_longlong),
        *((name, ctypes.c_int) for name in ("B", "H", "Hkv", "M", "N", "q_start")),
        ("scale", ctypes.c_float),
        ("tile_i", ctypes.c_int),
        ("tile_j", ctypes.c_int),
        ("chunk", ctypes.c_int),
        *MASK,
        *SIGHT,
    )


class Matrix(NamedTuple):
    """The address of a float32 matrix [B, H, rows, d] in bytes, and its strides in floats."""

    address: int
    batch: int
    head: int
    row: int

    @classmethod
    def of_batches(cls, address: SupportsInt, batch: int, d: int) -> Matrix:
        """The matrix of batches of one head, ``batch`` floats apart, whose rows of ``d`` numbers are contiguous."""
        return cls(int(address), batch, 0, d)


def argument(call: Call, chunk: int) -> Attention:
    """The argument for a call, without addresses; ``chunk`` is the number of tiles of keys in a chunk, 0 for none."""
    strides = {
        "q": call.q, "k": call.k, "v": call.v, "o": call.o, "bias_strides": call.bias_strides[:3],
        "mask_strides": call.mask_strides[:3],
    }  # fmt: skip
    return Attention(
        **{name: Strides(*by) for name, by in strides.items()}, chunk=chunk, **numbers(call)
    )  # fmt: skip


NOWHERE = Matrix(0, 0, 0, 0)


def of_batches(
    q: Matrix,
    k: Matrix,
    v: Matrix,
    o: Matrix,
    *,
    B: int,
    M: int,
    N: int,
    scale: float = 0.0,
    q_start: int = 0,
    workspace: SupportsInt = 0,
    nonfinite: int = 0,
) -> Attention:
    """The argument for B batches of one head, as files have them: M queries from position ``q_start``, and N keys."""
    given = Attention(
        Q=q.address, K=k.address, V=v.address, O=o.address, workspace=int(workspace), nonfinite=nonfinite, B=B, H=1,
        Hkv=1, M=M, N=N, q_start=q_start, scale=scale,
    )  # fmt: skip
    for name, matrix in {"q": q, "k": k, "v": v, "o": o}.items():
        setattr(given, name, Strides(*matrix[1:]))
    return given
