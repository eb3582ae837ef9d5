from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from flashcli.commands import options
from flashcli.terminal import as_json

if TYPE_CHECKING:
    from flashcli.measure.diagnosis import Finding


@click.command(epilog=options.examples("flashcli doctor", "flashcli doctor --json doctor.json"))
@as_json.json_option
def command(json_path: str | None) -> None:
    """Show what this machine can run, and what to install for what it cannot."""
    from flashcli.measure.diagnosis import diagnose

    findings = [*diagnose(), *_judge()]
    found = [{name: value for name, value in finding._asdict().items() if value != {}} for finding in findings]
    as_json.present(found, "\n".join(map(_text, findings)), json_path)


def _judge() -> list:
    """Find how `flashcli judge` can confine other people's programs on this machine; empty where it is not Linux."""
    if sys.platform != "linux":
        return []
    from flashcli.judge.containment import NAMES
    from flashcli.judge.sandbox import means
    from flashcli.measure.diagnosis import Finding

    containment, sandboxed = means()
    found = f"programs are contained by {NAMES[containment]}; {'a' if sandboxed else 'no'} sandbox by bubblewrap"
    hints = {
        containment == "freezing": "allow user namespaces (sysctl user.max_user_namespaces), or judge in a container.",
        not sandboxed: "install bubblewrap, to judge programs of strangers in a sandbox.",
    }
    return [Finding("judge", containment != "freezing", found, hints.get(True, ""))]


def _text(finding: Finding) -> str:
    from flashcli.measure import device

    lines = [f"[{'ok' if finding.ok else '--'}] {finding.name}: {finding.text}"]
    more = device.text(finding.properties).splitlines() if finding.properties else []
    more += [f"Hint: {finding.hint}"] if finding.hint else []
    return "\n     ".join(lines + more)
