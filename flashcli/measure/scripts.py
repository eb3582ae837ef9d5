"""What the scripts share that measure for records and are no commands: ``python -m flashcli.measure.NAME``."""

from __future__ import annotations

import sys

import click

from flashcli import as_json
from flashcli.measure import machine, records
from flashcli.measure.rows import Row
from flashcli.messages import explain


def publish(name: str, backend: str, threads: int, rows: list[Row], json_path: str | None) -> None:
    """Write the record of script ``name``, if it is wanted, and print its view of the same name."""
    where = machine.gpu_circumstances() if backend == "cuda" else machine.cpu_circumstances(threads)
    command = machine.repeatable(sys.argv[1:]).replace("flashcli", f"python -m flashcli.measure.{name}", 1)
    record = records.Record(machine.circumstances() | {"command": command} | where, rows)
    text = f"{records.VIEWS[name](rows)}\n{records.circumstances_text(record.circumstances)}"
    as_json.present(record.written(), text, json_path)


def run(main: click.Command) -> None:
    """Run a script with the errors and exit codes of the commands."""
    try:
        main(standalone_mode=False)
    except BaseException as error:
        sys.exit(explain(error))
