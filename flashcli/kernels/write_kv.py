"""The kernel that writes new keys and values into a cache in pages: its build, its launch, its argument."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from flashcli.asked.shape import ceil_div
from flashcli.kernels import decode
from flashcli.kernels.types import Launch

if TYPE_CHECKING:
    from flashcli.asked.write_kv import WriteKv

THREADS = 256  # in a block
POINTERS = ("key", "value", "key_cache", "value_cache", "slot_mapping", "k_scale", "v_scale")
STRIDES = (
    "new_key_token", "new_key_head", "new_value_token", "new_value_head", "key_page", "key_head", "key_slot",
    "key_chunk", "value_page", "value_head", "value_slot",
)  # fmt: skip


class Argument(ctypes.Structure):
    """``struct WriteKv`` of cuda/decode/write_kv.cu; a test has the compiler hold the two together."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in POINTERS),
        *((name, ctypes.c_longlong) for name in STRIDES),
        *((name, ctypes.c_int) for name in ("tokens", "kv_heads", "pages")),
        *((name, ctypes.c_float) for name in ("k_factor", "v_factor")),
    )


class Problem(NamedTuple):
    """What the kernel is compiled for."""

    d: int
    page: int
    key_type: str
    cache_type: str
    transposed: bool  # vLLM's layout of values


@dataclass(frozen=True)
class Kernel:
    """Its name, its file, and what it does."""

    name: str
    file: str
    summary: str
    on_host: bool = False


KERNEL = Kernel("write_kv", "decode/write_kv.cu", "new keys and values into the slots of a cache")
KERNELS = {KERNEL.name: KERNEL}


@dataclass(frozen=True)
class Build:
    """The kernel compiled for a problem."""

    problem: Problem
    kernel: Kernel = KERNEL

    def macros(self) -> dict[str, int]:
        asked = self.problem
        return {
            "HEAD_DIM": asked.d, "PAGE": asked.page, "QUERY_TYPE": decode.TYPE_NUMBERS[asked.key_type],
            "CACHE_TYPE": decode.TYPE_NUMBERS[asked.cache_type], "TRANSPOSED": int(asked.transposed), "ROWS": 1,
            "THREADS": THREADS,
        }  # fmt: skip

    def check(self, capability: tuple[int, int], gpu: str, hint: str) -> None:
        """Raise BackendUnavailable if a GPU of this compute capability does not run it."""
        decode.check_type(self.problem.cache_type, capability, gpu, hint)

    def functions(self) -> Iterable[Launch]:
        return (Launch(KERNEL.name, 1, THREADS),)

    def launches(self, tokens: int, kv_heads: int) -> tuple[Launch, ...]:
        """A thread for each vector of a token's key; none where there are no tokens."""
        size = decode.ITEM_SIZES[self.problem.cache_type]
        chunks = self.problem.d * size // decode.vector_bytes(self.problem.d, size)
        blocks = ceil_div(tokens * kv_heads * chunks, THREADS)
        return (Launch(KERNEL.name, blocks, THREADS),) if blocks else ()


def build_of(asked: WriteKv) -> Build:
    types = asked.key.dtype.name, asked.key_cache.dtype.name
    return Build(Problem(asked.D, asked.page, *types, asked.layout == "vllm"))


def argument(asked: WriteKv, strides: Mapping[str, int]) -> Argument:
    """The argument but for the addresses; ``strides``, in numbers, are those that contiguous arrays do not have."""
    cache = decode.cache_strides(asked.layout, asked.Hkv, asked.page, asked.D, asked.key_cache.dtype.itemsize)
    return Argument(
        **{**cache, **strides}, tokens=asked.tokens, kv_heads=asked.Hkv, pages=asked.pages, k_factor=asked.k_scale,
        v_factor=asked.v_scale,
    )  # fmt: skip
