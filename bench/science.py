"""Attention as scientific models ask for it, and its gradients: a pair bias that all rows share, and a mask beside it.

``python -m bench.science [--json FILE]`` needs PyTorch and a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from typing import Any

import click

from bench import scripts
from flashcli.measure import backward, in_place
from flashcli.measure.bench import Conditions
from flashcli.measure.in_place import EFFICIENT, Contender
from flashcli.measure.rows import Row
from flashcli.measure.tensors import Inputs, Problem
from flashcli.terminal import as_json

SIZES = (256, 768)
TRITON = "Triton bf16x6"


def problems(N: int) -> dict[str, Problem]:
    """Triangle attention's shapes: N rows, 4 heads, and as many queries and keys of 32 numbers as there are rows."""
    plain, bias, mask = Problem(N, 4, 4, N, N, 32), (1, 4, N, N), (N, 1, 1, N)
    return {
        f"{N} rows": plain,
        f"{N} rows, bias": replace(plain, bias=bias),
        f"{N} rows, bias and mask": replace(plain, bias=bias, mask=mask),
    }


def flex() -> Contender:
    """PyTorch's FlexAttention, compiled, which reads a bias and a mask as it computes scores."""
    import torch
    from torch.nn.attention.flex_attention import flex_attention

    torch.compiler.reset()  # else what was compiled for other problems counts against how often it may be compiled
    compiled = torch.compile(flex_attention)

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        bias, mask = inputs.bias, inputs.mask

        def changed(score: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
            if bias is not None:
                score = score + _at(bias, b, h, i, j)
            return score if mask is None else torch.where(_at(mask, b, h, i, j), score, -torch.inf)

        return functools.partial(compiled, inputs.q, inputs.k, inputs.v, score_mod=changed)

    return Contender("FlexAttention", bind)


def _at(tensor: Any, *index: Any) -> Any:
    """An element of a tensor that is broadcast along axes of length 1."""
    return tensor[tuple(i if length > 1 else 0 for i, length in zip(index, tensor.shape, strict=True))]


def without_dbias() -> Contender:
    """`flashcli.attention_backward` where the bias's gradient is not wanted."""

    def bind(problem: Problem, inputs: Inputs) -> Callable[[], Any]:
        call: Any = backward.ours().bind(problem, inputs)
        return functools.partial(call, return_dbias=False)

    return Contender("flashcli, no dbias", bind)


def measured(sizes: Iterable[int], conditions: Conditions) -> Iterator[Row]:
    """The rows of each problem: forward, then gradients, with the bias's and without."""
    for case, problem in (one for N in sizes for one in problems(N).items()):
        changed = problem.bias is not None
        tritons = [] if changed else [x for x in in_place.tritons() if x.name == TRITON]  # it has no bias and no mask
        forward = [in_place.ours(), *_efficient(in_place.pytorchs()), flex(), *tritons]
        yield from in_place.bench({case: problem}, forward, conditions)
        ours = [backward.ours(), *([without_dbias()] if changed else [])]
        gradients = [*ours, *_efficient(backward.pytorchs()), backward.alone(flex())]
        yield from in_place.bench({case: problem}, gradients, conditions, contest=backward.GRADIENTS)


def _efficient(found: list[Contender]) -> list[Contender]:
    """PyTorch's efficient attention, alone and with the forward pass, of those found."""
    return [one for one in found if one.name == EFFICIENT]


@click.command()
@click.option("--rows", type=click.Choice([*map(str, SIZES)]), help="Rows of the triangle; by default both.")
@scripts.runs_option(10)
@as_json.json_option
def main(rows: str | None, runs: int, json_path: str | None) -> None:
    """Time triangle attention and its gradients on this machine's first GPU, beside PyTorch's."""
    scripts.measure("science", measured([int(rows)] if rows else SIZES, Conditions(runs, False, 0)), json_path)


if __name__ == "__main__":
    scripts.run(main)
