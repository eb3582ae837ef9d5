"""The strongest fp32-accurate peer found: FlashAttention-2 in Triton, best of several tilings.

Its products are split by Triton: tf32x3, three TF32 products for one, or bf16x6, six of bfloat16. For the benchmark
only: d a power of two from 16, not causal.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

TILINGS = [
    (64, 32, 4), (64, 64, 4), (64, 128, 4), (128, 32, 4), (128, 32, 8), (128, 64, 4), (128, 64, 8), (128, 128, 8)
]  # fmt: skip  # Br, Bc, warps
KEY = ["M", "N", "D", "PRODUCTS"]


@triton.autotune([triton.Config({"BR": r, "BC": c}, num_warps=w) for r, c, w in TILINGS], key=KEY)
@triton.jit
def _kernel(  # type: ignore[no-untyped-def]
    Q, K, V, O, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row, H, group, M, N, scale,
    D: tl.constexpr, RAGGED: tl.constexpr, PRODUCTS: tl.constexpr, BR: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    batch, head = tl.program_id(1).to(tl.int64) // H, tl.program_id(1).to(tl.int64) % H
    rows = tl.program_id(0) * BR + tl.arange(0, BR)
    columns = tl.arange(0, D)
    Q += batch * q_batch + head * q_head
    K += batch * k_batch + head // group * k_head
    V += batch * v_batch + head // group * v_head
    O += (batch * H + head) * M * D
    q = tl.load(Q + rows[:, None] * q_row + columns[None, :], mask=rows[:, None] < M, other=0.0)
    m = tl.full((BR,), float("-inf"), tl.float32)
    l = tl.zeros((BR,), tl.float32)
    o = tl.zeros((BR, D), tl.float32)
    for j in range(0, N, BC):
        keys = j + tl.arange(0, BC)
        if RAGGED:
            k = tl.load(K + keys[None, :] * k_row + columns[:, None], mask=keys[None, :] < N, other=0.0)
        else:
            k = tl.load(K + keys[None, :] * k_row + columns[:, None])
        s = tl.dot(q, k, input_precision=PRODUCTS) * scale
        if RAGGED:
            s = tl.where(keys[None, :] < N, s, float("-inf"))
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


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, products: str = "tf32x3") -> torch.Tensor:
    """Attention of float32 tensors q [B, H, M, d], k and v [B, Hkv, N, d], contiguous along their last axis."""
    B, H, M, d = q.shape
    Hkv, N = k.shape[1:3]
    if d < 16 or d & (d - 1):
        raise RuntimeError("Triton peer needs d a power of two from 16")
    out = q.new_empty(q.shape)
    scale = d**-0.5 * 1.4426950408889634
    ragged = N % max(Bc for _, Bc, _ in TILINGS) != 0

    def grid(meta: dict) -> tuple[int, int]:
        return triton.cdiv(M, meta["BR"]), B * H

    strides = (stride for tensor in (q, k, v) for stride in tensor.stride()[:3])
    _kernel[grid](q, k, v, out, *strides, H, H // Hkv, M, N, scale, d, ragged, products)
    return out
