// Register tiles by FFMA, for `register_tiled`, of gradients and of tangents: a block owns OWN rows, and PASS others pass
// by.
//
// A thread has a register tile of scores, OWN_ROWS x PASS_ROWS, and one of each sum, OWN_ROWS x COLUMNS. A score adds up
// eight products at a time, each eight from zero.
#pragma once
#include "backward.cuh"
#include "float4.cuh"

constexpr int D = round_up(HEAD_DIM, 32), CHUNKS = D / 4;  // zero-padded; float4s in a row
constexpr int OWN = BR, PASS = BC;
constexpr int ACROSS = 8, DOWN = THREADS / ACROSS;  // threads that share a row, and rows of threads
constexpr int OWN_ROWS = OWN / DOWN, PASS_ROWS = PASS / ACROSS, COLUMNS = D / ACROSS;  // of a thread's register tiles

static_assert(THREADS % 32 == 0 && OWN % DOWN == 0 && PASS % 32 == 0, "whole register tiles");

// Shared memory, in float4s. Rows are multiples of 128 bytes, so equal columns of different rows are in the same banks.
// To keep apart the addresses that a warp reads at once, float4 c of row r is stored at c ^ swizzle(r).
extern __shared__ __align__(128) float4 shared[];
constexpr int OWN_SIZE = OWN * CHUNKS, PASS_SIZE = PASS * CHUNKS, SCORES = OWN * PASS / 4;

__device__ constexpr int swizzle_pass(int r) { return r / 4 % 8; }            // threads across read rows 4 apart
__device__ constexpr int swizzle_own(int r) { return r / OWN_ROWS % 2 * 4; }  // two threads down share a transaction

// ROWS rows of a matrix, from row `first` on.
template <int ROWS, bool OWNED, class Number>
__device__ __forceinline__ void copy_tile(float4 *to, const Number *matrix, long long stride, int first, int rows) {
#pragma unroll 4
    for (int e = threadIdx.x; e < ROWS * CHUNKS; e += THREADS) {
        const int r = e / CHUNKS, c = e % CHUNKS;
        copy4(to + r * CHUNKS + (c ^ (OWNED ? swizzle_own(r) : swizzle_pass(r))), matrix, stride, first + r, 4 * c,
              rows);
    }
}
template <class Number>
__device__ __forceinline__ void copy_own(float4 *to, const Number *matrix, long long stride, int first, int rows) {
    copy_tile<OWN, true>(to, matrix, stride, first, rows);
}
template <class Number>
__device__ __forceinline__ void copy_pass(float4 *to, const Number *matrix, long long stride, int first, int rows) {
    copy_tile<PASS, false>(to, matrix, stride, first, rows);
}

// Where a thread is. Neighbours in a row are lanes 1, 4 and 8 apart, neighbours in a column 2 and 16: the pipe merges
// the 16-byte reads of a half warp into one transaction only if lanes 1 apart, or lanes 2 apart, read the same address.
struct Thread {
    int across, r0;  // its own rows are r0 to r0 + OWN_ROWS, passing row x is at `passing(x)`
    __device__ __forceinline__ Thread() {
        const int lane = threadIdx.x % 32, down = (lane >> 1 & 1) | (lane >> 3 & 2);
        across = (lane & 1) | (lane >> 1 & 6), r0 = (threadIdx.x / 32 * 4 + down) * OWN_ROWS;
    }
    __device__ __forceinline__ int passing(int x) const { return 4 * across + x / 4 * 32 + x % 4; }
};

typedef float Scores[OWN_ROWS][PASS_ROWS];
typedef float Sum[OWN_ROWS][COLUMNS];

// s = own passᵀ
__device__ __forceinline__ void multiply(Scores &s, const float4 *own, const float4 *pass, const Thread &t) {
    const int own_at = t.r0 * CHUNKS, own_swizzle = swizzle_own(t.r0);
    const int pass_at = 4 * t.across * CHUNKS, pass_swizzle = swizzle_pass(4 * t.across);
#pragma unroll
    for (int x = 0; x < OWN_ROWS * PASS_ROWS; ++x) s[x / PASS_ROWS][x % PASS_ROWS] = 0;
    // Where one round is all, the compiler is not to know: it would mix it with what follows, and spill registers.
    const int rounds = HEAD_DIM <= 8 ? opaque(1) : ceil_div(HEAD_DIM, 8);
#pragma unroll 1
    for (int c = 0; c < 2 * rounds; c += 2) {  // eight columns at a time
        float4 left[OWN_ROWS][2];
#pragma unroll
        for (int x = 0; x < 2 * OWN_ROWS; ++x)
            left[x / 2][x % 2] = own[own_at + x / 2 * CHUNKS + ((c + x % 2) ^ own_swizzle)];
#pragma unroll
        for (int j = 0; j < PASS_ROWS; ++j) {
            const int row = pass_at + (j / 4 * 32 + j % 4) * CHUNKS;
            const float4 right[2] = {pass[row + (c ^ pass_swizzle)], pass[row + ((c + 1) ^ pass_swizzle)]};
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) {
                float sum = fmaf(part(left[i][0], 0), part(right[0], 0), part(left[i][0], 1) * part(right[0], 1));
#pragma unroll
                for (int x = 2; x < 8; ++x) sum = fmaf(part(left[i][x / 4], x % 4), part(right[x / 4], x % 4), sum);
                s[i][j] += sum;
            }
        }
    }
}

// Scores to shared memory, where all threads of a row find them.
__device__ __forceinline__ void store(float4 *to, const Scores &s, const Thread &t) {
#pragma unroll
    for (int i = 0; i < OWN_ROWS; ++i)
#pragma unroll
        for (int j = 0; j < PASS_ROWS; j += 4)
            to[(t.r0 + i) * (PASS / 4) + ((t.across + 2 * j) ^ swizzle_own(t.r0))] =
                make_float4(s[i][j], s[i][j + 1], s[i][j + 2], s[i][j + 3]);
}

// Whether two tiles, which may be one, hold something that is not finite; called by all threads.
__device__ __forceinline__ bool are_spoilt(const float4 *pass1, const float4 *pass2) {
    float sum = 0;
#pragma unroll 1
    for (int e = threadIdx.x; e < PASS_SIZE; e += THREADS)
        for (int x = 0; x < 4; ++x) sum += fabsf(part(pass1[e], x)) + fabsf(part(pass2[e], x));
    return !__syncthreads_and(sum < INFINITY_F);
}

// A row of a sum, times `factor`, to memory.
__device__ __forceinline__ void write(Gradient *row, const float (&sum)[COLUMNS], float factor, const Thread &t) {
#pragma unroll
    for (int y = 0; y < COLUMNS; y += 4) {
        const int column = 4 * t.across + y * 8, left = HEAD_DIM - column;
        const float4 four = make_float4(sum[y] * factor, sum[y + 1] * factor, sum[y + 2] * factor, sum[y + 3] * factor);
        if (ALIGNED) {
            if (left > 0) put(row + column, four);
        } else {
#pragma unroll
            for (int z = 0; z < 4; ++z)
                if (z < left) row[column + z] = part(four, z);
        }
    }
}

// The sum of all threads of a row.
__device__ __forceinline__ float across(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    x += __shfl_xor_sync(~0u, x, 4);
    return x + __shfl_xor_sync(~0u, x, 8);
}
