"""Time kernels and their peers on the same inputs in one run, correctness first; the record that the README quotes."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from flashcli import __version__
from flashcli.backends.cpu import blas_text
from flashcli.backends.request import Request, open_backend
from flashcli.files.distributions import draw
from flashcli.files.verify import Comparison, reference
from flashcli.kernels.attention import KERNELS
from flashcli.measure import peers
from flashcli.measure.diagnosis import gpus
from flashcli.run import arrays
from flashcli.shape import Shape, ceil_div, tflops
from flashcli.timeline import wall_seconds

L2_BYTES = 256 * 2**20  # several inputs, more than any second-level cache holds, take turns
CHECKED_ROWS = 512
# Relative L2 against float64 above which a contender is refused, not timed: fp32 arithmetic is below 1e-5 on uniform
# inputs whatever its order of summation, half precision near 7e-4; a wrong kernel is near 1.
REFUSED_ABOVE = {"float32": 1e-5, "float16": 5e-3}
WRONG = "wrong: "  # begins the error of a refused contender


class Conditions(NamedTuple):
    """Under which all contenders are timed. ``ceilings`` are the rates that `peers.ceilings` measured, if it did."""

    runs: int
    causal: bool
    seed: int
    ceilings: dict[str, float] = {}  # noqa: RUF012 (never changed)


class Contender(NamedTuple):
    """``measure(inputs, out, runs)`` gives the seconds of each run, and the first input's answer in ``out``."""

    name: str
    dtype: str
    unit: str | None  # which of the measured ceilings bounds it: fp32, fp16, fp16/3
    measure: object


def inputs_for(shape: Shape, seed: int) -> list[np.ndarray]:
    count = min(8, max(2, ceil_div(L2_BYTES, shape.input_bytes)))
    return [draw(shape, range(shape.B), seed + index) for index in range(count)]


def check(qkv: np.ndarray, out: np.ndarray, causal: bool, seed: int) -> Comparison:
    """A seeded sample of rows of the answer against float64."""
    B, _, N, _ = qkv.shape
    rng, comparison = np.random.default_rng(seed), Comparison()
    per_batch = max(1, min(N, CHECKED_ROWS // min(B, 64)))
    for batch in rng.choice(B, min(B, 64), replace=False):
        rows = np.sort(rng.choice(N, per_batch, replace=False))
        comparison.add(out[batch][rows], reference(qkv[batch], causal, rows=rows), int(batch), rows)
    return comparison


def bench(shapes: dict[str, Shape], contenders: list[Contender], conditions: Conditions) -> Iterator[dict[str, object]]:
    """One flat row for each shape and contender; a wrong or failing one has an ``error`` instead of times."""
    for case, shape in shapes.items():
        inputs = inputs_for(shape, conditions.seed)
        for contender in contenders:
            row = {"case": case, **vars(shape), "causal": conditions.causal, "contender": contender.name}
            yield row | measured(contender, shape, inputs, conditions)
            peers.release()


def measured(contender: Contender, shape: Shape, inputs: list[np.ndarray], conditions: Conditions) -> dict[str, object]:
    """The figures of one row: errors and seconds; or why there are none, as ``error``."""
    runs, causal, seed, ceilings = conditions
    out = np.full((shape.B, shape.N, shape.d), np.nan, np.float32)
    try:
        seconds = contender.measure(inputs, out, runs)
    except Exception as error:  # a peer may fail in any way: the other rows shall survive
        return {"error": (str(error).strip() or type(error).__name__).splitlines()[0]}
    result = check(inputs[0], out, causal, seed)
    accuracy = {"relative_l2": result.relative_l2, "max_abs": result.max_abs}
    if result.got_nonfinite or not result.relative_l2 <= REFUSED_ABOVE[contender.dtype]:
        return accuracy | {"error": f"{WRONG}relative L2 {result.relative_l2:.1e}, {result.got_nonfinite} not finite"}
    median = statistics.median(seconds)
    times = {"seconds": median, "min": min(seconds), "max": max(seconds), "runs": len(seconds)}
    floors, speed = {}, tflops(**vars(shape), seconds=median, causal=causal)
    if ceilings:
        floors["floor_bytes"] = 16 * shape.B * shape.N * shape.d / ceilings["bytes"]  # Q, K, V once in, O once out
    if ceilings and contender.unit:
        rate = ceilings["fp16"] / 3 if contender.unit == "fp16/3" else ceilings[contender.unit]
        floors["floor_operations"] = speed * 1e12 * median / rate
    return accuracy | times | floors | {"tflops": speed}


def failed(rows: list[dict[str, object]]) -> bool:
    """Whether any contender was wrong, or none could be timed."""
    return any(row.get("error", "").startswith(WRONG) for row in rows) or not any("seconds" in row for row in rows)


def gpu_contenders(kernels: list[str], precisions: list[str], against: list[str], causal: bool) -> list[Contender]:
    ours = [
        kernel_contender(kernel, precision, causal)
        for precision in precisions
        for kernel in kernels
        if precision in KERNELS[kernel].precisions
    ]
    theirs = [
        Contender(
            peer.name, peer.dtype, None, lambda inputs, out, runs, peer=peer: peers.measure(peer, inputs, out, runs)
        )
        for peer in peers.gpu_peers(against, causal)
    ]
    return ours + theirs


def kernel_contender(kernel: str, precision: str, causal: bool) -> Contender:
    """A rung, measured by the backend that it opens."""
    return Contender(*_named(kernel, precision), _measure(Request(causal=causal, kernel=kernel, precision=precision)))


def _measure(request: Request) -> Callable[..., list[float]]:
    """The ``measure`` of a contender of ours."""

    def measure(inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        with open_backend(request, Shape(*out.shape)) as backend:
            return arrays.measure(backend, inputs, out, runs)

    return measure


def _named(kernel: str, precision: str) -> tuple[str, str, str | None]:
    if precision == "fp16":
        return f"{kernel} fp16", "float16", "fp16"
    if KERNELS[kernel].on_host:
        return kernel, "float32", None
    return kernel, "float32", "fp16/3" if KERNELS[kernel].splits else "fp32"


def cpu_contenders(against: list[str], threads: int, causal: bool) -> list[Contender]:
    ours = [Contender("flashcli cpu", "float32", None, _measure(Request("cpu", causal, threads=threads)))]
    theirs = [
        Contender(peer.name, peer.dtype, None, _torch_cpu_measure(peer))
        for peer in (peers.cpu_peers(threads, causal) if "torch" in against else [])
    ]
    return ours + theirs


def _torch_cpu_measure(peer: peers.Peer):
    import torch

    def measure(inputs: list[np.ndarray], out: np.ndarray, runs: int) -> list[float]:
        tensors = [[torch.from_numpy(x[:, i, None]).contiguous() for i in range(3)] for x in inputs]
        seconds = wall_seconds(lambda qkv: peer.attend(*qkv), tensors, runs)
        out[...] = peer.attend(*tensors[0])[:, 0].numpy()
        return seconds

    return measure


def circumstances() -> dict[str, object]:
    """What a record must say so that others can repeat it."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": repeatable(sys.argv[1:]),
        "commit": os.environ.get("FLASHCLI_COMMIT") or _git_commit(),
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "cpu": _cpu_name(),
    }


def repeatable(arguments: list[str]) -> str:
    """The command line without the files that results went to."""
    return re.sub(r" --(json|csv|markdown|plot)([ =](?!--)\S+)?", "", " ".join(["flashcli", *arguments]))


def cpu_circumstances(threads: int) -> dict[str, object]:
    return {"threads": threads, "blas": blas_text()}


def gpu_circumstances() -> dict[str, object]:
    from flashcli.backends import cuda

    name, capability, memory = gpus()[0]
    version = cuda.load_driver().get_driver_version()
    return {
        "gpu": name,
        "compute_capability": "{}.{}".format(*capability),
        "memory_gib": round(memory / 2**30),
        "driver_cuda": f"{version // 1000}.{version % 1000 // 10}",
        "driver": _driver_version(),
    }


def _git_commit() -> str:
    return _first_line("git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty", "--abbrev=12")


def _driver_version() -> str:
    try:
        return Path("/sys/module/nvidia/version").read_text().strip()
    except OSError:
        return _first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")


def _first_line(*command: str) -> str:
    """What a command prints, if it is installed and has something to say."""
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return "unknown"
    return (result.stdout.splitlines() or ["unknown"])[0].strip()


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()
