"""Gradients of attention on PyTorch's tensors, timed beside PyTorch's on the same tensors: all of a call together.

Every contender's gradients are compared with float64 first, on a few heads.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from flashcli.measure import in_place, tensors
from flashcli.measure.bench import REFUSED_ABOVE
from flashcli.measure.in_place import Contender, Contest, Drawn
from flashcli.measure.rows import Failure, Gradients, Row
from flashcli.measure.tensors import Inputs, Problem, random_inputs

CHECKED_HEADS = 2  # of K and V, with all of Q's that share them
ROWS = 1024  # of scores in float64 at a time
FORWARD_TOO = ", forward too"
Known = dict[str, dict[tuple[int, int], Any]]  # of each gradient's name, by batch and head, tensors


def ours(kernel: str | None = None) -> Contender:
    """`flashcli.attention_backward` with a kernel, or its own choice, of what the forward pass gave."""
    from flashcli.api import attention, attention_backward

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        given = inputs.q, inputs.k, inputs.v, problem.causal
        changes: dict[str, Any] = {"bias": inputs.bias, "mask": inputs.mask}
        o, lse = attention(*given, **changes, return_lse=True)
        wanted = inputs.bias is not None
        return functools.partial(
            attention_backward, inputs.do, *given, **changes, o=o, lse=lse, return_dbias=wanted, kernel=kernel
        )

    return Contender(kernel or "flashcli", bind)


def ours_with_forward() -> Contender:
    """`flashcli.attention` and its gradients, by autograd."""
    return _with_forward(in_place.ours(name="flashcli", gradients=True))


def pytorchs() -> list[Contender]:
    """Each of PyTorch's on a GPU: the gradients; and with the forward pass, of the first."""
    found = in_place.pytorchs()
    return [*map(alone, found), *(_with_forward(one) for one in found if one.name == in_place.EFFICIENT)]


def alone(forward: Contender) -> Contender:
    """The gradients of an attention that PyTorch differentiates, without the forward pass."""
    import torch

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        answer = forward.bind(problem, inputs)()
        return functools.partial(torch.autograd.grad, answer, inputs.wanted, inputs.do, retain_graph=True)

    return forward._replace(bind=bind)


def _with_forward(forward: Contender) -> Contender:
    import torch

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(forward.bind(problem, inputs)(), inputs.wanted, inputs.do)

    return forward._replace(name=forward.name + FORWARD_TOO, bind=bind)


def contenders(kernels: Collection[str], against: Collection[str]) -> list[Contender]:
    """Our own choice with and without the forward pass, kernels of ours, and PyTorch's if wanted."""
    return [ours(), *map(ours, kernels), ours_with_forward(), *(pytorchs() if "torch" in against else [])]


def cpu_contenders(against: Collection[str]) -> list[Contender]:
    return [ours(), *([alone(in_place.pytorchs_choice())] if "torch" in against else [])]


def _drawn(problem: Problem, takes: str, gradients: bool, seed: int, device: str) -> Drawn:
    given = in_place.inputs_for(problem, takes, True, seed, device, most=4)
    of_loss = (random_inputs(problem, seed + 100 + index, device, takes).q for index in range(len(given)))
    inputs = [replace(some, do=do) for some, do in zip(given, of_loss, strict=True)]
    return Drawn(inputs, right(problem, inputs[0]))


def _judged(about: Row, known: Known, got: Sequence[Any], dtype: str) -> dict[str, Any] | Failure:
    errors = relative_errors(known, got)
    if not (largest := max(errors.values())) <= REFUSED_ABOVE[dtype]:
        return Failure(**vars(about), relative_l2=largest, error=f"wrong: relative L2 {largest:.1e}")
    return errors | {"relative_l2": largest}


# Gradients are five products of matrices, with the forward pass seven; the forward pass alone is two.
GRADIENTS = Contest(_drawn, _judged, Gradients, lambda name: (7 if name.endswith(FORWARD_TOO) else 5) / 2)


def right(problem: Problem, inputs: Inputs) -> Known:
    """Each gradient in float64 in the first heads, and where these are; a bias's in its first one."""
    known: Known = {"dq": {}, "dk": {}, "dv": {}, "dbias": {}}
    group = problem.H // problem.Hkv
    for b, kv in itertools.islice(np.ndindex(problem.B, problem.Hkv), CHECKED_HEADS):
        some = range(kv * group, (kv + 1) * group)
        dq, dk, dv, _ = zip(*(in_float64(problem, inputs, b, h) for h in some), strict=True)
        known["dq"] |= {(b, h): want for h, want in zip(some, dq, strict=True)}
        known["dk"][b, kv], known["dv"][b, kv] = sum(dk), sum(dv)
    if inputs.bias is not None:
        known["dbias"][0, 0] = sum(in_float64(problem, inputs, b, 0)[3] for b in range(problem.B))
    return known


def relative_errors(known: Known, got: Sequence[Any]) -> dict[str, float]:
    """‖got - want‖ / ‖want‖ of each gradient that a call gives, over the heads that are known."""
    errors = {}
    for (name, some), gradient in zip(known.items(), got, strict=False):
        pairs = [(gradient[place].detach().double() - want, want) for place, want in some.items()]
        off, size = (sum(float(x.norm() ** 2) for x in of) for of in zip(*pairs, strict=True))
        errors[name] = (off / size) ** 0.5
    return errors


def in_float64(problem: Problem, inputs: Inputs, batch: int, head: int) -> list[Any]:
    """The gradients [M, d], [N, d], [N, d], and [M, N] of biases if there are any, of one head of Q, in float64.

    PyTorch differentiates, some rows at a time.
    """
    import torch

    def wide(x: Any, of: int) -> Any:
        return x.detach()[batch, of].double().requires_grad_()

    assert inputs.do is not None, "it is random_inputs'"
    shared = head * problem.Hkv // problem.H
    q, k, v, do = wide(inputs.q, head), wide(inputs.k, shared), wide(inputs.v, shared), inputs.do[batch, head].double()
    found, of_bias = [torch.zeros_like(x) for x in (q, k, v)], []
    for rows in torch.arange(problem.M, device=q.device).split(ROWS):
        changes = inputs.changes(problem, batch, head, rows).requires_grad_()
        answer = tensors.in_float64(problem, q[rows], k, v, changes, rows)
        *of_rows, of_changes = torch.autograd.grad(answer, (q, k, v, changes), do[rows])
        for total, part in zip(found, of_rows, strict=True):
            total += part
        of_bias += [of_changes] if inputs.bias is not None else []
    return [*found, torch.cat(of_bias) if of_bias else None]
