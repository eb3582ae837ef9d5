// Attention with tensor cores for ragged queries: a block draws one piece after the other, of any sequence's rows.
//
// A row tile has the heads of a group for as many query tokens as there is room for, so that these read keys once; how
// it and its keys are found, and merged, see work.cuh.
#pragma once
#include "one_piece.cuh"

__device__ __forceinline__ Piece piece_of(const Decode &a, const Item &item) {
    const int *const table = a.block_tables + min(max(item.s, 0), a.sequences - 1) * a.table_row;
    const Sequence of = {item.s, item.kv_head, item.row0, item.length, table, item.start, item.tokens};
    return {of, item.first, item.end, item.index, item.count, 0};
}

// Where a block is among the pieces: the number of one, and what finds it. A read of 16 bytes gets nothing else.
struct __align__(16) Turn {
    Finder finder;
    int number;
};

__device__ __forceinline__ void drawn_pieces(const Decode &a) {
    __shared__ Meeting meeting;
    __shared__ __align__(16) SharedPiece present;
    __shared__ float factor;
    __shared__ Turn turn;
    __shared__ __align__(16) Finder found;  // after this piece; registers are full

    if (threadIdx.x == 0) turn = {{0, 0}, (int)blockIdx.x};
    __syncthreads();
    for (;;) {
        Finder now = turn.finder;
        Item item;
        if (!now.find(a, ANY, turn.number, item)) break;
        if (threadIdx.x == 0) {
            found = now;
            present.item = item;
            const int highest = ItemRow(a, item, min(item.row0 + ROWS, item.rows(a)) - 1).position;
            present.all_from = a.window ? highest - a.window + 1 : 0;
            present.all_until = ItemRow(a, item, item.row0).position + 1;
        }
        const Piece piece = piece_of(a, item);
        prepare(a, piece, present);
        attend(a, piece, present, meeting, factor);
        int next = 0;
        if (FINDS != BY_LENGTHS && threadIdx.x == 0) next = gridDim.x + next_number(a, DRAWN);
        store_sums(a, present, meeting, O_of_warps, [&](int r, int quad, const Partial &sum) {
            const ItemRow known(a, present.item, present.item.row0 + r);
            keep_quad(partials_of(a, present.item, known), present.item.index, quad, sum);
        });
        if (FINDS == BY_LENGTHS) break;  // there are as many blocks as pieces
        if (threadIdx.x == 0) turn = {found, next};
        __syncthreads();
    }
}
