// The pre-pass of the kernels that multiply split tiles: K and V, scaled, split and swizzled (split.cuh), once for all
// rows of Q, into the workspace.
//
// The workspace holds, for B * Hkv heads of Tc = ceil(N / BC) tiles each, tile t = (b * Hkv + head) * Tc + j:
//   at workspace + t * (K_TILE + V_TILE): K_TILE bytes, the keys of tile j: BC rows, D columns, keys beyond N zero;
//                                   then V_TILE bytes, the values transposed: D rows, BC columns (keys);
//   after all tiles, at 32 * t: the exponents s of K's and then of V's scale 2^s, each four times: 16 bytes are what a
//                                   bulk copy moves at least, and so they come by the same way as the tiles;
//   after those, where blocks may share a row tile (SHARING is SPREAD): an int for each 64 rows of each tile of Q, set
//                                   to zero (chunks.cuh).
// Launch: 2 * B * Hkv * Tc blocks of PREPARE_THREADS, even ones do K, odd ones V. Of packed sequences a head has as many
// tiles as they may have numbers (packed.cuh); a sequence without keys has a tile of zeros.
#pragma once
#include "attention.cuh"
#include "split.cuh"

// Where tile t of K is, of those of all heads; the one of V follows it.
__device__ __forceinline__ unsigned char *split_tile(const Attention &a, long long t) {
    return a.workspace + t * (K_TILE + V_TILE);
}

// The number of tiles of K of all heads, and of a head's first one among them.
__device__ __forceinline__ long long split_tiles(const Attention &a) {
    return (long long)a.B * a.Hkv * (PACKED ? key_numbers(a) : ceil_div(a.N, BC));
}
__device__ __forceinline__ long long first_tile_of(const Attention &a, Head head) {
    if (PACKED) return (long long)head.kv * key_numbers(a) + first_number(a.first_key, BC, a.sequence);
    return ((long long)head.b * a.Hkv + head.kv) * ceil_div(a.N, BC);
}

// Where the exponents are, those of K and V in turn.
__device__ __forceinline__ int4 *tile_exponents(const Attention &a) {
    return reinterpret_cast<int4 *>(a.workspace + split_tiles(a) * (K_TILE + V_TILE));
}

// Where what follows them is, and how much of it there is.
__device__ __forceinline__ int *tickets(const Attention &a) {
    return reinterpret_cast<int *>(tile_exponents(a) + 2 * split_tiles(a));
}
__device__ __forceinline__ unsigned ticket_count(const Attention &a) {
    return unsigned(a.B) * a.H * ceil_div(a.M, BR) * (BR / 64);
}

extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(const Attention a) {
    __shared__ unsigned scratch[2 * PREPARE_THREADS / 32];
    // What may have written K and V, or read the workspace, has ended then; and what may have written Q, which the next
    // launch reads.
    await_launch_before();
    let_next_launch_begin();
    // Blocks take the same rows of all heads before other rows: they may be neighbours in memory.
    const unsigned Tc = PACKED ? key_numbers(a) : ceil_div(a.N, BC), heads = IN_PLACE ? a.Hkv : 1;
    const unsigned h = blockIdx.x / 2 % heads, rows = blockIdx.x / 2 / heads, b = rows / Tc, j = rows - b * Tc;
    const unsigned t = (b * heads + h) * Tc + j;
    Slice keys = {0, 0, a.N, int(j)};
    if (PACKED) keys = slice_with(a.k_starts, a.S, a.N, BC, j);
    if (PACKED && !keys.has_tile(BC)) return;
    const int j0 = keys.tile * BC;
    if (SHARING == SPREAD)
        for (unsigned x = blockIdx.x * PREPARE_THREADS + threadIdx.x; x < ticket_count(a);
             x += gridDim.x * PREPARE_THREADS)
            tickets(a)[x] = 0;
    const bool values = blockIdx.x % 2;
    unsigned char *const tile = split_tile(a, t) + (values ? K_TILE : 0);
    const Input *const K = rows_of(a.K, a.k, b, h) + keys.first * row_stride(a.k);
    const Input *const V = rows_of(a.V, a.v, b, h) + keys.first * row_stride(a.v);
    const int s = values ? split_V<PREPARE_THREADS>(V, row_stride(a.v), j0, keys.rows, tile, scratch, threadIdx.x, 0)
                         : split_K<PREPARE_THREADS>(K, row_stride(a.k), j0, keys.rows, tile, scratch, threadIdx.x, 0);
    if (threadIdx.x == 0) tile_exponents(a)[2ll * t + values] = make_int4(s, s, s, s);
}
