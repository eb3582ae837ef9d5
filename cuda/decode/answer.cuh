// What leaves a block: answers, or partial answers, which somebody merges.
#pragma once
#include "decode.cuh"

// The answer of a row that has its maximum m, sum l and O: zeros and -inf if it saw nothing.
__device__ __forceinline__ void answer_number(const Decode &a, long long place, int d, float m, float l, float o) {
    const float v_scale = a.v_scale ? *a.v_scale : 1.0f;
    store_answer(a, place * HEAD_DIM + d, l == 0 ? 0.0f : o / l * v_scale);
    if (d == 0) a.lse[place] = l == 0 ? NEG_INF : m * LN2 + logf(l);
}

// Partial answers in the workspace: of each place, `parts` times m, l, and HEAD_DIM numbers of O.
constexpr int PARTIAL = HEAD_DIM + 2;

__device__ __forceinline__ void keep_number(float *partials, long long which, int d, float m, float l, float o) {
    float *const partial = partials + which * PARTIAL;
    if (d == 0) partial[0] = m, partial[1] = l;
    partial[2 + d] = o;
}

// Number d of the answer of partials `from` to `until` - 1 of one place, in this order. They are read past the first-level
// cache, which does not see what other multiprocessors write.
__device__ __forceinline__ void merge_number(const Decode &a, const float *partials, int parts, long long place,
                                             int from, int until, int d) {
    partials += place * parts * PARTIAL;
    float m = NEG_INF, l = 0, o = 0;
#pragma unroll 4
    for (int part = from; part < until; ++part) {
        const float theirs = __ldcg(partials + (long long)part * PARTIAL);
        m = theirs > m || theirs != theirs ? theirs : m;
    }
#pragma unroll 4
    for (int part = from; part < until; ++part) {
        const float *const partial = partials + (long long)part * PARTIAL;
        const float weight = exp2_fast(__ldcg(partial) - finite_or_zero(m));
        l += weight * __ldcg(partial + 1), o += weight * __ldcg(partial + 2 + d);
    }
    answer_number(a, place, d, m, l, o);
}
