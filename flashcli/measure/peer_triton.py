"""The strongest fp32-accurate peer found: FlashAttention-2 in Triton, best of several tilings.

Its products are split by Triton: tf32x3, three TF32 products for one, or bf16x6, six of bfloat16, which is faster. For
the benchmark only: d a power of two from 16, as many queries as keys where it is causal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILINGS = [
    (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8)
]  # fmt: skip  # Br, Bc, warps
LOG2E = 1.4426950408889634
KEY = ["M", "N", "D", "CAUSAL", "PRODUCTS"]
Tiling = tuple[int, int, int]


@triton.autotune([triton.Config({"BR": r, "BC": c}, num_warps=w) for r, c, w in TILINGS], key=KEY)
@triton.jit(do_not_specialize=["H", "group", "M", "N"])
def _kernel(  # type: ignore[no-untyped-def]
    Q, K, V, O, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, H, group, M, N, scale,
    D: tl.constexpr, RAGGED: tl.constexpr, CAUSAL: tl.constexpr, PRODUCTS: tl.constexpr, BR: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    tile, end = tl.program_id(0), N
    if CAUSAL:  # the longest rows first
        tile = tl.num_programs(0) - 1 - tile
        end = tl.minimum(N, (tile + 1) * BR)
    rows = tile * BR + tl.arange(0, BR)
    columns = tl.arange(0, D)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head // group * k_head
    V += batch * v_batch + head // group * v_head
    O += (batch * H + head) * M * D
    q = tl.load(Q + rows[:, None] * q_row + columns[None, :], mask=rows[:, None] < M, other=0.0)
    m = tl.full((BR,), float("-inf"), tl.float32)
    l = tl.zeros((BR,), tl.float32)
    o = tl.zeros((BR, D), tl.float32)
    for j in range(0, end, BC):
        keys = j + tl.arange(0, BC)
        if RAGGED:
            k = tl.load(K + keys[None, :] * k_row + columns[:, None], mask=keys[None, :] < N, other=0.0)
        else:
            k = tl.load(K + keys[None, :] * k_row + columns[:, None])
        s = tl.dot(q, k, input_precision=PRODUCTS) * scale
        if RAGGED:
            s = tl.where(keys[None, :] < N, s, float("-inf"))
        if CAUSAL:
            s = tl.where(keys[None, :] <= rows[:, None], s, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2(s - m_new[:, None])
        rescale = tl.exp2(m - m_new)
        l = l * rescale + tl.sum(p, 1)
        if RAGGED:
            v = tl.load(V + keys[:, None] * v_row + columns[None, :], mask=keys[:, None] < N, other=0.0)
        else:
            v = tl.load(V + keys[:, None] * v_row + columns[None, :])
        o = o * rescale[:, None] + tl.dot(p, v, input_precision=PRODUCTS)
        m = m_new
    tl.store(O + rows[:, None] * D + columns[None, :], o / l[:, None], mask=rows[:, None] < M)


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    products: str = "tf32x3",
    causal: bool = False,
    tiling: Tiling | None = None,
) -> torch.Tensor:
    """Attention of float32 tensors q [B, H, M, d], k and v [B, Hkv, N, d], contiguous along their last axis.

    Without a ``tiling``, the best of `TILINGS` is found at the first call for each M, N and d.
    """
    B, H, M, d = q.shape
    Hkv, N = k.shape[1:3]
    if not takes(d):
        raise RuntimeError("Triton peer needs d a power of two from 16")
    out = q.new_empty(q.shape)
    strides = (stride for tensor in (q, k, v) for stride in tensor.stride()[:3])
    arguments = q, k, v, out, *strides, H, H // Hkv, M, N, d**-0.5 * LOG2E, d, is_ragged(N), causal, products
    if tiling is None:
        _kernel[lambda meta: (triton.cdiv(M, meta["BR"]), B * H)](*arguments)
    else:
        Br, Bc, warps = tiling
        _kernel.fn[triton.cdiv(M, Br), B * H](*arguments, Br, Bc, num_warps=warps)
    return out


def takes(d: int) -> bool:
    """Whether there is a kernel for heads of this size."""
    return d >= 16 and d & (d - 1) == 0


def build(d: int, N: int, causal: bool, products: str, tiling: Tiling) -> None:
    """Compile the kernel for dense tensors, into Triton's cache, without launching it."""
    Br, Bc, warps = tiling
    strides = (16 * d,) * 9  # only their divisibility by 16 counts
    arguments = *(torch.float32,) * 4, *strides, 1, 1, N, N, d**-0.5, d, is_ragged(N), causal, products, Br, Bc
    _kernel.fn.warmup(*arguments, num_warps=warps, grid=(1, 1))


def is_ragged(N: int) -> bool:
    """Whether the last tile of keys has less than all, with some tiling: all take the same path for an N."""
    return N % max(Bc for _, Bc, _ in TILINGS) != 0
