// Split precision: fp32 products on fp16 tensor cores, and the tiles of shared memory that feed them.
//
// A matrix is scaled by a power of two (exact) so that its largest finite magnitude lies in [2^14, 2^15), just below
// fp16's end, and each number becomes hi + lo, hi = fp16(x), lo = fp16(x - hi): 22 bits. A product of two such numbers is
// lo*hi + hi*lo + hi*hi; the lo*lo left out is below 2^-22 of it. K and V are scaled per tile, Q per row: an outlier
// coarsens only its own tile. Inf and NaN are ignored when choosing the scale and survive the split (lo = Inf - Inf = NaN).
//
// A split tile of R rows and C columns, as wgmma (128-byte swizzle, K-major) and ldmatrix read it without bank conflicts:
//   hi and lo stand side by side, [hi | lo], 2C fp16 columns (PRODUCTS == 1: only hi, C columns);
//   the columns are cut into panels of 64 (128 bytes); a panel is R rows of 128 bytes, panels follow one another;
//   in row r, the 16-byte chunk c of a panel lies at chunk c ^ (r % 8).
// So (row, column) is at split_offset<R>(row, column), and column c of lo is column C + c. R is a multiple of 8, C of 16.
//
// The workspace that `prepare` fills, B * Tc tiles, Tc = ceil(N / BC), for the tile t = b * Tc + j:
//   at workspace + t * (K_TILE + V_TILE): K_TILE bytes, the keys of tile j: BC rows, D columns, keys beyond N zero;
//                                   then V_TILE bytes, the values transposed: D rows, BC columns (keys);
//   at workspace + B * Tc * (K_TILE + V_TILE) + 8 * t: two ints, the exponents s of K's and V's scale 2^s.
// D is HEAD_DIM padded with zeros. Launch: 2 * B * Tc blocks of PREPARE_THREADS, even ones do K, odd ones V.
#pragma once
#include "common.cuh"

#ifndef PRODUCTS
#define PRODUCTS 3  // 1: hi * hi only, the precision of fp16
#endif
static_assert(PRODUCTS == 3 || PRODUCTS == 1, "three products make fp32, one makes fp16");

constexpr int D = HEAD_DIM <= 32 ? 32 : HEAD_DIM <= 64 ? 64 : HEAD_DIM <= 96 ? 96 : HEAD_DIM <= 128 ? 128 : round_up(HEAD_DIM, 64);
constexpr bool ALIGNED = HEAD_DIM % 4 == 0;  // else rows do not start on 16 bytes: load floats
constexpr int PREPARE_THREADS = 256;

constexpr int split_bytes(int R, int C) { return ceil_div(PRODUCTS == 3 ? 2 * C : C, 64) * R * 128; }
constexpr int K_TILE = split_bytes(BC, D), V_TILE = split_bytes(D, BC);
static_assert(BC % 16 == 0, "a k-step of the tensor cores is 16 keys");

template <int R>
__host__ __device__ __forceinline__ constexpr int split_offset(int row, int column) {
    return column / 64 * (R * 128) + row * 128 + ((column % 64 / 8 ^ row % 8) * 16) + column % 8 * 2;
}

// ---- one number, two numbers, eight numbers

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }  // -126 <= e <= 127

// The bits of |x|, which order like the magnitudes; 0 for Inf and NaN.
__device__ __forceinline__ unsigned finite_magnitude(float x) {
    const unsigned bits = __float_as_uint(x) & 0x7fffffffu;
    return bits < 0x7f800000u ? bits : 0u;
}

// The exponent s for which 2^s brings a largest magnitude (as bits) into [2^14, 2^15). All zeros: 0. Magnitudes below
// 2^-112 stay below 2^14: 2^s must be a float itself.
__device__ __forceinline__ int scale_exponent(unsigned largest) {
    return largest == 0 ? 0 : min(14 + 127 - int(largest >> 23), 126);
}

// Two floats to two fp16 in one register, `low` in the low half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float2 unpack(unsigned x) {
    float2 r;
    asm("{\n .reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}" : "=f"(r.x), "=f"(r.y) : "r"(x));
    return r;
}

// hi + lo of two numbers.
__device__ __forceinline__ void split(float x, float y, unsigned &hi, unsigned &lo) {
    hi = pack(x, y);
    const float2 h = unpack(hi);
    lo = pack(x - h.x, y - h.y);
}

// Splits x[0..7] * factor (a power of two for K and V) and stores the two 16-byte chunks at columns `column` and C + column.
template <int R, int C>
__device__ __forceinline__ void store_split(unsigned char *tile, int row, int column, const float (&x)[8], float factor) {
    uint4 hi, lo;
    unsigned *h = &hi.x, *l = &lo.x;
#pragma unroll
    for (int e = 0; e < 4; ++e) {
        const float a = x[2 * e], b = x[2 * e + 1];
        h[e] = pack(a * factor, b * factor);
        const float2 rounded = unpack(h[e]);
        l[e] = pack(fmaf(a, factor, -rounded.x), fmaf(b, factor, -rounded.y));  // exact but for the last rounding
    }
    *reinterpret_cast<uint4 *>(tile + split_offset<R>(row, column)) = hi;
    if (PRODUCTS == 3) *reinterpret_cast<uint4 *>(tile + split_offset<R>(row, C + column)) = lo;
}

// ---- reading fp32 matrices [N, HEAD_DIM]

// Four floats of row `row` from column `column`, a multiple of 4; zeros beyond the matrix.
__device__ __forceinline__ float4 load4(const float *__restrict__ matrix, int row, int column, int N) {
    const float *x = matrix + (long long)row * HEAD_DIM + column;
    if (row >= N || column >= HEAD_DIM) return make_float4(0, 0, 0, 0);
    if (ALIGNED) return __ldg(reinterpret_cast<const float4 *>(x));
    const int left = HEAD_DIM - column;
    return make_float4(__ldg(x), left > 1 ? __ldg(x + 1) : 0, left > 2 ? __ldg(x + 2) : 0, left > 3 ? __ldg(x + 3) : 0);
}

// ---- one tile by a group of threads: load to registers, agree on the scale, wait until the tile is free, split, store

// The largest over the group; the group shares `scratch`, one word a warp. bar.sync 0 with all threads is __syncthreads.
template <int GROUP>
__device__ __forceinline__ unsigned group_max(unsigned x, unsigned *scratch, int thread, int barrier) {
    x = __reduce_max_sync(~0u, x);
    if (thread % 32 == 0) scratch[thread / 32] = x;
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(GROUP) : "memory");
#pragma unroll
    for (int w = 0; w < GROUP / 32; ++w) x = max(x, scratch[w]);
    return x;
}

// K: a piece of work is 8 columns of one key, one 16-byte chunk of hi and one of lo. Returns the scale's exponent.
template <int GROUP, class Wait>
__device__ __forceinline__ int split_K(const float *K, int j0, int N, unsigned char *tile, unsigned *scratch, int thread, int barrier, Wait tile_free) {
    constexpr int PIECES = BC * D / 8, EACH = ceil_div(PIECES, GROUP);
    float x[EACH][8];
    unsigned largest = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int piece = e * GROUP + thread, key = piece / (D / 8), column = piece % (D / 8) * 8;
        const int row = piece < PIECES ? j0 + key : N;
        *reinterpret_cast<float4 *>(&x[e][0]) = load4(K, row, column, N);
        *reinterpret_cast<float4 *>(&x[e][4]) = load4(K, row, column + 4, N);
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int i = 0; i < 8; ++i) largest = max(largest, finite_magnitude(x[e][i]));
    const int s = scale_exponent(group_max<GROUP>(largest, scratch, thread, barrier));
    const float factor = power_of_two(s);
    tile_free();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int piece = e * GROUP + thread;
        if (piece < PIECES) store_split<BC, D>(tile, piece / (D / 8), piece % (D / 8) * 8, x[e], factor);
    }
    return s;
}

// V, transposed: a piece of work is 4 columns of 8 keys, so both the reads (along columns) and the writes (along keys) of
// neighbouring threads meet in whole 32-byte sectors.
template <int GROUP, class Wait>
__device__ __forceinline__ int split_V(const float *V, int j0, int N, unsigned char *tile, unsigned *scratch, int thread, int barrier, Wait tile_free) {
    constexpr int PIECES = BC / 8 * (D / 4), EACH = ceil_div(PIECES, GROUP);
    float x[EACH][4][8];  // [column][key]
    unsigned largest = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int piece = e * GROUP + thread, key = piece % (BC / 8) * 8, column = piece / (BC / 8) * 4;
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const float4 v = load4(V, piece < PIECES ? j0 + key + k : N, column, N);
            x[e][0][k] = v.x, x[e][1][k] = v.y, x[e][2][k] = v.z, x[e][3][k] = v.w;
        }
    }
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int i = 0; i < 32; ++i) largest = max(largest, finite_magnitude(x[e][i / 8][i % 8]));
    const int s = scale_exponent(group_max<GROUP>(largest, scratch, thread, barrier));
    const float factor = power_of_two(s);
    tile_free();
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int piece = e * GROUP + thread;
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (piece < PIECES) store_split<D, BC>(tile, piece / (BC / 8) * 4 + c, piece % (BC / 8) * 8, x[e][c], factor);
    }
    return s;
}

// ---- the pre-pass

__device__ __forceinline__ const int *tile_exponents(const unsigned char *workspace, int B, int Tc) {
    return reinterpret_cast<const int *>(workspace + (long long)B * Tc * (K_TILE + V_TILE));
}

#ifndef NO_PREPARE
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(ATTENTION_ARGUMENTS) {
    __shared__ unsigned scratch[PREPARE_THREADS / 32];
    const int Tc = ceil_div(N, BC);
    const long long t = blockIdx.x / 2;  // tile j of batch b
    const int b = int(t / Tc), j0 = int(t % Tc) * BC;
    const bool values = blockIdx.x % 2;
    unsigned char *tile = workspace + t * (K_TILE + V_TILE) + (values ? K_TILE : 0);
    const int s = values ? split_V<PREPARE_THREADS>(V + b * batch_stride, j0, N, tile, scratch, threadIdx.x, 0, [] {})
                         : split_K<PREPARE_THREADS>(K + b * batch_stride, j0, N, tile, scratch, threadIdx.x, 0, [] {});
    if (threadIdx.x == 0) const_cast<int *>(tile_exponents(workspace, B, Tc))[2 * t + values] = s;
}
#endif
