// Sequences cut into pieces by their lengths, and the way from a number of a piece to the sequence that has it.
//
// How a sequence is cut depends on nothing but its own length, so that its answer has the same bytes in whatever company
// and on whatever GPU. A short one has pieces of PIECE tokens; a long one has at most MAX_PIECES, for partial answers need
// room for as many as there may be. Pieces of more than two PIECE are rounded to half a PIECE: the more of them there are,
// the more evenly multiprocessors share them.
#pragma once
#include "answer.cuh"

// Tokens in a piece of a sequence of which so many tokens are used.
__device__ __forceinline__ int piece_size(int used) {
    const int least = max(PIECE, div_up(used, MAX_PIECES)), unit = least > 2 * PIECE ? PIECE / 2 : PIECE;
    return (least + unit - 1) & -unit;
}

// Where a sequence's first piece begins.
__device__ __forceinline__ int first_begin(const Decode &a, int length) {
    return first_used(a, length) / PIECE * PIECE;
}

// How many pieces a sequence can have at most: so many partial answers are kept for each row.
__device__ __forceinline__ int most_pieces(const Decode &a) {
    const long long room = (long long)a.table_width * PAGE;
    return max(1, (int)min((long long)MAX_PIECES, (room + PIECE - 1) / PIECE));
}

// A piece of a sequence, for one head of the cache and the rows from `of.row0` on.
struct Piece {
    Sequence of;
    int first, end;   // its tokens, less those before the first that any query token sees
    int part, count;  // which of how many pieces of the sequence
    int tile;         // of rows
};

// Finds pieces by their numbers, counted over all sequences, with the heads of the cache as neighbours, which they are in a
// page. It knows THREADS sequences at a time; all threads of the block call it together, with numbers that only grow.
struct Pieces {
    int s0, before;     // the first of these sequences, and how many pieces the ones before it have
    int ends[THREADS];  // how many pieces the sequences from s0 to s0 + i have
    int lengths[THREADS];
    int of_warps[THREADS / 32];

    // The lengths are what everything waits for, so they are asked for before anything else. The tables and the queries
    // are brought to the second-level cache meanwhile.
    __device__ void start(const Decode &a) {
        const int length = length_or_zero(a, threadIdx.x);
        bring(a.block_tables, ((a.sequences - 1) * a.table_row + a.table_width) * 4);
        bring(a.query, ((a.sequences - 1) * a.query_sequence + a.heads * HEAD_DIM) * bytes_of(QUERY_TYPE));
        learn(a, 0, threadIdx.x, length);
    }
    // As much as takes no time, each thread of the grid a line.
    __device__ static void bring(const void *from, long long bytes) {
        const int at = (blockIdx.x * THREADS + threadIdx.x) * 128;
        if (at < min(bytes, 1LL << 20)) prefetch(static_cast<const char *>(from) + at);
    }
    __device__ static int length_or_zero(const Decode &a, int s) { return s < a.sequences ? length_of(a, s) : 0; }

    // The next THREADS sequences.
    __device__ void go_on(const Decode &a) {
        __syncthreads();  // all have looked
        const int s = s0 + THREADS + threadIdx.x;
        learn(a, before + ends[THREADS - 1], s, length_or_zero(a, s));
    }
    // `passed` pieces are of sequences before these. Each thread has the length of sequence s, the first one that of s0.
    __device__ void learn(const Decode &a, int passed, int s, int length) {
        const int used = length - first_begin(a, length), warp = threadIdx.x / 32;
        int end = s < a.sequences ? max(1, div_up(used, piece_size(used))) : 0;  // an empty one has an answer, too
#pragma unroll
        for (int apart = 1; apart < 32; apart *= 2) {
            const int more = __shfl_up_sync(~0u, end, apart);
            if (threadIdx.x % 32 >= apart) end += more;
        }
        if (threadIdx.x % 32 == 31) of_warps[warp] = end;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < THREADS / 32 - 1; ++i) end += i < warp ? of_warps[i] : 0;
        lengths[threadIdx.x] = length, ends[threadIdx.x] = end;
        if (threadIdx.x == 0) s0 = s, before = passed;
        __syncthreads();
    }
    // False if there is no piece of that number.
    __device__ bool find(const Decode &a, unsigned number, Piece &piece) {
        const unsigned tiles = div_up(rows_of(a), ROWS), together = a.kv_heads * tiles;
        const unsigned wanted = number / together, which = number % together;
        while (wanted >= (unsigned)before + ends[THREADS - 1]) {
            if (s0 + THREADS >= a.sequences) return false;
            go_on(a);
        }
        const int left = (int)(wanted - before);
        int low = 0;  // sequences that end before it
#pragma unroll
        for (int i = 0; i < THREADS; i += 32) low += __popc(__ballot_sync(~0u, ends[i + threadIdx.x % 32] <= left));
        const int s = s0 + low, tile = which / a.kv_heads, length = lengths[low];
        const int begin = first_begin(a, length), size = piece_size(length - begin), above = low ? ends[low - 1] : 0;
        piece.of = {s, (int)which - tile * a.kv_heads, tile * ROWS, length, a.block_tables + s * a.table_row};
        piece.part = left - above, piece.count = ends[low] - above, piece.tile = tile;
        const long long start = begin + (long long)piece.part * size;
        piece.first = max(start, (long long)first_used(a, length));
        piece.end = min((long long)length, start + size);
        return true;
    }
};

// The workspace of a launch over pieces: two counters of the launch; one for each sequence, tile of rows and head of the
// cache; then, from a multiple of 16 bytes on, partial answers. Every launch leaves zeros in the counters.
constexpr int LAUNCH_COUNTERS = 4;
__device__ __forceinline__ int *counter_of(const Decode &a, const Piece &piece) {
    const long long which = ((long long)piece.of.s * div_up(rows_of(a), ROWS) + piece.tile) * a.kv_heads;
    return static_cast<int *>(a.workspace) + LAUNCH_COUNTERS + which + piece.of.kv_head;
}
__device__ __forceinline__ float *partials_of(const Decode &a) {
    const long long counters = (long long)a.sequences * div_up(rows_of(a), ROWS) * a.kv_heads;
    return static_cast<float *>(a.workspace) + LAUNCH_COUNTERS + (counters + 3) / 4 * 4;
}

// The number of another piece, for one thread of a block, beyond those that follow from the block's own number. Who is early
// takes more. For one thread alone: the compiler would have a warp add together, and so wait
// for the sum at once.
__device__ __forceinline__ int take(const Decode &a) {
    return atomicInc(static_cast<unsigned *>(a.workspace), 0x7fffffff);
}

// To be called by one thread of each block that will take no more.
__device__ __forceinline__ void leave(const Decode &a) {
    int *const counters = static_cast<int *>(a.workspace);
    if (atomicAdd(counters + 1, 1) == (int)gridDim.x - 1) counters[0] = counters[1] = 0;
}

// How many of the sequence's pieces were done before this one; the last finds the counter zero again afterwards. What the
// block has written before a barrier is there for whoever learns that all are done, and for its block after a barrier.
__device__ __forceinline__ int count_done(int *counter, int count) {
    int before;
    asm volatile("atom.inc.acq_rel.gpu.global.u32 %0, [%1], %2;"
                 : "=r"(before)
                 : "l"(counter), "r"(count - 1)
                 : "memory");
    return before;
}

// Whether this block is the last of `count` that have come here with this counter, each after it has written what the last
// one will read. The counter is zero again afterwards.
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

// The answers of the piece's rows from the partial ones of all pieces. A thread has four numbers of a row; where there are
// more threads than that, the pieces are shared among several, each with a stretch of them. `scratch`: a Part a thread.
__device__ __forceinline__ void merge_pieces(const Decode &a, const Piece &piece, Part *scratch) {
    const int rows = smaller(ROWS, rows_of(a) - piece.of.row0), items = rows * QUADS, parts = most_pieces(a);
    const int shares = max(1, THREADS / items), each = div_up(piece.count, shares);
    const float *const partials = partials_of(a);
    __syncthreads();  // others may still read what is in the scratch
    for (int i = threadIdx.x; i < items * shares; i += THREADS) {
        const int item = i % items, share = i / items;
        const long long place = place_of_row(a, piece.of, piece.of.row0 + item / QUADS);
        const Part sum = merged(partials + place * parts * PARTIAL, share * each,
                                smaller(piece.count, (share + 1) * each), item % QUADS);
        if (shares > 1) scratch[i] = sum;
        else answer_quad(a, place, item % QUADS, sum);
    }
    if (shares == 1) return;
    __syncthreads();
    if (threadIdx.x >= items) return;
    Part sum = nothing();
    for (int share = 0; share < shares; ++share) {
        const Part one[1] = {scratch[share * items + threadIdx.x]};
        join_parts(sum, one);
    }
    answer_quad(a, place_of_row(a, piece.of, piece.of.row0 + threadIdx.x / QUADS), threadIdx.x % QUADS, sum);
}
