from __future__ import annotations

import json
from collections.abc import Collection, Iterator

import click
from click.core import ParameterSource

from flashcli.commands import options
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.types import PRECISIONS

FAST_FROM = "q_in_registers"  # the rungs below it would take hours for twenty runs on each case


def _names(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


@click.command()
@click.pass_context
@options.case_option
@options.shape_option
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="What to time.")
@click.option(
    "--kernels",
    callback=_names,
    default="",
    help=f"Comma-separated, or all; by default {FAST_FROM} and those after it, with --ladder all.",
)
@click.option("--precisions", callback=_names, default="fp32", show_default=True, help="Comma-separated: fp32, fp16.")
@click.option("--against", callback=_names, default="", help="Peers, comma-separated: torch, triton.")
@click.option("--causal", is_flag=True, help="Row i of Q sees rows 0 to i of K only.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Timed runs of each contender.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the cpu backend and its peer; all cores by default."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the inputs.")
@click.option("--ladder", is_flag=True, help="Each rung beside the one before it, its kernel and its whole command.")
@click.option("--plot", metavar="FILE", help="Draw the ladder to FILE, .png, .svg or .pdf, and a roofline beside it.")
@click.option("--json", metavar="FILE", help="Write the record to FILE; - is stdout, the table then on stderr.")
@click.option("--csv", metavar="FILE", help="Write its rows as CSV.")
@click.option("--markdown", metavar="FILE", help="Write its rows as a Markdown table.")
def command(
    context, cases, shapes, backend, kernels, precisions, against, causal, runs, threads, seed, ladder, plot, **files
) -> None:
    """Time kernels, and PyTorch and Triton if wanted, on the same inputs.

    A wrong one is refused, not timed. The exit code is 1 if one is wrong, or if none could be timed.
    """
    from flashcli.errors import MISMATCH
    from flashcli.files import testcases
    from flashcli.measure import bench, plots

    given = {name for name in context.params if context.get_parameter_source(name) != ParameterSource.DEFAULT}
    _check_options(given, backend, against, ladder)
    kernels, precisions = _chosen(kernels, ladder), _known("precision", precisions, PRECISIONS)
    chosen = options.named_shapes(cases, shapes, testcases.REPORT_CASES)
    files = {kind: path for kind, path in files.items() if path}
    _check_files(files, plot)
    record = {"circumstances": bench.circumstances(), "ceilings": {}, "rows": []}
    conditions = bench.Conditions(runs, causal, seed)
    if ladder:
        rows = _ladder(record, chosen, kernels, conditions, everywhere=bool(cases or shapes))
    elif backend == "cpu":
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


def _check_options(given: set[str], backend: str, against: list[str], ladder: bool) -> None:
    from flashcli.errors import UsageError
    from flashcli.measure import peers

    for name in against:
        if name not in ("torch", "triton") or not peers.installed(name):
            raise UsageError(f"there is no peer {name!r} here.", "install torch or triton, or leave out --against.")
    if "plot" in given and not ladder:
        raise UsageError("--plot draws the ladder.", "add --ladder.")
    if ladder and backend == "cpu":
        raise UsageError(
            "the ladder is one of kernels, the cpu backend is none of its rungs.",
            "leave out --backend cpu; a GPU is needed for all rungs but sequential.",
        )
    for name in sorted(given & {"against", "precisions", "threads"} if ladder else ()):
        raise UsageError(f"--{name} has no meaning for the ladder.", f"leave out --{name}, or --ladder.")
    for name in sorted(given & {"kernels", "precisions"} if backend == "cpu" else given & {"threads"}):
        of = "GPUs, not for the cpu backend" if backend == "cpu" else "the cpu backend, not for GPUs"
        raise UsageError(f"--{name} is for {of}.", f"leave out --{name}, or change --backend.")


def _check_files(files: dict[str, str], plot: str | None) -> None:
    """Find out before the timing whether its results can be kept."""
    from flashcli.files.outputs import check_creatable, check_distinct
    from flashcli.measure import plots

    paths = [path for path in files.values() if path != "-"]
    check_distinct(*paths, plot)
    for path in paths:
        check_creatable(path)
    if plot:
        plots.check(plot)


def _show(record: dict, files: dict[str, str], ladder: bool) -> None:
    """The table, on stderr where a file is stdout; and the files."""
    from flashcli.files.outputs import write_whole
    from flashcli.measure import records

    rows = record["rows"]
    as_text, as_markdown = (records.ladder_text, records.ladder) if ladder else (records.text, records.markdown)
    click.echo(as_text(rows), err="-" in files.values())
    views = {
        "json": lambda: json.dumps(options.finite(record), indent=1) + "\n",
        "csv": lambda: records.csv_text(rows),
        "markdown": lambda: as_markdown(rows),
    }
    for kind, path in files.items():
        if path == "-":
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


def _chosen(kernels: list[str], ladder: bool) -> list[str]:
    """In the order of the ladder."""
    names = list(KERNELS)
    if kernels == ["all"] or (ladder and not kernels):
        return names
    if not kernels:
        return names[names.index(FAST_FROM) :]
    return sorted(_known("kernel", kernels, KERNELS), key=names.index)


def _known(what: str, names: list[str], known: Collection[str]) -> list[str]:
    from flashcli.errors import UsageError

    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"there is no {what} {unknown[0]!r}.", f"choose from {', '.join(known)}.")
    return names
