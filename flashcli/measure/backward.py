"""Gradients of attention on PyTorch's tensors, timed beside PyTorch's on the same tensors: all of a call together.

Every contender's gradients are compared with float64 first, on a few heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any

from flashcli.asked.shape import ceil_div
from flashcli.measure import in_place
from flashcli.measure.bench import L2_BYTES, REFUSED_ABOVE, Conditions
from flashcli.measure.in_place import Contender, Entrant, Ready
from flashcli.measure.rows import Failure, Gradients, Row, over_all
from flashcli.measure.tensors import Inputs, Problem, random_inputs

CHECKED_HEADS = 2  # of K and V, with all of Q's that share them
ROWS = 1024  # of scores in float64 at a time
FORWARD_TOO = ", forward too"
WITHOUT_DBIAS = "flashcli, no dbias"


def ours(kernel: str | None = None, dbias: bool = True) -> Contender:
    """`flashcli.attention_backward` with a kernel, or its own choice, of what the forward pass gave."""
    from flashcli.api import attention, attention_backward

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        given = inputs.q, inputs.k, inputs.v, problem.causal
        changes: dict[str, Any] = {"bias": inputs.bias, "mask": inputs.mask}
        o, lse = attention(*given, **changes, return_lse=True)
        wanted = dbias and inputs.bias is not None
        return functools.partial(
            attention_backward, inputs.do, *given, **changes, o=o, lse=lse, return_dbias=wanted, kernel=kernel
        )

    return Contender(kernel or ("flashcli" if dbias else WITHOUT_DBIAS), bind)


def ours_with_forward() -> Contender:
    """`flashcli.attention` and its gradients, by autograd."""
    return _with_forward(in_place.ours(name="flashcli", gradients=True))


def pytorchs() -> list[Contender]:
    """Each of PyTorch's on a GPU: the gradients; and with the forward pass, of the first."""
    found = in_place.pytorchs()
    return [*map(_alone, found), *(_with_forward(one) for one in found if one.name == in_place.EFFICIENT)]


def flex() -> Contender:
    """The gradients of PyTorch's FlexAttention, compiled."""
    return _alone(in_place.flex())


def _alone(forward: Contender) -> Contender:
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
    return [ours(), *([_alone(in_place.pytorchs_choice())] if "torch" in against else [])]


def race(case: str, entrants: Sequence[Entrant], clock: str, conditions: Conditions, device: str = "cuda") -> list[Row]:
    """A row for each entrant: those with right gradients are timed in turn."""

    def timed(entrant: Entrant, errors: dict[str, Any], seconds: list[float]) -> Row:
        contender, problem = entrant
        times = over_all(seconds)
        products = 7 if contender.name.endswith(FORWARD_TOO) else 5
        tflops = problem.operations / 2 * products / times["seconds"] / 1e12
        return Gradients(
            **vars(problem.about(case, contender.name)), **times, **errors, relative_l2=max(errors.values()),
            tflops=tflops, **problem.figures(), clock=clock,
        )  # fmt: skip

    found = [_checked(case, *entrant, conditions.seed, device) for entrant in entrants]
    return in_place.in_turn(entrants, found, timed, in_place.CLOCKS[clock], conditions.runs)


def _checked(case: str, contender: Contender, problem: Problem, seed: int, device: str) -> Ready | Failure:
    about = problem.about(case, contender.name)
    try:
        turns = []
        for index in range(min(4, max(2, ceil_div(L2_BYTES, problem.bytes)))):
            inputs = random_inputs(problem, seed + index, device, contender.takes)
            inputs = replace(inputs, do=random_inputs(problem, seed + 100 + index, device, contender.takes).q)
            for tensor in inputs.wanted:
                tensor.requires_grad_()
            turns.append(contender.bind(problem, inputs))
            if index == 0:
                errors = relative_errors(problem, inputs, turns[0]())
    except Exception as error:  # a peer may fail in any way: the other rows shall survive
        return Failure.of(about, error)
    if not (largest := max(errors.values())) <= REFUSED_ABOVE[contender.dtype]:
        return Failure(**vars(about), relative_l2=largest, error=f"wrong: relative L2 {largest:.1e}")
    return Ready(errors, turns)


def relative_errors(problem: Problem, inputs: Inputs, got: Any) -> dict[str, float]:
    """‖got - want‖ / ‖want‖ of each gradient, want in float64: over the first heads; of a bias's over its first one."""
    of_each: dict[str, list[Any]] = {"dq": [], "dk": [], "dv": []}
    group = problem.H // problem.Hkv
    for index in range(min(CHECKED_HEADS, problem.B * problem.Hkv)):
        b, kv = divmod(index, problem.Hkv)
        some = range(kv * group, (kv + 1) * group)
        of_heads = [in_float64(problem, inputs, b, h) for h in some]
        dq, dk, dv, _ = zip(*of_heads, strict=True)
        for name, one, want in (("dk", got[1][b, kv], sum(dk)), ("dv", got[2][b, kv], sum(dv))):
            of_each[name].append((one, want))
        of_each["dq"] += [(got[0][b, h], want) for h, want in zip(some, dq, strict=True)]
    if len(got) > 3:
        want = sum(in_float64(problem, inputs, b, 0)[3] for b in range(problem.B))
        of_each["dbias"] = [(got[3][0, 0], want)]
    squares = {
        name: [(float((x.detach().double() - y).norm() ** 2), float(y.norm() ** 2)) for x, y in pairs]
        for name, pairs in of_each.items()
    }
    return {name: (sum(x for x, _ in some) / sum(y for _, y in some)) ** 0.5 for name, some in squares.items()}


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
    keys, found = torch.arange(problem.N, device=q.device), [torch.zeros_like(x) for x in (q, k, v)]
    of_bias = []
    for first in range(0, problem.M, ROWS):
        rows = slice(first, min(first + ROWS, problem.M))
        changes = inputs.changes(problem, batch, head, rows).requires_grad_()
        scores = q[rows] @ k.mT * problem.d**-0.5 + changes
        if problem.causal:
            beyond = keys > torch.arange(rows.start, rows.stop, device=q.device)[:, None]
            scores = scores.masked_fill(beyond, -torch.inf)
        *of_rows, of_changes = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v, changes), do[rows])
        for total, part in zip(found, of_rows, strict=True):
            total += part
        of_bias += [of_changes] if inputs.bias is not None else []
    return [*found, torch.cat(of_bias) if of_bias else None]
