"""The problem that an attention kernel is built for: sizes, types and options."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from flashcli.asked.attention import BIASES, TYPES
from flashcli.asked.how import PRECISIONS
from flashcli.asked.shape import ceil_div
from flashcli.kernels.speed import H200, Speed

LARGEST_TILE = 128  # rows of Q
JOINABLE = ("alibi and float32", "alibi and both")  # biases that compilers may join with products (bias.cuh)
BIAS_NUMBERS = {name: number for number, name in enumerate(BIASES)}  # the macro BIAS


def bias_macros(problem: Any) -> dict[str, int]:
    """Macros of kernels for a problem with a bias or a mask; none without."""
    if not problem.bias:
        return {}
    found = {"BIAS": BIAS_NUMBERS[problem.bias], "BIAS_COLUMN": problem.bias_contiguous * problem.bias_together}
    return found | ({"MASK_OF_KEYS": 1} if problem.mask_of_keys else {})


def sight_macros(problem: Any) -> dict[str, int]:
    """Macros of kernels for a window or packed sequences; none without."""
    return {name: 1 for name, there in (("WINDOW", problem.windowed), ("PACKED", problem.sequences)) if there}


def tiles(rows: int, size: int, sequences: int = 0) -> int:
    """The number of tiles of rows of a head; of packed sequences the numbers that these may have (cuda/packed.cuh)."""
    return rows // size + sequences if sequences else ceil_div(rows, size)


def type_macros(**types: str) -> dict[str, int]:
    """Macros of kernels for types of matrices, by name: 1 for float16, 2 for bfloat16; none for float32 or no type."""
    return {name: TYPES.index(kind) for name, kind in types.items() if kind not in ("", "float32")}


class Problem(NamedTuple):
    """Attention of Q (B, M, d), K and V (B / group, N, d), causal or not, on ``sms`` multiprocessors of this ``speed``.

    B counts all heads of all batches, of which ``group`` share one head of K and V. The build is right for any other B,
    M and N too; they only decide which tiles are fastest.

    ``in_place``: for arrays with any strides and with heads, right for NaN and Inf, and able to give the ``lse``.
    ``dense``: whether the rows of each head follow one another; ``aligned``: whether all rows start on 16 bytes.
    ``bias`` is one of `BIASES`, ``bias_contiguous`` whether those of neighbouring keys are neighbours, in the mask,
    too, and ``bias_together`` how many can be read at once; ``mask_of_keys``: whether the mask takes keys away from all
    queries. Where it is to be ``batch_invariant``, Bc does not depend on B and ``sms``, so that a row's bytes follow
    from its own data and (M, N, d, causal, precision, bias) alone.
    ``windowed``: a query does not see keys that are too far before it. Of packed ``sequences``, of which there are so
    many, M and N are the numbers of all rows; only launches and scratch depend on them. ``dtype`` is the
    type of Q, K and V, ``out_dtype`` that of O and dO.

    ``gradient`` is the type of dQ, dK and dV, empty where none are computed. ``dbias`` is the number of batches, heads,
    queries and keys that the bias's gradient has, 1 along axes that it has not, and 0 each where it is not wanted;
    ``heads`` are those of Q in a batch.
    """

    B: int
    M: int
    N: int
    d: int
    causal: bool = False
    precision: str = "fp32"
    sms: int = 132
    in_place: bool = False
    lse: bool = False
    dense: bool = True
    bias: str = ""
    bias_contiguous: bool = True
    bias_together: int = 1
    aligned: bool = True
    batch_invariant: bool = False
    group: int = 1
    windowed: bool = False
    sequences: int = 0
    speed: Speed = H200
    dtype: str = "float32"
    out_dtype: str = "float32"
    mask_of_keys: bool = False
    heads: int = 1
    dbias: tuple[int, int, int, int] = (0, 0, 0, 0)
    gradient: str = ""

    @property
    def work(self) -> float:
        """The number of products in Q Kᵀ on a multiprocessor, which computes at least the rows of a tile, unmasked.

        There is no end of them where builds may differ in bytes, so that none is quick.
        """
        if self.bias in JOINABLE or (self.sequences and self.gradient):
            return math.inf
        return max(ceil_div(self.B * self.M, self.sms), LARGEST_TILE) * self.N * self.d

    @property
    def rows(self) -> int:
        """The number of rows of Q in all heads."""
        return self.B * self.M

    def row_tiles(self, Br: int) -> int:
        """The number of tiles of Br rows of Q in all heads."""
        return self.B * tiles(self.M, Br, self.sequences)

    def key_tiles(self, Bc: int) -> int:
        """The number of tiles of Bc keys in all heads of K."""
        return self.B // self.group * tiles(self.N, Bc, self.sequences)

    @property
    def halves_corrections(self) -> bool:
        """Whether `mma` adds the two small ones of its three products in fp16: where that is faster."""
        return self.speed.halved and self.products == 3

    @property
    def products(self) -> int:
        """The number of fp16 products that make P V; Q Kᵀ of halves takes one, for nothing is left of them to split."""
        return min(PRECISIONS[self.precision], 3 if self.dtype == "float32" else 2)
