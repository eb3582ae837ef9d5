"""Whole commands timed from outside, in turn: `flashcli run`, the same without overlap, the homework's program in C++.

`make bench-e2e` runs it on a GPU; ``python -m flashcli.measure.end_to_end --backend cpu`` tries it anywhere, without
the C++. This process stays small, and has others do what takes memory: the peak that the system
reports of a process is at least that of the one which started it.
"""

from __future__ import annotations

import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import click

from flashcli import as_json
from flashcli.backends.cores import usable_cores
from flashcli.errors import BadInput, FlashError
from flashcli.files.fileformat import create_zeros
from flashcli.files.testcases import REPORT_CASES, TIME_LIMIT, Case, load
from flashcli.measure import scripts
from flashcli.shape import Shape, ceil_div

LARGE = (2048, 64)  # N, d of a large input
FLASHCLI = (sys.executable, "-m", "flashcli")
DEVICE_MEMORY = re.compile(r'"(device_mib)": ([\d.]+)')
TIME = re.compile(r"^(Total|Input|Computation|Output) Time: ([\d.]+) seconds$", re.MULTILINE)


def contenders(backend: str, hw4: Path) -> dict[str, list[str]]:
    """Commands by name, each to be followed by an input file and an output file."""
    options = ["--backend", backend]
    ours = {"run": [*FLASHCLI, "run", *options], "run --serial": [*FLASHCLI, "run", "--serial", *options]}
    if backend == "cpu":
        return ours
    if not hw4.exists():
        raise BadInput(f"{str(hw4)!r} is not there.", "`make bench-e2e` builds it, or: make -C testcases/hw4.")
    return ours | {"hw4 (C++)": [str(hw4.resolve())]}


def finish(command: list[object]) -> dict[str, float]:
    """Run a command to its end: wall seconds and peak memory, seen from outside, and the times it printed."""
    start = time.perf_counter()
    process = subprocess.Popen([*map(str, command)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    printed = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise FlashError(f"{' '.join(map(str, command))} failed: {printed.strip()}", "see whether it runs by itself.")
    return {
        "seconds": seconds,
        "peak_mib": usage.ru_maxrss / 1024,
        **{phase.lower(): float(value) for phase, value in TIME.findall(printed) + DEVICE_MEMORY.findall(printed)},
    }


def compete(case: Case, commands: dict[str, list[str]], rounds: int, folder: Path) -> Iterator[dict[str, object]]:
    """One row for each contender. The first round, untimed, fills the caches and compares the outputs."""
    outputs = {name: folder / f"{index}.out" for index, name in enumerate(commands)}
    lines = {name: [*command, case.input, outputs[name]] for name, command in commands.items()}
    memory = {}
    for name, line in lines.items():
        first = finish([*line, "--json", "-"] if line[: len(FLASHCLI)] == [*FLASHCLI] else line)
        memory[name] = {key: value for key, value in first.items() if key == "device_mib"}
        if name != "run":
            finish([*FLASHCLI, "compare", outputs[name], outputs["run"], "--input", case.input])
    runs = {name: [] for name in lines}
    for turn in range(rounds):
        for name in rotated(list(lines), turn):  # what a command leaves for the system to do slows down the next
            runs[name].append(finish(lines[name]))
    for name, taken in runs.items():
        seconds = [run["seconds"] for run in taken]
        times = {"seconds": statistics.median(seconds), "min": min(seconds), "max": max(seconds), "runs": rounds}
        yield {"case": case.name, **vars(case.shape), "contender": name, **taken[-1], **times, **memory[name]}


def rotated(names: list[str], turn: int) -> list[str]:
    """Beginning with another one in each turn."""
    first = turn % len(names)
    return names[first:] + names[:first]


def prepare(case: Case) -> None:
    if not case.is_ready():
        case.input.parent.mkdir(parents=True, exist_ok=True)
        shape = ",".join(str(size) for size in vars(case.shape).values())
        finish([*FLASHCLI, "generate", case.input, "--force", "--shape", shape, "--seed", case.seed])


def zeros(folder: Path, gigabytes: int) -> Case:
    """A case of so many 10^9 bytes or little more, all zeros."""
    path = folder / "large.in"
    shape = Shape(ceil_div(gigabytes * 10**9, Shape(1, *LARGE).input_batch_bytes), *LARGE)
    create_zeros(path, shape)
    return Case(f"{gigabytes} GB of zeros", shape, None, path, None, TIME_LIMIT)


@click.command()
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option("--case", "names", multiple=True, default=REPORT_CASES, show_default=True, help="May be repeated.")
@click.option("--folder", type=Path, default="testcases", show_default=True, help="Of the cases.")
@click.option("--hw4", type=Path, default="testcases/hw4/hw4", show_default=True, help="The C++ program.")
@click.option("--runs", type=click.IntRange(1), default=10, show_default=True, help="Timed runs of each command.")
@click.option("--large", metavar="GB", type=click.IntRange(1), help="Also an input of so many gigabytes, in 512 MiB.")
@as_json.json_option
def main(
    backend: str, names: tuple[str], folder: Path, hw4: Path, runs: int, large: int | None, json_path: str | None
) -> None:
    """Time whole commands in turn, and print their medians."""
    commands = contenders(backend, hw4)
    cases = {case.name: case for case in load(folder)}
    rows = []
    with tempfile.TemporaryDirectory() as outputs:
        for name in names:
            if name not in cases:
                raise BadInput(f"there is no case {name} in {str(folder)!r}.", f"choose from {', '.join(cases)}.")
            prepare(cases[name])
            rows += compete(cases[name], commands, runs, Path(outputs))
            click.echo(f"{name} done", err=True)
        if large:
            limited = {"run": [*commands["run"], *(["--max-device-memory", "512M"] if backend == "cuda" else [])]}
            rows += compete(zeros(Path(outputs), large), limited, min(runs, 3), Path(outputs))
    scripts.publish("end_to_end", backend, len(usable_cores()), rows, json_path)


if __name__ == "__main__":
    scripts.run(main)
