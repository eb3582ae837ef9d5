"""Steps of a case study on GPT-2's attention, `STEPS` of `bench.case_study`, timed one after the other.

``python -m bench.gpt2.steps [--json FILE]`` times them in GPT-2's shape, causal, on slices of a fused projection,
beside PyTorch's attention and ours. Needs PyTorch and a GPU.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import click

from bench import scripts
from bench.case_study import HEAD, SHARED, STEPS
from flashcli.asked.shape import ceil_div
from flashcli.kernels import attention as ladder
from flashcli.kernels.operation import Kernel, Tiling
from flashcli.kernels.problem import Problem
from flashcli.measure import in_place, tensors
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Row
from flashcli.terminal import as_json


def kernels() -> dict[str, Kernel]:
    """Each step with all before it, as a kernel for arrays on a GPU."""
    found: dict[str, Kernel] = {}
    macros: dict[str, int] = {}
    across = down = Br = Bc = 0
    for step in STEPS:
        macros = macros | step.macros
        across, down, Br, Bc = step.across or across, step.down or down, step.Br or Br, step.Bc or Bc
        columns = Br + Bc + (Br if macros["O_PLACE"] == SHARED else 0)
        shared = 4 * (HEAD * columns + Bc * (HEAD + macros["PAD"]) + Br * Bc)
        tiling = Tiling(Br, Bc, across * down, shared, (("ACROSS", across), *macros.items()))
        found[step.name] = Kernel(
            name=step.name, file=str(Path(__file__).with_name("steps.cu")), summary=step.change,
            tiling=functools.partial(_given, tiling), launches=ladder.block_per_row_tile,
            macros=ladder._strided_macros, workspace=_m_l_and_weights, refuses=_refused, strided=True,
        )  # fmt: skip
    return found


def _given(tiling: Tiling, problem: Problem) -> Tiling:
    return tiling


def _m_l_and_weights(tiling: Tiling, problem: Problem) -> int:
    """Bytes of m, l and O's weight of every row, padded to whole tiles, in float."""
    return problem.B * ceil_div(problem.M, tiling.Br) * tiling.Br * 3 * 4


def _refused(problem: Problem) -> str:
    plain = problem.d == HEAD and problem.aligned and not problem.lse and not problem.bias
    return "" if plain else f"it takes heads of {HEAD} numbers whose rows start on 16 bytes, without LSE or bias"


def measure(runs: int) -> Iterator[Row]:
    """A row for each step and each other contender, in batches of one sequence and of eight."""
    ladder.KERNELS.update(kernels())  # for this process: so `flashcli.attention` knows them by name
    math, efficient, *_ = in_place.pytorchs()
    names = [*(step.name for step in STEPS), "register_tiled"]
    contenders = [*map(in_place.ours, names), in_place.ours(), efficient, math]
    problems = {f"B = {B}": tensors.Problem(B, 12, 12, 1024, 1024, HEAD, True, "qkv") for B in (1, 8)}
    yield from in_place.bench(problems, contenders, Conditions(runs, True, 0))


@click.command()
@scripts.runs_option(20)
@as_json.json_option
def main(runs: int, json_path: str | None) -> None:
    """Time the steps, correctness first, beside PyTorch's attention and ours."""
    scripts.measure("steps", measure(runs), json_path, module="gpt2.steps")


if __name__ == "__main__":
    scripts.run(main)
