"""The kernels of tangents, which are also gradients of gradients: their tiles, their launches and their argument.

One kernel is one file ``tangents_NAME.cu`` in ``cuda/backward/``, and one entry in `KERNELS`. Each takes three steps:
what rows have in common, what is summed over keys, and what is summed over queries.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Iterator

from flashcli.asked.how import How
from flashcli.asked.shape import round_up
from flashcli.asked.tangents import Tangents
from flashcli.kernels import backward
from flashcli.kernels.arguments import Strides
from flashcli.kernels.operation import Build, Gpu, Kernel, Launch, Operation, Plan, Step, Tiling, ladder, named
from flashcli.kernels.problem import Problem

COMMON_BYTES = 32  # that are kept of a row: ``Common`` of cuda/backward/tangents.cuh
ADDRESSES = "tQ", "tK", "tV", "tO", "tlse"
POINTERS = (*backward.POINTERS, *ADDRESSES)


class Argument(backward.Argument):
    """The argument of kernels of tangents: ``Tangents`` of cuda/backward/tangents.cuh, which begins with `Backward`."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ADDRESSES),
        *((name, Strides) for name in ("tq", "tk", "tv", "to")),
    )


def argument(asked: Tangents) -> backward.Argument:
    """The argument for a call, without addresses."""
    found, along = backward.argument(asked.of, Argument), asked.along
    found.tq, found.tk, found.tv, found.to = (Strides(*by) for by in (along.q, along.k, along.v, along.o))
    return found


def _macros(tiling: Tiling, problem: Problem) -> dict[str, int]:
    """Macros that every kernel of tangents is compiled with."""
    own = {"GRADIENTS": int(problem.gradient != ""), "TANGENTS_BYTES": ctypes.sizeof(Argument)}
    return backward.macros(tiling, problem) | own | {"COMMON_BYTES": COMMON_BYTES}


_kernel = functools.partial(Kernel, macros=_macros, smallest=backward.smallest)


def plan(asked: Tangents, gpu: Gpu, how: How) -> Plan:
    """The launches of tangents that are not empty; BackendUnavailable says why the kernel named cannot.

    A kernel that splits numbers is followed by one that does not, for heads in which something is not finite, as with
    gradients.
    """
    problem = backward.problem_of(asked.of, gpu)._replace(gradient="float32" if asked.gradients else "")
    build = Build(choose(gpu.capability, problem, how.kernel), problem)
    if not build.kernel.splits:
        return Plan(build.steps(), argument(asked), build.workspace())
    exact = Build(KERNELS["register_tiled"], problem)
    again = (Step(exact, launch._replace(grid=min(launch.grid, backward.AGAIN))) for launch in exact.launches())
    words = 1 + problem.B // problem.group
    return backward.with_notes((*build.steps(), *again), argument(asked), build.workspace(), words)


# ---- register_tiled


def _register_tiled(problem: Problem) -> Tiling:
    D = round_up(problem.d, 32)
    own, passing = (64, 64) if D <= 64 else (32, 64) if D <= 128 else (32, 32)
    return Tiling(own, passing, 128, 4 * ((own + passing) * D + 4 * own * passing))


def _register_tiled_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    shape = tiling.threads, tiling.shared
    for function in ("of_rows", "rows"):
        yield Launch(function, problem.row_tiles(tiling.Br), *shape)
    if problem.gradient:
        yield Launch("keys", problem.key_tiles(tiling.Br), *shape)


# ---- wgmma


def _wgmma(problem: Problem) -> Tiling:
    queries, row, stages = (3 if problem.gradient else 2), _split_row(problem), 2
    tiles = max(queries * 64 + stages * 4 * 32, 4 * 64 + stages * queries * 32) * row
    macros = {"PASS": 32, "TAIL": backward.TAIL, "PAD": 64, "STAGES": stages, "PREPARE_THREADS": 256}
    blocks, threads = (2, 256) if problem.d <= 64 else (1, 384)
    return Tiling(64, 64, threads, tiles + 512, (*macros.items(), ("BLOCKS", blocks)))


def _split_row(problem: Problem) -> int:
    """Bytes of a row's halves."""
    return 4 * round_up(problem.d, 64)


def _records(problem: Problem) -> tuple[int, int]:
    """The numbers of tiles of 64 queries, and of 64 keys, in all batches and heads."""
    return problem.row_tiles(64), problem.key_tiles(64)


def _wgmma_launches(tiling: Tiling, problem: Problem) -> Iterator[Launch]:
    queries, keys = _records(problem)
    yield Launch("prepare", (3 if problem.gradient else 2) * queries + 4 * keys, 256)
    for launch in _register_tiled_launches(tiling, problem):
        yield launch._replace(early=True)


def _wgmma_workspace(tiling: Tiling, problem: Problem) -> int:
    queries, keys = _records(problem)
    tiles = (3 if problem.gradient else 2) * queries + 4 * keys
    return round_up(COMMON_BYTES * problem.rows, 1024) + tiles * 64 * _split_row(problem) + 16 * (queries + keys)


def _refused_by_wgmma(problem: Problem) -> str:
    if not backward.SHORT_HEAD <= problem.d <= 128:
        return f"it takes heads of {backward.SHORT_HEAD} to 128 numbers"
    return "one key gives exact zeros, which need sums without halves" if problem.N == 1 else ""


KERNELS = ladder(
    _kernel(
        "backward/tangents_register_tiled.cu",
        "a register tile of scores and of sums a thread: FFMA, heads of any length",
        _register_tiled, _register_tiled_launches, needs=(8, 0),
        workspace=lambda tiling, problem: COMMON_BYTES * problem.rows,
    ),
    _kernel(
        "backward/tangents_wgmma.cu",
        "tensor cores at fp32 accuracy on Hopper: three fp16 products for one, copies in the background",
        _wgmma, _wgmma_launches, workspace=_wgmma_workspace, needs=(9, 0), arch_only=True, splits=True,
        refuses=_refused_by_wgmma,
    ),
)  # fmt: skip


def choose(capability: tuple[int, int], problem: Problem, name: str | None = None) -> Kernel:
    """The kernel of that name, or the fastest for the problem on a GPU of this compute capability.

    UsageError for a name that no kernel of tangents has; BackendUnavailable if no kernel, or not this one, computes the
    problem.
    """
    if name is None:
        name = "register_tiled" if KERNELS["wgmma"].refusal(capability, problem) else "wgmma"
    hint = "see `flashcli kernels --operation tangents`."
    return named(KERNELS, name, "tangents").check(capability, problem, hint)


TANGENTS = Operation("tangents", POINTERS, KERNELS, plan)
