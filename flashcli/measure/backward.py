"""Gradients of attention on PyTorch's tensors, timed beside PyTorch's on the same tensors: all of a call together.

Every contender's gradients are compared with float64 first, on a few heads.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple

from flashcli.asked.shape import ceil_div
from flashcli.measure import in_place, peers
from flashcli.measure.bench import L2_BYTES, REFUSED_ABOVE, Conditions
from flashcli.measure.in_place import Ready
from flashcli.measure.rows import Failure, Gradients, Row, over_all
from flashcli.measure.tensors import Inputs, Problem, random_inputs

CHECKED_HEADS = 2  # of K and V, with all of Q's that share them
ROWS = 1024  # of scores in float64 at a time
FORWARD_TOO = ", forward too"
WITHOUT_DBIAS = "flashcli, no dbias"

Call = Callable[[], Any]


class Contender(NamedTuple):
    """``bind(problem, inputs, do)`` gives a call without arguments, for dQ, dK and dV as accurate as ``dtype``."""

    name: str
    bind: Callable[[Problem, Inputs, Any], Call]
    dtype: str = "float32"


def ours(kernel: str | None = None, dbias: bool = True) -> Contender:
    """`flashcli.attention_backward` with a kernel, or its own choice, of what the forward pass gave."""
    from flashcli.api import attention, attention_backward

    def bind(problem: Problem, inputs: Inputs, do: Any) -> Call:
        given = inputs.q, inputs.k, inputs.v, problem.causal
        changes: dict[str, Any] = {"bias": inputs.bias, "mask": inputs.mask}
        o, lse = attention(*given, **changes, return_lse=True)
        wanted = dbias and inputs.bias is not None
        return functools.partial(
            attention_backward, do, *given, **changes, o=o, lse=lse, return_dbias=wanted, kernel=kernel
        )

    return Contender(kernel or ("flashcli" if dbias else WITHOUT_DBIAS), bind)


def ours_of_halves(dtype: str) -> Contender:
    """`flashcli.attention_backward` of halves, float16 or bfloat16."""
    return Contender(f"flashcli, {dtype} in", ours().bind, dtype)


def ours_with_forward() -> Contender:
    """`flashcli.attention` and its gradients, by autograd."""
    return _with_forward("flashcli", functools.partial(_answer, in_place.ours(gradients=True)))


def pytorchs() -> list[Contender]:
    """Each of PyTorch's on a GPU: the gradients; and with the forward pass, of the first."""
    found = []
    for contender in in_place.pytorchs():
        attend = functools.partial(_answer, contender)
        found.append(Contender(contender.name, functools.partial(_bind_backward, attend), contender.dtype))
    efficient = next(x for x in in_place.pytorchs() if x.name == peers.EFFICIENT)
    return [*found, _with_forward(efficient.name, functools.partial(_answer, efficient))]


def _wanted(inputs: Inputs) -> tuple[Any, ...]:
    """Tensors whose gradients are taken: q, k, v, and the bias, if there is one."""
    return tuple(x for x in (inputs.q, inputs.k, inputs.v, inputs.bias) if x is not None)


def _answer(contender: in_place.Contender, problem: Problem, inputs: Inputs) -> Any:
    return contender.bind(problem, inputs)()


def _bind_backward(attend: Callable[[Problem, Inputs], Any], problem: Problem, inputs: Inputs, do: Any) -> Call:
    import torch

    answer = attend(problem, inputs)
    return functools.partial(torch.autograd.grad, answer, _wanted(inputs), do, retain_graph=True)


def _with_forward(name: str, attend: Callable[[Problem, Inputs], Any]) -> Contender:
    import torch

    def bind(problem: Problem, inputs: Inputs, do: Any) -> Call:
        return lambda: torch.autograd.grad(attend(problem, inputs), _wanted(inputs), do)

    return Contender(name + FORWARD_TOO, bind)


def contenders(kernels: Collection[str], against: Collection[str]) -> list[Contender]:
    """Our own choice with and without the forward pass, kernels of ours, and PyTorch's if wanted."""
    return [
        ours(), *map(ours, kernels), ours_with_forward(), *(pytorchs() if "torch" in against else [])
    ]  # fmt: skip


def cpu_contenders(against: Collection[str]) -> list[Contender]:
    return [ours(), *([_pytorchs_choice()] if "torch" in against else [])]


def _pytorchs_choice() -> Contender:
    """PyTorch's attention, whichever it chooses."""
    attend = functools.partial(_answer, in_place.pytorchs_choice())
    return Contender("PyTorch SDPA", functools.partial(_bind_backward, attend))


def race(case: str, problem: Problem, entrants: Sequence[Contender], conditions: Conditions, device: str) -> list[Row]:
    """A row for each contender: those with right gradients are timed in turn."""
    clock = "gpu" if device == "cuda" else "cpu"

    def timed(contender: Contender, errors: dict[str, Any], seconds: list[float]) -> Row:
        times = over_all(seconds)
        products = 7 if contender.name.endswith(FORWARD_TOO) else 5
        tflops = problem.operations / 2 * products / times["seconds"] / 1e12
        return Gradients(
            **vars(problem.about(case, contender.name)), **times, **errors, relative_l2=max(errors.values()),
            tflops=tflops, **problem.figures(), clock=clock,
        )  # fmt: skip

    found = [_checked(case, problem, contender, conditions.seed, device) for contender in entrants]
    return in_place.in_turn(entrants, found, timed, clock, conditions.runs)


def measured(
    problems: dict[str, Problem], entrants: Sequence[Contender], conditions: Conditions, device: str = "cuda"
) -> Iterator[Row]:  # fmt: skip
    """The rows of all problems."""
    for case, problem in problems.items():
        yield from race(case, problem, entrants, conditions, device)


def _checked(case: str, problem: Problem, contender: Contender, seed: int, device: str) -> Ready | Failure:
    about = problem.about(case, contender.name)
    try:
        turns = []
        for index in range(min(4, max(2, ceil_div(L2_BYTES, problem.bytes)))):
            inputs = random_inputs(problem, seed + index, device, contender.dtype)
            for tensor in _wanted(inputs):
                tensor.requires_grad_()
            do = random_inputs(problem, seed + 100 + index, device, contender.dtype).q
            turns.append(contender.bind(problem, inputs, do))
            if index == 0:
                errors = relative_errors(problem, inputs, do, turns[0]())
    except Exception as error:  # a peer may fail in any way: the other rows shall survive
        return Failure.of(about, error)
    if not (largest := max(errors.values())) <= REFUSED_ABOVE[contender.dtype]:
        return Failure(**vars(about), relative_l2=largest, error=f"wrong: relative L2 {largest:.1e}")
    return Ready(errors, turns)


def relative_errors(problem: Problem, inputs: Inputs, do: Any, got: Any) -> dict[str, float]:
    """‖got - want‖ / ‖want‖ of each gradient, want in float64: over the first heads; of a bias's over its first one."""
    heads = range(min(CHECKED_HEADS, problem.B * problem.Hkv))
    of_each: dict[str, list[Any]] = {"dq": [], "dk": [], "dv": []}
    for index in heads:
        b, kv = divmod(index, problem.Hkv)
        group = problem.H // problem.Hkv
        some = slice(kv * group, (kv + 1) * group)
        do_, q, k, v = do[b, some], *(x.detach()[b, at] for x, at in ((inputs.q, some), (inputs.k, kv), (inputs.v, kv)))
        changes = [inputs.changes(problem, b, h) for h in range(problem.H)[some]]
        want = _in_float64(problem, do_, q, k, v, changes)
        mine = got[0].detach()[b, some], got[1].detach()[b, kv], got[2].detach()[b, kv]
        for name, one, other in zip(of_each, mine, want, strict=True):
            of_each[name].append((float((one.double() - other).norm()), float(other.norm())))
    if len(got) > 3:
        want_dbias = _dbias_in_float64(problem, inputs, do)
        of_each["dbias"] = [(float((got[3].detach()[0, 0].double() - want_dbias).norm()), float(want_dbias.norm()))]
    return {name: (sum(x**2 for x, _ in pairs) / sum(y**2 for _, y in pairs)) ** 0.5 for name, pairs in of_each.items()}


def _dbias_in_float64(problem: Problem, inputs: Inputs, do: Any) -> Any:
    """The gradient [M, N] of a bias [1, H, M, N], of its first head: the sum of all batches."""
    found: Any = 0
    for b in range(problem.B):
        q, k, v, d_o = (x.detach()[b, 0].double() for x in (inputs.q, inputs.k, inputs.v, do))
        P = (q @ k.mT * problem.d**-0.5 + inputs.changes(problem, b, 0)).softmax(-1)
        dP = d_o @ v.mT
        found += P * (dP - (P * dP).sum(-1, keepdim=True))
    return found


def _in_float64(problem: Problem, do: Any, q: Any, k: Any, v: Any, changes: Sequence[Any]) -> tuple[Any, Any, Any]:
    """dQ [group, M, d], dK and dV [N, d] of the heads that share one of K and V, some rows at a time."""
    import torch

    do, q, k, v = (x.double() for x in (do, q, k, v))
    scale, dq, dk, dv = problem.d**-0.5, torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    keys = torch.arange(problem.N, device=q.device)
    for head in range(len(q)):
        for first in range(0, problem.M, ROWS):
            rows = slice(first, min(first + ROWS, problem.M))
            scores = q[head, rows] @ k.mT * scale + changes[head][rows]
            if problem.causal:
                scores.masked_fill_(keys > torch.arange(rows.start, rows.stop, device=q.device)[:, None], -torch.inf)
            P = scores.softmax(-1)
            dP = do[head, rows] @ v.mT
            dS = P * (dP - (P * dP).sum(-1, keepdim=True))
            dq[head, rows] = scale * dS @ k
            dk += scale * dS.mT @ q[head, rows]
            dv += P.mT @ do[head, rows]
    return dq, dk, dv
