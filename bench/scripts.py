"""Common parts of the scripts that measure for records and are no commands: ``python -m bench.NAME``."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import click

from bench.records import circumstances_text
from bench.views import VIEWS
from flashcli.errors import MISMATCH
from flashcli.measure import bench, machine, peers, records
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


def measure(name: str, rows: Iterator[Row], json_path: str | None) -> None:
    """Measure rows of PyTorch's tensors on the first GPU, telling each, and publish them; exit if an answer is wrong.

    ``rows`` is a generator, which may want PyTorch from its first row on.
    """
    peers.check_installed("torch", gpu=True)
    told: list[Row] = []
    for row in rows:
        told.append(row)
        click.echo(f"{row.case} {row.contender}: {records.outcome(row)}", err=True)
    publish(name, machine.pytorchs_circumstances("cuda"), told, json_path)
    if bench.failed(told):
        raise SystemExit(MISMATCH)


def run(main: click.Command) -> None:
    """Run a script with the errors and exit codes of the commands, and with full builds only."""
    os.environ.setdefault("FLASHCLI_QUICK", "0")
    try:
        main(standalone_mode=False)
    except BaseException as error:
        sys.exit(explain(error))
