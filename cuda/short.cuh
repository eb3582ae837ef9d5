// What mma_short's kernels share, attention's and its gradients': a warp has 16 rows of a matrix in registers, and BC
// keys in a split tile of shared memory (split.cuh).
//
// In an accumulator a lane has rows g and g + 8 of 16, and columns 8x + 2t and the next, g = lane / 4, t = lane % 4
// (mma.cuh). So rows are read, split and written.
//
// Included after attention.cuh or backward.cuh, whose mask and biases it asks for.
#pragma once
#include "mma.cuh"

constexpr int K_STEPS = D / 16, P_STEPS = BC / 16;  // of products: over the numbers of a head, and over keys

// A lane has columns 8c + 2t and the next of a tile. With FOUR all tiles have their columns in such an order that those
// of two c are four neighbours in memory.
#ifndef FOUR
#define FOUR 0
#endif
__device__ __forceinline__ int column_of(int c) {
    const int t = threadIdx.x % 4;
    return FOUR ? c / 2 * 16 + 4 * t + c % 2 * 2 : 8 * c + 2 * t;
}

// A lane's numbers of a row to memory; value(c) are two.
template <class Number, class Value>
__device__ __forceinline__ void write_row(Number *row, Value value) {
#pragma unroll
    for (int c = 0; c < D / 8; c += 2) {
        const float2 one = value(c), other = value(c + 1);
        if (FOUR && ALIGNED) {
            if (column_of(c) < HEAD_DIM) put(row + column_of(c), make_float4(one.x, one.y, other.x, other.y));
        } else {
            store2(row, column_of(c), one.x, one.y), store2(row, column_of(c + 1), other.x, other.y);
        }
    }
}

// A lane's part of two rows, i and i + 8; beyond the matrix zeros.
struct TwoRows {
    float x[2][D / 8][2];

    template <class Number>
    __device__ __forceinline__ void load(const Number *matrix, long long stride, int i, int rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const Number *const row = matrix + (i + 8 * r) * stride;
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                const int left = i + 8 * r < rows ? HEAD_DIM - column_of(c) : 0;
                float *const two = x[r][c];
                if (FOUR && ALIGNED) {
                    if (c % 2 > 0) continue;
                    const float4 four = left > 0 ? four_from(row + column_of(c)) : make_float4(0, 0, 0, 0);
                    two[0] = four.x, two[1] = four.y, two[2] = four.z, two[3] = four.w;
                } else if (ALIGNED) {
                    const float2 from = left > 0 ? two_from(row + column_of(c)) : make_float2(0, 0);
                    two[0] = from.x, two[1] = from.y;
                } else {
                    two[0] = left > 0 ? float(row[column_of(c)]) : 0;
                    two[1] = left > 1 ? float(row[column_of(c) + 1]) : 0;
                }
            }
        }
    }
    __device__ __forceinline__ float largest() const { return largest_of<D / 2>(&x[0][0][0]); }
    __device__ __forceinline__ float magnitude() const {  // from which to tell whether all is finite
        float sum[4] = {};
#pragma unroll
        for (int e = 0; e < D / 2; ++e) sum[e % 4] += fabsf((&x[0][0][0])[e]);
        return sum[0] + sum[1] + (sum[2] + sum[3]);
    }
    // hi and lo of a row, scaled, into the words of left operands that are its. Returns the exponent of its own scale;
    // with it no number of the row, nor `other`, is too large.
    __device__ __forceinline__ int split(int r, float factor, Fragment (&hi)[K_STEPS], Fragment (&lo)[K_STEPS],
                                         float other = 0) const {
        float largest = fmaxf(quad_max(largest_of<D / 4>(&x[r][0][0])), other);
        if (__any_sync(~0u, largest == INFINITY_F)) largest = quad_max(largest_finite_of<D / 4>(&x[r][0][0]));
        const int s = scale_exponent(largest);
#pragma unroll
        for (int c = 0; c < D / 8; ++c)
            split_scaled(x[r][c][0], x[r][c][1], power_of_two(s) * factor, hi[c / 2].x[c % 2 * 2 + r],
                         lo[c / 2].x[c % 2 * 2 + r]);
        return s;
    }
};

// c += A B, two blocks of 16 x 8.
__device__ __forceinline__ void multiply(float (&c)[2][4], const Fragment &a, const Fragment &b) {
    mma(c[0], a, b.x), mma(c[1], a, b.x + 2);
}

// s = A Bᵀ, of 16 rows and 16 keys of the split tile B from `key` on, small products first.
__device__ __forceinline__ void multiply_block(float (&s)[2][4], const Fragment (&hi)[K_STEPS],
                                               const Fragment (&lo)[K_STEPS], const unsigned char *tile, int key) {
    Fragment b[K_STEPS];
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
        b[k] = right_operand<BC>(tile, key, 16 * k);
        if (PRODUCTS > 1) multiply(s, lo[k], b[k]);
        if (PRODUCTS > 2) multiply(s, hi[k], right_operand<BC>(tile, key, D + 16 * k));
    }
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) multiply(s, hi[k], b[k]);
}

// s = A Bᵀ, of the first `blocks` times 16 keys. `exponent` is one that is read in the kernel, so that ptxas cannot know
// that a branch on it is never taken.
__device__ __forceinline__ void multiply_rows(float (&s)[P_STEPS][2][4], const Fragment (&hi)[K_STEPS],
                                              const Fragment (&lo)[K_STEPS], const unsigned char *tile, int blocks,
                                              int exponent) {
#pragma unroll
    for (int n = 0; n < P_STEPS; ++n) {
        if (n >= blocks || (n % (D <= 32 ? 1 : 2) == 0 && never(exponent + n))) break;
        multiply_block(s[n], hi, lo, tile, 16 * n);
    }
}

// c = A B, of 16 rows and all columns of a head; A sums over the first `steps` times 16 keys of the split tile B. Small
// products have a sum of their own: for operands of all keys to wait for them, there would be no registers. SPARING:
// where A is needed later on, there are few to fetch ahead.
template <bool SPARING = false>
__device__ __forceinline__ void multiply_keys(float (&c)[K_STEPS][2][4], const Fragment (&hi)[P_STEPS],
                                              const Fragment (&lo)[P_STEPS], const unsigned char *tile, int steps,
                                              int exponent) {
#pragma unroll
    for (int n = 0; n < K_STEPS; ++n) {
        if (never(exponent + n)) break;
        float small[2][4] = {};
#pragma unroll
        for (int k = 0; k < P_STEPS; ++k) {
            if (k >= steps || (SPARING && k % 2 == 0 && never(exponent + k))) break;
            const Fragment b = right_operand_transposed<BC>(tile, 16 * k, 16 * n);
            if (PRODUCTS > 1) multiply(small, lo[k], b);
            if (PRODUCTS > 2) multiply(small, hi[k], right_operand_transposed<BC>(tile, 16 * k, D + 16 * n));
            multiply(c[n], hi[k], b);
        }
#pragma unroll
        for (int x = 0; x < 8; ++x) c[n][x / 4][x % 4] += small[x / 4][x % 4];
    }
}

// Takes what row i + 8r does not see from scores s, whose units are unit[r] in powers of two; adds biases, where there
// are some, and then the units are 1. Query `row` sees keys from hidden(row) on, before seen(row).
template <class Arguments, class Head, class Hidden, class Seen>
__device__ __forceinline__ void mask_scores(float (&s)[P_STEPS][2][4], float (&unit)[2], const Arguments &a, Head head,
                                            int i, Hidden hidden, Seen seen) {
    const int first_key = threadIdx.x % 4 * 2;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = i + 8 * r, first = hidden(row), end = seen(row);
        const BiasRow of(a, head, min(row, a.M - 1));
#pragma unroll
        for (int n = 0; n < P_STEPS; ++n) {
            const auto key = [&](int x) { return 16 * n + x / 2 * 8 + first_key + x % 2; };
            Biases<4, Neighbours<1, 0>> bias;
            if (BIAS) bias.template read<4>(a, head, [&](int) { return of; }, key);
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                float &score = s[n][x / 2][2 * r + x % 2];
                if (BIAS) score = biased(score, unit[r], bias, x);
                if ((CAUSAL || n == P_STEPS - 1) && key(x) >= end) score = NEG_INF;
                if (WINDOW && key(x) < first) score = NEG_INF;
            }
        }
        if (BIAS) unit[r] = 1;
    }
}

// Scores become p = 2^(s unit - shift), of which a row's largest is 2^largest; l is a row's sum of them.
__device__ __forceinline__ void exponentiate(float (&s)[P_STEPS][2][4], const float (&unit)[2], float largest,
                                             float (&shift)[2], float (&l)[2]) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float m = NEG_INF, sum = 0;
#pragma unroll
        for (int x = 0; x < BC / 8; ++x) m = fmaxf(m, fmaxf(s[x / 2][x % 2][2 * r], s[x / 2][x % 2][2 * r + 1]));
        shift[r] = finite_or_zero(fmaf(quad_max(m), unit[r], -largest));
#pragma unroll
        for (int x = 0; x < BC / 8; ++x) {
            float *const two = &s[x / 2][x % 2][2 * r];
            two[0] = exp2_fast(fmaf(two[0], unit[r], -shift[r])), two[1] = exp2_fast(fmaf(two[1], unit[r], -shift[r]));
            sum += two[0] + two[1];
        }
        l[r] = quad_sum(sum);
    }
}

// hi and lo of numbers as a left operand: row g of it times factor[0], row g + 8 times factor[1].
__device__ __forceinline__ void split_rows(const float (&x)[P_STEPS][2][4], const float (&factor)[2],
                                           Fragment (&hi)[P_STEPS], Fragment (&lo)[P_STEPS]) {
#pragma unroll
    for (int n = 0; n < P_STEPS; ++n)
#pragma unroll
        for (int w = 0; w < 4; ++w)
            split_scaled(x[n][w / 2][w % 2 * 2], x[n][w / 2][w % 2 * 2 + 1], factor[w % 2], hi[n].x[w], lo[n].x[w]);
}
