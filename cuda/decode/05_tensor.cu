// Tensor: products on tensor cores, keys and values straight from memory into their registers.
//
// What changed: a warp takes 16 tokens at a time and computes S = Q Kᵀ and Oᵀ = Vᵀ Pᵀ on tensor cores (see tensor.cuh). Each
// lane loads what it will multiply (see tiles.cuh); shared memory has the query and the numbers of pages. The next tile's keys
// are asked for as soon as S has been computed, its values as soon as O has, whether it is of this piece or of the next one.
// While a piece's first tile is on its way, the piece after it is found and its pages and queries asked for. Warps have
// maxima and sums of their own, and meet at the end of a piece. Nobody counts a sequence's pieces: partial answers are merged
// by a launch of its own, which begins while this one runs and waits for its end, or, where they are few, by clusters of
// blocks (see cluster.cuh). fp8 becomes half in registers.
// Why it is faster: between the arrival of a tile and the next, a warp has some 250 instructions to do instead of thousands,
// so it mostly waits for memory, not memory for it; 12 to 16 warps to a multiprocessor have 64 to 128 KB under way, more than
// the memory's rate needs. To count and merge in between took them 2 to 4 % of the time.
// What it costs: P and the query are rounded to 16 bits, so there is no fp32, for which grouped is there. A tile's registers
// leave room for few warps: what can wait in shared memory does. With rows of 256 bytes, 12 warps with more registers are
// faster than 16. In small batches much of the time is that of beginning and ending: there a block has one piece (see
// one_piece.cuh), the same bytes by other code.
#include "one_piece.cuh"

__device__ __forceinline__ void piece_after_piece(const Decode &a) {
    __shared__ Pieces pieces;
    __shared__ Meeting meeting;
    __shared__ __align__(16) Work works[2];  // this piece's and the next one's
    __shared__ float factor;                 // see factor_of

    pieces.start(a);

    // The first tile as early as can be: after the lengths and the first pages, and nothing else.
    Keys keys = {};
    Values values = {};
    Piece found = {};
    if (pieces.find(a, blockIdx.x, found)) {
        prepare(a, found, works[0]);
        wait_for_copies<1>();
        __syncwarp();
        const Tile tile = tile_at(works[0].pages, found, first_tile(found));
        load_keys(a, tile, keys), load_values(a, tile, values);
    }
    if (threadIdx.x == 0) {
        factor = factor_of(a);
        works[0].piece = found, works[0].after = blockIdx.x + gridDim.x;
    }
    __syncthreads();

    for (int turn = 0; works[turn].piece.count > 0; turn ^= 1) {
        Work &work = works[turn], &next = works[turn ^ 1];

        // While the first tile is on its way: the piece after this one.
        found = {};
        if (pieces.find(a, work.after, found)) prepare(a, found, next);
        else commit_copies(), commit_copies();
        if (threadIdx.x == 0) next.piece = found;
        wait_for_copies<2>();  // this piece's queries
        __syncthreads();

        State state;
        state.forget();
#pragma unroll 1
        for (int token0 = first_tile(work.piece);; token0 += APART) {
            const int end = work.piece.end;
            const bool any = token0 < end;                                          // is there a tile,
            const bool on = end - token0 > APART;                                   // one after it,
            const bool whole = token0 >= work.piece.first && end - token0 >= TILE;  // and is all of it the piece's?
            work.pages.go_on(work.piece, token0);
            if (!on || ((unsigned)token0 / APART + 1) % AHEAD == 0) {
                wait_for_copies<0>();
                __syncwarp();
            }
            const Work &of = on ? work : next;
            const int first = on ? token0 + APART : first_tile(of.piece);
            take_tile(a, work, factor, token0, any, whole, of, first, keys, values, state);
            if (!on) break;
        }

        hand_in(state, meeting, O_of_warps);
        int after = 0;
        if (threadIdx.x == 0) {
            await_launch_before();  // for its zero; the first time only there is anything to wait for
            if (next.piece.count > 0) after = take(a);
        }
        __syncthreads();
        store_sums(a, work, meeting, O_of_warps);
        if (threadIdx.x == 0) next.after = after + 2 * gridDim.x;
        __syncthreads();
    }
}

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
constexpr int MERGING = larger(MERGED_ROWS, div_up(MAX_PIECES, AT_ONCE));  // warps at most
extern "C" __global__ void __launch_bounds__(32 * MERGING) merge(const __grid_constant__ Decode a) {
    extern __shared__ __align__(16) float scratch[];
    merge_rows(a, scratch);
}
