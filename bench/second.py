"""Gradients of attention's gradients, beside those of PyTorch's operations.

``python -m bench.second [--json FILE]`` needs PyTorch and a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from bench import scripts
from flashcli.measure import in_place, peers
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Gradients, Row, over_all
from flashcli.measure.tensors import Inputs, Problem, random_inputs

PRODUCTS = 12  # of two matrices for each head, that all ways need: five for scores, seven for sums
CHECKED_HEADS = 2
NAMES = "dq", "dk", "dv"


def problems() -> dict[str, Problem]:
    """Heads of each length that has tiles of its own, with the causal mask and without."""
    found = {f"heads of {d}": Problem(4, 12, 12, 1024, 1024, d) for d in (32, 64, 128)}
    return found | {f"{name}, causal": Problem(4, 12, 12, 1024, 1024, one.d, True) for name, one in found.items()}


class Drawn(NamedTuple):
    """The arrays of gradients, and the gradients of a loss with respect to dQ, dK and dV."""

    inputs: Inputs
    do: Any
    weights: tuple[Any, ...]


def drawn(problem: Problem, seed: int, device: str) -> Drawn:
    """Random numbers for a problem."""
    inputs, of_loss = (random_inputs(problem, seed + more, device) for more in (0, 100))
    do = random_inputs(problem, seed + 200, device).q
    for x in (inputs.q, inputs.k, inputs.v, do):
        x.requires_grad_()
    return Drawn(inputs, do, (of_loss.q, of_loss.k, of_loss.v))


def second(attend: Callable[[], Any], given: Drawn) -> Callable[[], Any]:
    """A call for the loss's gradients with respect to Q, K, V and dO, of an attention whose gradients are there."""
    import torch

    matrices = given.inputs.q, given.inputs.k, given.inputs.v
    first = torch.autograd.grad(attend(), matrices, given.do, create_graph=True)
    return functools.partial(torch.autograd.grad, first, (*matrices, given.do), given.weights, retain_graph=True)


def relative_errors(problem: Problem, given: Drawn, got: Sequence[Any]) -> list[float]:
    """‖got - want‖ / ‖want‖ of each, want in float64, over the first heads of the first batch."""
    import torch

    def wide(x: Any) -> Any:
        return x.detach()[:1, :CHECKED_HEADS].double()

    q, k, v, do = (wide(x).requires_grad_() for x in (given.inputs.q, given.inputs.k, given.inputs.v, given.do))
    scores = q @ k.mT * problem.d**-0.5
    if problem.causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -torch.inf)
    first = torch.autograd.grad(scores.softmax(-1) @ v, (q, k, v), do, create_graph=True)
    want = torch.autograd.grad(first, (q, k, v, do), [wide(x) for x in given.weights])
    return [float((wide(x) - y).norm() / y.norm()) for x, y in zip(got, want, strict=True)]


def race(case: str, problem: Problem, conditions: Conditions, device: str = "cuda") -> Iterator[Row]:
    """A row of ours and one of PyTorch's operations, timed in turn."""
    given = [drawn(problem, conditions.seed + i, device) for i in range(2)]
    contenders = [in_place.ours(gradients=True), in_place.pytorchs()[0]]
    turns = [[second(one.bind(problem, x.inputs), x) for x in given] for one in contenders]
    errors = [relative_errors(problem, given[0], calls[0]()) for calls in turns]
    clock = "gpu" if device == "cuda" else "cpu"
    seconds = in_place.CLOCKS[clock](turns, conditions.runs)
    for contender, of_each, some in zip(contenders, errors, seconds, strict=True):
        times: dict[str, Any] = over_all(some) | dict(zip(NAMES, of_each[:3], strict=True))
        yield Gradients(
            **vars(problem.about(case, contender.name)), **times, **problem.figures(), clock=clock,
            relative_l2=max(of_each), tflops=problem.operations / 2 * PRODUCTS / times["seconds"] / 1e12,
        )  # fmt: skip
    peers.release()


def measured(conditions: Conditions) -> Iterator[Row]:
    """The rows of all problems."""
    for case, problem in problems().items():
        yield from race(case, problem, conditions)


main = scripts.of_tensors(
    "second", measured, 10, "Time gradients of gradients on this machine's first GPU, beside PyTorch's operations."
)


if __name__ == "__main__":
    scripts.run(main)
