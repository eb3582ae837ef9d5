// Attention with tensor cores for ragged queries: a block draws one piece after the other, of any sequence's rows.
//
// A row tile has the heads of a group for as many query tokens as there is room for, so that these read keys once; how
// it and its keys are found, see work.cuh. The last block to finish a piece of a row tile merges all: how many rows
// there are to be merged, no launch could know.
#pragma once
#include "one_piece.cuh"

__device__ __forceinline__ Piece piece_of(const Decode &a, const Item &item) {
    const int *const table = a.block_tables + min(max(item.s, 0), a.sequences - 1) * a.table_row;
    const Sequence of = {item.s, item.kv_head, item.row0, item.length, table, item.start, item.tokens};
    return {of, item.first, item.end, item.index, item.count, 0};
}

// All rows of a tile merged, once the pieces of it are finished; by the block that is the last to be so.
__device__ __forceinline__ void merge_if_last(const Decode &a, const Item &item, int rows) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) is_last = atomicAdd(counter_of(a, item, item.row0), 1) + 1 == item.count;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    const float v_scale = v_scale_of(a);
    for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
        const ItemRow known(a, item, item.row0 + i / QUADS);
        const Partial sum = merged(partials_of(a, item, known), 0, item.count, i % QUADS);
        answer_quad(a, known.place(a, item), i % QUADS, sum, v_scale);
    }
}

__device__ __forceinline__ void drawn_pieces(const Decode &a) {
    __shared__ Meeting meeting;
    __shared__ __align__(16) SharedPiece present;
    __shared__ float factor;
    __shared__ Finder finder, found;  // before and after this piece; registers are full
    __shared__ int number;

    if (threadIdx.x == 0) finder = {0, 0}, number = blockIdx.x;
    __syncthreads();
    for (;;) {
        Finder now = finder;
        Item item;
        if (!now.find(a, ANY, number, item)) break;
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
        if (threadIdx.x == 0) next = gridDim.x + next_number(a, ANY);
        store_sums(a, present, meeting, O_of_warps, [&](int r, int quad, const Partial &sum) {
            const ItemRow known(a, present.item, present.item.row0 + r);
            keep_quad(partials_of(a, present.item, known), present.item.index, quad, sum);
        });
        if (present.item.count > 1) merge_if_last(a, present.item, rows_of_piece(a, present.piece));
        if (threadIdx.x == 0) finder = found, number = next;
        __syncthreads();
    }
}
