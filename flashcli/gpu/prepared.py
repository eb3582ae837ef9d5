"""From what is asked of arrays on a GPU to launches that can be repeated, whatever library the arrays are of."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from flashcli.asked.attention import Call, Operand
from flashcli.errors import UsageError
from flashcli.gpu.launcher import Place, Prepared
from flashcli.kernels.arguments import Attention, Bias, Matrix, attention
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.plan import Plan, plan
from flashcli.kernels.types import Problem, check_precision

ALIGNMENT = 16  # bytes on which rows start, for kernels to move four numbers at a time
SHAPES = 1024  # that are remembered: a growing cache of keys asks for another one with each token
CANNOT_TELL = 10**5  # steps after which two arrays count as overlapping


class Options(NamedTuple):
    """How attention is to be computed: the arguments of that name of `flashcli.attention`."""

    backend: str = "auto"
    kernel: str | None = None
    precision: str = "fp32"
    batch_invariant: bool = True
    return_lse: bool = False


def check_options(options: Options) -> None:
    """Refuse what there is not, or not for arrays on a GPU."""
    if options.backend not in ("auto", "cuda"):
        raise ValueError(f"backend must be 'auto' or 'cuda' for arrays on a GPU, not {options.backend!r}")
    check_precision(options.precision)
    able = [name for name, kernel in KERNELS.items() if kernel.strided]
    if options.kernel is not None and options.kernel not in able:
        raise UsageError(
            f"there is no kernel {options.kernel!r} for arrays on a GPU.", f"choose one of {', '.join(able)}."
        )
    if options.kernel is not None and options.precision not in KERNELS[options.kernel].precisions:
        has = ", ".join(KERNELS[options.kernel].precisions)
        raise UsageError(f"kernel {options.kernel} has no {options.precision}.", f"it has {has}.")


def is_aligned(call: Call, addresses: int) -> bool:
    """Whether the rows of all matrices start on `ALIGNMENT`; ``addresses`` are those of all, or'ed."""
    return addresses % ALIGNMENT == 0 and not any(
        stride % 4 for by in (call.q, call.k, call.v, call.o) for stride in by
    )


def _is_dense(call: Call) -> bool:
    """Whether the rows of each head follow one another."""
    strides = (call.q, call.M), (call.k, call.N), (call.v, call.N), (call.o, call.M)
    return all(row == call.d or rows == 1 for (_, _, row), rows in strides)


@functools.lru_cache(maxsize=SHAPES)
def prepare(place: Place, call: Call, aligned: bool, options: Options) -> Prepared:
    """Its kernels compiled and loaded, its arguments packed but for the addresses. There is something to compute."""
    check_options(options)
    return Prepared(place, planned(place, call, aligned, options), _arguments(call))


def planned(place: Place, call: Call, aligned: bool, options: Options) -> Plan:
    """The launches, of which nothing is compiled yet."""
    problem = Problem(
        call.B * call.H, call.M, call.N, call.d, call.causal, options.precision, place.multiprocessors,
        lse=bool(options.return_lse), dense=_is_dense(call), aligned=aligned, bias=call.bias,
        bias_contiguous=call.bias_strides[3] == 1, batch_invariant=bool(options.batch_invariant),
    )  # fmt: skip
    return plan(place.capability, problem, call.B, call.H, call.Hkv, options.kernel)


def _arguments(call: Call) -> Attention:
    q, k, v, o = (Matrix(0, *strides) for strides in (call.q, call.k, call.v, call.o))
    return attention(
        q, k, v, o, B=call.B, M=call.M, N=call.N, scale=call.scale, H=call.H, Hkv=call.Hkv, q_start=call.q_start,
        bias=Bias(0, *call.bias_strides),
    )  # fmt: skip


def refuse_overlap(out: int, of_out: Operand, inputs: Mapping[str, tuple[int, Operand]]) -> None:
    """Raise ValueError where ``out`` shares memory with an input: each is an address and what lies there."""
    for name, (address, operand) in inputs.items():
        if _overlap(_there(out, of_out), _there(address, operand)):
            raise ValueError(f"out must not share memory with {name}")


def _there(address: int, operand: Operand) -> np.ndarray:
    """An array that only says where it is: it is never read."""
    size = np.dtype(operand.dtype).itemsize
    there = {"shape": tuple(operand.shape), "strides": tuple(size * stride for stride in operand.strides)}
    lies: Any = type("Lies", (), {})()
    lies.__array_interface__ = {
        **there, "typestr": np.dtype(operand.dtype).str, "data": (address, False), "version": 3
    }  # fmt: skip
    return np.asarray(lies)


def _overlap(a: np.ndarray, b: np.ndarray) -> bool:
    try:
        return np.shares_memory(a, b, max_work=CANNOT_TELL)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
