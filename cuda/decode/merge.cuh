// The partial answers of a row merged by warps: here in a launch of its own after all of them have been written.
#pragma once
#include "tensor.cuh"

constexpr int AT_ONCE = 8;                    // partial answers that a warp merges
constexpr int OF_LANE = ceil_div(QUADS, 32);  // of O, four numbers each
static_assert(MAX_PIECES <= AT_ONCE * AT_ONCE, "a warp can merge what the warps of a block have merged");

// A row's sum as a warp has it: m and l in each lane; of O quads lane, lane + 32 and so on.
struct RowSum {
    float m, l;
    float4 o[OF_LANE];
};

// The maximum, and the sum, over AT_ONCE neighbouring lanes.
__device__ __forceinline__ float max_of_lanes(float x) {
#pragma unroll
    for (int apart = 1; apart < AT_ONCE; apart *= 2) x = fmaxf(x, __shfl_xor_sync(~0u, x, apart));
    return x;
}
__device__ __forceinline__ float sum_of_lanes(float x) {
#pragma unroll
    for (int apart = 1; apart < AT_ONCE; apart *= 2) x += __shfl_xor_sync(~0u, x, apart);
    return x;
}

// The sum of `count` partial answers, which are at partial_of(0), partial_of(1) and so on, in this order. All are asked
// for at once: each lane has m and l of one of them, and its quads of all. NaN in m is not lost: it comes back in l and
// O.
template <typename Of>
__device__ __forceinline__ RowSum merged_by_warp(Of partial_of, int count) {
    const int lane = threadIdx.x % 32, which = lane % AT_ONCE;
    float2 ml = make_float2(NEG_INF, 0);
    if (which < count) ml = *reinterpret_cast<const float2 *>(partial_of(which));
    float4 o[AT_ONCE][OF_LANE] = {};
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i)
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k)
            if (i < count && lane + k * 32 < QUADS)
                o[i][k] = reinterpret_cast<const float4 *>(partial_of(i))[1 + lane + k * 32];
    __threadfence_block();  // or ptxas would have some of these wait for the lanes' exchange

    RowSum sum = {max_of_lanes(ml.x)};
    const float weight = exp2_fast(ml.x - finite_or_zero(sum.m));
    sum.l = sum_of_lanes(weight * ml.y);
#pragma unroll
    for (int i = 0; i < AT_ONCE; ++i) {  // beyond `count` there are zeros
        const float w = __shfl_sync(~0u, weight, i);
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) add_times(sum.o[k], w, o[i][k]);
    }
    return sum;
}

// Calls what(quad, partial answer) for each quad that a lane has of a row.
template <typename Do>
__device__ __forceinline__ void for_each_quad(const RowSum &sum, Do what) {
#pragma unroll
    for (int k = 0; k < OF_LANE; ++k)
        if (const int quad = threadIdx.x % 32 + k * 32; quad < QUADS) what(quad, Partial{sum.m, sum.l, sum.o[k]});
}

// By a warp for each AT_ONCE partial answers that there may be.
__device__ __forceinline__ void merge_row(const Decode &a, int place, int warp, float *scratch) {
    const int count = pieces_of(a, length_of(a, place / a.heads / a.tokens));
    // The next launch waits for this one alone, which therefore must not end before the one before it: its
    // first block waits, even if all rows have been answered.
    if (count == 1 && place > 0) return;
    const float v_scale = v_scale_of(a);
    await_launch_before();
    if (count == 1) return;
    const int warps = ceil_div_large(count, AT_ONCE), first = warp * AT_ONCE;
    const float *const partials = partials_of_row(a, place) + first * PARTIAL;
    RowSum sum = merged_by_warp([&](int i) { return partials + i * PARTIAL; }, min(AT_ONCE, count - first));
    if (warps > 1) {
        if (warp < warps)
            for_each_quad(sum, [&](int quad, const Partial &sum) { keep_quad(scratch, warp, quad, sum); });
        __syncthreads();
        if (warp == 0) sum = merged_by_warp([&](int i) { return scratch + i * PARTIAL; }, warps);
    }
    if (warp == 0) for_each_quad(sum, [&](int quad, const Partial &sum) { answer_quad(a, place, quad, sum, v_scale); });
}

// Where a warp is enough for a row, a block has several: many blocks take longer to begin than to merge.
__device__ __forceinline__ void merge_rows(const Decode &a, float *scratch) {
    const int warp = threadIdx.x / 32, place = blockIdx.x * (blockDim.x / 32) + warp;
    if (most_pieces(a) > AT_ONCE) merge_row(a, blockIdx.x, warp, scratch);
    else if (place < askers(a) * a.tokens * a.heads) merge_row(a, place, 0, scratch);
}
