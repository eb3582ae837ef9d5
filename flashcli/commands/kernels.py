from __future__ import annotations

import click

from flashcli.commands import options
from flashcli.kernels import KERNELS, Problem


@click.command()
@click.option("--d", default=64, show_default=True, type=click.IntRange(1, 256), help="Head size the tiles are for.")
@options.json_option
def command(d: int, as_json: bool) -> None:
    """Show the ladder of kernels: each one's tiles for a head size, what it needs, and its idea."""
    rows = [_row(kernel, d) for kernel in KERNELS.values()]
    if as_json:
        options.print_json(rows)
        return
    for row in rows:
        click.echo("{name}: Br={Br}, Bc={Bc}, {threads} threads, needs sm_{needs}; cuda/{file}".format(**row))
        click.echo(f"    {row['summary']}")


def _row(kernel, d: int) -> dict[str, object]:
    tiling = kernel.tiling(Problem(1, 2048, d))
    needs = "{}{}".format(*kernel.needs) + ("a" if kernel.arch_only else "")
    return {
        "name": kernel.name, "file": kernel.file, "summary": kernel.summary, "needs": needs, "d": d,
        "Br": tiling.Br, "Bc": tiling.Bc, "threads": tiling.threads,
    }  # fmt: skip
