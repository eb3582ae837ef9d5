// Read: the floor.
//
// What it does: it reads the keys and values that an answer needs, page by page through the tables, and computes nothing.
// Why: decoding does hardly anything but read, so no kernel is faster than this one, which reads as the last one does.
// `python -m flashcli.measure.decode` times it beside the others.
#include "tiles.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) read(const Decode a) {
    __shared__ Pieces pieces;
    __shared__ int taken;
    unsigned sum = 0;
    Piece piece;
    pieces.start(a);
    for (int number = blockIdx.x; pieces.find(a, number, piece); number = taken) {
        int next = 0;
        if (threadIdx.x == 0) next = take(a, 1);
        Way way = Way::first(piece);
        for (way.ask(a); way.count > 0; way = way.after({}), way.ask(a))
            for (int i = 0; i < way.count; ++i) {
                Keys keys = {};
                Values values = {};
                load_keys(a, way.tile(i), keys), load_values(a, way.tile(i), values);
#pragma unroll
                for (int n = 0; n < 2 * KEY_VECTORS; ++n) sum ^= keys.of[n][0];
#pragma unroll
                for (int n = 0; n < VALUE_LOADS; ++n) sum ^= values.of[n][0];
            }
        __syncthreads();  // all have found this piece
        if (threadIdx.x == 0) taken = next;
        __syncthreads();
    }
    if (sum == 0x9e3779b9)
        static_cast<unsigned *>(a.workspace)[2] = sum;  // or the compiler would leave the reading out
    if (threadIdx.x == 0) leave(a);
}
