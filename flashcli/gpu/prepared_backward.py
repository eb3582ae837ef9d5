"""From what gradients are asked of arrays on a GPU to launches that can be repeated, whatever library they are of."""

from __future__ import annotations

import functools

from flashcli.asked.attention import Backward
from flashcli.gpu.launcher import Place, PreparedBackward
from flashcli.gpu.prepared import ALIGNMENT, SHAPES
from flashcli.kernels.backward import Plan, Problem, argument, check_name, plan, sizes_of


def check_names(backend: str, kernel: str | None) -> None:
    """Refuse what there is not, or not for arrays on a GPU."""
    if backend not in ("auto", "cuda"):
        raise ValueError(f"backend must be 'auto' or 'cuda' for arrays on a GPU, not {backend!r}")
    check_name(kernel)


def is_aligned(asked: Backward, addresses: int) -> bool:
    """Whether the rows of all matrices start on `ALIGNMENT`; ``addresses`` are those of all, or'ed."""
    call = asked.of
    by = call.q, call.k, call.v, call.o, asked.do, asked.dq, asked.dk, asked.dv
    return addresses % ALIGNMENT == 0 and not any(stride % 4 for strides in by for stride in strides)


@functools.lru_cache(maxsize=SHAPES)
def prepare(place: Place, asked: Backward, aligned: bool, kernel: str | None) -> PreparedBackward:
    """Its kernels compiled and loaded, its arguments packed but for the addresses. There is something to compute."""
    return PreparedBackward(place, planned(place.capability, asked, aligned, kernel), argument(asked))


def planned(capability: tuple[int, int], asked: Backward, aligned: bool, kernel: str | None) -> Plan:
    """The launches, of which nothing is compiled yet."""
    call = asked.of
    problem = Problem(call.d, call.causal, call.bias, call.bias_strides[3] == 1, aligned)
    return plan(capability, problem, sizes_of(asked), kernel)
