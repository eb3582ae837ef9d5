from __future__ import annotations

import contextlib
import json
from pathlib import Path

import click

from flashcli.commands import options
from flashcli.kernels import KERNELS

REPORT_CASES = ("t10", "t11", "t22", "t29", "t30")


def _names(context: click.Context, option: click.Parameter, value: str) -> list[str]:
    return [name.strip() for name in value.split(",") if name.strip()]


@click.command()
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
@click.option("--json", "json_file", type=click.File("w"), help="Write the record to this file.")
@click.option("--csv", "csv_file", type=click.File("w"), help="Write its rows as CSV.")
@click.option("--markdown", "markdown_file", type=click.File("w"), help="Write its rows as a Markdown table.")
def command(cases, shapes, backend, kernels, precisions, against, causal, runs, threads, seed, **files) -> None:
    """Time kernels, and PyTorch and Triton if wanted, on the same inputs; a wrong one is refused, not timed."""
    from flashcli import bench, peers, records
    from flashcli.backends.cpu import usable_cores
    from flashcli.errors import UsageError

    for name in against:
        if name not in ("torch", "triton") or not peers.installed(name):
            raise UsageError(f"there is no peer {name!r} here.", "install torch or triton, or leave out --against.")
    contenders, record = [], {"circumstances": bench.circumstances(), "ceilings": {}}
    if backend == "cpu":
        record["circumstances"] |= bench.cpu_circumstances(threads or usable_cores())
        contenders = bench.cpu_contenders(against, threads or usable_cores())
    else:
        record["circumstances"] |= bench.gpu_circumstances()
        record["ceilings"] = peers.ceilings() if "torch" in against else {}
        contenders = bench.gpu_contenders(_kernels(kernels), precisions, against, causal)
    record["rows"] = []
    chosen = _shapes(cases, shapes)
    for row in bench.bench(chosen, contenders, runs, causal, seed, record["ceilings"]):
        record["rows"].append(row)
        click.echo(
            f"{row['case']} {row['contender']}: {row.get('error') or '%.3f ms' % (row['seconds'] * 1e3)}", err=True
        )
    click.echo(records.text(record["rows"]))
    with contextlib.ExitStack() as stack:
        for name, view in {"json": lambda: json.dumps(options.finite(record), indent=1) + "\n",
                           "csv": lambda: records.csv_text(record["rows"]),
                           "markdown": lambda: records.markdown(record["rows"])}.items():  # fmt: skip
            if file := files[f"{name}_file"]:
                stack.enter_context(file).write(view())


def _kernels(names: list[str]) -> list[str]:
    from flashcli.errors import UsageError

    if names == ["all"]:
        return list(KERNELS)
    if unknown := [name for name in names if name not in KERNELS]:
        raise UsageError(f"there is no kernel {unknown[0]!r}.", f"choose from {', '.join(KERNELS)}.")
    return names


def _shapes(cases: tuple[str, ...], shapes: tuple) -> dict:
    from flashcli import testcases
    from flashcli.errors import UsageError

    named = {str(shape): shape for shape in shapes}
    known = {case.name: case.shape for case in testcases.load(Path("testcases"))}
    for name in cases or (() if shapes else REPORT_CASES):
        if name not in known:
            raise UsageError(f"there is no case {name!r}.", "see testcases/manifest.toml, or use --shape.")
        named[name] = known[name]
    return named
