// What the attention kernels share: their arguments, the causal mask, and a look for NaN and Inf.
#pragma once
#include "arguments.h"
#include "common.cuh"

#ifndef CAUSAL
#error "CAUSAL is a macro, 1: a query sees no key after its own position; see flashcli/kernels/types.py"
#endif
#ifdef ARGUMENT_BYTES  // not in testcases/hw4, which has no Python that packs them
static_assert(sizeof(Attention) == ARGUMENT_BYTES, "as flashcli/kernels/arguments.py packs them");
#endif

// Q, K, V and O of one batch, for kernels that take a single head whose rows follow one another.
struct Batch {
    const float *Q, *K, *V;
    float *O;
};
__device__ __forceinline__ Batch batch_of(const Attention &a, long long b) {
    return {a.Q + b * a.q.batch, a.K + b * a.k.batch, a.V + b * a.v.batch, a.O + b * a.o.batch};
}

// The batch of the index-th head of all batches, its number there, and that of its head of K and V. A single head, as files
// have it, costs no division.
struct Head {
    int b, h, kv;
};
__device__ __forceinline__ Head head_of(const Attention &a, unsigned index) {
    if (a.H == 1) return {int(index), 0, 0};
    const int h = index % a.H;
    return {int(index / a.H), h, h / (a.H / a.Hkv)};
}

// How many keys, of N, the query at a position in the sequence sees: keys 0 to that many - 1.
__device__ __forceinline__ int keys_seen(int position, int N) { return CAUSAL ? min(N, position + 1) : N; }

// Sets *nonfinite where Q, K or V holds NaN or Inf; a null matrix is passed over. A warp takes a row at a time; any number
// of blocks. Kernels that split numbers into halves make NaN of an Inf: what is not finite goes to one that does not.
__device__ __forceinline__ bool rows_finite(const float *x, Strides by, int B, int H, int rows) {
    const long long count = x == nullptr ? 0 : (long long)B * H * rows;
    const int warps = blockDim.x / 32, lane = threadIdx.x % 32;
    bool finite = true;
    for (long long r = blockIdx.x * (long long)warps + threadIdx.x / 32; r < count; r += (long long)gridDim.x * warps) {
        const float *const row = x + r / rows / H * by.batch + r / rows % H * by.head + r % rows * by.row;
        for (int c = lane; c < HEAD_DIM; c += 32) finite &= fabsf(row[c]) < INFINITY_F;
    }
    return finite;
}

extern "C" __global__ void find_nonfinite(const Attention a) {
    const bool finite = rows_finite(a.Q, a.q, a.B, a.H, a.M) & rows_finite(a.K, a.k, a.B, a.Hkv, a.N) &
                        rows_finite(a.V, a.v, a.B, a.Hkv, a.N);
    if (!finite) *a.nonfinite = 1;
}
