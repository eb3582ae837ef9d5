// Few pieces merged without another launch: the blocks that may have a piece of the same sequence, head of the cache
// and rows are a cluster, from Hopper on, and read each other's partial answers in shared memory.
//
// Blocks that find no piece leave: nobody waits for them, or reads what is theirs. The others share the rows.
#pragma once
#include "merge.cuh"

static_assert(CLUSTER == 1 || (FINDS == AHEAD_OF_LENGTH && CLUSTER <= AT_ONCE),
              "pieces by the numbers of blocks, as many as a warp merges");

#if CLUSTER > 1 && __CUDA_ARCH__ >= 900
#include "hopper.cuh"
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)

// Each block's number in its cluster is that of its piece.
__device__ __forceinline__ void store_or_merge(const Decode &a, const SharedPiece &present, const Meeting &meeting,
                                               const float *O) {
    __shared__ __align__(16) float partials[ROWS * PARTIAL];
    const Piece &piece = present.piece;
    store_sums(a, present, meeting, O, [&](int r, int quad, const Partial &sum) { keep_quad(partials, r, quad, sum); });
    if (piece.count == 1) return;
    const float v_scale = v_scale_of(a);
    cluster_arrive();
    cluster_wait();
    const int warp = threadIdx.x / 32, rows = rows_of_piece(a, piece);
    for (int r = warp * piece.count + piece.index; r < rows; r += WARPS * piece.count) {
        const RowSum sum =
            merged_by_warp([&](int rank) { return in_block(partials + r * PARTIAL, rank); }, piece.count);
        for_each_quad(sum,
                      [&](int quad, const Partial &sum) { answer_quad(a, present.rows[r].place, quad, sum, v_scale); });
    }
    cluster_arrive();
    cluster_wait();  // nobody leaves while others read what is its own
}
#else
#define IN_CLUSTERS

__device__ __forceinline__ void store_or_merge(const Decode &a, const SharedPiece &present, const Meeting &meeting,
                                               const float *O) {
    store_sums(a, present, meeting, O);
}
#endif
