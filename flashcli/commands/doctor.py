from __future__ import annotations

import click

from flashcli import as_json
from flashcli.commands import options


@click.command(epilog=options.examples("flashcli doctor", "flashcli doctor --json doctor.json"))
@as_json.json_option
def command(json_path: str | None) -> None:
    """Show what this machine can run, and what to install for what it cannot."""
    from flashcli.measure.diagnosis import diagnose

    findings = diagnose()
    as_json.present([finding._asdict() for finding in findings], "\n".join(map(_text, findings)), json_path)


def _text(finding) -> str:
    mark = "ok" if finding.ok else "--"
    return f"[{mark}] {finding.name}: {finding.text}" + (f"\n     Hint: {finding.hint}" if finding.hint else "")
