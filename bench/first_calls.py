"""First calls on PyTorch's tensors on a GPU, with an empty cache of kernels and with what that has left in it.

``python -m bench.first_calls --json cuda/records/first-calls.json``: one process for each head size and state of the
cache, in which each call is of a new kind; some head sizes side by side. The first call of a process includes the
import of flashcli's modules.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import click

from bench import scripts
from bench.rows import FirstCall
from flashcli.errors import KernelFailure
from flashcli.measure import machine
from flashcli.measure.rows import Row
from flashcli.terminal import as_json

B, H, N = 2, 8, 2048  # of attention and gradients
S, PAGES = 8, 1024  # sequences of decode, pages of 16 tokens of its cache
STATES = ("empty cache", "kept kernels")
LIMIT = 300  # seconds for a process
AT_ONCE = 5  # head sizes, whose compilers must find idle cores: a call has two
CALLS = (("attention", False), ("backward", False), ("attention", True), ("backward", True), ("decode", False))


def call(operation: str, d: int, causal: bool) -> Callable[[], object]:
    """The call, whose tensors are there already."""
    import torch

    from flashcli.api import attention, attention_backward, decode

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
    if operation == "backward":
        return lambda: attention_backward(q, q, q, q, causal=causal)
    return lambda: attention(q, q, q, causal=causal)


def child(d: int) -> None:
    """Print the seconds of each first call, one a line."""
    import torch

    torch.zeros(1, device="cuda")  # the context is there before
    for operation, causal in CALLS:
        this = call(operation, d, causal)
        torch.cuda.synchronize()
        start = time.perf_counter()
        this()
        torch.cuda.synchronize()
        print(json.dumps(time.perf_counter() - start), flush=True)


def rows(d: int) -> list[FirstCall]:
    """A row for each state of the cache and call."""
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for state in STATES:
            done = subprocess.run(
                [sys.executable, "-c", f"from bench.first_calls import child; child({d})"],
                env={**os.environ, "FLASHCLI_CACHE_DIR": folder}, capture_output=True, text=True, timeout=LIMIT,
            )  # fmt: skip
            if done.returncode:
                raise KernelFailure(f"first calls failed: {done.stderr.splitlines()[-1]}.", "run one by hand.")
            found += [
                FirstCall(
                    case=operation, B=S if operation == "decode" else B * H, N=N, d=d, causal=causal, contender=state,
                    seconds=json.loads(line),
                )
                for (operation, causal), line in zip(CALLS, done.stdout.splitlines(), strict=True)
            ]  # fmt: skip
    return found


@click.command()
@click.option("--d", "heads", multiple=True, type=int, default=(32, 64, 80, 96, 128), help="A head size.")
@as_json.json_option
def main(heads: tuple[int, ...], json_path: str | None) -> None:
    """Time first calls of attention, its gradients and decode, with an empty cache and with what that left."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        found: list[Row] = [row for each in pool.map(rows, heads) for row in each]
    scripts.publish("first_calls", machine.pytorchs_circumstances("cuda"), found, json_path)


if __name__ == "__main__":
    scripts.run(main)
