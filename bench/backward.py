"""Gradients of attention on PyTorch's tensors, timed on the training page's cases.

``python -m bench.backward [--json FILE]`` needs PyTorch and a GPU; ``flashcli bench-tensors --backward`` times any
other shape.
"""

from __future__ import annotations

import click

from bench import scripts
from bench.targets import BACKWARD
from flashcli.errors import MISMATCH
from flashcli.measure import bench, machine, peers, records
from flashcli.measure.backward import contenders, measured
from flashcli.measure.bench import Conditions
from flashcli.measure.rows import Row
from flashcli.terminal import as_json


@click.command()
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Time each contender so often.")
@as_json.json_option
def main(runs: int, json_path: str | None) -> None:
    """Time the gradients of the training page's cases on this machine's first GPU."""
    peers.check_installed("torch", gpu=True)
    rows: list[Row] = []
    problems = {str(target.problem): target.problem for target in BACKWARD}
    for row in measured(problems, contenders(["register_tiled"], ["torch"]), Conditions(runs, False, 0)):
        rows.append(row)
        click.echo(f"{row.case} {row.contender}: {records.outcome(row)}", err=True)
    scripts.publish("backward", machine.pytorchs_circumstances("cuda"), rows, json_path)
    if bench.failed(rows):
        raise SystemExit(MISMATCH)


if __name__ == "__main__":
    scripts.run(main)
