from __future__ import annotations

from pathlib import Path

import click

from flashcli.commands import options


@click.command(epilog=options.examples("flashcli export-hw4 handed-in", "flashcli export-hw4 handed-in --kernel mma"))
@click.argument("folder", metavar="DIR")
@options.backend_option
@options.kernel_option
def command(folder: str, backend: str, kernel: str | None) -> None:
    """Write an executable hw4, run as ./hw4 IN OUT, and a Makefile with the target hw4 to DIR.

    With these, flashcli can be handed in to a judge of the homework, this one or another.
    """
    from flashcli.judge.export import export
    from flashcli.run.request import Request, refuse_conflicts

    refuse_conflicts(Request(backend, kernel=kernel), options.as_option)
    for path in export(Path(folder), backend, kernel):
        click.echo(path)
