"""What the scripts share that measure for records and are no commands: ``python -m flashcli.measure.NAME``."""

from __future__ import annotations

import sys

import click

from flashcli.errors import BackendUnavailable
from flashcli.measure import machine, peers, records
from flashcli.measure.rows import Row
from flashcli.terminal import as_json
from flashcli.terminal.messages import explain


def check_installed(*packages: str, gpu: bool = False) -> None:
    """Raise BackendUnavailable where one of the packages is missing, or where PyTorch finds no ``gpu``."""
    for name in packages:
        if not peers.installed(name):
            raise BackendUnavailable(f"{name} is not installed.", f"pip install {name}.")
    if gpu:
        machine.pytorchs_gpu()


def whereabouts(backend: str, threads: int) -> dict[str, object]:
    """The circumstances of what we compute on the first GPU, "cuda", or on the "cpu"."""
    return machine.gpu_circumstances() if backend == "cuda" else machine.cpu_circumstances(threads)


def publish(
    name: str,
    where: dict[str, object],
    rows: list[Row],
    json_path: str | None,
    ceilings: dict[str, float] | None = None,
) -> records.Record:
    """The record of script ``name``: written, if that is wanted, and its view of the same name printed.

    ``where`` says on what it was measured: the circumstances that `flashcli.measure.machine` gives.
    """
    command = machine.repeatable(sys.argv[1:]).replace("flashcli", f"python -m flashcli.measure.{name}", 1)
    record = records.Record(machine.circumstances() | {"command": command} | where, rows, ceilings)
    text = f"{records.VIEWS[name](rows)}\n{records.circumstances_text(record.circumstances)}"
    as_json.present(record.written(), text, json_path)
    return record


def run(main: click.Command) -> None:
    """Run a script with the errors and exit codes of the commands."""
    try:
        main(standalone_mode=False)
    except BaseException as error:
        sys.exit(explain(error))
