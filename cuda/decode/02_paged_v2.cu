// Paged V2: partitions of 512 tokens, and a reduction.
//
// What changed: a block takes one partition of a sequence, not all of it, and leaves its maximum m, sum l and O in the
// workspace. A second launch merges the partitions of each row: with M the largest m, O = sum 2^(m - M) O / sum 2^(m -
// M) l.
// Why it is faster: a long sequence has many blocks, and the scores of one partition always fit in shared memory: any
// length, and many blocks to a multiprocessor.
// What it costs: a launch more, and partial answers that travel to and fro. The grid is as wide as the tables: where
// one sequence is long and the others are short, most blocks find nothing to do. (vLLM keeps partial answers in the
// query's type; here they are float.) The heads of a group still read the same keys and values each for itself.
#include "piece.cuh"

static_assert(ROWS == 1, "a block has one row");
constexpr int PARTITION = 512;

// How many partitions the longest sequence can have.
__device__ __forceinline__ int partitions(const Decode &a) {
    return (int)(((long long)a.table_width * PAGE + PARTITION - 1) / PARTITION);
}

extern "C" __global__ void __launch_bounds__(THREADS, 4) paged_v2(const Decode a) {
    __shared__ __align__(16) float q[HEAD_DIM];
    __shared__ float S[PARTITION], O[HEAD_DIM];
    __shared__ unsigned char seen[PARTITION];
    __shared__ Running running;
    const int count = partitions(a), partition = blockIdx.x % count, which = blockIdx.x / count;
    const int rows = rows_of(a), row = which % rows, rest = which / rows;
    const Sequence of = sequence_of(a, rest / a.kv_heads, rest % a.kv_heads, row);
    const int first = max((long long)first_used(a, of.length), (long long)partition * PARTITION);
    const int end = min((long long)of.length, (partition + 1LL) * PARTITION);
    if (first >= end) return;

    load_queries(a, of, q, running);
    scores(a, of, q, first, end, S, PARTITION, seen);
    softmax(S, PARTITION, end - first, running);
    float o[ROWS][OWN] = {};
    add_values(a, of, first, end, S, PARTITION, seen, running, o);
    collect(o, O);
    keep_partials(a, of, static_cast<float *>(a.workspace), count, partition, running, O);
}

// One block a row, a thread for each number of the head.
extern "C" __global__ void __launch_bounds__(QUADS) merge(const Decode a) {
    const int length = length_of(a, blockIdx.x / a.heads / a.tokens), count = partitions(a);
    const float *const partials = static_cast<const float *>(a.workspace) + (long long)blockIdx.x * count * PARTIAL;
    const int from = first_used(a, length) / PARTITION, until = ceil_div_large(length, PARTITION);
    answer_quad(a, blockIdx.x, threadIdx.x, merged(partials, from, until, threadIdx.x), v_scale_of(a));
}
