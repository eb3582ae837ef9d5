"""What the scripts share that measure for the project's records and are no commands: ``python -m flashcli.NAME``."""

from __future__ import annotations

import sys

import click

from flashcli import as_json
from flashcli.measure import bench, records
from flashcli.messages import explain


def publish(name: str, backend: str, threads: int, rows: list[dict], json_path: str | None) -> None:
    """Write the record of script ``name``, if it is wanted, and print its view of the same name."""
    machine = bench.gpu_circumstances() if backend == "cuda" else bench.cpu_circumstances(threads)
    command = bench.repeatable(sys.argv[1:]).replace("flashcli", f"python -m flashcli.{name}", 1)
    record = {"circumstances": bench.circumstances() | {"command": command} | machine, "rows": rows}
    as_json.present(record, f"{records.VIEWS[name](rows)}\n{records.about(record)}", json_path)


def run(main: click.Command) -> None:
    """Run a script with the errors and exit codes of the commands."""
    try:
        main(standalone_mode=False)
    except BaseException as error:
        sys.exit(explain(error))
