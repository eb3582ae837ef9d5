"""Common parts of the scripts that measure for records and are no commands: ``python -m bench.NAME``."""

from __future__ import annotations

import sys

import click

from bench.records import circumstances_text
from bench.views import VIEWS
from flashcli.measure import machine
from flashcli.measure.records import Record
from flashcli.measure.rows import Row
from flashcli.terminal import as_json
from flashcli.terminal.messages import explain


def whereabouts(backend: str, threads: int) -> dict[str, object]:
    """The circumstances of what we compute on the first GPU, "cuda", or on the "cpu"."""
    return machine.gpu_circumstances() if backend == "cuda" else machine.cpu_circumstances(threads)


def publish(
    name: str,
    where: dict[str, object],
    rows: list[Row],
    json_path: str | None,
    ceilings: dict[str, float] | None = None,
    module: str = "",
) -> Record:
    """The record of script ``name``, a ``module`` of another name perhaps: written, if wanted, and its view printed.

    ``where`` says on what it was measured: the circumstances that `flashcli.measure.machine` gives.
    """
    command = machine.repeatable(sys.argv[1:]).replace("flashcli", f"python -m bench.{module or name}", 1)
    record = Record(machine.circumstances() | {"command": command} | where, rows, ceilings)
    text = f"{VIEWS[name](rows)}\n{circumstances_text(record.circumstances)}"
    as_json.present(record.written(), text, json_path)
    return record


def run(main: click.Command) -> None:
    """Run a script with the errors and exit codes of the commands."""
    try:
        main(standalone_mode=False)
    except BaseException as error:
        sys.exit(explain(error))
