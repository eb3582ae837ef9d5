"""First calls on PyTorch's tensors on a GPU, and runs: by quick builds, by full ones, and by kept kernels.

``python -m bench.first_calls --json cuda/records/first-calls.json``: in a process, each call is of a new kind, and the
first includes the import of flashcli's modules. Full builds are timed in a process for each head size, side by side;
quick builds, which take more cores, one after the other.
"""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import click
import numpy as np

from bench import scripts
from bench.rows import FirstCall
from flashcli.errors import KernelFailure
from flashcli.measure import machine
from flashcli.measure.rows import Row
from flashcli.terminal import as_json

B, H, N = 2, 8, 2048  # of attention, and of runs with B * H batches
S, PAGES = 8, 1024  # sequences of decode, pages of 16 tokens of its cache
QUICK, FULL, KEPT = "empty cache", "empty cache, full builds", "kept kernels"
STATES = {QUICK: "1", FULL: "0", KEPT: "1"}  # FLASHCLI_QUICK
RUNS = (32, 64)  # head sizes of runs
LIMIT = 300  # seconds for a process
CALLS = (("attention", False), ("attention", True), ("decode", False))


def call(operation: str, d: int, causal: bool) -> Callable[[], object]:
    """The call, whose tensors are there already."""
    import torch

    from flashcli.api import attention, decode

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype)

    if operation == "decode":
        half = torch.float16
        query, keys = random(S, 32, d, dtype=half), random(PAGES, 8, d // 8, 16, 8, dtype=half)
        values = random(PAGES, 8, d, 16, dtype=half)
        tables = torch.arange(PAGES, device="cuda", dtype=torch.int32).reshape(S, -1)
        lengths = torch.full((S,), 2000, device="cuda", dtype=torch.int32)
        return lambda: decode(query, keys, values, tables, lengths)
    q = random(B, H, N, d)
    return lambda: attention(q, q, q, causal=causal)


def child(heads: Sequence[int]) -> None:
    """Print the seconds of each first call, one a line."""
    import torch

    torch.zeros(1, device="cuda")  # the context is there before
    for d, (operation, causal) in itertools.product(heads, CALLS):
        this = call(operation, d, causal)
        torch.cuda.synchronize()
        start = time.perf_counter()
        this()
        torch.cuda.synchronize()
        print(json.dumps(time.perf_counter() - start), flush=True)


def runs(state: str, folder: Path, heads: Sequence[int]) -> Iterator[FirstCall]:
    """A row for each run, in one state of the cache, which is in ``folder``."""
    for d in heads:
        start = time.perf_counter()
        finished(state, folder, "-m", "flashcli", "run", str(folder / f"{d}.in"), os.devnull)
        seconds = time.perf_counter() - start
        yield FirstCall(case="run", B=B * H, N=N, d=d, causal=False, contender=state, seconds=seconds)


def calls(state: str, folder: Path, heads: Sequence[int]) -> Iterator[FirstCall]:
    """A row for each call of a process, in one state of the cache, which is in ``folder``."""
    told = finished(state, folder, "-c", f"from bench.first_calls import child; child({heads})")
    for (d, (operation, causal)), line in zip(itertools.product(heads, CALLS), told.splitlines(), strict=True):
        rows, seconds = S if operation == "decode" else B * H, json.loads(line)
        yield FirstCall(case=operation, B=rows, N=N, d=d, causal=causal, contender=state, seconds=seconds)


def finished(state: str, folder: Path, *arguments: str) -> str:
    """Run Python in one state of the cache, and return what it writes; KernelFailure if it does not end well.

    NVRTC, too, keeps what it has compiled, which no fresh machine has.
    """
    environment = {
        "FLASHCLI_CACHE_DIR": str(folder / ("quick" if state == QUICK else "full")), "FLASHCLI_QUICK": STATES[state],
        "CUDA_CACHE_DISABLE": "1",
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
@click.option("--d", "heads", multiple=True, type=int, default=(32, 64, 80, 96, 128), help="A head size.")
@as_json.json_option
def main(heads: tuple[int, ...], json_path: str | None) -> None:
    """Time runs and first calls of attention and decode, with an empty cache and with kept kernels."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as name:
        folder, of_runs = Path(name), [d for d in heads if d in RUNS]
        for d in of_runs:
            write_input(folder / f"{d}.in", d)
        for state in STATES:
            shares = [(d,) for d in heads] if state == FULL else [heads]
            with ThreadPoolExecutor(len(shares) if state == FULL else 1) as pool:
                parts = [pool.submit(list, runs(state, folder, of_runs))]
                parts += [pool.submit(list, calls(state, folder, share)) for share in shares]
                found += itertools.chain(*(part.result() for part in parts))
    scripts.publish("first_calls", machine.pytorchs_circumstances("cuda"), found, json_path)


if __name__ == "__main__":
    scripts.run(main)
