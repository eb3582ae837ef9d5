"""How a run gains by several GPUs: --devices, and ranks of MPI, on an input that takes long to compute and on one that
takes long to read and write, beside plain reading and writing of the same files.

``make bench-scaling`` runs it on the GPUs of a machine; ``python -m flashcli.measure.scaling --backend cpu --shape
2,2000,64 --bytes 200M`` tries it anywhere.
"""

from __future__ import annotations

import filecmp
import json
import mmap
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click

from flashcli import as_json, parameters
from flashcli.backends.cores import usable_cores
from flashcli.backends.cpu import CpuBackend
from flashcli.backends.cuda import CudaBackend
from flashcli.errors import FlashError
from flashcli.files.cut import CHUNK_BYTES
from flashcli.files.distributions import draw
from flashcli.files.fileformat import create_input
from flashcli.files.outputs import AtomicFile
from flashcli.measure import scripts
from flashcli.measure.diagnosis import gpus
from flashcli.run.report import busy
from flashcli.shape import Shape

RUN = (sys.executable, "-m", "flashcli", "run", "--json", "-")
N, D = 2048, 64  # of the large input, which takes ten times as long to read as to compute
ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # containers have no other user
TIMES = ("seconds", "busy", "pipeline", "total", "input", "computation", "output")


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


def timed(command: list[str], given: Path, out: Path) -> dict[str, float]:
    """Seconds of a command, seen from outside, and those it tells of; ``busy`` are those of the slowest part."""
    start = time.perf_counter()
    done = subprocess.run([*command, str(given), str(out)], env={**os.environ, **ROOT}, capture_output=True, text=True)
    seconds = time.perf_counter() - start
    if done.returncode:
        raise FlashError(f"{' '.join(command)} failed: {done.stderr.strip()}", "see whether it runs by itself.")
    record = json.loads(done.stdout)
    parts = record.get("devices") or record.get("ranks") or [record]
    return {**record, "seconds": seconds, "busy": max(map(busy, parts))}


def compete(
    case: str, shape: Shape, given: Path, backend: str, counts: tuple[int, ...], rounds: int
) -> Iterator[dict[str, object]]:
    """One row for each contender. The first round, untimed, fills the caches and compares the outputs."""
    entrants = list(contenders(backend, counts))
    outs = [given.with_name(f"{index}.out") for index in (0, 1)]
    for index, (_, _, command) in enumerate(entrants):
        timed(command, given, outs[min(index, 1)])
        if index and not filecmp.cmp(*outs, shallow=False):
            raise FlashError(f"{' '.join(command)} gives other bytes than one process with one GPU.", "report it.")
    runs = [[] for _ in entrants]
    for _ in range(rounds):
        for taken, (_, _, command) in zip(runs, entrants, strict=True):
            taken.append(timed(command, given, outs[1]))
    for taken, (name, count, _) in zip(runs, entrants, strict=True):
        times = {key: statistics.median(run[key] for run in taken) for key in TIMES}
        ends = {"min": min(run["seconds"] for run in taken), "max": max(run["seconds"] for run in taken)}
        rates = {
            "reads": shape.input_bytes / times["input"] / 1e9, "writes": shape.output_bytes / times["output"] / 1e9,
        }  # fmt: skip
        yield {"case": case, **vars(shape), "contender": name, "count": count, **times, **ends, "runs": rounds, **rates}
    for out in outs:
        out.unlink(missing_ok=True)


def plain(case: str, shape: Shape, given: Path, backend: str, count: int) -> dict[str, object]:
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
    rates = {"reads": shape.input_bytes / reading / 1e9, "writes": shape.output_bytes / writing / 1e9}
    return {"case": case, **vars(shape), "contender": "plain files", "count": count, **rates}


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
    "--shape", type=parameters.SHAPE, default="8,65536,64", show_default=True, help="That takes long to compute."
)
@click.option("--bytes", "size", type=parameters.BYTES, default="20G", show_default=True, help="Of the large input.")
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
@click.option("--folder", type=Path, help="For the files; a temporary one by default.")
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
    large, rows = Shape(max(1, size // (12 * N * D)), N, D), []
    with tempfile.TemporaryDirectory(dir=folder) as files:
        for case, one in (("compute", shape), ("files", large)):
            given = Path(files, "x.in")
            fill(given, one)
            rows += compete(case, one, given, backend, tried, runs)
            if case == "files":
                rows += [plain(case, one, given, backend, count) for count in tried]
            click.echo(f"{case} done", err=True)
    scripts.publish("scaling", backend, 1, rows, json_path)


if __name__ == "__main__":
    scripts.run(main)
