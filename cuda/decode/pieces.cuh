// Sequences cut into pieces by their lengths, and the way from a number of a piece to the sequence that has it.
//
// FINDS, a macro of the kernels whose blocks may have one piece alone, says how. Where all pieces run at once, a block
// finds its own by all lengths; where they are few, by its number, ahead of the length; where they are many, by its
// number and the length, which is the least to wait for. Blocks take piece after piece where none of these serves.
//
// How a sequence is cut depends on nothing but its own length, so that its answer has the same bytes in whatever
// company and on whatever GPU. Up to WHOLE tokens are one piece; beyond, there are pieces of PIECE tokens, but no more
// than MAX_PIECES, for partial answers need room for as many as there may be. PieceFinder of more than two PIECE are
// rounded to half a PIECE: the more of them there are, the more evenly multiprocessors share them.
#pragma once
#include "answer.cuh"

constexpr int PIECE_AFTER_PIECE = 0, BY_LENGTHS = 1, BY_NUMBER = 2, AHEAD_OF_LENGTH = 3;  // FINDS

// Tokens in a piece of a sequence of which so many tokens are used, no fewer than `fewest`.
__device__ __forceinline__ int piece_size(int used, int fewest = PIECE) {
    if (used <= WHOLE) return WHOLE;
    const int least = max(fewest, ceil_div_large(used, MAX_PIECES)), step = least > 2 * PIECE ? PIECE / 2 : PIECE;
    return (least + step - 1) & -step;
}

// Where a sequence's first piece begins.
__device__ __forceinline__ int first_begin(const Decode &a, int length) {
    return first_used(a, length) / PIECE * PIECE;
}

// How many pieces a sequence can have at most: so many partial answers are kept for each row.
__device__ __forceinline__ int most_pieces(const Decode &a) {
    const long long room = room_of(a);
    return room <= WHOLE ? 1 : (int)min((long long)MAX_PIECES, (room + PIECE - 1) / PIECE);
}

// A piece of a sequence, for one head of the cache and the rows from `of.row0` on.
struct Piece {
    Sequence of;
    int first, end;    // its tokens, less those before the first that any query token sees
    int index, count;  // which of how many pieces of the sequence
    int tile;          // of rows
};

// How many pieces a sequence of this length has: an empty one has an answer, too.
__device__ __forceinline__ int pieces_of(const Decode &a, int length) {
    const int used = length - first_begin(a, length), size = piece_size(used);
    if (used <= WHOLE) return 1;
    return size == PIECE ? ceil_div_large(used, PIECE) : ceil_div_large(used, size);  // dividing takes a while
}

// PieceFinder are counted over all sequences, with the heads of the cache as neighbours, which they are in a page, and
// then the tiles of rows: how many a sequence has for each of its own.
__device__ __forceinline__ unsigned heads_and_tiles(const Decode &a) {
    return a.kv_heads * ceil_div_large(rows_of(a), ROWS);
}

// One of `count` pieces of a sequence, for the head and tile that `which` of `heads_and_tiles` stands for.
__device__ __forceinline__ Piece piece_of(const Decode &a, int s, int length, int index, int count, int which) {
    Piece piece;
    const int begin = first_begin(a, length), size = piece_size(length - begin);
    piece.tile = rows_of(a) > ROWS ? (unsigned)which / (unsigned)a.kv_heads : 0;
    piece.of = {s, which - piece.tile * a.kv_heads, piece.tile * ROWS, length, table_of(a, s)};
    piece.index = index, piece.count = count;
    const long long start = begin + (long long)index * size;
    piece.first = max(start, (long long)first_used(a, length));
    piece.end = min((long long)length, start + size);
    return piece;
}

// The meaning of a block's number where sequences have as many blocks as the tables have room for pieces. Neighbouring
// blocks have different heads of the same pages; those of a cluster have different pieces.
struct Numbered {
    int s, index, most, which;  // the piece's number among `most`, and of heads and tiles
};

template <int IN_CLUSTER = 1>
__device__ __forceinline__ Numbered numbered(const Decode &a) {
    const int together = heads_and_tiles(a);
    Numbered found;
    found.most = IN_CLUSTER > 1 ? IN_CLUSTER : most_pieces(a);
    unsigned number = blockIdx.x;
    if (IN_CLUSTER > 1) found.index = take_digit(number, found.most);
    found.which = take_digit(number, together);
    if (IN_CLUSTER <= 1) found.index = take_digit(number, found.most);
    found.s = number;
    return found;
}

// The piece that the block's number stands for; false if its sequence is too short to have it.
__device__ __forceinline__ bool find_by_number(const Decode &a, Piece &piece) {
    const Numbered mine = numbered(a);
    const int length = length_of(a, mine.s), count = pieces_of(a, length);
    if (mine.index >= count) return false;
    piece = piece_of(a, mine.s, length, mine.index, count, mine.which);
    return true;
}

__device__ __forceinline__ int length_or_zero(const Decode &a, int s) { return s < askers(a) ? length_of(a, s) : 0; }

// The sum over the warp's lanes up to this one.
__device__ __forceinline__ int sum_up_to_lane(int x) {
#pragma unroll
    for (int apart = 1; apart < 32; apart *= 2) {
        const int more = __shfl_up_sync(~0u, x, apart);
        if (threadIdx.x % 32 >= apart) x += more;
    }
    return x;
}

// Tables and queries to the second-level cache, as much as takes no time, each thread of the grid a line.
__device__ __forceinline__ void bring(const void *from, long long bytes) {
    const int at = (blockIdx.x * THREADS + threadIdx.x) * 128;
    if (at < min(bytes, 1LL << 20)) prefetch(static_cast<const char *>(from) + at);
}
__device__ __forceinline__ void bring_tables_and_queries(const Decode &a) {
    bring(a.block_tables, ((a.sequences - 1) * a.table_row + a.table_width) * 4);
    bring(a.query, ((askers(a) - 1) * a.query_sequence + a.heads * HEAD_DIM) * bytes_of(QUERY_TYPE));
}

// The piece of the block's number among all that there are, found by each warp for itself, which takes no barrier;
// false if there is none. Sequences have as many blocks as they have pieces, and those left over are the last ones: so
// that many blocks are spread evenly over multiprocessors.
__device__ __forceinline__ bool find_by_lengths(const Decode &a, Piece &piece) {
    const int lane = threadIdx.x % 32;
    int length = length_or_zero(a, lane);  // what everything waits for
    bring_tables_and_queries(a);
    const unsigned together = heads_and_tiles(a);
    const int wanted = blockIdx.x / together, which = blockIdx.x % together;
    for (int s0 = 0, before = 0; s0 < askers(a); s0 += 32) {
        if (s0 > 0) length = length_or_zero(a, s0 + lane);
        const int count = s0 + lane < askers(a) ? pieces_of(a, length) : 0;
        const int end = before + sum_up_to_lane(count), low = __popc(__ballot_sync(~0u, end <= wanted));
        before = __shfl_sync(~0u, end, 31);
        if (low == 32) continue;
        const int its = __shfl_sync(~0u, count, low), index = wanted - (__shfl_sync(~0u, end, low) - its);
        piece = piece_of(a, s0 + low, __shfl_sync(~0u, length, low), index, its, which);
        return true;
    }
    return false;
}

// The block's only piece; false if it has none.
template <int HOW>
__device__ __forceinline__ bool find_alone(const Decode &a, Piece &piece) {
    return HOW == BY_NUMBER ? find_by_number(a, piece) : find_by_lengths(a, piece);
}

// Finds one piece after the other by their numbers. It knows THREADS sequences at a time; all threads of the block call
// it together, with numbers that only grow.
struct PieceFinder {
    int s0, before;     // the first of these sequences, and how many pieces the ones before it have
    int ends[THREADS];  // how many pieces the sequences from s0 to s0 + i have
    int lengths[THREADS];
    int of_warps[THREADS / 32];

    // The lengths are what everything waits for, so they are asked for before anything else.
    __device__ void start(const Decode &a) {
        const int length = length_or_zero(a, threadIdx.x);
        bring_tables_and_queries(a);
        learn(a, 0, threadIdx.x, length);
    }
    // The next THREADS sequences.
    __device__ void go_on(const Decode &a) {
        __syncthreads();  // all have looked
        const int s = s0 + THREADS + threadIdx.x;
        learn(a, before + ends[THREADS - 1], s, length_or_zero(a, s));
    }
    // `passed` pieces are of sequences before these. Each thread has the length of sequence s, the first one that of
    // s0.
    __device__ void learn(const Decode &a, int passed, int s, int length) {
        const int warp = threadIdx.x / 32;
        int end = sum_up_to_lane(s < askers(a) ? pieces_of(a, length) : 0);
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
        const unsigned together = heads_and_tiles(a), wanted = number / together, which = number % together;
        while (wanted >= (unsigned)before + ends[THREADS - 1]) {
            if (s0 + THREADS >= askers(a)) return false;
            go_on(a);
        }
        const int left = (int)(wanted - before);
        int low = 0;  // sequences that end before it
#pragma unroll
        for (int i = 0; i < THREADS; i += 32) low += __popc(__ballot_sync(~0u, ends[i + threadIdx.x % 32] <= left));
        const int above = low ? ends[low - 1] : 0;
        piece = piece_of(a, s0 + low, lengths[low], left - above, ends[low] - above, which);
        return true;
    }
};

// The workspace of a launch over pieces begins with two counters of the launch: how many numbers of pieces have been
// drawn, and how many blocks have left.
constexpr int LAUNCH_COUNTERS = 4;

// The number of another piece, for one thread of a block, beyond those that follow from the block's own number. Who is
// early takes more. For one thread alone: the compiler would have a warp add together, and so wait for the sum at once.
__device__ __forceinline__ int take(const Decode &a) {
    return atomicInc(static_cast<unsigned *>(a.workspace), 0x7fffffff);
}

// To be called by one thread of each block that will take no more, so that the next launch finds zeros again.
__device__ __forceinline__ void leave(const Decode &a) {
    int *const counters = static_cast<int *>(a.workspace);
    if (atomicAdd(counters + 1, 1) == (int)gridDim.x - 1) counters[0] = counters[1] = 0;
}
