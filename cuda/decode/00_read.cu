// Read: the floor.
//
// What it does: it reads the keys and values that an answer needs, page by page through the tables, and computes nothing.
// Why: decoding does hardly anything but read, so no kernel is faster than this one. `flashcli bench --decode` times it
// beside the others.
#include "pieces.cuh"

// Vectors of a token's keys, then of its values, one a thread, eight under way.
__device__ __forceinline__ unsigned read_tokens(const Decode &a, const Sequence &of, int first, int end) {
    unsigned sum = 0;
    const int vectors = (end - first) * CHUNKS;
#pragma unroll 8
    for (int i = threadIdx.x; i < 2 * vectors; i += THREADS) {
        const int of_token = i % vectors, token = first + of_token / CHUNKS, c = of_token % CHUNKS;
        const unsigned char *const row = i < vectors ? key_of(a, of, token) : value_of(a, of, token);
        sum ^= load<VECTOR_BYTES>(row + c * VECTOR_BYTES).word[0];
    }
    return sum;
}

extern "C" __global__ void __launch_bounds__(THREADS) read(const Decode a) {
    __shared__ Finder finder;
    unsigned sum = 0;
    finder.start(a);
    for (long long task = blockIdx.x;; task += gridDim.x) {
        int s, part;
        if (!finder.find(a, task / a.kv_heads, s, part)) break;
        const Sequence of = sequence_of(a, s, task % a.kv_heads, 0);
        const Cut has = cut(a, of.length);
        const long long start = has.begin + (long long)part * has.piece;
        sum ^= read_tokens(a, of, start, min((long long)of.length, start + has.piece));
    }
    if (sum == 0x9e3779b9) *static_cast<unsigned *>(a.workspace) = sum;  // or the compiler would leave the reading out
}
