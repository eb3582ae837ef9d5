from __future__ import annotations

from typing import TYPE_CHECKING

import click

from flashcli.commands import options, timing
from flashcli.errors import UsageError
from flashcli.kernels import backward as backward_kernels
from flashcli.kernels.attention import KERNELS
from flashcli.measure.tensors import LAYOUTS
from flashcli.terminal import parameters

if TYPE_CHECKING:
    from flashcli.asked.shape import Shape
    from flashcli.measure.tensors import Problem

ABLE = [name for name, kernel in KERNELS.items() if kernel.strided]
GRADIENTS = list(backward_kernels.KERNELS)


@click.command(
    epilog=options.examples(
        "flashcli bench-tensors --shape 4,3081,64 --heads 24 --kv-heads 12 --against torch",
        "flashcli bench-tensors --case t10 --heads 4 --layout qkv --kernel wgmma",
        "flashcli bench-tensors --backward --shape 4,1024,64 --heads 12 --causal",
    )
)
@options.case_option
@options.shape_option
@click.option(
    "--heads", metavar="H", type=click.IntRange(1), help="Heads of Q; by default as many as of K and V, or 1."
)
@click.option("--kv-heads", metavar="H", type=click.IntRange(1), help="Heads of K and V; by default as many as of Q.")
@click.option("--queries", metavar="M", type=click.IntRange(1), help="Rows of Q; by default as many as of K and V.")
@click.option(
    "--layout",
    type=click.Choice(LAYOUTS),
    default="bhnd",
    show_default=True,
    help="How they lie: contiguous, as views of [B, N, H, d], or as slices of one fused tensor.",
)
@click.option(
    "--backward",
    "gradients",
    is_flag=True,
    help="Time the gradients dQ, dK and dV, by themselves and with the forward pass.",
)
@timing.precision_option
@timing.causal_option
@timing.options_of(
    dict.fromkeys([*ABLE, *GRADIENTS]), "all that take tensors as they lie, with --backward flashcli's own choice",
    ("torch", "triton"),
)  # fmt: skip
def command(
    cases: tuple[str, ...], shapes: tuple[Shape, ...], heads: int | None, kv_heads: int | None, queries: int | None,
    layout: str, gradients: bool, precisions: tuple[str, ...], causal: bool, how: timing.Timing,
) -> None:  # fmt: skip
    """Time attention on PyTorch's tensors [B, H, N, d] where they lie, or its gradients.

    A wrong answer is refused, not timed. The exit code is 1 if anything is wrong, or if nothing could be
    timed.
    """
    from flashcli.measure import backward, bench, in_place, machine, peers, plots, records

    peers.check_installed("torch", *how.against)
    how.check(plots.check_drawable)
    able, what = (GRADIENTS, "gradients") if gradients else (ABLE, "attention")
    if unable := set(how.kernels) - {*able, parameters.ALL}:
        raise UsageError(f"kernel {min(unable)} does not compute {what}.", f"choose one of {', '.join(able)}.")
    on_gpus = timing.on_gpus([], precisions, how.against)
    if gradients and on_gpus:
        raise UsageError(f"{on_gpus[0]} has no meaning for gradients, which are in fp32.", f"leave out {on_gpus[0]}.")
    on_cpu = how.is_cpu([*on_gpus, *(f"--kernel {name}" for name in how.kernels)], machine.pytorchs_gpu)
    device, conditions = "cpu" if on_cpu else "cuda", bench.Conditions(how.runs_on(on_cpu), causal, how.seed)
    problems = _problems(timing.shapes(cases, shapes, on_cpu), causal, heads, kv_heads, queries, layout)
    if gradients:
        contest, kernels = backward.GRADIENTS, how.chosen(able, ())
        contenders = backward.cpu_contenders(how.against) if on_cpu else backward.contenders(kernels, how.against)
    elif on_cpu:
        contest, contenders = in_place.ANSWERS, in_place.cpu_contenders(how.against)
    else:
        contest, kernels = in_place.ANSWERS, how.chosen(able, able)
        contenders = in_place.gpu_contenders(kernels, precisions, how.against)
    rows = in_place.bench(problems, contenders, conditions, device, contest)
    record = records.Record(machine.circumstances() | machine.pytorchs_circumstances(device), ceilings={})
    how.finish(record, rows, records.contender_tables)


def _problems(
    shapes: dict[str, Shape], causal: bool, heads: int | None, kv_heads: int | None, queries: int | None, layout: str
) -> dict[str, Problem]:
    """For each shape the problem on tensors, under a name that says all of it."""
    from flashcli.measure.tensors import Problem

    heads = heads or kv_heads or 1
    kv_heads = kv_heads or heads
    if heads % kv_heads:
        raise UsageError(f"--kv-heads {kv_heads} does not divide --heads {heads}.", "choose a divisor of it.")
    found = {}
    for name, shape in shapes.items():
        M = queries or shape.N
        if layout == "qkv" and shape.N != M:
            hint = f"leave out --queries, or name N = {M} in --shape."
            raise UsageError("--layout qkv is of one tensor, which has as many rows of Q as of K.", hint)
        problem = Problem(shape.B, heads, kv_heads, M, shape.N, shape.d, causal, layout)
        found[" ".join([*([] if name == str(shape) else [name]), str(problem), layout])] = problem
    return found
