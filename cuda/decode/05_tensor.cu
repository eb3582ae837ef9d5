// Tensor: products on tensor cores, keys and values straight from memory into their registers.
//
// What changed: a warp takes 16 tokens at a time and computes S = Q Kᵀ and Oᵀ = Vᵀ Pᵀ on tensor cores (see tensor.cuh). Each
// lane loads what it will multiply (see tiles.cuh); shared memory has only the query. The next tile's keys are asked for as
// soon as S has been computed, its values as soon as O has, whether it is of this piece or of the next one: that one was
// found, its pages and its queries asked for, while this one was gone through. Warps have maxima and sums of their own,
// and meet at the end of a piece, at two barriers. Whether a piece was its sequence's last is known, and its sequence
// merged, at the next one's end: nobody waits for the count. fp8 becomes half in registers.
// Why it is faster: between the arrival of a tile and the next, a warp has some 250 instructions to do instead of thousands,
// so it mostly waits for memory, not memory for it; 12 warps to a multiprocessor have up to 96 KB under way, more than twice
// what the memory's rate needs.
// What it costs: P and the query are rounded to 16 bits, so there is no fp32, for which grouped is there. A tile's registers
// leave room for 12 or 16 warps only.
#include "tensor.cuh"

extern __shared__ __align__(16) float O_of_warps[];  // [WARPS][ROWS][O_ROW], or a Part a thread

__device__ __forceinline__ int following(int turn) { return turn == 2 ? 0 : turn + 1; }

// There is one copy of everything below, also for the first piece: before it come two turns without tokens, in which it and
// the one after it are found. A kernel of some microseconds waits for its instructions, too.
extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tensor(const __grid_constant__ Decode a) {
    __shared__ Pieces pieces;
    __shared__ Meeting meeting;
    __shared__ __align__(16) Work works[3];  // this piece's, the next one's, and that of the one after it
    __shared__ Piece before;                 // the one before
    __shared__ int number;                   // of the piece after the next one
    __shared__ bool last;                    // is the sequence of the one before to be merged here?
    const float factor = a.scale * (a.k_scale ? *a.k_scale : 1.0f) * LOG2E;
    const bool simple = a.tokens == 1 && a.sparse_stride <= 1 && !a.alibi_slopes;

    bool here = false, next = false, more = true, merging = false;  // is there a piece, one after it, perhaps another?
    Way way = {};                                                   // a run
    Keys keys = {};
    Values values = {};
    State state;
    int asked = 0, done = 0;  // the next number, and how many of the sequence's pieces were done

#pragma unroll 1
    for (int i = threadIdx.x; i < 3 * KEY_STEPS * 32; i += THREADS)  // rows 8 to 15, which nobody copies
        if (COLUMNS == 1) works[i / (KEY_STEPS * 32)].query[i / 32 % KEY_STEPS][i % 32] = make_uint4(0, 0, 0, 0);
    if (threadIdx.x < 3) works[threadIdx.x].piece = {};
    if (threadIdx.x == 0) number = blockIdx.x;
    pieces.start(a);
    for (int turn = 0;; turn = following(turn)) {
        const Work &work = works[turn];
        const Piece &piece = work.piece;
        if (here || next || merging) {
            state.forget();
            for (bool end = !here && !next; !end;) {
                Way then = way.after(works[following(turn)].piece);
                then.ask(a);
#pragma unroll 1
                for (int i = 0;; ++i) {
                    const bool on = i + 1 < way.count;
                    const Tile tile = on ? way.tile(i + 1) : then.tile(0);
                    const int token0 = way.token0(i);
                    const bool whole = token0 >= piece.first && token0 + TILE <= way.end;
                    Scores s = {};
                    // Without a tile it is of no use, but a branch would keep addresses from being computed meanwhile. Those
                    // of 16 pages are too many for that.
                    if (PAGE > 1 || i < way.count) multiply_keys(keys, work, s);
                    load_keys(a, tile, keys);
                    if (i < way.count) {
                        unsigned p[COLUMNS][2];
                        softmax(a, work, s, factor, token0, whole && simple, state, p);
                        if (!whole) clear(token0, piece.first, way.end, values);
                        multiply_values(values, p, state);
                    }
                    load_values(a, tile, values);
                    if (!on) break;
                }
                end = way.left == 0, way = then;
            }

            if (here) hand_in(state, meeting, O_of_warps);
            if (threadIdx.x == 0) {
                number = asked, last = merging && done == before.count - 1;
                if (last) __threadfence();
            }
            __syncthreads();
            const int rows = here ? smaller(ROWS, rows_of(a) - piece.of.row0) : 0;
            for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
                const int r = i / QUADS, quad = i % QUADS;
                const Part sum = sum_of(meeting, O_of_warps, r, quad);
                const long long place = work.rows[r].place;
                if (piece.count == 1) answer_quad(a, place, quad, sum);
                else keep_quad(partials_of(a), place * most_pieces(a) + piece.part, quad, sum);
            }
            if (last) merge_pieces(a, before, reinterpret_cast<Part *>(O_of_warps));
        }
        Work &after = works[following(following(turn))];
        Piece found = {};
        if (more) {
            more = pieces.find(a, number, found);
            if (more) prepare(a, found, after);
            else if (threadIdx.x == 0) leave(a);
        }
        merging = here && piece.count > 1;
        if (!next && !more && !merging) break;
        if (threadIdx.x == 0) after.piece = found;
        commit_copies();
        wait_for_copies<1>();  // the next piece's queries
        __syncthreads();
        if (threadIdx.x == 0) {
            if (merging) before = piece, done = count_done(counter_of(a, piece), piece.count);
            if (more) asked = next ? take(a, 2) : blockIdx.x + gridDim.x;
        }
        here = next, next = more;
    }
}
