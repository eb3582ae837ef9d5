from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import click
from click.core import ParameterSource

from flashcli.commands import options
from flashcli.kernels import KERNELS, PRECISIONS

REPORT_CASES = ("t10", "t11", "t22", "t29", "t30")


def _names(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


@click.command()
@click.pass_context
@click.option("--case", "cases", multiple=True, help="A case of testcases/; the report's five by default.")
@click.option("--shape", "shapes", type=options.SHAPE, multiple=True, help="Any other B,N,d.")
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True, help="What to time.")
@click.option("--kernels", callback=_names, default="all", show_default=True, help="Comma-separated, or all.")
@click.option("--precisions", callback=_names, default="fp32", show_default=True, help="Comma-separated: fp32, fp16.")
@click.option("--against", callback=_names, default="", help="Peers, comma-separated: torch, triton.")
@click.option("--causal", is_flag=True, help="Row i of Q sees rows 0 to i of K only.")
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Timed runs of each contender.")
@click.option(
    "--threads", type=click.IntRange(1), help="Threads of the cpu backend and its peer; all cores by default."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True, help="Of the inputs.")
@click.option("--json", metavar="FILE", help="Write the record to FILE; - is stdout.")
@click.option("--csv", metavar="FILE", help="Write its rows as CSV.")
@click.option("--markdown", metavar="FILE", help="Write its rows as a Markdown table.")
def command(
    context, cases, shapes, backend, kernels, precisions, against, causal, runs, threads, seed, **files
) -> None:
    """Time kernels, and PyTorch and Triton if wanted, on the same inputs.

    A wrong one is refused, not timed, and makes the exit code 1.
    """
    from flashcli import bench, peers, records
    from flashcli.backends.cpu import usable_cores
    from flashcli.errors import MISMATCH, UsageError
    from flashcli.fileformat import check_creatable, write_whole

    for name in against:
        if name not in ("torch", "triton") or not peers.installed(name):
            raise UsageError(f"there is no peer {name!r} here.", "install torch or triton, or leave out --against.")
    for name in ("kernels", "precisions"):
        if backend == "cpu" and context.get_parameter_source(name) != ParameterSource.DEFAULT:
            raise UsageError(f"--{name} is for GPUs, not for the cpu backend.", "leave out one of the two.")
    kernels = list(KERNELS) if kernels == ["all"] else _known("kernel", kernels, KERNELS)
    precisions = _known("precision", precisions, PRECISIONS)
    chosen = _shapes(cases, shapes)
    files = {kind: path for kind, path in files.items() if path}
    for path in files.values():
        if path != "-":
            check_creatable(path)
    contenders, record = [], {"circumstances": bench.circumstances(), "ceilings": {}}
    if backend == "cpu":
        record["circumstances"] |= bench.cpu_circumstances(threads or usable_cores())
        contenders = bench.cpu_contenders(against, threads or usable_cores(), causal)
    else:
        record["circumstances"] |= bench.gpu_circumstances()
        record["ceilings"] = peers.ceilings() if "torch" in against else {}
        contenders = bench.gpu_contenders(kernels, precisions, against, causal)
    record["rows"] = []
    for row in bench.bench(chosen, contenders, runs, causal, seed, record["ceilings"]):
        record["rows"].append(row)
        click.echo(
            f"{row['case']} {row['contender']}: {row.get('error') or '%.3f ms' % (row['seconds'] * 1e3)}", err=True
        )
    click.echo(records.text(record["rows"]))
    views = {
        "json": lambda: json.dumps(options.finite(record), indent=1) + "\n",
        "csv": lambda: records.csv_text(record["rows"]),
        "markdown": lambda: records.markdown(record["rows"]),
    }
    for kind, path in files.items():
        if path == "-":
            click.echo(views[kind](), nl=False)
        else:
            write_whole(path, views[kind]())
    if bench.any_wrong(record["rows"]):
        raise SystemExit(MISMATCH)


def _known(what: str, names: list[str], known: Collection[str]) -> list[str]:
    from flashcli.errors import UsageError

    if unknown := [name for name in names if name not in known]:
        raise UsageError(f"there is no {what} {unknown[0]!r}.", f"choose from {', '.join(known)}.")
    return names


def _shapes(cases: tuple[str, ...], shapes: tuple) -> dict:
    from flashcli import testcases
    from flashcli.errors import UsageError

    named = {str(shape): shape for shape in shapes}
    names = cases or (() if shapes else REPORT_CASES)
    known = {case.name: case.shape for case in testcases.load(Path("testcases"))} if names else {}
    for name in names:
        if name not in known:
            raise UsageError(f"there is no case {name!r}.", "see testcases/manifest.toml, or use --shape.")
        named[name] = known[name]
    return named
