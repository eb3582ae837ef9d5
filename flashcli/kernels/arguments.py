"""The argument of attention kernels: one struct, passed by value, as in ``cuda/attention/arguments.h``."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any, SupportsInt

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


def argument(call: Call, chunk: int) -> Attention:
    """The argument for a call, without addresses; ``chunk`` is the number of tiles of keys in a chunk, 0 for none."""
    strides = {
        "q": call.q, "k": call.k, "v": call.v, "o": call.o, "bias_strides": call.bias_strides[:3],
        "mask_strides": call.mask_strides[:3],
    }  # fmt: skip
    return Attention(**{name: Strides(*by) for name, by in strides.items()}, chunk=chunk, **numbers(call))


def of_batches(
    addresses: Sequence[SupportsInt], d: int, *, apart: Sequence[int] = (0, 0, 0, 0), B: int = 1, **numbers: Any
) -> Attention:
    """The argument for B batches of one head, as files have them, whose rows of ``d`` numbers are contiguous.

    ``addresses`` are those of Q, K, V and O, 0 for none, and ``apart`` is how many floats their batches are apart.
    """
    places = dict(zip("QKVO", map(int, addresses), strict=True))
    strides = {name: Strides(batch, 0, d) for name, batch in zip("qkvo", apart, strict=True)}
    return Attention(**places, **strides, B=B, H=1, Hkv=1, **numbers)


def of_file(qkv: int, output: int, shape: tuple[int, int, int], **numbers: Any) -> Attention:
    """The argument for whole batches of a file, [B, 3, N, d], and of their answer, [B, N, d], at these addresses."""
    B, N, d = shape
    each = 3 * N * d
    addresses = *(qkv + 4 * index * N * d for index in range(3)), output
    return of_batches(addresses, d, apart=(each, each, each, N * d), B=B, M=N, N=N, **numbers)
