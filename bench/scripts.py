"""Common parts of the scripts that measure for records and are no commands: ``python -m bench.NAME``."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import UnionType

import click

from bench.records import circumstances_text, load_record
from bench.views import VIEWS
from flashcli.errors import MISMATCH
from flashcli.measure import bench, machine, peers, records
from flashcli.measure.bench import Conditions
from flashcli.measure.plots import check_picture
from flashcli.measure.records import Kind, Record
from flashcli.measure.rows import Row
from flashcli.terminal import as_json
from flashcli.terminal.messages import explain


def whereabouts(backend: str, threads: int) -> dict[str, object]:
    """The circumstances of what we compute on the first GPU, "cuda", or on the "cpu"."""
    return machine.gpu_circumstances() if backend == "cuda" else machine.cpu_circumstances(threads)


def told_briefly(row: Row) -> str:
    return f"{row.case} {row.contender}: {records.outcome(row)}"


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


def told(rows: Iterable[Kind], tell: Callable[[Kind], str] = told_briefly) -> list[Row]:
    """Measure all rows, telling each on stderr as it comes."""
    found: list[Row] = []
    for row in rows:
        found.append(row)
        click.echo(tell(row), err=True)
    return found


def measure(name: str, rows: Iterator[Row], json_path: str | None, module: str = "") -> None:
    """Measure rows of PyTorch's tensors on the first GPU, telling each, and publish them; exit if an answer is wrong.

    ``rows`` is a generator, which may want PyTorch from its first row on.
    """
    peers.check_installed("torch", gpu=True)
    found = told(rows)
    publish(name, machine.pytorchs_circumstances("cuda"), found, json_path, module=module)
    if bench.failed(found):
        raise SystemExit(MISMATCH)


def runs_option(default: int) -> Callable:
    return click.option(
        "--runs", type=click.IntRange(1), default=default, show_default=True, help="Time each contender so often."
    )


def of_tensors(name: str, measured: Callable[[Conditions], Iterator[Row]], runs: int, about: str) -> click.Command:
    """The command of a script that times PyTorch's tensors on the first GPU, with no options of its own."""

    @click.command(help=about)
    @runs_option(runs)
    @as_json.json_option
    def main(runs: int, json_path: str | None) -> None:
        measure(name, measured(Conditions(runs, False, 0)), json_path)

    return main


def redrawing(command: str, kind: type[Row] | UnionType, draw: Callable[[Record, str], None]) -> click.Command:
    """The command of a script that draws a record of another command again."""

    @click.command(help=f"Draw a RECORD of `{command}` to PICTURE.")
    @click.argument("record", type=click.Path(exists=True, dir_okay=False, path_type=Path))
    @click.argument("picture")
    def main(record: Path, picture: str) -> None:
        check_picture(picture)
        draw(load_record(record, command, kind), picture)

    return main


def run(main: click.Command) -> None:
    """Run a script with the errors and exit codes of the commands, and with full builds only."""
    os.environ.setdefault("FLASHCLI_QUICK", "0")
    try:
        main(standalone_mode=False)
    except BaseException as error:
        sys.exit(explain(error))
