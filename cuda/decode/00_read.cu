// Read: the floor.
//
// What it does: it reads the keys and values that an answer needs, page by page through the tables, and computes
// nothing.
// Why: decoding does hardly anything but read, so no kernel is faster than this one, which reads as the last one does.
// `python -m bench.decode` times it beside the others.
#include "tiles.cuh"

// All of a piece's numbers together, so that each is waited for.
__device__ __forceinline__ unsigned read_piece(const Decode &a, const Piece &piece, Pages &pages) {
    unsigned sum = 0;
    pages.start(piece);
    for (int token0 = first_tile(piece); token0 < piece.end; token0 += APART) {
        wait_for_copies<0>();
        __syncwarp();
        pages.go_on(piece, token0);
        const Tile tile = {pages.of_tile(token0), piece.of.kv_head, token0, true};
        Keys keys = {};
        Values values = {};
        load_keys(a, tile, keys), load_values(a, tile, values);
#pragma unroll
        for (int i = 0; i < 2 * KEY_VECTORS * 4; ++i) sum ^= keys.of[i / 4][i % 4];
#pragma unroll
        for (int i = 0; i < VALUE_LOADS * VALUE_WORDS; ++i) sum ^= values.of[i / VALUE_WORDS][i % VALUE_WORDS];
    }
    wait_for_copies<0>();  // if there was no tile, too: the next pages go to the same place
    return sum;
}

__device__ __forceinline__ unsigned read_piece_after_piece(const Decode &a, Pages &pages) {
    __shared__ PieceFinder finder;
    __shared__ int taken;
    unsigned sum = 0;
    Piece piece;
    finder.start(a);
    for (int number = blockIdx.x; finder.find(a, number, piece); number = taken) {
        int next = 0;
        if (threadIdx.x == 0) next = take(a);
        sum ^= read_piece(a, piece, pages);
        __syncthreads();  // all have found this piece
        if (threadIdx.x == 0) taken = next + gridDim.x;
        __syncthreads();
    }
    if (threadIdx.x == 0) leave(a);
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) read(const Decode a) {
    __shared__ Pages pages;
    unsigned sum = 0;
    Piece piece;
    if constexpr (FINDS == PIECE_AFTER_PIECE) sum = read_piece_after_piece(a, pages);
    else if (find_alone<FINDS>(a, piece)) sum = read_piece(a, piece, pages);
    if (sum == 0x9e3779b9)
        static_cast<unsigned *>(a.workspace)[2] = sum;  // or the compiler would leave the reading out
}
