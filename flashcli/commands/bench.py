from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

import click
from click.core import ParameterSource

from flashcli.asked.decode import LAYOUTS as PAGED_LAYOUTS
from flashcli.commands import bench_decode, decode_options, options
from flashcli.kernels import backward as backward_kernels
from flashcli.kernels import decode as decode_kernels
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.types import PRECISIONS
from flashcli.measure.tensors import LAYOUTS
from flashcli.terminal import as_json, parameters

if TYPE_CHECKING:
    from flashcli.asked.shape import Shape
    from flashcli.commands.decode_options import What
    from flashcli.measure.bench import Conditions, Contender
    from flashcli.measure.records import Record
    from flashcli.measure.rows import Row
    from flashcli.measure.tensors import Problem
    from flashcli.terminal import tables

RUNS, RUNS_ON_CPU = 20, 5  # which takes a hundred times as long
FAST_FROM = "q_in_registers"  # the rungs below it would take hours for twenty runs on each case
ONLY_ON_GPUS = ("--kernel", "--precision")
OF_TENSORS = (
    "--heads",
    "--kv-heads",
    "--queries",
    "--layout",
    "--backward",
)  # with any of them, PyTorch's tensors are timed


def _file_option(name: str, text: str) -> Callable:
    return click.option(
        f"--{name}", metavar="FILE", type=parameters.FILE_OR_STREAM, callback=as_json.creatable, help=text
    )


@click.command(
    epilog=options.examples(
        "flashcli bench --case t10 --kernel mma --kernel wgmma --precision fp32 --precision fp16",
        "flashcli bench --shape 4,3081,64 --heads 24 --kv-heads 12 --layout bnhd --against torch",
        "flashcli bench --decode 8,32,8,128 --lengths 4096 --ladder --against torch",
    )
)
@click.pass_context
@options.case_option
@options.shape_option
@options.backend_option
@click.option(
    "--kernel",
    "kernels",
    metavar="NAME",
    multiple=True,
    type=click.Choice([*dict.fromkeys([*KERNELS, *decode_kernels.KERNELS, *backward_kernels.KERNELS]), parameters.ALL]),
    help=f"Time this kernel, or all; repeatable. By default {FAST_FROM} and those after it, with --ladder all; "
    "on tensors those that take them; with --decode the fastest.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(list(PRECISIONS)),
    default=["fp32"],
    show_default=True,
    help="Time kernels in fp32, or in fp16 if they have it; repeatable.",
)
@click.option(
    "--against",
    multiple=True,
    type=click.Choice(["torch", "triton"]),
    help="Time this package's kernels too; repeatable.",
)
@click.option("--backward", "gradients", is_flag=True, help="Time dQ, dK and dV of PyTorch's tensors.")
@click.option("--causal", is_flag=True, help="Have row i of Q see rows 0 to i of K only.")
@click.option(
    "--heads", metavar="H", type=click.IntRange(1), help="Time PyTorch's tensors [B, H, N, d] where they lie."
)
@click.option("--kv-heads", metavar="H", type=click.IntRange(1), help="The same with so many heads of K and V.")
@click.option("--queries", metavar="M", type=click.IntRange(1), help="The same with so many rows of Q.")
@click.option(
    "--layout",
    type=click.Choice([*LAYOUTS, *PAGED_LAYOUTS]),
    help="How they lie: contiguous (bhnd, if nothing is said), as views of [B, N, H, d], or as slices of one fused "
    "tensor (qkv); with --decode how a page lies: hnd, if nothing is said, nhd or vllm.",
)
@decode_options.bench_options
@click.option(
    "--runs",
    type=click.IntRange(1),
    show_default=f"{RUNS}, on a CPU {RUNS_ON_CPU}",
    help="Time each kernel so many times.",
)
@click.option(
    "--threads",
    type=click.IntRange(1),
    help="So many threads compute on the CPU; as many as there are cores by default.",
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The inputs are made from this number."
)
@click.option("--ladder", is_flag=True, help="Time each kernel beside the one before it, and whole commands.")
@click.option("--plot", metavar="FILE", help="Draw the ladder to FILE, .png, .svg or .pdf, and a roofline beside it.")
@_file_option("json", "Write the record to FILE as JSON; - prints it, and the table goes to stderr.")
@_file_option("csv", "Write the rows of the record to FILE as CSV; - prints them, as above.")
@_file_option("markdown", "Write the rows of the record to FILE as a Markdown table; - prints it, as above.")
def command(
    context: click.Context,
    cases: tuple[str, ...],
    shapes: tuple[Shape, ...],
    backend: str,
    kernels: tuple[str, ...],
    precisions: tuple[str, ...],
    against: tuple[str, ...],
    gradients: bool,
    causal: bool,
    heads: int | None,
    kv_heads: int | None,
    queries: int | None,
    layout: str | None,
    decode: What | None,
    runs: int | None,
    threads: int | None,
    seed: int,
    ladder: bool,
    plot: str | None,
    **files: str | None,
) -> None:
    """Time kernels, and those of PyTorch and Triton if wanted, on the same inputs.

    What gives a wrong answer is refused, not timed. The exit code is 1 if anything is wrong, or if nothing could be
    timed.
    """
    from flashcli.errors import MISMATCH
    from flashcli.files import testcases
    from flashcli.measure import bench, decode_plot, machine, plots, records

    given = {option.opts[0] for option in context.command.params if _was_given(context, option)}
    kept = {kind: path for kind, path in files.items() if path}
    record = records.Record(machine.circumstances(), ceilings=None if decode else {})
    needs_gpu = bool(given.intersection(ONLY_ON_GPUS)) or "triton" in against
    if decode is not None:
        asked = bench_decode.Asked(decode, layout or "hnd", kernels, ladder, against, runs or RUNS, seed, threads)
        bench_decode.check_options(given, asked, backend)
        _check_files(kept, plot, plots.check_picture)
        if on_cpu := _is_cpu(backend, needs_gpu or ladder or bool(against), machine.gpus):
            asked = asked._replace(runs=runs or RUNS_ON_CPU)
        rows = bench_decode.on_cpu(record, asked) if on_cpu else bench_decode.on_gpu(record, asked)
    else:
        _check_options(given, backend, against, ladder, layout)
        on_tensors = bool(given.intersection(OF_TENSORS))
        names = _of_gradients(kernels) if gradients else _chosen(kernels, ladder, on_tensors)
        chosen = options.named_shapes(cases, shapes, testcases.REPORT_CASES)
        _check_files(kept, plot, plots.check_drawable)
        conditions = bench.Conditions(runs or RUNS, causal, seed)
        fewer = conditions._replace(runs=runs or RUNS_ON_CPU)
        if on_tensors:
            problems = _problems(chosen, causal, heads or kv_heads or 1, kv_heads, queries, layout or "bhnd")
            on_cpu = _is_cpu(backend, needs_gpu, machine.pytorchs_gpu)
            device, conditions = ("cpu", fewer) if on_cpu else ("cuda", conditions)
            if gradients:
                rows = _gradients(record, problems, names, against, conditions, device)
            else:
                rows = _on_tensors(record, problems, names, precisions, against, conditions, device)
        elif ladder:
            rows = _ladder(record, chosen, names, conditions, everywhere=bool(cases or shapes))
        elif _is_cpu(backend, needs_gpu, machine.gpus):
            rows = _on_cpu(record, chosen, against, threads, fewer)
        else:
            contenders = bench.gpu_contenders(names, precisions, against, causal)
            rows = _on_gpu(record, chosen, contenders, against, conditions)
    for row in rows:
        record.rows.append(row)
        click.echo(f"{row.case} {row.contender}: {records.outcome(row)}", err=True)
    _show(record, kept, _decode_view if decode else _ladder_view if ladder else _view)
    if plot:
        (decode_plot.draw_decode if decode else plots.draw_ladder)(record, plot)
    if bench.failed(record.rows):
        raise SystemExit(MISMATCH)


def _was_given(context: click.Context, option: click.Parameter) -> bool:
    return option.expose_value and context.get_parameter_source(option.name) != ParameterSource.DEFAULT


def _check_options(
    given: set[str], backend: str, against: tuple[str, ...], ladder: bool, layout: str | None
) -> None:  # fmt: skip
    from flashcli.errors import BackendUnavailable, UsageError
    from flashcli.measure import peers

    if layout in PAGED_LAYOUTS:
        raise UsageError(f"--layout {layout} is one of pages.", f"add --decode, or choose one of {', '.join(LAYOUTS)}.")
    if "--plot" in given and not ladder:
        raise UsageError("--plot draws the ladder.", "add --ladder.")
    if ladder and backend == "cpu":
        raise UsageError(
            "the ladder is one of kernels, the cpu backend is none of its rungs.",
            "leave out --backend cpu; a GPU is needed for all rungs but sequential.",
        )
    for name in sorted(given & {"--against", "--precision", "--threads", *OF_TENSORS} if ladder else ()):
        raise UsageError(f"{name} has no meaning for the ladder.", f"leave out {name}, or --ladder.")
    if "--backward" in given:
        for name in sorted(given & {"--precision"}):
            raise UsageError(f"{name} has no meaning for gradients, which are in fp32.", "leave it out.")
        if "triton" in against:
            raise UsageError("--against triton has no gradients.", "leave it out.")
    for name in sorted(given.intersection(OF_TENSORS)):
        if not peers.installed("torch"):
            raise BackendUnavailable(
                f"{name} is for PyTorch's tensors, and torch is not installed.", "pip install torch."
            )
        if "--threads" in given:
            raise UsageError("--threads has no meaning for PyTorch's tensors.", f"leave it out, or {name}.")
    for name in sorted(given.intersection(ONLY_ON_GPUS) if backend == "cpu" else given & {"--threads"}):
        of = "GPUs, not for the cpu backend" if backend == "cpu" else "the cpu backend, not for GPUs"
        raise UsageError(f"{name} is for {of}.", f"leave out {name}, or change --backend.")
    if backend == "cpu" and "triton" in against:
        raise UsageError("--against triton is for GPUs, not for the cpu backend.", "leave it out.")
    for name in against:
        if not peers.installed(name):
            raise BackendUnavailable(f"{name} is not installed.", f"pip install {name}, or leave out --against {name}.")


def _is_cpu(backend: str, needs_gpu: bool, look_for_gpus: Callable[[], object]) -> bool:
    """Whether it is the CPU that is timed: for "auto" where no GPU is usable, unless something asked for needs one."""
    from flashcli.errors import BackendUnavailable

    if backend == "cpu":
        return True
    try:
        look_for_gpus()
    except BackendUnavailable as error:
        if backend == "cuda" or needs_gpu:
            if "--backend cpu" in error.hint:
                raise
            raise BackendUnavailable(str(error), f"{error.hint} Or time the CPU: --backend cpu.") from error
        options.notice(f"no usable GPU, timing the CPU: {error}")
        return True
    return False


def _check_files(files: dict[str, str], plot: str | None, check_picture: Callable[[str], None]) -> None:
    """Find out before the timing whether there is a file for each of its results."""
    from flashcli.files.outputs import check_distinct

    check_distinct(*(path for path in files.values() if path != as_json.PRINT), plot)
    if plot:
        check_picture(plot)


class Texts(NamedTuple):
    """A table for a terminal, and in Markdown."""

    text: str
    markdown: str


def _view(rows: list[Row]) -> Texts:
    from flashcli.measure import records

    return _table(records.contender_lines(rows))


def _decode_view(rows: list[Row]) -> Texts:
    from flashcli.measure import records

    return _table(records.decode_lines(rows))


def _table(lines: tables.Lines) -> Texts:
    from flashcli.terminal import tables

    return Texts(tables.text(lines), tables.markdown(lines))


def _ladder_view(rows: list[Row]) -> Texts:
    from flashcli.measure import records

    return Texts(records.texts(records.ladder_tables(rows)), records.markdowns(records.ladder_tables(rows)))


def _show(record: Record, files: dict[str, str], view: Callable[[list[Row]], Texts]) -> None:
    """The table, on stderr where a file is stdout; and the files."""
    from flashcli.files.outputs import write_whole
    from flashcli.measure import records

    rows, (text, markdown) = record.rows, view(record.rows)
    click.echo(text, err=as_json.PRINT in files.values())
    contents = {"json": as_json.json_text(record.written()), "csv": records.csv_text(rows), "markdown": markdown}
    for kind, path in files.items():
        if path == as_json.PRINT:
            click.echo(contents[kind], nl=False)
        else:
            write_whole(path, contents[kind])


def _on_cpu(
    record: Record, shapes: dict[str, Shape], against: tuple[str, ...], threads: int | None, conditions: Conditions
) -> Iterator[Row]:
    from flashcli.cpu.cores import usable_cores
    from flashcli.measure import bench, machine

    threads = threads or len(usable_cores())
    record.circumstances |= machine.cpu_circumstances(threads)
    return bench.bench(shapes, bench.cpu_contenders(against, threads, conditions.causal), conditions)


def _on_gpu(
    record: Record, shapes: dict[str, Shape], contenders: list[Contender], against: tuple[str, ...],
    conditions: Conditions,
) -> Iterator[Row]:  # fmt: skip
    from flashcli.measure import bench, machine, peers

    record.circumstances |= machine.gpu_circumstances()
    record.ceilings = peers.ceilings() if "torch" in against else {}
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


def _problems(
    shapes: dict[str, Shape], causal: bool, heads: int, kv_heads: int | None, queries: int | None, layout: str
) -> dict[str, Problem]:
    """For each shape the problem on tensors, under a name that says all of it."""
    from flashcli.errors import UsageError
    from flashcli.measure.tensors import Problem

    if heads % (kv_heads or heads):
        raise UsageError(f"--kv-heads {kv_heads} does not divide --heads {heads}.", "choose a divisor of it.")
    found = {}
    for name, shape in shapes.items():
        M = queries or shape.N
        if layout == "qkv" and shape.N != M:
            hint = f"leave out --queries, or name N = {M} in --shape."
            raise UsageError("--layout qkv is of one tensor, which has as many rows of Q as of K.", hint)
        problem = Problem(shape.B, heads, kv_heads or heads, M, shape.N, shape.d, causal, layout)
        found[" ".join([*([] if name == str(shape) else [name]), str(problem), layout])] = problem
    return found


def _on_tensors(
    record: Record, problems: dict[str, Problem], kernels: list[str], precisions: tuple[str, ...],
    against: tuple[str, ...], conditions: Conditions, device: str,
) -> Iterator[Row]:  # fmt: skip
    from flashcli.measure import in_place, machine

    record.circumstances |= machine.pytorchs_circumstances(device)
    if device == "cpu":
        contenders = in_place.cpu_contenders(against)
    else:
        contenders = in_place.gpu_contenders(kernels, precisions, against)
    return in_place.bench(problems, contenders, conditions, device)


def _gradients(
    record: Record, problems: dict[str, Problem], kernels: list[str], against: tuple[str, ...], conditions: Conditions,
    device: str,
) -> Iterator[Row]:  # fmt: skip
    from flashcli.measure import backward, machine

    record.circumstances |= machine.pytorchs_circumstances(device)
    if device == "cpu":
        return backward.measured(problems, backward.cpu_contenders(against), conditions, device)
    return backward.measured(problems, backward.contenders(kernels, against), conditions, device)


def _of_gradients(kernels: tuple[str, ...]) -> list[str]:
    """In the order of their ladder."""
    from flashcli.errors import UsageError

    if unable := set(kernels) - {*backward_kernels.KERNELS, parameters.ALL}:
        text = f"kernel {min(unable)} does not compute gradients."
        raise UsageError(text, f"choose one of {', '.join(backward_kernels.KERNELS)}.")
    return [name for name in backward_kernels.KERNELS if name in kernels or parameters.ALL in kernels]


def _chosen(kernels: tuple[str, ...], ladder: bool, on_tensors: bool) -> list[str]:
    """In the order of the ladder."""
    from flashcli.errors import UsageError

    names = list(KERNELS)
    for name in kernels:
        if name not in (*names, parameters.ALL):
            if name in backward_kernels.KERNELS:
                raise UsageError(f"kernel {name} computes gradients only.", "add --backward, or choose another one.")
            raise UsageError(f"kernel {name} is one of paged decode.", "add --decode, or see `flashcli kernels`.")
    if on_tensors:
        able = [name for name in names if KERNELS[name].strided]
        if unable := set(kernels) - {*able, parameters.ALL}:
            text = f"kernel {min(unable)} does not take tensors as they lie."
            raise UsageError(text, f"choose one of {', '.join(able)}.")
        return able if parameters.ALL in kernels or not kernels else [name for name in able if name in kernels]
    if parameters.ALL in kernels or (ladder and not kernels):
        return names
    return [name for name in names if name in kernels] if kernels else names[names.index(FAST_FROM) :]
