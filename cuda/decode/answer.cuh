// Answers of a block, and partial answers, which another block or launch merges.
#pragma once
#include "decode.cuh"

// The factor of all answers.
__device__ __forceinline__ float v_scale_of(const Decode &a) { return a.v_scale ? *a.v_scale : 1.0f; }

// What the sum l over exponentials, and O, are multiplied by once the sink of a row's head is counted, too. m becomes
// the maximum with it.
__device__ __forceinline__ float count_sink(const Decode &a, long long place, float &m, float &l) {
#if SINKS
    const float sink = a.sinks[place % a.heads] * LOG2E, old = m;
    m = old > sink || old != old ? old : sink;
    const float weight = exp2_fast(old - finite_or_zero(m));
    l = l * weight + exp2_fast(sink - finite_or_zero(m));
    return weight;
#else
    return 1;
#endif
}

// A number of the answer of a row that has its maximum m, sum l and O: zeros and -inf if it saw nothing.
__device__ __forceinline__ void answer_number(const Decode &a, long long place, int d, float m, float l, float o) {
    o *= count_sink(a, place, m, l);
    store_answer(a, place * HEAD_DIM + d, l == 0 ? 0.0f : o / l * v_scale_of(a));
    if (d == 0) a.lse[place] = l == 0 ? NEG_INF : m * LN2 + logf(l);
}

// Partial answers in the workspace: of each place, as many as it may have times m, l, and HEAD_DIM numbers of O from
// the fourth on, which are read and written four at a time.
constexpr int PARTIAL = HEAD_DIM + 4, QUADS = HEAD_DIM / 4;

__device__ __forceinline__ void keep_number(float *partials, long long which, int d, float m, float l, float o) {
    float *const partial = partials + which * PARTIAL;
    if (d == 0) partial[0] = m, partial[1] = l;
    partial[4 + d] = o;
}

// A partial answer, the sum over some tokens, of a row: maximum, sum of exponentials, and four numbers of O.
struct Partial {
    float m, l;
    float4 o;
};

__device__ __forceinline__ Partial nothing() { return {NEG_INF, 0, make_float4(0, 0, 0, 0)}; }

__device__ __forceinline__ Partial read_partial(const float *partial, int quad) {
    const float2 ml = *reinterpret_cast<const float2 *>(partial);
    return {ml.x, ml.y, reinterpret_cast<const float4 *>(partial)[1 + quad]};
}

__device__ __forceinline__ void add_times(float4 &sum, float weight, float4 o) {
    sum.x = fmaf(weight, o.x, sum.x), sum.y = fmaf(weight, o.y, sum.y);
    sum.z = fmaf(weight, o.z, sum.z), sum.w = fmaf(weight, o.w, sum.w);
}

// Adds N partial answers to `sum`. NaN in m is not lost: it comes back in l and O.
template <int N>
__device__ __forceinline__ void join(Partial &sum, const Partial (&partials)[N]) {
    float m = sum.m;
#pragma unroll
    for (int i = 0; i < N; ++i) m = fmaxf(m, partials[i].m);
    const float shift = finite_or_zero(m), rescale = exp2_fast(sum.m - shift);
    sum = {m, sum.l * rescale, make_float4(sum.o.x * rescale, sum.o.y * rescale, sum.o.z * rescale, sum.o.w * rescale)};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const float weight = exp2_fast(partials[i].m - shift);
        sum.l = fmaf(weight, partials[i].l, sum.l);
        add_times(sum.o, weight, partials[i].o);
    }
}

// The sum of one row's partial answers `from` to `until` - 1, in their order, eight of them under way at a time.
__device__ __forceinline__ Partial merged(const float *partials, int from, int until, int quad) {
    constexpr int EIGHT = 8;
    Partial sum = nothing();
    for (int first = from; first < until; first += EIGHT) {
        Partial some[EIGHT];
#pragma unroll
        for (int i = 0; i < EIGHT; ++i)
            some[i] = first + i < until ? read_partial(partials + (long long)(first + i) * PARTIAL, quad) : nothing();
        join(sum, some);
    }
    return sum;
}

__device__ __forceinline__ void answer_quad(const Decode &a, long long place, int quad, Partial sum, float v_scale) {
    const float weight = count_sink(a, place, sum.m, sum.l), factor = sum.l == 0 ? 0.0f : v_scale / sum.l * weight;
    const float o[4] = {sum.o.x, sum.o.y, sum.o.z, sum.o.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) store_answer(a, place * HEAD_DIM + quad * 4 + i, sum.l == 0 ? 0.0f : o[i] * factor);
    if (quad == 0) a.lse[place] = sum.l == 0 ? NEG_INF : (sum.m + __log2f(sum.l)) * LN2;
}

__device__ __forceinline__ void keep_quad(float *partials, long long which, int quad, const Partial &sum) {
    float *const partial = partials + which * PARTIAL;
    if (quad == 0) partial[0] = sum.m, partial[1] = sum.l;
    reinterpret_cast<float4 *>(partial)[1 + quad] = sum.o;
}
