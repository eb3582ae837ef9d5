"""Attention in fp32 on a grid of shapes: each of our kernels beside every peer, on the same tensors in one run.

``python -m bench.grid [--json FILE] [--plot FILE]`` needs PyTorch and a GPU. Each contender's answer is
checked; then its single calls are timed, and its calls in a CUDA graph.
"""

from __future__ import annotations

import functools
import itertools
import math
import multiprocessing
import os
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, ThreadPoolExecutor
from typing import Any, NamedTuple

import click

from bench import scripts
from bench.clocks import in_a_graph
from bench.rows import Gridded
from flashcli.asked.attention import call, contiguous
from flashcli.asked.how import How
from flashcli.compiler import compiler
from flashcli.errors import MISMATCH
from flashcli.kernels.attention import KERNELS
from flashcli.kernels.operation import Build, Gpu
from flashcli.kernels.plan import ATTENTION
from flashcli.kernels.problem import Problem as Built
from flashcli.measure import bench, clocks, in_place, machine, peers
from flashcli.measure.in_place import Contender, Entrant, Ready
from flashcli.measure.rows import Row, over_all
from flashcli.measure.tensors import Inputs, Problem
from flashcli.terminal import as_json

# (B, N, d): small heads, short rows, few rows, long rows, and as much as fills 8 GB; and the same with the causal mask.
PLAIN = (
    (64, 256, 8), (4000, 64, 8), (16000, 128, 8), (1, 4096, 8),
    (1, 1024, 16), (2048, 256, 16), (60000, 64, 16), (32, 4096, 16),
    (1024, 200, 24), (16, 2048, 24),
    (4, 128, 32), (1, 512, 32), (8, 1000, 32), (60000, 32, 32), (256, 512, 32), (13600, 128, 32), (1536, 384, 32),
    (4, 32768, 32), (1, 131072, 32),
    (16, 4096, 40), (64, 1024, 48),
    (8, 32, 64), (1, 256, 64), (1, 1024, 64), (1, 2048, 64), (4, 2048, 64), (512, 128, 64), (384, 197, 64),
    (2000, 200, 64), (64, 512, 64), (1, 8192, 64), (10, 2048, 64), (20, 1500, 64), (60000, 128, 64), (16, 4096, 64),
    (500, 2048, 64), (2, 32768, 64), (1, 131072, 64),
    (7, 777, 80), (160, 1024, 80), (24, 2048, 96),
    (1, 1024, 128), (32, 512, 128), (1000, 128, 128), (1, 8192, 128), (64, 2048, 128), (2, 16384, 128),
    (16, 1024, 160), (4, 4096, 192), (1, 512, 256), (200, 128, 256), (1, 4096, 256), (16, 2048, 256),
)  # fmt: skip
CAUSAL = (
    (8, 2048, 16), (1536, 384, 32), (4, 8192, 32), (12, 512, 64), (128, 256, 64), (12, 1024, 64), (25, 1024, 64),
    (64, 2048, 64), (1, 16384, 64), (4, 32768, 64), (32, 1024, 96), (8, 512, 128), (1, 8192, 128), (32, 2048, 128),
    (8, 2048, 256),
)  # fmt: skip
GRID = tuple(
    Problem(B, 1, 1, N, N, d, causal) for shapes, causal in ((PLAIN, False), (CAUSAL, True)) for B, N, d in shapes
)

OURS = tuple(name for name, kernel in KERNELS.items() if kernel.strided)
PRODUCTS = "bf16x6"  # of the Triton kernel: faster than tf32x3 everywhere
# Tilings of the Triton kernel that are tried: each is the fastest somewhere, the others at most 2 % faster anywhere.
TILINGS = ((64, 64, 4), (64, 128, 4), (128, 64, 8), (128, 32, 8))
LONGEST_HEAD = 128  # of the Triton kernel: of longer ones no tiling's tiles fit shared memory

# Bounds beyond which a contender takes so long that no more is told of it.
MOST_OPERATIONS = {"register_tiled": 2e11, "PyTorch math": 1e12}
MOST_SCORES = 2**32  # bytes of all scores, which PyTorch's math attention has in memory more than once
MOST_SPLITTING = 1024  # keys, up to which `wgmma_short` is raced, more than it is chosen for
SLOW = 20e-3  # seconds of a call from which on one is enough, and a graph of it shows nothing

RUNS = 3, 15  # at least, at most
SECONDS = 0.08  # that the runs of all contenders on a shape, each with one before it, may take together
REPLAY = 2e-3  # seconds of a replay, so that its own launch does not count: as many calls as that takes, up to
MOST_CALLS = 20


Ceilings = dict[str, float]  # the rates that `peers.ceilings` measured


def floors(problem: Problem, ceilings: Ceilings) -> dict[str, Any]:
    """Seconds that Q, K and V once in and O once out take, and three half products for each fp32 one."""
    moved = 4 * problem.B * problem.d * (2 * problem.H * problem.M + 2 * problem.Hkv * problem.N)
    return {
        "floor_bytes": moved / ceilings["bytes"], "floor_operations": 3 * problem.operations / ceilings["fp16"]
    }  # fmt: skip


# ---- Contenders


def name_of(problem: Problem) -> str:
    return f"({problem.B}, {problem.N}, {problem.d})" + (" causal" if problem.causal else "")


def entrants(problem: Problem, kernels: Collection[str], against: Collection[str]) -> list[Entrant]:
    """The kernels and peers that can compute a problem, and do not take far too long."""
    found = [in_place.ours(name) for name in kernels if _can(name, problem)]
    if "torch" in against:
        math, efficient, *_ = in_place.pytorchs()
        few = 4 * problem.B * problem.N**2 <= MOST_SCORES and problem.operations <= MOST_OPERATIONS[math.name]
        found += [efficient, *([math] if few else [])]
    if "triton" in against and _for_triton(problem):
        found.append(_triton())
    return [(contender, problem) for contender in found]


def _can(name: str, problem: Problem) -> bool:
    if KERNELS[name].refuses(built(problem)) or (name == "wgmma_short" and problem.N > MOST_SPLITTING):
        return False
    return problem.operations <= MOST_OPERATIONS.get(name, float("inf"))


def _for_triton(problem: Problem) -> bool:
    return 16 <= problem.d <= LONGEST_HEAD and problem.d & (problem.d - 1) == 0


@functools.cache
def _triton() -> Contender:
    """The Triton kernel with the best of `TILINGS` for each problem."""
    from flashcli.measure.peer_triton import attend

    best: dict[Problem, Any] = {}

    def bind(problem: Problem, inputs: Inputs) -> Any:
        call = functools.partial(attend, inputs.q, inputs.k, inputs.v, PRODUCTS, problem.causal)
        if problem not in best:
            best[problem] = min(TILINGS, key=lambda tiling: _seconds(functools.partial(call, tiling)))
        return functools.partial(call, best[problem])

    return Contender(f"Triton {PRODUCTS}", bind)


def _seconds(call: Any) -> float:
    """Seconds of one call; a tiling that does not fit the GPU takes for ever."""
    try:
        return peers.event_seconds(call, call)[0]
    except Exception:  # Triton's own kind, for what exceeds shared memory
        return float("inf")


# ---- What has to be compiled


def built(problem: Problem, multiprocessors: int = 132) -> Built:
    """The problem that our kernels are built for."""
    return Built(
        problem.B * problem.H, problem.M, problem.N, problem.d, problem.causal, sms=multiprocessors, in_place=True,
        batch_invariant=True,
    )  # fmt: skip


def builds(problems: Iterable[Problem], kernels: Collection[str], gpu: Gpu) -> list[Build]:
    """All builds that the kernels launch, once each."""
    found: dict[tuple, Build] = {}
    for problem in problems:
        q = contiguous((problem.B, problem.H, problem.M, problem.d), "float32")
        k = contiguous((problem.B, problem.Hkv, problem.N, problem.d), "float32")
        asked = call(q, k, k, causal=problem.causal).at(0)
        for name in kernels:
            if _can(name, problem):
                steps = ATTENTION.plan(asked, gpu, How(name)).steps
                found |= {(step.build.kernel.name, *step.build.macros().items()): step.build for step in steps}
    return list(found.values())


def compile_all(problems: Sequence[Problem], kernels: Collection[str], triton: bool) -> None:
    """Fill the caches, ours and Triton's, on all cores."""
    from flashcli.gpu.place import place_of_device

    gpu = place_of_device(0).gpu
    arch, cores = compiler.architecture(gpu.capability), os.cpu_count() or 1
    with ThreadPoolExecutor(cores) as threads, ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        made: list[Future] = _compile_triton(problems, pool) if triton else []
        made += [threads.submit(compiler.cubin, build, arch) for build in builds(problems, kernels, gpu)]
        for one in made:
            one.result()


def _compile_triton(problems: Iterable[Problem], pool: Executor) -> list[Future]:
    from flashcli.measure.peer_triton import build, is_ragged

    kinds = {(p.d, is_ragged(p.N), p.causal): p.N for p in problems if _for_triton(p)}
    return [
        pool.submit(build, d, N, causal, PRODUCTS, tiling)
        for (d, _, causal), N in kinds.items()
        for tiling in TILINGS
    ]  # fmt: skip


# ---- Measuring


def measured(
    problems: Iterable[Problem], kernels: Collection[str], against: Collection[str], ceilings: Ceilings
) -> Iterator[Row]:
    """A row for each contender on each problem."""
    for problem in problems:
        yield from _race(entrants(problem, kernels, against), ceilings)


def _race(entered: Sequence[Entrant], ceilings: Ceilings) -> list[Row]:
    """A row for each entrant. Right ones are timed in turn, slow ones only once."""
    case = name_of(entered[0][1])
    found = in_place.checked(case, entered, seed=0)
    ready = [one for one in found if isinstance(one, Ready)]
    first = [peers.event_seconds(one.turns[1], one.turns[0])[0] for one in ready]
    times = iter(_times([one.turns for one in ready], first))
    rows: list[Row] = [
        _row(case, entrant, one.accuracy, next(times), ceilings) if isinstance(one, Ready) else one
        for entrant, one in zip(entered, found, strict=True)
    ]
    del found, ready
    peers.release()
    return rows


class Times(NamedTuple):
    """Seconds of single calls, and of one in a graph of so many."""

    single: list[float]
    calls: int = 0
    replayed: list[float] | None = None


def _times(contenders: list[clocks.Turns], first: list[float]) -> list[Times]:
    """The times of contenders that took so long for a ``first`` call."""
    quick = [turns for turns, seconds in zip(contenders, first, strict=True) if seconds < SLOW]
    if not quick:
        return [Times([seconds]) for seconds in first]
    together, (least, most) = sum(seconds for seconds in first if seconds < SLOW), RUNS
    runs = min(most, max(least, int(SECONDS / 2 / together)))
    calls = min(MOST_CALLS, max(1, int(REPLAY * len(quick) / together)))
    single = iter(clocks.on_gpu(quick, runs))
    replayed = iter(in_a_graph(quick, max(least, runs // 2), calls))
    return [Times(next(single), calls, next(replayed)) if seconds < SLOW else Times([seconds]) for seconds in first]


def _row(case: str, entrant: Entrant, accuracy: dict[str, Any], times: Times, ceilings: Ceilings) -> Gridded:
    contender, problem = entrant
    seconds = over_all(times.single)
    return Gridded(
        **vars(problem.about(case, contender.name)), **accuracy, **seconds, **floors(problem, ceilings),
        tflops=problem.operations / seconds["seconds"] / 1e12, calls=times.calls,
        replayed=over_all(times.replayed)["seconds"] if times.replayed else None,
        chosen=contender.name == _chosen(problem) if contender.name in KERNELS else None,
    )  # fmt: skip


@functools.cache
def _chosen(problem: Problem) -> str:
    """The kernel that computes when nobody names one."""
    from flashcli.gpu.place import place_of_device
    from flashcli.kernels.choice import choose

    place = place_of_device(0)
    return choose(place.gpu.capability, built(problem, place.gpu.multiprocessors)).name


@click.command()
@click.option("--every", type=click.IntRange(1), default=1, help="Take only every so many-th shape.")
@click.option("--only", multiple=True, metavar="TEXT", help="Take only shapes with TEXT in their name; repeatable.")
@click.option("--kernel", "kernels", multiple=True, type=click.Choice(OURS), help="Time this one of ours; repeatable.")
@click.option("--peers/--no-peers", "beside", default=True, show_default=True, help="Beside PyTorch's and Triton's.")
@click.option("--seconds", type=click.FloatRange(0), default=math.inf, help="Begin no other shape after so long.")
@as_json.json_option
def main(
    every: int, only: tuple[str, ...], kernels: tuple[str, ...], beside: bool, seconds: float, json_path: str | None
) -> None:
    """Time attention on the grid of shapes on this machine's first GPU."""
    peers.check_installed("torch", gpu=True)
    problems = [one for one in GRID if not only or any(text in name_of(one) for text in only)][::every]
    against = [name for name in ("torch", "triton") if beside and peers.installed(name)]
    start = time.monotonic()
    compile_all(problems, kernels or OURS, "triton" in against)
    ceilings = peers.ceilings()
    left = itertools.takewhile(lambda problem: time.monotonic() - start < seconds, problems)
    rows = scripts.told(
        measured(left, kernels or OURS, against, ceilings),
        lambda row: f"{time.monotonic() - start:.0f} s: {scripts.told_briefly(row)}",
    )
    scripts.publish("grid", machine.pytorchs_circumstances("cuda"), rows, json_path, ceilings)
    if bench.failed(rows):
        raise SystemExit(MISMATCH)


if __name__ == "__main__":
    scripts.run(main)
