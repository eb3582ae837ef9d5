// Attention with tensor cores where all pieces of a launch run at once: a block has one piece, or none.
//
// Nothing is to be found or asked for beyond it, so its registers and instructions serve its tiles alone: UNDER_WAY of a
// warp at a time. The bytes are those of the other form, for a piece's tiles have the same warps and the same order.
#pragma once
#include "tensor.cuh"

__device__ __forceinline__ void one_piece(const Decode &a) {
    __shared__ Meeting meeting;
    __shared__ __align__(16) Work work;
    __shared__ float factor;  // see factor_of
    constexpr int N = UNDER_WAY > 0 ? UNDER_WAY : 1;

    const int length = length_or_zero(a, lane_of());  // what everything waits for
    bring_tables_and_queries(a);
    Piece piece;
    if (!find_alone(a, blockIdx.x, length, piece)) return;
    prepare(a, piece, work);
    wait_for_copies<1>();
    __syncwarp();
    Keys keys[N] = {};
    Values values[N] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const Tile tile = tile_at(work.pages, piece, first_tile(piece) + i * APART);
        load_keys(a, tile, keys[i]), load_values(a, tile, values[i]);
    }
    if (threadIdx.x == 0) factor = factor_of(a), work.piece = piece;
    wait_for_copies<0>();
    __syncthreads();

    State state;
    state.forget();
#pragma unroll 1
    for (int first = first_tile(work.piece); first < work.piece.end; first += N * APART) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int token0 = first + i * APART, end = work.piece.end;
            if (i > 0 && token0 >= end) break;
            const bool whole = token0 >= work.piece.first && end - token0 >= TILE;  // is all of the tile the piece's?
            work.pages.go_on(work.piece, token0);
            if (((unsigned)token0 / APART + N) % AHEAD == 0) {
                wait_for_copies<0>();
                __syncwarp();
            }
            take_tile(a, work, factor, token0, true, whole, work, token0 + N * APART, keys[i], values[i], state);
        }
    }

    hand_in(state, meeting, O_of_warps);
    __syncthreads();
    store_sums(a, work, meeting, O_of_warps);
}
