// Packed sequences: rows of Q of one after the other, and rows of K and V. A block looks up by itself of which sequence
// its tile is, for the host does not know the lengths.
//
// The tiles of `size` rows of sequence s have the numbers from start / size + s on. The next sequence begins so many
// numbers later that all tiles fit, so that nothing has to be summed up: a search finds the sequence. Some numbers, as
// many as there are sequences at most, are of no tile. Starts that make no sense are cut to the arrays.
#pragma once
#include "bias.cuh"

#ifndef WINDOW
#define WINDOW 0  // 1: a query sees keys from first + i on; CAUSAL says up to which
#endif
#ifndef PACKED
#define PACKED 0  // 1: there are packed sequences
#endif

// The numbers that tiles may have, and the first one of a sequence, whose rows begin at `first`.
__device__ __forceinline__ int tile_numbers(int tokens, int size, int sequences) { return tokens / size + sequences; }
__device__ __forceinline__ int first_number(int first, int size, int sequence) { return first / size + sequence; }

// A sequence's rows in a matrix, and which of its tiles has a number: none, where it is negative or beyond the rows.
struct Slice {
    int sequence, first, rows, tile;
    __device__ __forceinline__ bool has_tile(int size) const {
        return tile >= 0 && (long long)tile * size < (rows > 0 ? rows : 1);
    }
};

// Where a sequence's rows are, of `tokens` rows of all.
__device__ __forceinline__ Slice slice_of(const int *starts, int sequence, int tokens) {
    const int first = min(max(starts[sequence], 0), tokens), end = min(max(starts[sequence + 1], first), tokens);
    return {sequence, first, end - first, 0};
}

// The sequence and the tile with a number. Called by a whole warp, which looks at 32 sequences at a time.
__device__ __forceinline__ Slice slice_with(const int *starts, int sequences, int tokens, int size, int number) {
    int from = 0;
    for (int count = sequences; count > 1;) {
        const int step = ceil_div(count, 32), at = threadIdx.x % 32 * step, s = from + min(at, count - 1);
        const bool begun = at < count && (at == 0 || first_number(starts[s], size, s) <= number);
        const int last = 31 - __clz(__ballot_sync(~0u, begun));
        from += last * step;
        count = min(step, count - last * step);
    }
    Slice found = slice_of(starts, from, tokens);
    found.tile = number - first_number(found.first, size, from);
    return found;
}

// The arguments of a kernel, but for matrices, of the sequence that a tile of queries, or with OF_KEYS of keys, is of,
// as if it were alone; `tile` is negative where the number is of no tile with rows. Called by a whole warp.
template <bool OF_KEYS, class Arguments>
__device__ __forceinline__ void take_sequence(Arguments &one, const Arguments &all, int size, int number) {
    const Slice own = OF_KEYS ? slice_with(all.k_starts, all.S, all.N, size, number)
                              : slice_with(all.q_starts, all.S, all.M, size, number);
    const Slice other =
        OF_KEYS ? slice_of(all.q_starts, own.sequence, all.M) : slice_of(all.k_starts, own.sequence, all.N);
    if (threadIdx.x % 32 != 0) return;
    const Slice &rows = OF_KEYS ? other : own, &keys = OF_KEYS ? own : other;
    one = all;
    one.M = rows.rows, one.N = keys.rows, one.first_row = rows.first, one.first_key = keys.first;
    one.sequence = own.sequence, one.tile = own.rows > 0 && own.has_tile(size) ? own.tile : -1;
    const int ahead = keys.rows - rows.rows;  // the last query is at the position of the last key
    one.q_start += ahead, one.first += ahead, one.position += ahead;
    if (SLOPES) one.slopes += own.sequence * all.slopes_batch;
}

// Whether a block has a tile.
template <class Arguments>
__device__ __forceinline__ bool has_tile(const Arguments &a) {
    return !PACKED || a.tile >= 0;
}
