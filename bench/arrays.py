"""Attention on PyTorch's tensors where they lie, beside PyTorch's: heads, grouped heads, a bias, layouts, the time of a
call on the host, CUDA graphs.

``python -m bench.arrays [--json FILE]`` needs PyTorch and a GPU. What is wanted of it is in
`bench.targets`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

import click

from bench import scripts
from bench.clocks import CLOCKS
from bench.targets import LAYOUT_CASES
from flashcli.measure import in_place, peers
from flashcli.measure.bench import Conditions
from flashcli.measure.in_place import Contender, Entrant
from flashcli.measure.rows import Row
from flashcli.measure.tensors import LAYOUTS, Problem
from flashcli.terminal import as_json


def _in_pytorchs_place(gradients: bool = False) -> Contender:
    """`flashcli.torch.scaled_dot_product_attention`."""
    from flashcli.torch import scaled_dot_product_attention

    return Contender("flashcli.torch SDPA", in_place.bound(scaled_dot_product_attention), gradients=gradients)


class Case(NamedTuple):
    """Entrants of a race, and its clock; the first is the one that others are compared with."""

    name: str
    clock: str  # one of `bench.clocks.CLOCKS`
    entrants: list[Entrant]


def cases(triton: bool = True) -> Iterator[Case]:
    """The cases on a GPU; with the Triton kernel, which takes long to compile, or without it."""
    ours, (math, efficient, *_) = in_place.ours(), in_place.pytorchs()
    grouped = [ours, efficient, math, *(in_place.tritons()[-1:] if triton else [])]
    yield _case("grouped heads", "gpu", Problem(4, 24, 12, 3081, 3081, 64), *grouped)
    biased = Problem(4, 16, 16, 1024, 1024, 64, bias=(4, 1, 1024, 1024))
    yield _case("bias", "gpu", biased, ours, efficient, math)
    for name, (B, H, N, d) in zip(
        LAYOUT_CASES, ((50, 10, 2048, 64), (200, 10, 200, 64), (1700, 8, 128, 32)), strict=True
    ):
        problems = [Problem(B, H, H, N, N, d, layout=layout) for layout in LAYOUTS]
        yield Case(name, "gpu", [*((ours, problem) for problem in problems), (efficient, problems[0])])
    tiny = Problem(1, 4, 4, 32, 32, 64)
    yield _case("a call", "host", tiny, ours, _in_pytorchs_place(), in_place.pytorchs_choice())
    wanted = in_place.ours(gradients=True), _in_pytorchs_place(True), in_place.pytorchs_choice(True)
    yield _case("a call, gradients", "host", tiny, *wanted)
    gpt2 = Problem(1, 12, 12, 512, 512, 64, causal=True)
    yield _case("replayed", "graph", gpt2, ours, efficient, math)
    yield _case("replayed, longer", "graph", replace(gpt2, M=1024, N=1024), ours, efficient, math)


def _case(name: str, clock: str, problem: Problem, *contenders: in_place.Contender) -> Case:
    return Case(name, clock, [(contender, problem) for contender in contenders])


def measured(chosen: Iterator[Case], conditions: Conditions, device: str = "cuda") -> Iterator[Row]:
    """A row for each entrant of each case."""
    for case in chosen:
        yield from in_place.race(case.name, case.entrants, case.clock, conditions, device, clocks=CLOCKS)


@click.command()
@scripts.runs_option(20)
@click.option("--triton/--no-triton", default=True, show_default=True, help="Beside the Triton kernel, too.")
@as_json.json_option
def main(runs: int, triton: bool, json_path: str | None) -> None:
    """Time attention on PyTorch's tensors on this machine's first GPU, and say which targets are reached."""
    entered = cases(triton and peers.installed("triton"))
    scripts.measure("arrays", measured(entered, Conditions(runs, False, 0)), json_path)


if __name__ == "__main__":
    scripts.run(main)
