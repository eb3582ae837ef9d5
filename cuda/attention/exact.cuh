// Rows whose answer is not finite, computed once more without splitting: NaN and Inf are as IEEE arithmetic has them.
//
// Splitting makes NaN of an Inf, and a product of two tiles brings it to rows that do not see it. The warp that has
// written a row has seen whether it is finite. If not, it takes Q, K and V as they are in memory, and multiplies in
// fp32: some rows at a time, for which K and V are read once; for scores each lane has a key, for O some columns. So it
// needs neither shared memory nor a barrier, and other warps go on meanwhile. It hardly ever runs: it is short rather
// than fast.
#pragma once
#include "attention.cuh"
#include "float4.cuh"

// Six warpgroups leave a thread few registers; a kernel may say so itself.
#ifndef FEW_REGISTERS
#define FEW_REGISTERS (THREADS > 640)
#endif
// At a time: O and T take registers; and five warpgroups leave few of them for a mask, too.
constexpr int EXACT_ROWS = HEAD_DIM <= 128 && !(BIAS && THREADS > 512) && !FEW_REGISTERS ? 4 : 2;
constexpr int EXACT_AHEAD = (FEW_REGISTERS ? 4 : 8) / EXACT_ROWS;  // steps of S whose loads are under way
constexpr int EXACT_COLUMNS = ceil_div(HEAD_DIM, 32);              // of O, for each lane

// Tells whether numbers are finite, from sums of products of two: several, so that one need not wait for the other. Of
// numbers beyond 2^60 it may say that they are not.
struct Finiteness {
    float sums[4] = {};
    int next = 0;
    __device__ __forceinline__ void add(float x, float y) {
        if (IN_PLACE) sums[next % 4] = fmaf(x, y, sums[next % 4]), ++next;
    }
    __device__ __forceinline__ bool finite() const {
        return fabsf(sums[0] + sums[1] + (sums[2] + sums[3])) < INFINITY_F;
    }
};

// Rows i0 + r of a head where bit r of `rows` is set, by all lanes of a warp.
__device__ __forceinline__ void compute_exactly(const Attention &a, Head head, int i0, unsigned rows) {
    constexpr float UNSEEN = -1;  // which no p is
    const int lane = opaque(threadIdx.x) % 32;
    const Input *const Q = rows_of(a.Q, a.q, head.b, head.h);
    const Input *const K = rows_of(a.K, a.k, head.b, head.kv), *const V = rows_of(a.V, a.v, head.b, head.kv);
    const float factor = a.scale * LOG2E;
#pragma unroll 1
    while (rows != 0) {
        int i[EXACT_ROWS];  // if rows are fewer, the last one is done over and over
#pragma unroll
        for (int r = 0; r < EXACT_ROWS; ++r) {
            i[r] = rows != 0 ? i0 + __ffs(rows) - 1 : i[max(r - 1, 0)];
            rows &= rows - 1;
        }
        const int keys = keys_seen(a.q_start + i[EXACT_ROWS - 1], a.N);
        float o[EXACT_ROWS][EXACT_COLUMNS] = {}, m[EXACT_ROWS], l[EXACT_ROWS] = {};  // l: of this lane's keys
#pragma unroll
        for (int r = 0; r < EXACT_ROWS; ++r) m[r] = NEG_INF;
#pragma unroll 1
        for (int j0 = WINDOW ? min(keys_hidden(a, i[0]), max(keys, 0)) / 32 * 32 : 0; j0 < keys; j0 += 32) {
            const int key = j0 + lane;
            float s[EXACT_ROWS] = {}, T[EXACT_ROWS][EXACT_COLUMNS] = {};
#pragma unroll EXACT_AHEAD
            for (int c = 0; c < HEAD_DIM; c += 4) {
                const float4 k = load4(K, row_stride(a.k), key, c, a.N);
                const float x = k.x * factor, y = k.y * factor, z = k.z * factor, w = k.w * factor;
#pragma unroll
                for (int r = 0; r < EXACT_ROWS; ++r) {
                    const float4 q = load4(Q, row_stride(a.q), i[r], c, a.M);
                    s[r] += fmaf(q.w, w, fmaf(q.z, z, fmaf(q.x, x, q.y * y)));
                }
            }
#pragma unroll
            for (int r = 0; r < EXACT_ROWS; ++r) {
                bool seen = sees(a, i[r], key);
                if (BIAS) {
                    const float bias = bias_of(a, head, i[r], key);
                    s[r] = biased(s[r], 1, bias), seen = seen && bias != NEG_INF;
                }
                if (!seen) s[r] = NEG_INF;
                const float m_new = fmaxf(m[r], over_warp(s[r], fmaxf)), shift = finite_or_zero(m_new);
                const float rescale = exp2_fast(m[r] - shift), p = exp2_fast(s[r] - shift);
                m[r] = m_new, l[r] = fmaf(l[r], rescale, p), s[r] = seen ? p : UNSEEN;
#pragma unroll
                for (int c = 0; c < EXACT_COLUMNS; ++c) o[r][c] *= rescale;
            }
#pragma unroll 4
            for (int x = 0; x < 32; ++x) {
                const Input *const row = V + min(j0 + x, a.N - 1) * row_stride(a.v);
                float v[EXACT_COLUMNS];
#pragma unroll
                for (int c = 0; c < EXACT_COLUMNS; ++c) v[c] = lane + 32 * c < HEAD_DIM ? float(row[lane + 32 * c]) : 0;
#pragma unroll
                for (int r = 0; r < EXACT_ROWS; ++r) {
                    const float p = __shfl_sync(~0u, s[r], x);
                    if (p == UNSEEN) continue;  // 0 times what a row does not see may be NaN
#pragma unroll
                    for (int c = 0; c < EXACT_COLUMNS; ++c) T[r][c] = fmaf(p, v[c], T[r][c]);
                }
            }
#pragma unroll
            for (int r = 0; r < EXACT_ROWS; ++r)
#pragma unroll
                for (int c = 0; c < EXACT_COLUMNS; ++c) o[r][c] += T[r][c];
        }

#pragma unroll
        for (int r = 0; r < EXACT_ROWS; ++r) {
            const float inverse_l = inverse(a, i[r], over_warp(l[r], [](float x, float y) { return x + y; }));
            Answer *const row = rows_of(a.O, a.o, head.b, head.h) + i[r] * row_stride(a.o);
#pragma unroll
            for (int c = 0; c < EXACT_COLUMNS; ++c)  // a row that sees no key does not see what is not finite
                if (lane + 32 * c < HEAD_DIM) row[lane + 32 * c] = inverse_l == 0 ? 0 : o[r][c] * inverse_l;
            if (lane == 0) give_lse(a, head, i[r], m[r], inverse_l);
        }
    }
}

// Computes rows of a head once more whose answer in memory is not finite, of `count` rows from i0 on, up to 32. Called
// by all lanes of the warp that has written them.
__device__ __forceinline__ void redo_rows(const Attention &a, Head head, int i0, int count) {
    // Nothing is kept from before for this, where registers are few.
    i0 = opaque(i0), head = {opaque(head.b), opaque(head.h), opaque(head.h) / (a.H / a.Hkv)};
    unsigned rows = 0;
    __syncwarp();
#pragma unroll 1
    for (int r = 0; r < min(count, a.M - i0); ++r) {
        const Answer *const row = rows_of(a.O, a.o, head.b, head.h) + (i0 + r) * row_stride(a.o);
        bool finite = true;
        for (int c = opaque(threadIdx.x) % 32; c < HEAD_DIM; c += 32) finite &= fabsf(row[c]) < INFINITY_F;
        rows |= unsigned(!__all_sync(~0u, finite)) << r;
    }
    compute_exactly(a, head, i0, rows);
}
