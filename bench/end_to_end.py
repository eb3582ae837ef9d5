"""Whole commands timed from outside, in turn: `flashcli run`, the same without overlap, the homework's program in C++.

`make bench-e2e` runs it on a GPU; ``python -m bench.end_to_end --backend cpu`` tries it anywhere, without
the C++. This process stays small, and has others do what takes memory: the peak that the system
reports of a process is at least that of the one which started it.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from bench import scripts
from bench.race import compete, succeed
from bench.rows import WholeCommand
from flashcli.asked.shape import Shape, ceil_div
from flashcli.cpu.workers import usable_cores
from flashcli.errors import BadInput
from flashcli.files.fileformat import HEADER
from flashcli.files.testcases import REPORT_CASES, TIME_LIMIT, Case, load
from flashcli.measure.race import FLASHCLI
from flashcli.measure.rows import Row, over_all
from flashcli.terminal import as_json

LARGE = (2048, 64)  # N, d of a large input
DEVICE_MEMORY = re.compile(r'"device_mib": ([\d.]+)')
TIME = re.compile(r"^(Total|Input|Computation|Output) Time: ([\d.]+) seconds$", re.MULTILINE)


def contenders(backend: str, hw4: Path) -> dict[str, list[str]]:
    """Commands by name, each to be followed by an input file and an output file."""
    options = ["--backend", backend]
    ours = {
        "run": [*FLASHCLI, "run", *options],
        "run --serial": [*FLASHCLI, "run", "--serial", *options],
    }
    if backend == "cpu":
        return ours
    if not hw4.exists():
        raise BadInput(f"{str(hw4)!r} is not there.", "`make bench-e2e` builds it, or: make -C testcases/hw4.")
    return ours | {"hw4 (C++)": [str(hw4.resolve())]}


def rows_of(case: Case, commands: dict[str, list[str]], runs: int, folder: Path) -> Iterator[WholeCommand]:
    """One row for each contender. The first round, untimed, fills the caches and compares the outputs."""
    outputs = {name: folder / f"{index}.out" for index, name in enumerate(commands)}
    lines = {name: [*command, str(case.input), str(outputs[name])] for name, command in commands.items()}
    memory: dict[str, float | None] = {}
    for name, line in lines.items():
        ours = tuple(line[: len(FLASHCLI)]) == FLASHCLI
        told = DEVICE_MEMORY.search(succeed([*line, "--json", "-"] if ours else line).out)
        memory[name] = float(told[1]) if told else None
        if name != "run":
            succeed([*FLASHCLI, "compare", outputs[name], outputs["run"], "--input", case.input])
    for name, taken in compete(lines, runs).items():
        last = taken[-1]
        phases: dict[str, Any] = {phase.lower(): float(seconds) for phase, seconds in TIME.findall(last.out)}
        times = over_all([run.seconds for run in taken])
        about = Row.about(case.name, case.shape, name)
        yield WholeCommand(**vars(about), **times, **phases, peak_mib=last.peak_mib, device_mib=memory[name])


def prepare(case: Case) -> None:
    if not case.is_ready():
        case.input.parent.mkdir(parents=True, exist_ok=True)
        shape = ",".join(str(size) for size in vars(case.shape).values())
        succeed([*FLASHCLI, "generate", case.input, "--force", "--shape", shape, "--seed", case.seed])


def zeros(folder: Path, gigabytes: int) -> Case:
    """A case of so many 10^9 bytes or little more, all zeros."""
    path = folder / "large.in"
    shape = Shape(ceil_div(gigabytes * 10**9, Shape(1, *LARGE).input_batch_bytes), *LARGE)
    with open(path, "wb") as file:  # zeros take no space where the file system can do without
        file.write(HEADER.pack(*vars(shape).values()))
        file.truncate(shape.input_bytes)
    return Case(f"{gigabytes} GB of zeros", shape, None, path, None, TIME_LIMIT)


@click.command()
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--case", "names", multiple=True, default=REPORT_CASES, show_default=True, help="May be repeated.")
@click.option("--folder", type=Path, default="testcases", show_default=True, help="Where the cases are.")
@click.option("--hw4", type=Path, default="testcases/hw4/hw4", show_default=True, help="The homework's program in C++.")
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Timed runs of each command.")
@click.option(
    "--large",
    metavar="GB",
    type=click.IntRange(1),
    help="Also an input of so many gigabytes, in 512 MiB of the GPU.",
)
@as_json.json_option
def main(
    backend: str, names: tuple[str], folder: Path, hw4: Path, runs: int, large: int | None, json_path: str | None
) -> None:
    """Time whole commands in turn, and print their medians."""
    commands = contenders(backend, hw4)
    cases = {case.name: case for case in load(folder)}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as outputs:
        for name in names:
            if name not in cases:
                raise BadInput(f"there is no case {name} in {str(folder)!r}.", f"choose from {', '.join(cases)}.")
            prepare(cases[name])
            rows += rows_of(cases[name], commands, runs, Path(outputs))
            click.echo(f"{name} done", err=True)
        if large:
            limited = {"run": [*commands["run"], *(["--max-device-memory", "512M"] if backend == "cuda" else [])]}
            rows += rows_of(zeros(Path(outputs), large), limited, min(runs, 3), Path(outputs))
    scripts.publish("end_to_end", scripts.whereabouts(backend, len(usable_cores())), rows, json_path)


if __name__ == "__main__":
    scripts.run(main)
