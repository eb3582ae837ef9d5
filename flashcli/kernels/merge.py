"""The kernel of merge, which makes one answer of those to parts of the keys: its argument and its launch."""

from __future__ import annotations

import ctypes

from flashcli.asked.attention import contiguous
from flashcli.asked.decode import ITEM_SIZES
from flashcli.asked.how import How
from flashcli.asked.merge import MOST_PARTS, VECTOR, Merge
from flashcli.asked.shape import ceil_div
from flashcli.kernels import pages
from flashcli.kernels.operation import Build, Gpu, Kernel, Launch, Operation, Plan, Tiling, ladder
from flashcli.kernels.tuning.decode import Problem

THREADS = 256
POINTERS = ("out", "lse", *(f"{name}[{i}]" for name in ("outs", "lses") for i in range(MOST_PARTS)))


class Argument(ctypes.Structure):
    """The argument of the merge kernel: ``struct Merge`` of cuda/decode/merge_answers.cu; a test compares the two."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        ("rows", ctypes.c_longlong),
        ("parts", ctypes.c_int),
    )


def _launches(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """The launch of a thread for each vector of an answer; no launch where there are no rows."""
    vectors = problem.total * problem.d * ITEM_SIZES[problem.query_type] // VECTOR
    return (Launch("merge_answers", ceil_div(vectors, tiling.threads), tiling.threads),) if vectors else ()


KERNEL = Kernel(
    file="decode/merge_answers.cu",
    summary="answers to parts of the keys as the answer to all",
    tiling=lambda problem: Tiling(1, 0, THREADS),
    launches=_launches,
    macros=pages.macros,
    smallest=lambda problem: problem._replace(total=1),
    refuses=pages.odd_heads,
)
KERNELS = ladder(KERNEL)


def plan(asked: Merge, gpu: Gpu, how: How = How()) -> Plan:  # noqa: B008  it is never changed
    """The launch of `flashcli.merge`; ValueError for arrays that are not contiguous."""
    for name in ("outs", "lses"):
        for i, array in enumerate(getattr(asked, name)):
            if 0 not in array.shape:
                pages.check_strides(f"{name}[{i}]", array, contiguous(array.shape, array.dtype).strides)
    build = Build(KERNEL, Problem(asked.D, 1, asked.type, asked.type, transposed=False, total=asked.rows))
    return Plan(build.steps(), Argument(rows=asked.rows, parts=len(asked.outs)))


MERGE = Operation("merge", POINTERS, KERNELS, plan)
