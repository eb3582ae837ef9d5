// Paged V1: vLLM's first kernel, one block for each query token and head.
//
// What it does: a warp takes a page, a group of threads in it a token: with pages of 16 tokens, two threads that fetch
// 16 bytes of its key at a time. Scores of all tokens stay in shared memory, as logits. Their maximum and sum are found
// by shuffles, in the warp and then over the block. Then each warp goes through its pages again, for the values, and
// halves of the warps add up what they have (see paged.cuh).
// Why so: neighbouring threads read neighbouring bytes; no token waits for another, and a score is computed once. As
// many blocks as there are heads and sequences fill the GPU in a large batch.
// What it costs: shared memory holds one sequence of some 57,000 tokens at most, and the longer it is, the fewer blocks
// a multiprocessor has. A single sequence leaves most of the GPU idle, and the longest one of a batch is waited for.
// All heads of a group read the same keys and values, each for itself.
#include "paged.cuh"

extern __shared__ __align__(16) float logits[];

extern "C" __global__ void __launch_bounds__(THREADS) paged_v1(const Decode a) {
    const Query query = query_of(a, blockIdx.x);
    Attended found = attend(a, query, query.first / PAGE, ceil_div_large(max(query.end, 0), PAGE), logits);

    const float v_scale = v_scale_of(a);
    if (threadIdx.x < WARP_SIZE)
        found.accs.for_each([&](int d, float acc) { store_answer(a, query.place * HEAD_DIM + d, acc * v_scale); });
    store_lse(a, query, found.qk_max, found.exp_sum);
}
