"""The kernel that writes new keys and values into a cache in pages: its build, its launch, its argument."""

from __future__ import annotations

import ctypes

from flashcli.asked.attention import ALIGNMENT
from flashcli.asked.decode import ITEM_SIZES, vector_bytes
from flashcli.asked.how import How
from flashcli.asked.shape import ceil_div
from flashcli.asked.write_kv import WriteKv
from flashcli.kernels import pages
from flashcli.kernels.operation import Build, Gpu, Kernel, Launch, Operation, Plan, Tiling, ladder
from flashcli.kernels.tuning.decode import Problem

THREADS = 256  # in a block
POINTERS = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
STRIDES = (
    "new_key_token", "new_key_head", "new_value_token", "new_value_head", "key_page", "key_head", "key_slot",
    "key_chunk", "value_page", "value_head", "value_slot",
)  # fmt: skip


class Argument(ctypes.Structure):
    """The argument of write_kv: ``struct WriteKv`` of cuda/decode/write_kv.cu; a test compares the two layouts."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in STRIDES),
        *((name, ctypes.c_int) for name in ("tokens", "kv_heads", "pages")),
        *((name, ctypes.c_float) for name in ("k_factor", "v_factor")),
    )


def _launches(tiling: Tiling, problem: Problem) -> tuple[Launch, ...]:
    """The launch of a thread for each vector of a token's key; no launch where there are no tokens."""
    row = problem.d * ITEM_SIZES[problem.cache_type]
    blocks = ceil_div(problem.total * problem.kv_heads * (row // vector_bytes(row)), tiling.threads)
    return (Launch("write_kv", blocks, tiling.threads),) if blocks else ()


KERNEL = Kernel(
    file="decode/write_kv.cu",
    summary="new keys and values into the slots of a cache",
    tiling=lambda problem: Tiling(1, 0, THREADS),
    launches=_launches,
    macros=pages.macros,
    smallest=lambda problem: problem._replace(total=1, kv_heads=1),
    refuses=pages.odd_heads,
)
KERNELS = ladder(KERNEL)


def plan(asked: WriteKv, gpu: Gpu, how: How = How()) -> Plan:  # noqa: B008  it is never changed
    """The launch of `flashcli.write_kv`; ValueError for arrays with strides that the kernel does not read."""
    types = asked.key.dtype, asked.cache_type, asked.layout == "vllm"
    build = Build(KERNEL, Problem(asked.D, asked.page, *types, total=asked.tokens, kv_heads=asked.Hkv))
    return Plan(build.steps(), argument(asked))


def argument(asked: WriteKv) -> Argument:
    """The argument for a call, without addresses."""
    return Argument(
        **_strides(asked), tokens=asked.tokens, kv_heads=asked.Hkv, pages=asked.pages, k_factor=asked.k_scale,
        v_factor=asked.v_scale,
    )  # fmt: skip


def _strides(asked: WriteKv) -> dict[str, int]:
    """The strides in the argument, in elements; ValueError for strides or alignments that the kernel cannot read."""
    told: dict[str, int] = {}
    for name in ("key", "value"):
        array = getattr(asked, name)
        pages.check_strides(name, array, (pages.FREE, pages.FREE, 1))
        apart = {f"new_{name}_token": pages.stride(array, 0), f"new_{name}_head": pages.stride(array, 1)}
        pages.check_rows(name, apart.values(), ITEM_SIZES[array.dtype], ALIGNMENT)
        told |= apart
    pages.check_strides("slot_mapping", asked.slot_mapping, (1,))
    return told | pages.cache_strides(asked)


WRITE_KV = Operation("write_kv", POINTERS, KERNELS, plan)
