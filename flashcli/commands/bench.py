from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from flashcli.commands import options, timing
from flashcli.errors import UsageError
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import nothing

if TYPE_CHECKING:
    from flashcli.asked.shape import Shape
    from flashcli.measure.bench import Conditions
    from flashcli.measure.records import Record
    from flashcli.measure.rows import Row

FAST_FROM = "o_in_registers"  # the rungs below it would take hours for twenty runs on each case
# Where options went that this command once had.
ELSEWHERE = {
    "bench-tensors": ("--heads", "--kv-heads", "--queries", "--layout", "--backward"),
    "bench-decode": ("--decode", "--lengths", "--page", "--type", "--cache", "--fp8"),
}


class Bench(click.Command):
    """The command, which knows where options are that it does not have."""

    def parse_args(self, context: click.Context, args: list[str]) -> list[str]:
        try:
            return super().parse_args(context, args)
        except click.NoSuchOption as error:
            for name, moved in ELSEWHERE.items():
                if error.option_name in moved:
                    raise click.UsageError(f"{error.message} See `flashcli {name} --help`.", context) from error
            raise


@click.command(
    cls=Bench,
    epilog=options.examples(
        "flashcli bench --case t10 --kernel mma --kernel wgmma --precision fp32 --precision fp16",
        "flashcli bench --ladder --plot ladder.png",
        "flashcli bench --tune",
    ),
)
@options.case_option
@options.shape_option
@timing.precision_option
@timing.causal_option
@timing.options_of(
    KERNELS, f"{FAST_FROM} and those after it, with --ladder all, on a CPU the NumPy backend", ("torch", "triton"),
    ladder=(
        "Time each kernel beside the one before it, and whole commands.",
        "Draw the ladder to FILE, .png, .svg or .pdf, and a roofline beside it; or what --tiles has found.",
    ),
)  # fmt: skip
@click.option("--tiles", is_flag=True, help="Time kernels with every Br and Bc that fit a block.")
@click.option("--tune", is_flag=True, help="Time kernels on arrays, and have the fastest here be chosen from now on.")
@click.option("--untune", is_flag=True, help="Forget what --tune has found on this GPU.")
def command(
    cases: tuple[str, ...], shapes: tuple[Shape, ...], precisions: tuple[str, ...], causal: bool, how: timing.Timing,
    tune: bool, untune: bool,
) -> None:  # fmt: skip
    """Time kernels as `flashcli run` uses them, and those of PyTorch and Triton if wanted, on the same inputs.

    A wrong answer is refused, not timed. The exit code is 1 if anything is wrong, or if nothing could be
    timed. Without a GPU the CPU is timed: on the first of the report's cases alone, if nothing else is said.
    """
    from flashcli.measure import bench, machine, peers, plots, records, tiles

    if tune or untune:
        others = {"--tune": tune and untune, "--case": cases, "--shape": shapes, "--kernel": how.kernels}
        _check_alone("tune" if tune and not untune else "untune", {**others, "--against": how.against})
        return _tune(forget=untune)
    how.check(plots.check_picture if how.tiles else plots.check_drawable)
    names, on_gpus = list(KERNELS), timing.on_gpus(how.kernels, precisions, how.against)
    names = how.chosen(names, names[names.index(FAST_FROM) :])
    if how.ladder or how.tiles:
        given = {"--against": how.against, "--precision": precisions != ("fp32",), "--threads": how.threads}
        _check_alone("the ladder" if how.ladder else "tiles", given | {"--tiles": how.ladder and how.tiles})
        on_gpus += ["--ladder"] * (how.ladder and not how.kernels) + ["--tiles"] * how.tiles
    if how.tiles:
        names = _with_tiles(names, how)
    peers.check_installed(*how.against)
    on_host = bool(how.kernels) and not on_gpus  # all that is asked for, so that nobody looks for a GPU
    on_cpu = (on_host and how.backend == "auto") or how.is_cpu(on_gpus, machine.gpus)
    chosen = timing.shapes(cases, shapes, on_cpu)
    conditions = bench.Conditions(how.runs_on(on_cpu), causal, how.seed)
    record = records.Record(machine.circumstances(), ceilings={})
    if how.ladder:
        rows = _ladder(record, chosen, names, conditions, everywhere=bool(cases or shapes))
    elif how.tiles:
        record.circumstances |= machine.gpu_circumstances()
        rows = tiles.search(chosen, names, conditions)
    elif on_cpu:
        rows = _on_cpu(record, chosen, names if on_host else [], conditions, how)
    else:
        rows = _on_gpu(record, chosen, names, precisions, conditions, how)
    tables = records.ladder_tables if how.ladder else records.tiles_tables if how.tiles else records.contender_tables
    how.finish(record, rows, tables, plots.draw_tiles if how.tiles else plots.draw_ladder)


def _tune(forget: bool) -> None:
    """Keep how long each kernel takes on the first GPU, telling each; or forget it."""
    from flashcli.gpu.place import place_of_device
    from flashcli.measure import tune

    place = place_of_device(0)
    factors: dict[str, dict[int, float]] = {}
    for kernel, d, seconds, factor in () if forget else tune.tune(place):
        factors.setdefault(kernel, {})[d] = round(factor, 3)
        told = f"{seconds * 1e3:.3f} ms, for a tile {factor:.2f} times as long as an H200"
        click.echo(f"{kernel}, heads of up to {d}: {told}", err=True)
    path = tune.keep(place.name, factors)
    done = "are forgotten" if forget else "are kept"
    click.echo(f"Times of kernels on {place.name} {done}, in {path}; new processes choose accordingly.")


def _check_alone(what: str, given: dict[str, object]) -> None:
    """Refuse options, each with whether it is given, that have no meaning for ``what`` is timed: ladder or tiles."""
    for option in (option for option, value in given.items() if value):
        raise UsageError(f"{option} has no meaning for {what}.", f"leave out {option}, or --{what.split()[-1]}.")


def _with_tiles(names: list[str], how: timing.Timing) -> list[str]:
    """The names of those kernels that leave a choice of tiles; UsageError if none of those asked for does."""
    able = [name for name, kernel in KERNELS.items() if kernel.tilings is not nothing]
    if found := [name for name in names if name in able]:
        return found
    told = f"there is no choice of tiles for {' and '.join(how.kernels)}."
    raise UsageError(told, f"there is one for {', '.join(able)}.")


def _on_cpu(
    record: Record, shapes: dict[str, Shape], kernels: list[str], conditions: Conditions, how: timing.Timing
) -> Iterator[Row]:
    """The kernels, which run on the host, or else the NumPy backend; and the peers."""
    from flashcli.cpu.workers import usable_cores
    from flashcli.measure import bench, in_place, machine

    threads = how.threads or len(usable_cores())
    record.circumstances |= machine.cpu_circumstances(threads)
    contenders = bench.cpu_contenders(kernels, threads, conditions.causal)
    if "torch" in how.against:
        import torch

        torch.set_num_threads(threads)
        theirs = in_place.pytorchs_choice()._replace(name=f"PyTorch {torch.__version__} SDPA")
        contenders.append(in_place.of_files(theirs, conditions.causal, "cpu"))
    return bench.bench(shapes, contenders, conditions)


def _on_gpu(
    record: Record, shapes: dict[str, Shape], kernels: list[str], precisions: tuple[str, ...], conditions: Conditions,
    how: timing.Timing,
) -> Iterator[Row]:  # fmt: skip
    """The kernels and the peers. The ceilings, for the floor, are measured with PyTorch where that is a peer."""
    from flashcli.measure import bench, in_place, machine, peers

    record.circumstances |= machine.gpu_circumstances()
    record.ceilings = peers.ceilings() if "torch" in how.against else {}
    contenders = bench.gpu_contenders(kernels, precisions, conditions.causal)
    contenders += [in_place.of_files(one, conditions.causal, "gpu") for one in in_place.gpu_peers(how.against)]
    return bench.bench(shapes, contenders, conditions._replace(ceilings=record.ceilings))


def _ladder(
    record: Record, shapes: dict[str, Shape], kernels: list[str], conditions: Conditions, everywhere: bool
) -> Iterator[Row]:
    """The ceilings, for the roofline, are measured with PyTorch where that is installed."""
    from flashcli.measure import ladder, machine, peers

    capability, ceilings = None, {}
    if not all(KERNELS[name].on_host for name in kernels):
        record.circumstances |= machine.gpu_circumstances()
        capability = machine.gpus()[0].capability
        record.ceilings = ceilings = peers.ceilings() if peers.reach_gpu() else {}
    return ladder.ladder(shapes, kernels, conditions._replace(ceilings=ceilings), capability, everywhere)
