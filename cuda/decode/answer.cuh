// What leaves a block: answers, or partial answers, which somebody merges.
#pragma once
#include "decode.cuh"

// A number of the answer of a row that has its maximum m, sum l and O: zeros and -inf if it saw nothing.
__device__ __forceinline__ void answer_number(const Decode &a, long long place, int d, float m, float l, float o) {
    const float v_scale = a.v_scale ? *a.v_scale : 1.0f;
    store_answer(a, place * HEAD_DIM + d, l == 0 ? 0.0f : o / l * v_scale);
    if (d == 0) a.lse[place] = l == 0 ? NEG_INF : m * LN2 + logf(l);
}

// Partial answers in the workspace: of each place, `parts` times m, l, and HEAD_DIM numbers of O from the fourth on, which
// are read and written four at a time.
constexpr int PARTIAL = HEAD_DIM + 4, QUADS = HEAD_DIM / 4;

__device__ __forceinline__ void keep_number(float *partials, long long which, int d, float m, float l, float o) {
    float *const partial = partials + which * PARTIAL;
    if (d == 0) partial[0] = m, partial[1] = l;
    partial[4 + d] = o;
}

// What some tokens have given a row: maximum, sum, and four numbers of O. Others are read past the first-level cache, which
// does not see what other multiprocessors write.
struct Part {
    float m, l;
    float4 o;
};

__device__ __forceinline__ Part nothing() { return {NEG_INF, 0, make_float4(0, 0, 0, 0)}; }

__device__ __forceinline__ Part part_of(const float *partial, int quad) {
    const float2 ml = __ldcg(reinterpret_cast<const float2 *>(partial));
    return {ml.x, ml.y, __ldcg(reinterpret_cast<const float4 *>(partial) + 1 + quad)};
}

// NaN in m is not lost: it comes back in l and O.
template <int N>
__device__ __forceinline__ void join_parts(Part &sum, const Part (&parts)[N]) {
    float m = sum.m;
#pragma unroll
    for (int i = 0; i < N; ++i) m = fmaxf(m, parts[i].m);
    const float shift = finite_or_zero(m), rescale = exp2_fast(sum.m - shift);
    sum = {m, sum.l * rescale, make_float4(sum.o.x * rescale, sum.o.y * rescale, sum.o.z * rescale, sum.o.w * rescale)};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float weight = exp2_fast(parts[i].m - shift);
        sum.l += weight * parts[i].l;
        sum.o.x += weight * parts[i].o.x, sum.o.y += weight * parts[i].o.y;
        sum.o.z += weight * parts[i].o.z, sum.o.w += weight * parts[i].o.w;
    }
}

// Sums of `count` partial answers each, in this order, eight under way at a time.
template <int N>
__device__ __forceinline__ void join_all(const float *const (&partials)[N], int count, const int (&quads)[N],
                                         Part (&sums)[N]) {
    constexpr int AT_ONCE = 8 / N;
#pragma unroll
    for (int k = 0; k < N; ++k) sums[k] = nothing();
    for (int first = 0; first < count; first += AT_ONCE) {
        Part some[N][AT_ONCE];
#pragma unroll
        for (int k = 0; k < N; ++k)
#pragma unroll
            for (int i = first; i < first + AT_ONCE; ++i)
                some[k][i - first] = i < count ? part_of(partials[k] + i * PARTIAL, quads[k]) : nothing();
#pragma unroll
        for (int k = 0; k < N; ++k) join_parts(sums[k], some[k]);
    }
}

// That of the partial answers `from` to `until` - 1.
__device__ __forceinline__ Part merged(const float *partials, int from, int until, int quad) {
    const float *const first[1] = {partials + (long long)from * PARTIAL};
    const int quads[1] = {quad};
    Part sums[1];
    join_all(first, until - from, quads, sums);
    return sums[0];
}

__device__ __forceinline__ void answer_quad(const Decode &a, long long place, int quad, const Part &sum) {
    const float factor = sum.l == 0 ? 0.0f : (a.v_scale ? *a.v_scale : 1.0f) / sum.l;
    const float o[4] = {sum.o.x, sum.o.y, sum.o.z, sum.o.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) store_answer(a, place * HEAD_DIM + quad * 4 + i, sum.l == 0 ? 0.0f : o[i] * factor);
    if (quad == 0) a.lse[place] = sum.l == 0 ? NEG_INF : (sum.m + __log2f(sum.l)) * LN2;
}

__device__ __forceinline__ void keep_quad(float *partials, long long which, int quad, const Part &sum) {
    float *const partial = partials + which * PARTIAL;
    if (quad == 0) partial[0] = sum.m, partial[1] = sum.l;
    reinterpret_cast<float4 *>(partial)[1 + quad] = sum.o;
}
