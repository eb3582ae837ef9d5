// The gradients of a head by one block, in fp32: NaN and Inf are as IEEE arithmetic has them.
//
// Halves cannot hold what is not finite. A block that has all of a head, and has seen that, takes the matrices as they
// are in memory, instead: a warp a query, whose lanes have keys, for dQ; then a warp a key, whose lanes have queries, for
// dK and dV. P is found anew. It hardly ever runs: it is short rather than fast. So nothing needs to be launched after the
// kernel, to see whether something is left.
#pragma once
#include "backward.cuh"

constexpr int LANE_COLUMNS = ceil_div(HEAD_DIM, 32);  // of a sum, for each lane

// Found anew each time: kept for this, it would take a register from what nearly always runs.
__device__ __forceinline__ int own_lane() { return opaque(threadIdx.x) % 32; }

// One score, in powers of two, and its dP: of a lane. A query beyond the last one sees nothing.
struct ExactScore {
    float s = 0, dP = 0;
    bool seen;
    __device__ __forceinline__ ExactScore(const Backward &a, Head head, int i, int key) {
        const Input *const Q = rows_of(a.Q, a.q, head.b, head.h), *const K = rows_of(a.K, a.k, head.b, head.kv);
        const Answer *const dO = rows_of(a.dO, a.d_o, head.b, head.h);
        const Input *const V = rows_of(a.V, a.v, head.b, head.kv);
#pragma unroll 4
        for (int c = 0; c < HEAD_DIM; c += 4) {
            const float4 q = load4(Q, a.q.row, i, c, a.M), k = load4(K, a.k.row, key, c, a.N);
            s += fmaf(q.w, k.w, fmaf(q.z, k.z, fmaf(q.x, k.x, q.y * k.y)));
            const float4 d_o = load4(dO, a.d_o.row, i, c, a.M), v = load4(V, a.v.row, key, c, a.N);
            dP += fmaf(d_o.w, v.w, fmaf(d_o.z, v.z, fmaf(d_o.x, v.x, d_o.y * v.y)));
        }
        const float bias = bias_of(a, head, i, key);
        seen = i < a.M && sees(a, i, key) && !(BIAS && bias == NEG_INF);
        const float factor = a.scale * LOG2E;
        s = ADDS ? fmaf(s, factor, in_powers_of_two(bias)) : __fmul_rn(s, factor);
    }
};

// sum += of each lane that is `seen` its x times its row of a matrix, the first lane's being `first`. All rows are read,
// so that no read waits for another; what is not seen meets nothing.
template <class Number>
__device__ __forceinline__ void add_rows(float (&sum)[LANE_COLUMNS], float x, unsigned seen, const Number *matrix,
                                         long long stride, int first, int rows) {
    float of_these[LANE_COLUMNS] = {};
#pragma unroll 8
    for (int lane = 0; lane < 32; ++lane) {
        const float of_lane = __shfl_sync(~0u, x, lane);
        const Number *const row = matrix + min(first + lane, rows - 1) * stride;
#pragma unroll
        for (int y = 0; y < LANE_COLUMNS; ++y) {
            const int c = own_lane() + 32 * y;
            const float added = fmaf(of_lane, c < HEAD_DIM ? float(row[c]) : 0, of_these[y]);
            of_these[y] = seen >> lane & 1 ? added : of_these[y];
        }
    }
#pragma unroll
    for (int y = 0; y < LANE_COLUMNS; ++y) sum[y] += of_these[y];
}

__device__ __forceinline__ void write_lanes(Gradient *row, const float (&sum)[LANE_COLUMNS], float factor) {
#pragma unroll
    for (int y = 0; y < LANE_COLUMNS; ++y) {
        const int c = own_lane() + 32 * y;
        if (c < HEAD_DIM) row[c] = sum[y] * factor;
    }
}

// What is known of a query: P = 2^(s - shift) * inverse and dS = P (dP - D). The inverse is 0 if it sees nothing.
struct ExactRow {
    float shift, inverse, D;
    __device__ __forceinline__ float p(const ExactScore &one) const { return exp2_fast(one.s - shift) * inverse; }
    __device__ __forceinline__ float ds(const ExactScore &one) const { return p(one) * (one.dP - D); }
    __device__ __forceinline__ unsigned seen(const ExactScore &one) const {
        return __ballot_sync(~0u, one.seen && inverse != 0);
    }
};

// What is known of query i, by all lanes of a warp: at first each lane knows it of its keys.
__device__ __forceinline__ ExactRow exact_row(const Backward &a, Head head, int i) {
    const auto add = [](float x, float y) { return x + y; };
    float m = NEG_INF, l = 0, D = 0;
#pragma unroll 1
    for (int first = 0; first < a.N; first += 32) {
        const ExactScore one(a, head, i, first + own_lane());
        if (!one.seen) continue;
        const float m_new = fmaxf(m, one.s), rescale = exp2_fast(m - finite_or_zero(m_new));
        const float p = exp2_fast(one.s - finite_or_zero(m_new));
        m = m_new, l = fmaf(l, rescale, p), D = fmaf(D, rescale, p * one.dP);
    }
    const float shift = finite_or_zero(over_warp(m, fmaxf)), rescale = exp2_fast(m - shift);
    l = over_warp(__fmul_rn(l, rescale), add), D = over_warp(__fmul_rn(D, rescale), add);
    const float inverse = l == 0 ? 0 : 1 / l;
    return {shift, inverse, fmaf(D, inverse, -dlse_of(a, head, i))};
}

// Writes dQ of query i, by all lanes of a warp.
__device__ __forceinline__ void exact_dq(const Backward &a, Head head, int i, ExactRow row) {
    const Input *const K = rows_of(a.K, a.k, head.b, head.kv);
    float dQ[LANE_COLUMNS] = {};
#pragma unroll 1
    for (int first = 0; first < a.N; first += 32) {
        const ExactScore one(a, head, i, first + own_lane());
        add_rows(dQ, row.ds(one), row.seen(one), K, a.k.row, first, a.N);
    }
    write_lanes(rows_of(a.dQ, a.dq, head.b, head.h) + i * a.dq.row, dQ, a.scale);
}

// Writes dK and dV of a key, by all lanes of a warp.
__device__ __forceinline__ void exact_dk_dv(const Backward &a, Head head, int key, const ExactRow *rows) {
    const Input *const Q = rows_of(a.Q, a.q, head.b, head.h);
    const Answer *const dO = rows_of(a.dO, a.d_o, head.b, head.h);
    float dK[LANE_COLUMNS] = {}, dV[LANE_COLUMNS] = {};
#pragma unroll 1
    for (int first = 0; first < a.M; first += 32) {
        const int i = first + own_lane();
        const ExactScore one(a, head, i, key);
        const ExactRow row = rows[min(i, a.M - 1)];
        const unsigned seen = row.seen(one);
        add_rows(dV, row.p(one), seen, dO, a.d_o.row, first, a.M);
        add_rows(dK, row.ds(one), seen, Q, a.q.row, first, a.M);
    }
    write_lanes(rows_of(a.dK, a.dk, head.b, head.kv) + key * a.dk.row, dK, a.scale);
    write_lanes(rows_of(a.dV, a.dv, head.b, head.kv) + key * a.dv.row, dV, 1);
}

// All gradients of a block's head, by all of its threads; `rows` is shared memory for as many as there are queries.
// Its number and the warp's are found anew, too.
__device__ __forceinline__ void exact_head(const Backward &a, ExactRow *rows) {
    const Head head = head_of(a, block_index());
    const int warp = opaque(threadIdx.x) / 32;
#pragma unroll 1
    for (int i = warp; i < a.M; i += THREADS / 32) {
        const ExactRow row = exact_row(a, head, i);
        exact_dq(a, head, i, row);
        if (own_lane() == 0) rows[i] = row;
    }
    __syncthreads();
#pragma unroll 1
    for (int key = warp; key < a.N; key += THREADS / 32) exact_dk_dv(a, head, key, rows);
}
