// Attention with tensor cores where all pieces of a launch run at once: a block has one piece, or none.
//
// Nothing is to be found or asked for beyond it, so its registers and instructions serve its tiles alone: UNDER_WAY of a
// warp at a time. The bytes are those of the other form, for a piece's tiles have the same warps and the same order.
#pragma once
#include "cluster.cuh"

// Both ways to the block's piece leave two groups of copies: its first tiles' pages, and its queries.

// Sequences have as many blocks as they have pieces, and those left over are the last ones: so that many blocks are spread
// evenly over multiprocessors.
__device__ __forceinline__ bool find_by_lengths(const Decode &a, Work &work, Piece &piece) {
    const int length = length_or_zero(a, lane_of());  // what everything waits for
    bring_tables_and_queries(a);
    if (!find_alone(a, blockIdx.x, length, piece)) return false;
    prepare(a, piece, work);
    return true;
}

// The last digit of a number, which loses it.
__device__ __forceinline__ int take_digit(unsigned &number, unsigned base) {
    const unsigned digit = number % base;
    number /= base;
    return digit;
}

// Sequences have as many blocks as the tables have room for pieces, so that a block's number says what to ask for while the
// length is on its way. Where there is a window, or the length decides how long pieces are, that may be wrong, and pages are
// asked for again. Neighbouring blocks have different heads of the same pages; those of a cluster have different pieces.
__device__ __forceinline__ bool find_by_room(const Decode &a, Work &work, Piece &piece) {
    const int together = heads_and_tiles(a), most = CLUSTER > 1 ? CLUSTER : most_pieces(a);
    unsigned number = blockIdx.x;
    int part = CLUSTER > 1 ? take_digit(number, most) : 0;
    const int which = take_digit(number, together);
    if (CLUSTER <= 1) part = take_digit(number, most);
    const int s = number;

    const int length = length_of(a, s);
    const Piece likely = piece_of(a, s, room_of(a), part, most, which);
    const Rows rows = rows_of_lane(a, likely.of);
    work.pages.start(likely);
    ask_for_queries(a, likely.of, rows, work);
    const int count = pieces_of(a, length);
    if (part < count) piece = piece_of(a, s, length, part, count, which);
    if (part >= count || piece.first != likely.first || piece.end > likely.end) {
        wait_for_copies<0>();
        __syncwarp();
        if (part >= count) return false;
        work.pages.start(piece);
        commit_copies();
    }
    know_rows(a, piece.of, rows, work);
    return true;
}

__device__ __forceinline__ void one_piece(const Decode &a) {
    __shared__ Meeting meeting;
    __shared__ __align__(16) Work work;
    __shared__ float factor;  // see factor_of
    constexpr int N = UNDER_WAY > 0 ? UNDER_WAY : 1;

    Piece piece;
    if (!(UNDER_WAY > 1 ? find_by_room(a, work, piece) : find_by_lengths(a, work, piece))) return;
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
    store_or_merge(a, work, meeting, O_of_warps);
}
