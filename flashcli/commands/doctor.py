from __future__ import annotations

import click

from flashcli.commands import options


@click.command()
@options.json_option
def command(as_json: bool) -> None:
    """Show what this machine can run, and what to install for what it cannot."""
    from flashcli.measure.diagnosis import diagnose

    findings = diagnose()
    if as_json:
        options.print_json([finding._asdict() for finding in findings])
        return
    for finding in findings:
        click.echo(f"[{'ok' if finding.ok else '--'}] {finding.name}: {finding.text}")
        if finding.hint:
            click.echo(f"     Hint: {finding.hint}")
