"""First calls on PyTorch's tensors on a GPU, and runs: by quick builds, by full ones, and by what `warm` has compiled.

``python -m bench.first_calls --json cuda/records/first-calls.json``: each call is the first of its process, and imports
flashcli's modules (`bench.forked_calls`). Full builds are timed for all head sizes side by side; quick builds, which
take more cores, one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np

from bench import scripts
from bench.forked_calls import CALLS, B, H, N, S
from bench.records import load_record
from bench.rows import FirstCall
from flashcli.errors import KernelFailure
from flashcli.kernels import usual
from flashcli.measure import machine
from flashcli.measure.rows import Row
from flashcli.terminal import as_json

FULL = "empty cache, full builds"
STATES = {"quick": "empty cache", "full": FULL, "warm": "after `warm`"}
LIMIT = 600  # seconds for a process


def runs(state: str, folder: Path, heads: Sequence[int]) -> Iterator[FirstCall]:
    """A row for each run, in one state of the cache, which is in ``folder``."""
    for d in heads:
        start = time.perf_counter()
        finished(state, folder, "-m", "flashcli", "run", str(folder / f"{d}.in"), os.devnull)
        seconds = time.perf_counter() - start
        yield FirstCall(case="run", B=B * H, N=N, d=d, causal=False, contender=state, seconds=seconds)


def calls(state: str, folder: Path, heads: Sequence[int]) -> Iterator[FirstCall]:
    """A row for each call of a process, in one state of the cache, which is in ``folder``."""
    told = finished(state, folder, "-m", "bench.forked_calls", *map(str, heads))
    for (d, (operation, causal)), line in zip(itertools.product(heads, CALLS), told.splitlines(), strict=True):
        rows, seconds = S if operation == "decode" else B * H, json.loads(line)
        yield FirstCall(case=operation, B=rows, N=N, d=d, causal=causal, contender=state, seconds=seconds)


def finished(state: str, folder: Path, *arguments: str) -> str:
    """Run Python in one state of the cache, and return what it writes; KernelFailure if it does not end well.

    NVRTC, too, keeps what it has compiled, which no fresh machine has.
    """
    environment = {
        "FLASHCLI_CACHE_DIR": str(folder / state), "FLASHCLI_QUICK": str(int(state != FULL)), "CUDA_CACHE_DISABLE": "1",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=LIMIT
    )
    if done.returncode:
        raise KernelFailure(f"first calls failed: {done.stderr.splitlines()[-1]}.", "run one by hand.")
    return done.stdout


def write_input(path: Path, d: int) -> None:
    """Write an input of `flashcli run`, of random numbers."""
    numbers = np.random.default_rng(d).standard_normal((B * H, 3, N, d), np.float32)
    path.write_bytes(np.array([B * H, N, d], "<i4").tobytes() + numbers.tobytes())


@click.command()
@click.option("--d", "heads", multiple=True, type=int, default=usual.HEADS, help="A head size.")
@click.option(
    "--warmed", type=click.Path(file_okay=False, resolve_path=True, path_type=Path),
    help="A cache's folder, in which `flashcli warm` leaves what is there; a new one by default.",
)  # fmt: skip
@click.option("--state", "states", multiple=True, type=click.Choice(list(STATES)), default=list(STATES))
@click.option("--beside", type=click.Path(path_type=Path), help="A record, whose rows of what is not timed are kept.")
@as_json.json_option
def main(
    heads: tuple[int, ...], warmed: Path | None, states: tuple[str, ...], beside: Path | None, json_path: str | None
) -> None:
    """Time runs and first calls of attention, gradients and decode, with an empty cache and after `flashcli warm`."""
    earlier = load_record(beside, "python -m bench.first_calls", FirstCall).rows if beside else []
    wanted = [STATES[state] for state in states]
    found: list[Row] = [row for row in earlier if row.d not in heads or row.contender not in wanted]
    with tempfile.TemporaryDirectory() as name:
        folder, of_runs = Path(name), [d for d in heads if d in usual.CALLS["run"].heads]
        for d in of_runs:
            write_input(folder / f"{d}.in", d)
        if warmed:
            warmed.mkdir(exist_ok=True)
            (folder / STATES["warm"]).symlink_to(warmed)
        if "warm" in states:
            finished(STATES["warm"], folder, "-m", "flashcli", "warm", *(f"--d={d}" for d in heads))
        for state in wanted:
            shares = [(d,) for d in heads] if state == FULL else [heads]
            with ThreadPoolExecutor(len(shares) if state == FULL else 1) as pool:
                parts = [pool.submit(list, runs(state, folder, of_runs))]
                parts += [pool.submit(list, calls(state, folder, share)) for share in shares]
                found += itertools.chain(*(part.result() for part in parts))
    scripts.publish("first_calls", machine.pytorchs_circumstances("cuda"), found, json_path)


if __name__ == "__main__":
    scripts.run(main)
