// Shared by the attention kernels: their arguments, the causal mask, the bias, the log-sum-exp, and what is done about
// NaN and Inf.
#pragma once
#include "arguments.h"
#include "bias.cuh"
#include "common.cuh"
#include "packed.cuh"

#ifndef CAUSAL
#error "CAUSAL is a macro, 1: a query sees no key after its own position; see flashcli/kernels/attention.py"
#endif
#ifndef IN_PLACE
#define IN_PLACE 0  // 1: on arrays as they lie, with heads, with rows that are not finite done again
#endif
#ifndef LSE
#define LSE 0  // 1: the logarithms of the rows' sums of exponentials are wanted
#endif
#ifndef DENSE
#define DENSE 1  // the rows of a head follow one another; 0: they are as far apart as the arguments say
#endif
// How blocks share the keys of a row tile, where these are cut into chunks (chunks.cuh).
#define WHOLE 0        // they do not: a block has all keys of its row tiles, uncut
#define FOLD 1         // a block has all chunks of its row tiles, and merges each as it ends, in the workspace
#define FOLD_SHARED 2  // as FOLD, but in shared memory
#define SPREAD 3  // blocks may have chunks of the same row tile: all go to the workspace, the last block merges them
#define MEET 4    // a cluster of blocks has a row tile, a chunk each: they merge through each other's shared memory
#define JOIN 5    // a cluster of blocks has a row tile whose keys are not cut, a tile of them each (joined.cuh)
#ifndef SHARING
#define SHARING WHOLE
#endif
#ifdef ARGUMENT_BYTES  // not in testcases/hw4, which has no Python that packs them
static_assert(sizeof(Attention) == ARGUMENT_BYTES, "as flashcli/kernels/arguments.py packs them");
#endif

// Q, K, V and O of one batch, for kernels that take a single head whose rows follow one another.
struct Batch {
    const Input *Q, *K, *V;
    Answer *O;
};
__device__ __forceinline__ Batch batch_of(const Attention &a, long long b) {
    return {a.Q + b * a.q.batch, a.K + b * a.k.batch, a.V + b * a.v.batch, a.O + b * a.o.batch};
}

// The batch of the index-th head of all batches, its number there, and that of its head of K and V. Files have a single
// one, whose rows follow one another: there, all of this costs nothing.
struct Head {
    int b, h, kv;
};
__device__ __forceinline__ Head head_of(const Attention &a, unsigned index) {
    if (!IN_PLACE || a.H == 1) return {int(index), 0, 0};
    const int h = index % a.H;
    return {int(index / a.H), h, h / (a.H / a.Hkv)};
}

// `head_of` without a division where there is one batch, or a head of K and V for each of Q: a division takes 100 ns.
__device__ __forceinline__ Head head_soon(const Attention &a, unsigned index) {
    if (!IN_PLACE || a.H == 1) return {int(index), 0, 0};
    const int b = index < a.H ? 0 : index / a.H, h = index - b * a.H;
    return {b, h, a.Hkv == a.H ? h : h / (a.H / a.Hkv)};
}

// The rows of a head, and how far apart they are.
template <class Number>
__device__ __forceinline__ Number *rows_of(Number *matrix, Strides by, int b, int h) {
    return matrix + b * by.batch + (IN_PLACE ? h * by.head : 0);
}
__device__ __forceinline__ long long row_stride(Strides by) { return DENSE ? HEAD_DIM : by.row; }

// How many keys, of N, the query at a position in the sequence sees: keys 0 to that many - 1.
__device__ __forceinline__ int keys_seen(int position, int N) { return CAUSAL ? min(N, position + 1) : N; }

// How many keys at the beginning, or more than there are, query i of a head does not see; and whether it sees a key.
__device__ __forceinline__ int keys_hidden(const Attention &a, int i) { return WINDOW ? max(0, a.first + i) : 0; }
__device__ __forceinline__ bool sees(const Attention &a, int i, int key) {
    return key < keys_seen(a.q_start + i, a.N) && (!WINDOW || key >= a.first + i);
}
// The first tile of keys that some of BR rows from i0 on see; 0 if they see none.
__device__ __forceinline__ int first_tile_seen(const Attention &a, int i0) {
    return WINDOW ? min(keys_hidden(a, i0), max(keys_seen(a.q_start + i0 + BR - 1, a.N) - 1, 0)) / BC : 0;
}

// ---- packed sequences

// The numbers that tiles of all sequences' rows, and keys, may have.
__device__ __forceinline__ int row_numbers(const Attention &a) { return tile_numbers(a.tokens, BR, a.S); }
__device__ __forceinline__ int key_numbers(const Attention &a) { return tile_numbers(a.key_tokens, BC, a.S); }

// The arguments that a block has: where sequences are packed, those of its row tile's, in shared memory, where they take
// no registers.
__device__ __forceinline__ const Attention &of_block(const Attention &all) {
#if PACKED
    __shared__ Attention one;
    if (threadIdx.x < 32) take_sequence<false>(one, all, BR, blockIdx.x % row_numbers(all));
    if (threadIdx.x == 0) {
        one.Q += one.first_row * row_stride(all.q), one.O += one.first_row * row_stride(all.o);
        one.K += one.first_key * row_stride(all.k), one.V += one.first_key * row_stride(all.v);
    }
    __syncthreads();
    return one;
#else
    return all;
#endif
}

// The head and the row tile of a block, where it has one; Tr is the number of row tiles of a head.
__device__ __forceinline__ Head head_of_block(const Attention &a, unsigned Tr) {
    return head_of(a, blockIdx.x / (PACKED ? row_numbers(a) : Tr));
}
__device__ __forceinline__ int tile_of_block(const Attention &a, unsigned Tr) {
    return PACKED ? a.tile : blockIdx.x % Tr;
}

// ---- after the last key

// The factor that makes O of a row's sum of P V, l being its sum of exponentials: 1 / l; or 0 for a row that sees no
// key.
__device__ __forceinline__ float inverse(const Attention &a, int i, float l) {
    return l == 0 && (BIAS || WINDOW || PACKED || (CAUSAL && a.q_start + i < 0)) ? 0 : 1 / l;
}

// The row of all batches and heads that query i of a head is.
__device__ __forceinline__ long long row_of(const Attention &a, Head head, int i) {
    if (PACKED) return (long long)head.h * a.tokens + a.first_row + i;
    return ((long long)head.b * a.H + head.h) * a.M + i;
}

// Gives the logarithm of a row's sum of exponentials, where it is wanted: m is the row's maximum, in powers of two, and
// inverse_l what `inverse` gave. All is exact but for the logarithm of what is left of l without powers of two, which of
// 1 is 0, and the last rounding.
__device__ __forceinline__ void give_lse(const Attention &a, Head head, int i, float m, float inverse_l) {
    if (!LSE) return;
    constexpr float LN2 = 0.693147180559945309, LN2_REST = 0.693147180559945309 - double(LN2);
    const int exponent = (__float_as_int(inverse_l) >> 23) - 127;
    const float sum = m - exponent, added = sum - m, left = m - (sum - added) - (exponent + added);
    const float small = left - log2_fast(inverse_l * __int_as_float((127 - exponent) << 23));
    a.lse[row_of(a, head, i)] = inverse_l == 0 ? NEG_INF : fmaf(sum, LN2, fmaf(sum, LN2_REST, small * LN2));
}

// ---- NaN and Inf

// Kernels that split numbers into halves make NaN of an Inf. Into a file's answer they write it, and the host, who has
// looked with find_nonfinite, has another kernel do the chunk again. On arrays they look at what they write, and do
// rows that are not finite again themselves, without splitting (exact.cuh).

// Sets *nonfinite where Q, K or V holds NaN or Inf; a null matrix is passed over. A warp takes a row at a time; any
// number of blocks.
__device__ __forceinline__ bool rows_finite(const Input *x, Strides by, int B, int H, int rows) {
    const long long count = x == nullptr ? 0 : (long long)B * H * rows;
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    bool finite = true;
    for (long long r = blockIdx.x * (long long)warps + threadIdx.x / 32; r < count; r += (long long)gridDim.x * warps) {
        const Input *const row = x + r / rows / H * by.batch + r / rows % H * by.head + r % rows * by.row;
        for (int c = lane; c < HEAD_DIM; c += 32) finite &= fabsf(row[c]) < INFINITY_F;
    }
    return finite;
}

extern "C" __global__ void find_nonfinite(const Attention a) {
    const bool finite = rows_finite(a.Q, a.q, a.B, a.H, a.M) & rows_finite(a.K, a.k, a.B, a.Hkv, a.N) &
                        rows_finite(a.V, a.v, a.B, a.Hkv, a.N);
    if (!finite) *a.nonfinite = 1;
}
