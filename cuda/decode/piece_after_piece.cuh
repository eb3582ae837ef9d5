// Attention with tensor cores where most blocks might find no piece if there were one for each that the tables have
// room for; and in large batches with heads of more than 128 numbers, of which a multiprocessor has two blocks in
// either form.
//
// As many blocks as the GPU holds, each with its first piece by its own number, draw the numbers of others. While a
// piece's first tile is on its way, the piece after it is found and its pages and queries are asked for; its first tile
// is asked for like any next one. So a block never waits between two pieces, which takes registers and instructions,
// also of each tile.
#pragma once
#include "tensor.cuh"

__device__ __forceinline__ void piece_after_piece(const Decode &a) {
    __shared__ PieceFinder finder;
    __shared__ Meeting meeting;
    __shared__ __align__(16) SharedPiece both[2];  // this piece's and the next one's
    __shared__ float factor;                       // see factor_of

    finder.start(a);

    // The first tile as early as can be: after the lengths and the first pages, and nothing else.
    Keys keys = {};
    Values values = {};
    Piece found = {};
    if (finder.find(a, blockIdx.x, found)) {
        prepare(a, found, both[0]);
        wait_for_copies<1>();
        __syncwarp();
        const Tile tile = tile_at(both[0].pages, found, first_tile(found));
        load_keys(a, tile, keys), load_values(a, tile, values);
    }
    if (threadIdx.x == 0) {
        factor = factor_of(a);
        both[0].piece = found, both[0].after = blockIdx.x + gridDim.x;
    }
    __syncthreads();

    for (int turn = 0; both[turn].piece.count > 0; turn ^= 1) {
        SharedPiece &present = both[turn], &next = both[turn ^ 1];

        // While the first tile is on its way: the piece after this one.
        found = {};
        if (finder.find(a, present.after, found)) prepare(a, found, next);
        else commit_copies(), commit_copies();
        if (threadIdx.x == 0) next.piece = found;
        wait_for_copies<2>();  // this piece's queries
        __syncthreads();

        State state;
        state.forget();
#pragma unroll 1
        for (int token0 = first_tile(present.piece);; token0 += APART) {
            const int end = present.piece.end;
            const bool any = token0 < end;                                             // is there a tile,
            const bool on = end - token0 > APART;                                      // one after it,
            const bool whole = token0 >= present.piece.first && end - token0 >= TILE;  // and is all of it the piece's?
            present.pages.go_on(present.piece, token0);
            if (!on || ((unsigned)token0 / APART + 1) % AHEAD == 0) {
                wait_for_copies<0>();
                __syncwarp();
            }
            const SharedPiece &of = on ? present : next;
            const int first = on ? token0 + APART : first_tile(of.piece);
            take_tile(a, present, factor, token0, any, whole, of, first, keys, values, state);
            if (!on) break;
        }

        hand_in(state, meeting, O_of_warps);
        int after = 0;
        if (threadIdx.x == 0) {
            await_launch_before();  // for its zero; the first time only there is anything to wait for
            if (next.piece.count > 0) after = take(a);
        }
        __syncthreads();
        store_sums(a, present, meeting, O_of_warps);
        if (threadIdx.x == 0) next.after = after + 2 * gridDim.x;
        __syncthreads();
    }
}
