// Merge: the answers to parts of the keys as the answer to all of them. No rung of the ladder, but what lets a prefix
// that sequences share be read once.
//
// What it does: a thread takes 16 bytes of a head's answer from each part. A part counts exp(its LSE), relative to the
// largest of them; one that has seen no key counts nothing, and its answer is not looked at.
// Why: all is read once and nothing waits. Threads of a row compute its weights each for itself, from numbers that
// arrive together with the answers.
#include "decode.cuh"

constexpr int MOST_PARTS = 16;

// The one argument, by value.
struct Merge {
    void *out;   // [rows, HEAD_DIM]
    float *lse;  // [rows]
    const void *outs[MOST_PARTS];
    const float *lses[MOST_PARTS];
    long long rows;
    int parts;
};

static_assert(QUERY_TYPE == CACHE_TYPE && VECTOR_BYTES == 16, "unpack is for the cache's type; rows are whole vectors");

// A vector of numbers of the query's type.
__device__ __forceinline__ uint4 packed(const float (&x)[X]) {
    unsigned word[4] = {};
#pragma unroll
    for (int i = 0; i < X; ++i) {
        if (QUERY_TYPE == FP32) word[i % 4] = __float_as_uint(x[i]);
        else word[i / 2 % 4] |= bits_of_answer(x[i]) << i % 2 * 16;
    }
    return make_uint4(word[0], word[1], word[2], word[3]);
}

extern "C" __global__ void __launch_bounds__(THREADS) merge_answers(const Merge a) {
    const long long number = blockIdx.x * (long long)THREADS + threadIdx.x, row = number / CHUNKS;
    if (row >= a.rows) return;
    float m = NEG_INF, l = 0, o[X] = {};
    for (int i = 0; i < a.parts; ++i) {
        const float lse = a.lses[i][row];
        m = lse > m || lse != lse ? lse : m;  // NaN is not lost
    }
    const float shift = finite_or_zero(m);
    for (int i = 0; i < a.parts; ++i) {
        const float weight = exp2_fast((a.lses[i][row] - shift) * LOG2E);
        l += weight;
        if (weight == 0) continue;
        float part[X];
        unpack(load<16>(static_cast<const unsigned char *>(a.outs[i]) + number * 16).word, part);
#pragma unroll
        for (int x = 0; x < X; ++x) o[x] += weight * part[x];
    }
#pragma unroll
    for (int x = 0; x < X; ++x) o[x] = l == 0 ? 0 : o[x] / l;
    static_cast<uint4 *>(a.out)[number] = packed(o);
    if (number % CHUNKS == 0) a.lse[row] = l == 0 ? NEG_INF : m + logf(l);
}
