"""How a run gains by several GPUs: --devices, and ranks of MPI, on an input that takes long to compute and on one that
takes long to read and write, beside plain reading and writing of the same files.

``make bench-scaling`` runs it on the GPUs of a machine; ``python -m bench.scaling --backend cpu --shape
2,2000,64 --bytes 200M`` tries it anywhere.
"""

from __future__ import annotations

import filecmp
import json
import mmap
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import click

from bench import scripts
from bench.race import Measured, compete, succeed
from bench.rows import PlainFiles, Scaled
from flashcli.asked.shape import Shape
from flashcli.cpu.workers import usable_cores
from flashcli.errors import FlashError
from flashcli.files.cut import CHUNK_BYTES
from flashcli.files.distributions import draw
from flashcli.files.fileformat import create_input
from flashcli.files.outputs import AtomicFile
from flashcli.measure.machine import gpus
from flashcli.measure.race import FLASHCLI
from flashcli.measure.rows import Row, over_all
from flashcli.run.report import busy
from flashcli.run.slots_cpu import CpuBackend
from flashcli.run.slots_cuda import CudaBackend
from flashcli.terminal import as_json, parameters

RUN = (*FLASHCLI, "run", "--json", "-")
N, D = 2048, 64  # of the large input, which takes ten times as long to read as to compute
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # containers have no other user
RUN_TIMES = ("pipeline", "total", "input", "computation", "output")  # the times in the record of a run


def contenders(backend: str, counts: tuple[int, ...]) -> Iterator[tuple[str, int, list[str]]]:
    """Name, number of GPUs or processes, and command; to be followed by an input file and an output file."""
    mpirun = shutil.which("mpirun", path=str(Path(sys.executable).parent)) or shutil.which("mpirun")
    own = ["--backend", backend, *(["--threads", "1"] if backend == "cpu" else [])]
    for count in counts:
        if backend == "cuda":
            yield "--devices", count, [*RUN, *own, "--devices", ",".join(map(str, range(count)))]
        elif count == 1:
            yield "alone", 1, [*RUN, *own]
        if count > 1 and mpirun:
            yield "mpirun", count, [mpirun, "--oversubscribe", "--bind-to", "none", "-n", str(count), *RUN, *own]


def told(done: Measured) -> dict[str, float]:
    """The seconds that a command tells of; ``busy`` are those of the slowest GPU or process."""
    record = json.loads(done.out)
    parts = record.get("devices") or record.get("ranks") or [record]
    return {**{name: record[name] for name in RUN_TIMES}, "busy": max(map(busy, parts))}


def rows_of(case: str, shape: Shape, given: Path, backend: str, counts: tuple[int, ...], runs: int) -> Iterator[Scaled]:
    """One row for each contender. The first round, untimed, fills the caches and compares the outputs."""
    entrants = {(name, count): command for name, count, command in contenders(backend, counts)}
    first, other = (given.with_name(name) for name in ("first.out", "other.out"))
    for index, command in enumerate(entrants.values()):
        succeed([*command, given, other if index else first], environment=_environment())
        if index and not filecmp.cmp(first, other, shallow=False):
            raise FlashError(f"{' '.join(command)} gives other bytes than one process with one GPU.", "report it.")
    lines = {entrant: [*command, given, other] for entrant, command in entrants.items()}
    for (name, count), taken in compete(lines, runs, _environment()).items():
        tellings = [told(done) for done in taken]
        times: dict[str, Any] = {key: statistics.median(each[key] for each in tellings) for key in (*RUN_TIMES, "busy")}
        rates = _rates(shape, times["input"], times["output"])
        over = over_all([done.seconds for done in taken])
        yield Scaled(**vars(Row.about(case, shape, name)), count=count, **rates, **over, **times)
    for out in (first, other):
        out.unlink(missing_ok=True)


def _rates(shape: Shape, reading: float, writing: float) -> dict[str, Any]:
    """10^9 bytes a second, of the seconds that reading and writing took."""
    return {"reads": shape.input_bytes / reading / 1e9, "writes": shape.output_bytes / writing / 1e9}


def _environment() -> dict[str, str]:
    return {**os.environ, **ROOT}


def plain(case: str, shape: Shape, given: Path, backend: str, count: int) -> PlainFiles:
    """Reading all of the input, and writing as much as the output, and nothing else, with as many threads as a run."""
    overlap = (CudaBackend if backend == "cuda" else CpuBackend).overlap
    source = os.open(given, os.O_RDONLY)
    buffers = [mmap.mmap(-1, CHUNK_BYTES) for _ in range(count * max(overlap.reading, overlap.writing))]

    def read(buffer: mmap.mmap, offset: int, size: int) -> None:
        os.preadv(source, [memoryview(buffer)[:size]], offset)

    with AtomicFile(given.with_name("plain.out"), shape.output_bytes) as sink:

        def write(buffer: mmap.mmap, offset: int, size: int) -> None:
            sink.write_at(offset, memoryview(buffer)[:size])

        reading = side_by_side(read, buffers[: count * overlap.reading], shape.input_bytes)
        writing = side_by_side(write, buffers[: count * overlap.writing], shape.output_bytes)
    os.close(source)
    rates = _rates(shape, reading, writing)
    return PlainFiles(**vars(Row.about(case, shape, "plain files")), count=count, **rates)


def side_by_side(work: Callable[[mmap.mmap, int, int], None], buffers: list[mmap.mmap], size: int) -> float:
    """Seconds for all blocks of a file, each taken by the next thread that is free; a thread for each buffer."""
    offsets = iter(range(0, size, CHUNK_BYTES))

    def take(buffer: mmap.mmap) -> None:
        for offset in offsets:  # next() of a range's iterator is one step, which threads do not share
            work(buffer, offset, min(CHUNK_BYTES, size - offset))

    start = time.perf_counter()
    with ThreadPoolExecutor(len(buffers)) as pool:
        list(pool.map(take, buffers))
    return time.perf_counter() - start


def fill(path: Path, shape: Shape) -> None:
    """An input whose batches repeat except for their first number: random ones would take longer than all the rest."""
    qkv = draw(shape, range(min(shape.B, max(1, 8 * CHUNK_BYTES // shape.input_batch_bytes))), seed=0)
    with create_input(path, shape) as file:
        for first in range(0, shape.B, len(qkv)):
            batches = range(first, min(first + len(qkv), shape.B))
            qkv[: len(batches), 0, 0, 0] = [batch % 1000 / 500 for batch in batches]
            file.write(shape.whole(batches), qkv[: len(batches)])
        file.commit()


@click.command()
@click.option("--backend", type=click.Choice(["cuda", "cpu"]), default="cuda", show_default=True)
@click.option(
    "--shape",
    type=parameters.SHAPE,
    default="8,65536,64",
    show_default=True,
    help="An input that is long to compute.",
)
@click.option(
    "--bytes",
    "size",
    type=parameters.BYTES,
    default="20G",
    show_default=True,
    help="The size of one that is long to read.",
)
@click.option(
    "--count",
    "counts",
    multiple=True,
    type=click.IntRange(1),
    default=[1, 2, 4],
    show_default=True,
    help="So many GPUs, or processes; repeatable. Those beyond the machine's are left out.",
)
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Timed runs of each command.")
@click.option("--folder", type=Path, help="Where the files are for the time; a temporary folder by default.")
@as_json.json_option
def main(
    backend: str,
    shape: Shape,
    size: int,
    counts: tuple[int, ...],
    runs: int,
    folder: Path | None,
    json_path: str | None,
) -> None:
    """Time runs on 1 GPU and on several, in turn, and print the medians."""
    there = len(gpus()) if backend == "cuda" else len(usable_cores())
    tried = tuple(count for count in counts if count <= there)
    large, rows = Shape(max(1, size // (12 * N * D)), N, D), list[Row]()
    with tempfile.TemporaryDirectory(dir=folder) as files:
        for case, one in (("compute", shape), ("files", large)):
            given = Path(files, "x.in")
            fill(given, one)
            rows += rows_of(case, one, given, backend, tried, runs)
            if case == "files":
                rows += [plain(case, one, given, backend, count) for count in tried]
            click.echo(f"{case} done", err=True)
    scripts.publish("scaling", scripts.whereabouts(backend, 1), rows, json_path)


if __name__ == "__main__":
    scripts.run(main)
