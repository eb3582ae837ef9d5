// Split: pieces by the actual length, in one launch.
//
// What changed: the grid is as large as the GPU, whatever the tables are. Each block counts the pieces that the
// sequences really have, and takes one after the other, whoever is ready the next one. Long pieces are gone through in
// steps, with the running maximum and sum of FlashAttention. The block that finishes the last piece of a sequence
// merges them, in order; a sequence of one piece is answered at once.
// Why it is faster: no block finds nothing to do, one long sequence among short ones is spread over all
// multiprocessors, and there is no second launch to wait for.
// What it costs: the counting, some microseconds with thousands of sequences; and a counter for each sequence and head,
// to be zero before the first launch (each launch leaves zeros).
#include "pieces.cuh"
#include "piece.cuh"

// Behind the counters of the launch there is one for each sequence, tile of rows and head of the cache; then, from a
// multiple of 16 bytes on, there are partial answers.
__device__ __forceinline__ int *counter_of(const Decode &a, const Piece &piece) {
    const long long which = ((long long)piece.of.s * ceil_div_large(rows_of(a), ROWS) + piece.tile) * a.kv_heads;
    return static_cast<int *>(a.workspace) + LAUNCH_COUNTERS + which + piece.of.kv_head;
}
__device__ __forceinline__ float *partials_of(const Decode &a) {
    const long long counters = (long long)askers(a) * ceil_div_large(rows_of(a), ROWS) * a.kv_heads;
    return static_cast<float *>(a.workspace) + LAUNCH_COUNTERS + (counters + 3) / 4 * 4;
}

// Whether this block is the last of `count` that have come here with this counter, each after it has written what the
// last one will read. The counter is zero again afterwards.
__device__ __forceinline__ bool last_of(int *counter, int count) {
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(counter, 1) == count - 1;
        if (is_last) *counter = 0;
    }
    __syncthreads();
    __threadfence();
    return is_last;
}

// The answers of the piece's rows from the partial ones of all pieces.
__device__ __forceinline__ void merge_pieces(const Decode &a, const Piece &piece) {
    const int rows = min(ROWS, rows_of(a) - piece.of.row0);
    for (int i = threadIdx.x; i < rows * QUADS; i += THREADS) {
        const long long place = place_of_row(a, piece.of, piece.of.row0 + i / QUADS);
        const float *const partials = partials_of(a) + place * most_pieces(a) * PARTIAL;
        answer_quad(a, place, i % QUADS, merged(partials, 0, piece.count, i % QUADS), v_scale_of(a));
    }
}

constexpr int STEP = smaller(PIECE, 256);  // tokens whose scores are in shared memory at a time

extern "C" __global__ void __launch_bounds__(THREADS, ROWS > 4 || FEWER_BLOCKS ? 2 : 3) split(const Decode a) {
    __shared__ __align__(16) float q[ROWS * HEAD_DIM];
    __shared__ __align__(16) float S[ROWS * STEP], O[ROWS * HEAD_DIM];
    __shared__ unsigned char seen[STEP];
    __shared__ Running running;
    __shared__ PieceFinder finder;
    __shared__ int taken;
    float *const partials = partials_of(a);
    Piece piece;

    finder.start(a);
    for (int number = blockIdx.x; finder.find(a, number, piece); number = taken) {
        int next = 0;  // asked for now, for the answer takes a while
        if (threadIdx.x == 0) next = take(a);
        load_queries(a, piece.of, q, running);
        float o[ROWS][OWN] = {};
        for (long long first = piece.first; first < piece.end; first += STEP) {
            const int until = min((long long)piece.end, first + STEP);
            scores(a, piece.of, q, first, until, S, STEP, seen);
            softmax(S, STEP, until - first, running);
            add_values(a, piece.of, first, until, S, STEP, seen, running, o);
            __syncthreads();  // before the next scores
        }
        collect(o, O);

        if (piece.count == 1) answer(a, piece.of, running, O);
        else {
            keep_partials(a, piece.of, partials, most_pieces(a), piece.index, running, O);
            if (last_of(counter_of(a, piece), piece.count)) merge_pieces(a, piece);
        }
        if (threadIdx.x == 0) taken = next + gridDim.x;
        __syncthreads();  // before the next piece's queries
    }
    if (threadIdx.x == 0) leave(a);
}
