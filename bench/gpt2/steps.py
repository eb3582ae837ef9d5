"""Steps of a case study on GPT-2's attention, each change alone: which of our rungs has it, and what it gains here.

``python -m bench.gpt2.steps [--json FILE]`` times them in GPT-2's shape, causal, on slices of a fused projection,
beside PyTorch's attention and ours. Needs PyTorch and a GPU.

Source: Gordon Gustafson, "llm-inference", of whose twelve versions only the descriptions were read.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import click

from bench import scripts
from bench.rows import Stepped
from flashcli.asked.shape import ceil_div
from flashcli.errors import MISMATCH
from flashcli.kernels import attention as ladder
from flashcli.kernels.operation import Kernel, Tiling
from flashcli.kernels.problem import Problem
from flashcli.measure import bench, in_place, machine, peers, tensors
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import InPlace, Row
from flashcli.terminal import as_json

GLOBAL, SHARED, REGISTERS = range(3)  # where O is
HEAD = 64
BEGINNING = {
    "PAD": 0, "FAST_EXP": 0, "SHUFFLE": 0, "DIVIDE_LATE": 0, "READ_ONLY": 0, "FLOAT4": 0, "O_PLACE": GLOBAL, "TILED": 0,
    "SWIZZLE": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Step:
    """A change, the rungs of our ladder that have it, and what differs from the step before in macros and threads.

    A block has ``across`` x ``down`` threads on Br x Bc scores; 0 is as before.
    """

    name: str
    change: str
    rungs: str
    macros: dict[str, int] = field(default_factory=dict)
    across: int = 0
    down: int = 0
    Br: int = 0
    Bc: int = 0


STEPS = (
    Step("v1", "one kernel; O, m and l in global memory", "`fused`", BEGINNING, 32, 16, 64, 64),
    Step("v2", "rows of K padded by 4 bytes", "`no_bank_conflicts`, by other layouts", {"PAD": 1}),
    Step("v3", "32 x 32 threads on tiles of 32 x 32", "none", {}, 32, 32, 32, 32),
    Step("v4", "an approximate exponential", "`restructured`", {"FAST_EXP": 1}),
    Step("v5", "m and l by warp shuffles, in registers", "`register_tiled`", {"SHUFFLE": 1}),
    Step("v6, division", "division out of the loop over keys", "all", {"DIVIDE_LATE": 1}),
    Step("v6, restrict", "loads as `__restrict__` allows them", "none", {"READ_ONLY": 1}),
    Step("v7", "four numbers to a load", "`float4`", {"FLOAT4": 1}),
    Step("v8", "O in shared memory", "none", {"O_PLACE": SHARED}),
    Step("v9", "a register tile of 2 x 1", "none", {"TILED": 1}, 16, 32),
    Step("v10", "a register tile of 2 x 2", "none", {}, 16, 32, 64, 32),
    Step(
        "v12", "a register tile of 4 x 4; O in registers, a swizzle for the padding", "`register_tiled`, with 8 x 8",
        {"O_PLACE": REGISTERS, "SWIZZLE": 1, "PAD": 0}, 16, 16, 64, 64,
    ),
)  # fmt: skip


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
    steps = {step.name: step for step in STEPS}
    math, efficient, *_ = in_place.pytorchs()
    entrants = [*map(in_place.ours, [*steps, "register_tiled"]), in_place.ours(), efficient, math]
    for B in (1, 8):
        problem = tensors.Problem(B, 12, 12, 1024, 1024, HEAD, causal=True, layout="qkv")
        raced = [(one, problem) for one in entrants]
        for row in in_place.race(f"B = {B}", raced, "gpu", Conditions(runs, True, 0)):
            step = steps.get(row.contender) if isinstance(row, InPlace) else None
            yield Stepped(**vars(row), change=step.change, rungs=step.rungs) if step else row


@click.command()
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Time each so often.")
@as_json.json_option
def main(runs: int, json_path: str | None) -> None:
    """Time the steps, correctness first, beside PyTorch's attention and ours."""
    peers.check_installed("torch", gpu=True)
    rows = list(measure(runs))
    scripts.publish("steps", machine.pytorchs_circumstances("cuda"), rows, json_path, module="gpt2.steps")
    if bench.failed(rows):
        raise SystemExit(MISMATCH)


if __name__ == "__main__":
    scripts.run(main)
