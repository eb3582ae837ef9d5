// Shared by the kernels of tangents: their arguments, P of one score, and what is kept of a row.
//
// A tangent is how fast a number changes while Q, K and V move along tQ, tK and tV. With S = scale Q Kᵀ + bias, P =
// softmax(S), dP = dO Vᵀ and D, the row sums of P dP less the gradient of the LSE:
//   tS = scale (tQ Kᵀ + Q tKᵀ), R the row sums of P tS, which are the tangent of the LSE;
//   tP = P (tS - R), and tO = tP V + P tV;
//   dS = P (dP - D), and tdS = tP (dP - D) + P (dO tVᵀ - tD), tD being what makes its row sums 0: those of dO ∘ tO;
//   tdQ = scale (tdS K + dS tK), tdK = scale (tdSᵀ Q + dSᵀ tQ), tdV = tPᵀ dO.
// Gradients of gradients are the same numbers. If X, Y and Z are the gradients of a loss with respect to dQ, dK and dV,
// those with respect to Q, K, V and dO are tdQ, tdK, tdV and tO along X, Y and Z: both are second derivatives of dO ∘ O.
//
// R, D and tD are found first, by `of_rows`, from the very products that they are taken from later: what is rounded of
// them is an error that a whole row has in common, and does not average out.
#pragma once
#include "backward.cuh"

#ifndef GRADIENTS
#error "GRADIENTS is a macro, 1: tangents of gradients are wanted, too; 0: those of O and the LSE alone"
#endif

typedef struct {
    Backward of;                // dQ, dK and dV are where their tangents go; dO is null without GRADIENTS
    const float *tQ, *tK, *tV;  // as Q, K and V
    float *tO, *tlse;           // as O and lse; contiguous
    Strides tq, tk, tv, to;
} Tangents;
static_assert(sizeof(Tangents) == TANGENTS_BYTES, "as flashcli/kernels/tangents.py packs them");
static_assert(!PACKED && INPUT == 0 && ANSWER == 0 && GRADIENT == 0, "heads of floats, each with all of its rows");

// What a row has in common, at the beginning of the workspace.
struct __align__(16) Common {
    float above;    // the LSE in powers of two; infinite where the row sees nothing
    float inverse;  // 1 / the sum of 2^(s - above); 0 where the row sees nothing
    float R;        // before the scale, so that R of one key is just what it is taken from
    float D, tD;
    float unused[3];
};
static_assert(sizeof(Common) == COMMON_BYTES, "as flashcli/kernels/tangents.py says");
__device__ __forceinline__ long long number_of(const Backward &a, Head head, int i) {
    return ((long long)head.b * a.H + head.h) * a.M + i;
}
__device__ __forceinline__ Common &common_of(const Backward &a, Head head, int i) {
    return reinterpret_cast<Common *>(a.workspace)[number_of(a, head, i)];
}
__device__ __forceinline__ float above_of(const Backward &a, Head head, int i) {
    const float lse = a.lse[head.b * a.lse_at.batch + head.h * a.lse_at.head + i * a.lse_at.row];
    return lse == NEG_INF ? INFINITY_F : lse * LOG2E;
}

// P of a product q . k, times `inverse`; `factor` brings the product to a score in powers of two. It is -0 where query
// i does not see the key, so that this is told from a small P, and met by nothing that is not finite; or, unless MASKED,
// all queries see it.
template <bool MASKED = true>
__device__ __forceinline__ float p_of(const Backward &a, Head head, int i, int key, float product, float factor,
                                      float above, float inverse) {
    const float bias = bias_of(a, head, i, key);
    if (!MASKED) return exp2_fast(fmaf(product, factor, -above)) * inverse;
    if (i >= a.M || !sees(a, i, key) || (BIAS && bias == NEG_INF)) return -0.0f;
    const float exponent = ADDS ? fmaf(product, factor, in_powers_of_two(bias)) - above : fmaf(product, factor, -above);
    return exp2_fast(exponent) * inverse;
}
__device__ __forceinline__ bool is_unseen(float p) { return __float_as_uint(p) == 0x80000000; }

// Means over keys, weighted by P, of what a thread has met of a row: R, D, and what tD is the mean of. Each tile's are
// found by themselves and then merged, so that only differences from means of the same keys are multiplied: those from
// another mean would be as large as it is far, and cancel (https://en.wikipedia.org/wiki/Algorithms_for_calculating_variance).
struct Means {
    float total = 0, R = 0, D = 0, of_tD = 0;  // sums of P, and of P times what tD is the mean of; means

    __device__ __forceinline__ void merge(const Means &other, float scale) {
        const float both = total + other.total, part = total == 0 ? 1 : __fdividef(other.total, both);
        const float r = other.R - R, d = other.D - D;
        of_tD += other.of_tD + scale * r * d * (total * part);
        total = both, R = fmaf(part, r, R), D = fmaf(part, d, D);
    }
    // n of the scores that arrays have, at(0) to at(n - 1). A mean is taken twice, so that it is right of a single key.
    template <int n, int size, class At>
    __device__ __forceinline__ void add(const float (&p)[size], const float (&ts)[size], const float (&dp)[size],
                                        const float (&tdp)[size], float scale, At at) {
        Means tile;
        float rest_R = 0, rest_D = 0;
#pragma unroll
        for (int y = 0; y < n; ++y) {
            tile.total += p[at(y)], tile.R = fmaf(p[at(y)], ts[at(y)], tile.R);
            if (GRADIENTS) tile.D = fmaf(p[at(y)], dp[at(y)], tile.D);
        }
        const float inverse =
            tile.total > 0x1p-100f ? __fdividef(1, tile.total) : 0;  // of less nothing is left in sums
        tile.R *= inverse, tile.D *= inverse;
#pragma unroll
        for (int y = 0; y < n; ++y) {
            const float t = ts[at(y)] - tile.R;
            rest_R = fmaf(p[at(y)], t, rest_R);
            if (!GRADIENTS) continue;
            const float x = dp[at(y)] - tile.D;
            rest_D = fmaf(p[at(y)], x, rest_D);
            tile.of_tD = fmaf(p[at(y)], fmaf(t * scale, x, tdp[at(y)]), tile.of_tD);
        }
        tile.R = fmaf(rest_R, inverse, tile.R), tile.D = fmaf(rest_D, inverse, tile.D);
        merge(tile, scale);
    }
    // With the means of other lanes.
    __device__ __forceinline__ void merge_lanes(int lanes, float scale) {
        merge({__shfl_xor_sync(~0u, total, lanes), __shfl_xor_sync(~0u, R, lanes), __shfl_xor_sync(~0u, D, lanes),
               __shfl_xor_sync(~0u, of_tD, lanes)},
              scale);
    }
    __device__ __forceinline__ void keep(const Backward &a, float *tlse, Head head, int i, float above) const {
        const bool nothing = above == INFINITY_F && total == 0;
        const float inverse = nothing ? 0 : 1 / total;
        common_of(a, head, i) = {above, inverse, R, nothing ? 0 : D - dlse_of(a, head, i), of_tD * inverse};
        tlse[number_of(a, head, i)] = a.scale * R;
    }
};
