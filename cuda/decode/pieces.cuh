// Sequences cut into pieces by their lengths, and the way from a number of a piece to the sequence that has it.
//
// How a sequence is cut depends on nothing but its own length, so that its answer has the same bytes in whatever company
// and on whatever GPU. A short one has pieces of PIECE tokens; a long one has at most MAX_PIECES, for partial answers need
// room for as many as there may be.
#pragma once
#include "decode.cuh"

struct Cut {
    int begin;  // where its first piece begins
    int piece;  // tokens in a piece
    int count;  // of pieces; an empty sequence has one, for its answer has to be written, too
};

__device__ __forceinline__ Cut cut(const Decode &a, int length) {
    const int begin = first_used(a, length) / PIECE * PIECE;
    const int piece = max(PIECE, ceil_div(ceil_div(length - begin, MAX_PIECES), PIECE) * PIECE);
    return {begin, piece, max(1, ceil_div(length - begin, piece))};
}

// How many pieces a sequence can have at most: so many partial answers are kept for each row.
__device__ __forceinline__ int most_pieces(const Decode &a) {
    const long long room = (long long)a.table_width * PAGE;
    return max(1, (int)min((long long)MAX_PIECES, (room + PIECE - 1) / PIECE));
}

// Finds pieces by their numbers, counted over all sequences, for numbers that only grow. It knows THREADS sequences at a
// time; all threads of the block call it together.
struct Finder {
    int s0, before;     // the first of these sequences, and how many pieces the ones before it have
    int ends[THREADS];  // how many pieces the sequences from s0 to s0 + i have

    __device__ void count(const Decode &a) {
        const int s = s0 + threadIdx.x;
        ends[threadIdx.x] = s < a.sequences ? cut(a, length_of(a, s)).count : 0;
        __syncthreads();
        for (int apart = 1; apart < THREADS; apart *= 2) {
            const int more = threadIdx.x >= apart ? ends[threadIdx.x - apart] : 0;
            __syncthreads();
            ends[threadIdx.x] += more;
            __syncthreads();
        }
    }
    __device__ void start(const Decode &a) {
        if (threadIdx.x == 0) s0 = before = 0;
        __syncthreads();
        count(a);
    }
    // The sequence that has the piece, and the piece's number in it; false if there is no such piece.
    __device__ bool find(const Decode &a, long long wanted, int &s, int &piece) {
        while (wanted >= (long long)before + ends[THREADS - 1]) {
            if (s0 + THREADS >= a.sequences) return false;
            __syncthreads();  // all have looked
            if (threadIdx.x == 0) before += ends[THREADS - 1], s0 += THREADS;
            __syncthreads();
            count(a);
        }
        const int left = (int)(wanted - before);
        int low = 0;  // the first sequence with an end after it
        for (int step = THREADS / 2; step > 0; step /= 2)
            if (ends[low + step - 1] <= left) low += step;
        s = s0 + low, piece = left - (low ? ends[low - 1] : 0);
        return true;
    }
};
static_assert((THREADS & (THREADS - 1)) == 0, "searched by halves");

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

// The workspace of a launch over pieces: a counter for each sequence, tile of rows and head of the cache; then, from a
// multiple of 16 bytes on, partial answers.
__device__ __forceinline__ int *counter_of(const Decode &a, int s, int tile, int tiles, int kv_head) {
    return static_cast<int *>(a.workspace) + ((long long)s * tiles + tile) * a.kv_heads + kv_head;
}
__device__ __forceinline__ float *partials_of(const Decode &a, int tiles) {
    return static_cast<float *>(a.workspace) + ((long long)a.sequences * tiles * a.kv_heads + 3) / 4 * 4;
}
