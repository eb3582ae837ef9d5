// Paged V1: one block for each query token and head.
//
// What it does: vLLM's first kernel, written anew from what it computes. A block walks through the pages of its
// sequence and keeps the scores of all tokens in shared memory; then their softmax; then it walks through the pages of
// values. Two threads share a token's key, so that 64 tokens are met at a time and a warp reads whole sectors of 32
// bytes.
// Why so: no token waits for another, and a score is computed once. As many blocks as there are heads and sequences
// fill the GPU in a large batch.
// What it costs: shared memory holds one sequence of some 57,000 tokens at most, and the longer it is, the fewer blocks
// a multiprocessor has. A single sequence leaves most of the GPU idle, and the longest one of a batch is waited for.
// All heads of a group read the same keys and values, each for itself.
#include "piece.cuh"

static_assert(ROWS == 1, "a block has one row");

extern __shared__ float S[];  // as many scores as the tables have room for, then as many bytes: which are seen

extern "C" __global__ void __launch_bounds__(THREADS) paged_v1(const Decode a) {
    __shared__ __align__(16) float q[HEAD_DIM];
    __shared__ float O[HEAD_DIM];
    __shared__ Running running;
    const int rows = rows_of(a), row = blockIdx.x % rows, rest = blockIdx.x / rows;
    const Sequence of = sequence_of(a, rest / a.kv_heads, rest % a.kv_heads, row);
    const int first = first_used(a, of.length), room = a.table_width * PAGE;
    unsigned char *const seen = reinterpret_cast<unsigned char *>(S + room);

    load_queries(a, of, q, running);
    scores(a, of, q, first, of.length, S, room, seen);
    softmax(S, room, of.length - first, running);
    float o[ROWS][OWN] = {};
    add_values(a, of, first, of.length, S, room, seen, running, o);
    collect(o, O);
    answer(a, of, running, O);
}
