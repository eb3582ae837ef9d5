// What every kernel shares: the entry point's argument list, the macros it is built with, and a few one-line helpers.
//
// Macros, set by flashcli/kernels.py so that launch and kernel cannot disagree:
//   HEAD_DIM  d, the length of a row of Q, K, V and O       BR, BC   rows of a Q tile and of a K/V tile
//   THREADS   threads in a block                            CAUSAL   1: a query sees no key after its own position
#pragma once

#ifndef HEAD_DIM
#error "HEAD_DIM, BR, BC, THREADS and CAUSAL are macros: see flashcli/kernels.py"
#endif

// One argument list for every __global__ function of every kernel.
//   Q             float32 [M, d] of batch 0, some query rows; batch b starts q_stride floats later
//   K, V          float32 [N, d] of batch 0, all keys; batch b starts kv_stride floats later
//   O             float32 [B, M, d], contiguous
//   workspace     scratch of the size the registry asks for; null for most kernels
//   first_row     the position of Q's first row in the sequence: where the causal mask lets it look. All rows: 0, and M = N
//   scale         factor on Q Kᵀ, usually 1/sqrt(d)
//   tile_i, tile_j  the pair of tiles that the launch is for, where one launch does not take them all (01_baseline.cu); else 0
// (The file interleaves Q, K and V per batch: then both strides are 3 N d.) Where d is a multiple of 4, matrices start on
// 16 bytes.
#define ATTENTION_ARGUMENTS                                                                                       \
    const float *__restrict__ Q, const float *__restrict__ K, const float *__restrict__ V, float *__restrict__ O, \
        unsigned char *__restrict__ workspace, long long q_stride, long long kv_stride, int B, int M, int N,      \
        int first_row, float scale, int tile_i, int tile_j

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }

// How many keys, of N, the query at a position in the sequence sees: keys 0 to that many - 1.
__device__ __forceinline__ int keys_seen(int position, int N) { return CAUSAL ? min(N, position + 1) : N; }

constexpr float LOG2E = 1.44269504088896340736f;
#define NEG_INF __int_as_float(0xff800000)

// 2^x with one instruction of the special-function unit: relative error below 2^-22; 2^-inf = 0, 2^NaN = NaN.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The value to subtract from scores whose row maximum is m. While a row has seen only -inf, subtracting -inf would
// make NaN of what must be exp(-inf) = 0.
__device__ __forceinline__ float finite_or_zero(float m) { return m == NEG_INF ? 0.0f : m; }
