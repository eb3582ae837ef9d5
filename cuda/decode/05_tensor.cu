// Tensor: products on tensor cores, keys and values straight from memory into their registers.
//
// What changed: a warp takes 16 tokens at a time and computes S = Q Kᵀ and Oᵀ = Vᵀ Pᵀ on tensor cores (see tensor.cuh).
// Each lane loads what it will multiply (see tiles.cuh); shared memory has the query and the numbers of pages. The next
// tile's keys are asked for as soon as S has been computed, its values as soon as O has. Warps have maxima and sums of
// their own, and meet at the end of a piece. A block has one piece (see one_piece.cuh), and the GPU begins one where
// another ends; where that does not serve, blocks take piece after piece (see piece_after_piece.cuh). Nobody counts a
// sequence's pieces: partial answers are merged by a launch of its own, which begins while this one runs and waits for
// its end, or, where they are few, by clusters of blocks (see cluster.cuh). fp8 and int8 become half in registers.
// Why it is faster: between the arrival of a tile and the next, a warp has some 250 instructions to do instead of
// thousands, so it mostly waits for memory, not memory for it; 12 to 16 warps to a multiprocessor have 64 to 128 KB
// under way, more than the memory's rate needs, also while a block among them begins or ends. To count and merge in
// between took them 2 to 4 % of the time.
// What it costs: P and the query are rounded to 16 bits, so there is no fp32, for which grouped is there. A tile's
// registers leave room for few warps: what can wait in shared memory does. In small batches much of the time is that of
// beginning and ending: there blocks know their pieces sooner. All forms give the same bytes, for a piece's tiles have
// the same warps and the same order.
#if TILED
#include "drawn.cuh"
#else
#include "one_piece.cuh"
#include "piece_after_piece.cuh"
#endif

#if TILED
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tensor(const __grid_constant__ Decode a) {
    let_next_launch_begin();
    drawn_pieces(a);
}

extern "C" __global__ void __launch_bounds__(MERGING) merge(const __grid_constant__ Decode a) { merge_cut_rows(a); }
#else
// Where blocks take piece after piece: no number of one has been drawn yet.
extern "C" __global__ void begin(const __grid_constant__ Decode a) {
    let_next_launch_begin();
    if (threadIdx.x == 0) *static_cast<int *>(a.workspace) = 0;
}

extern "C" __global__ void IN_CLUSTERS __launch_bounds__(THREADS, BLOCKS) tensor(const __grid_constant__ Decode a) {
    let_next_launch_begin();
    if constexpr (FINDS == PIECE_AFTER_PIECE) piece_after_piece(a);
    else one_piece(a);
}

// Where a sequence may have several pieces, which no cluster has merged.
constexpr int MERGING = larger(MERGED_ROWS, ceil_div(MAX_PIECES, AT_ONCE));  // warps at most
extern "C" __global__ void __launch_bounds__(32 * MERGING) merge(const __grid_constant__ Decode a) {
    extern __shared__ __align__(16) float scratch[];
    merge_rows(a, scratch);
}
#endif
