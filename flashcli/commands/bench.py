from __future__ import annotations

from collections.abc import Iterator

import click
from click.core import ParameterSource

from flashcli import as_json
from flashcli.commands import options
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.types import PRECISIONS

FAST_FROM = "q_in_registers"  # the rungs below it would take hours for twenty runs on each case
ALL = "all"
ONLY_ON_GPUS = ("--kernel", "--precision")


def _file_option(name: str, text: str):
    return click.option(f"--{name}", metavar="FILE", callback=as_json.creatable, help=text)


@click.command(
    epilog=options.examples(
        "flashcli bench --shape 10,2048,64 --against torch",
        "flashcli bench --case t10 --kernel mma --kernel wgmma --precision fp32 --precision fp16",
        "flashcli bench --ladder --plot ladder.png --json ladder.json",
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
    type=click.Choice([*KERNELS, ALL]),
    help=f"One of `flashcli kernels`, or all; repeatable. {FAST_FROM} and later ones by default, with --ladder all.",
)
@click.option(
    "--precision",
    "precisions",
    multiple=True,
    type=click.Choice(list(PRECISIONS)),
    default=["fp32"],
    show_default=True,
    help="How precisely kernels that have a choice compute; repeatable.",
)
@click.option("--against", multiple=True, type=click.Choice(["torch", "triton"]), help="Time these too; repeatable.")
@click.option("--causal", is_flag=True, help="Row i of Q sees rows 0 to i of K only.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Timed runs of each contender.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the cpu backend and its peer; all cores by default."
)
@click.option(
    "--seed", type=click.IntRange(0), default=0, show_default=True, help="The inputs are made from this number."
)
@click.option("--ladder", is_flag=True, help="Each rung beside the one before it, its kernel and its whole command.")
@click.option("--plot", metavar="FILE", help="Draw the ladder to FILE, .png, .svg or .pdf, and a roofline beside it.")
@_file_option("json", "Write the record to FILE as JSON; - prints it, and the table goes to stderr.")
@_file_option("csv", "Write the rows of the record to FILE as CSV; - prints them, as above.")
@_file_option("markdown", "Write the rows of the record to FILE as a Markdown table; - prints it, as above.")
def command(
    context, cases, shapes, backend, kernels, precisions, against, causal, runs, threads, seed, ladder, plot, **files
) -> None:
    """Time kernels, and PyTorch and Triton if wanted, on the same inputs.

    A wrong one is refused, not timed. The exit code is 1 if one is wrong, or if none could be timed.
    """
    from flashcli.errors import MISMATCH
    from flashcli.files import testcases
    from flashcli.measure import bench, plots

    given = {option.opts[0] for option in context.command.params if _was_given(context, option)}
    _check_options(given, backend, against, ladder)
    kernels = _chosen(kernels, ladder)
    chosen = options.named_shapes(cases, shapes, testcases.REPORT_CASES)
    files = {kind: path for kind, path in files.items() if path}
    _check_files(files, plot)
    record = {"circumstances": bench.circumstances(), "ceilings": {}, "rows": []}
    conditions = bench.Conditions(runs, causal, seed)
    if ladder:
        rows = _ladder(record, chosen, kernels, conditions, everywhere=bool(cases or shapes))
    elif _is_cpu(backend, needs_gpu=bool(given.intersection(ONLY_ON_GPUS)) or "triton" in against):
        rows = _on_cpu(record, chosen, against, threads, conditions)
    else:
        rows = _on_gpu(record, chosen, kernels, precisions, against, conditions)
    for row in rows:
        record["rows"].append(row)
        told = row.get("error") or row.get("skipped") or f"{row['seconds'] * 1e3:.3f} ms"
        click.echo(f"{row['case']} {row['contender']}: {told}", err=True)
    _show(record, files, ladder)
    if plot:
        plots.draw(record, plot)
    if bench.failed(record["rows"]):
        raise SystemExit(MISMATCH)


def _was_given(context: click.Context, option: click.Parameter) -> bool:
    return option.expose_value and context.get_parameter_source(option.name) != ParameterSource.DEFAULT


def _check_options(given: set[str], backend: str, against: tuple[str, ...], ladder: bool) -> None:
    from flashcli.errors import UsageError
    from flashcli.measure import peers

    for name in against:
        if not peers.installed(name):
            raise UsageError(f"{name} is not installed.", f"pip install {name}, or leave out --against {name}.")
    if "--plot" in given and not ladder:
        raise UsageError("--plot draws the ladder.", "add --ladder.")
    if ladder and backend == "cpu":
        raise UsageError(
            "the ladder is one of kernels, the cpu backend is none of its rungs.",
            "leave out --backend cpu; a GPU is needed for all rungs but sequential.",
        )
    for name in sorted(given & {"--against", "--precision", "--threads"} if ladder else ()):
        raise UsageError(f"{name} has no meaning for the ladder.", f"leave out {name}, or --ladder.")
    for name in sorted(given.intersection(ONLY_ON_GPUS) if backend == "cpu" else given & {"--threads"}):
        of = "GPUs, not for the cpu backend" if backend == "cpu" else "the cpu backend, not for GPUs"
        raise UsageError(f"{name} is for {of}.", f"leave out {name}, or change --backend.")
    if backend == "cpu" and "triton" in against:
        raise UsageError("--against triton is for GPUs, not for the cpu backend.", "leave it out.")


def _is_cpu(backend: str, needs_gpu: bool) -> bool:
    """Whether it is the CPU that is timed: for "auto" where no GPU is usable, unless something asked for needs one."""
    from flashcli.errors import BackendUnavailable
    from flashcli.measure.diagnosis import gpus

    if backend == "cpu":
        return True
    try:
        gpus()
    except BackendUnavailable as error:
        if backend == "cuda" or needs_gpu:
            hint = f"{error.hint} Or time the CPU: flashcli bench --backend cpu."
            raise BackendUnavailable(str(error), hint) from error
        options.notice(f"no usable GPU, timing the CPU: {error}")
        return True
    return False


def _check_files(files: dict[str, str], plot: str | None) -> None:
    """Find out before the timing whether there is a file for each of its results."""
    from flashcli.files.outputs import check_distinct
    from flashcli.measure import plots

    check_distinct(*(path for path in files.values() if path != as_json.STDOUT), plot)
    if plot:
        plots.check(plot)


def _show(record: dict, files: dict[str, str], ladder: bool) -> None:
    """The table, on stderr where a file is stdout; and the files."""
    from flashcli.files.outputs import write_whole
    from flashcli.measure import records

    rows = record["rows"]
    as_text, as_markdown = (records.ladder_text, records.ladder) if ladder else (records.text, records.markdown)
    click.echo(as_text(rows), err=as_json.STDOUT in files.values())
    views = {
        "json": lambda: as_json.json_text(record),
        "csv": lambda: records.csv_text(rows),
        "markdown": lambda: as_markdown(rows),
    }
    for kind, path in files.items():
        if path == as_json.STDOUT:
            click.echo(views[kind](), nl=False)
        else:
            write_whole(path, views[kind]())


def _on_cpu(record, shapes, against, threads, conditions) -> Iterator[dict]:
    from flashcli.backends.cores import usable_cores
    from flashcli.measure import bench

    record["circumstances"] |= bench.cpu_circumstances(threads or len(usable_cores()))
    contenders = bench.cpu_contenders(against, threads or len(usable_cores()), conditions.causal)
    return bench.bench(shapes, contenders, conditions)


def _on_gpu(record, shapes, kernels, precisions, against, conditions) -> Iterator[dict]:
    from flashcli.measure import bench, peers

    record["circumstances"] |= bench.gpu_circumstances()
    record["ceilings"] = peers.ceilings() if "torch" in against else {}
    contenders = bench.gpu_contenders(kernels, precisions, against, conditions.causal)
    return bench.bench(shapes, contenders, conditions._replace(ceilings=record["ceilings"]))


def _ladder(record, shapes, kernels, conditions, everywhere) -> Iterator[dict]:
    """The ceilings, for the roofline, are measured with PyTorch where that is installed."""
    from flashcli.measure import bench, ladder, peers
    from flashcli.measure.diagnosis import gpus

    capability = None
    if not all(KERNELS[name].on_host for name in kernels):
        record["circumstances"] |= bench.gpu_circumstances()
        capability = gpus()[0][1]
        record["ceilings"] = peers.ceilings() if peers.reach_gpu() else {}
    return ladder.ladder(shapes, kernels, conditions._replace(ceilings=record["ceilings"]), capability, everywhere)


def _chosen(kernels: tuple[str, ...], ladder: bool) -> list[str]:
    """In the order of the ladder."""
    names = list(KERNELS)
    if ALL in kernels or (ladder and not kernels):
        return names
    return [name for name in names if name in kernels] if kernels else names[names.index(FAST_FROM) :]
