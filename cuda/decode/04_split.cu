// Split: pieces by the actual length, in one launch.
//
// What changed: the grid is as large as the GPU, whatever the tables are. Each block counts the pieces that the sequences
// really have, and takes every gridDim-th of them. Long pieces are gone through in steps, with the running maximum and sum of
// FlashAttention. The block that finishes the last piece of a sequence merges them, in order; a sequence of one piece is
// answered at once.
// Why it is faster: no block finds nothing to do, one long sequence among short ones is spread over all multiprocessors,
// and there is no second launch to wait for.
// What it costs: the counting, some microseconds with thousands of sequences; and a counter for each sequence and head, to
// be zero before the first launch (each launch leaves zeros).
#include "pieces.cuh"
#include "piece.cuh"

constexpr int STEP = PIECE;  // tokens whose scores are in shared memory at a time

extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 4 ? 2 : 3) split(const Decode a) {
    __shared__ __align__(16) float q[ROWS * HEAD_DIM];
    __shared__ float S[ROWS * STEP], O[ROWS * HEAD_DIM];
    __shared__ unsigned char seen[STEP];
    __shared__ Running running;
    __shared__ Finder finder;
    const int tiles = ceil_div(rows_of(a), ROWS), together = a.kv_heads * tiles, parts = most_pieces(a);
    float *const partials = partials_of(a, tiles);

    finder.start(a);
    for (long long task = blockIdx.x;; task += gridDim.x) {
        int s, part;
        if (!finder.find(a, task / together, s, part)) break;
        // Neighbouring blocks have neighbouring heads of the cache, which are neighbours in a page.
        const int kv_head = task % together % a.kv_heads, tile = task % together / a.kv_heads;
        const Sequence of = sequence_of(a, s, kv_head, tile * ROWS);
        const Cut has = cut(a, of.length);
        const long long start = has.begin + (long long)part * has.piece;
        const int end = min((long long)of.length, start + has.piece);

        load_queries(a, of, q, running);
        float o[ROWS][OWN] = {};
        for (long long first = max(start, (long long)first_used(a, of.length)); first < end; first += STEP) {
            const int until = min((long long)end, first + STEP);
            scores(a, of, q, first, until, S, STEP, seen);
            softmax(S, STEP, until - first, running);
            add_values(a, of, first, until, S, STEP, seen, running, o);
            __syncthreads();  // before the next scores
        }
        collect(o, O);

        if (has.count == 1) answer(a, of, running, O);
        else {
            keep_partials(a, of, partials, parts, part, running, O);
            if (last_of(counter_of(a, s, tile, tiles, kv_head), has.count))
                for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS)
                    if (const int row = of.row0 + i / HEAD_DIM; row < rows_of(a))
                        merge_number(a, partials, parts, place_of_row(a, of, row), 0, has.count, i % HEAD_DIM);
        }
        __syncthreads();  // before the next piece's queries
    }
}
