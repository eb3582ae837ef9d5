// Attention with tensor cores where a block has one piece, or none.
//
// Nothing is to be found or asked for beyond it, so its registers and instructions serve its tiles alone: UNDER_WAY of
// a warp at a time. The bytes are those of the other form, for a piece's tiles have the same warps and the same order.
#pragma once
#include "cluster.cuh"

// Each way to the block's piece leaves two groups of copies: its first tiles' pages, and its queries.

// The block's number says what to ask for while the length is on its way. Where there is a window, or the length
// decides how long pieces are, that may be wrong, and pages are asked for again.
__device__ __forceinline__ bool find_ahead_of_length(const Decode &a, SharedPiece &present, Piece &piece) {
    const Numbered mine = numbered<CLUSTER>(a);
    const int length = length_of(a, mine.s);
    const Piece likely = piece_of(a, mine.s, room_of(a), mine.index, mine.most, mine.which);
    const RowsOfLane rows = rows_of_lane(a, likely.of);
    present.pages.start(likely);
    ask_for_queries(a, likely.of, rows, present);
    const int count = pieces_of(a, length);
    if (mine.index < count) piece = piece_of(a, mine.s, length, mine.index, count, mine.which);
    if (mine.index >= count || piece.first != likely.first || piece.end > likely.end) {
        wait_for_copies<0>();
        __syncwarp();
        if (mine.index >= count) return false;
        present.pages.start(piece);
        commit_copies();
    }
    know_rows(a, piece.of, rows, present);
    return true;
}

__device__ __forceinline__ bool find(const Decode &a, SharedPiece &present, Piece &piece) {
    if (FINDS == AHEAD_OF_LENGTH) return find_ahead_of_length(a, present, piece);
    if (!find_alone<FINDS>(a, piece)) return false;
    prepare(a, piece, present);
    return true;
}

// A piece that has been prepared: all its tiles, and the warps' states in shared memory. `factor`: see factor_of.
__device__ __forceinline__ void attend(const Decode &a, const Piece &piece, SharedPiece &present, Meeting &meeting,
                                       float &factor) {
    wait_for_copies<1>();
    __syncwarp();
    Keys keys[UNDER_WAY] = {};
    Values values[UNDER_WAY] = {};
#pragma unroll
    for (int i = 0; i < UNDER_WAY; ++i) {
        const Tile tile = tile_at(present.pages, piece, first_tile(piece) + i * APART);
        load_keys(a, tile, keys[i]), load_values(a, tile, values[i]);
    }
    if (threadIdx.x == 0) factor = factor_of(a), present.piece = piece;
    wait_for_copies<0>();
    __syncthreads();

    State state;
    state.forget();
#pragma unroll 1
    for (int first = first_tile(present.piece); first < present.piece.end; first += UNDER_WAY * APART) {
#pragma unroll
        for (int i = 0; i < UNDER_WAY; ++i) {
            const int token0 = first + i * APART, end = present.piece.end;
            if (i > 0 && token0 >= end) break;
            const bool whole =
                token0 >= present.piece.first && end - token0 >= TILE;  // is all of the tile the piece's?
            present.pages.go_on(present.piece, token0);
            if (((unsigned)token0 / APART + UNDER_WAY) % AHEAD == 0) {
                wait_for_copies<0>();
                __syncwarp();
            }
            take_tile(a, present, factor, token0, true, whole, present, token0 + UNDER_WAY * APART, keys[i], values[i],
                      state);
        }
    }

    hand_in(state, meeting, O_of_warps);
    __syncthreads();
}

__device__ __forceinline__ void one_piece(const Decode &a) {
    __shared__ Meeting meeting;
    __shared__ __align__(16) SharedPiece present;
    __shared__ float factor;

    Piece piece;
    if (!find(a, present, piece)) return;
    attend(a, piece, present, meeting, factor);
    store_or_merge(a, present, meeting, O_of_warps);
}
