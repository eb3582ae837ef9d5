// Paged V2: vLLM's second kernel, partitions of 512 tokens and a reduction.
//
// What changed: a block takes one partition of a sequence, as if it were all of it, and leaves max_logits, exp_sums and
// tmp_out, its own answer, in the workspace. A second launch weighs the partitions of each query: with M the largest
// maximum, each counts exp_sum * exp(max_logit - M).
// Why it is faster: a long sequence has many blocks, and the logits of a partition always fit in shared memory: any
// length, and many blocks to a multiprocessor. It is the idea of Flash-Decoding.
// What it costs: a launch more, and partial answers that travel to and fro. The grid is as wide as the tables: where
// one sequence is long and the others are short, most blocks find nothing to do. (vLLM keeps tmp_out in the query's
// type; here it is float.) The heads of a group still read the same keys and values each for itself.
#include "paged.cuh"

constexpr int PARTITION = 512, PAGES_PER_PARTITION = PARTITION / PAGE;
static_assert(PARTITION % PAGE == 0, "a partition has whole pages");

// How many partitions the longest sequence can have.
__device__ __forceinline__ int partitions(const Decode &a) {
    return ceil_div_large(a.table_width, PAGES_PER_PARTITION);
}

// What blocks leave in the workspace: a number each for every query and partition, then HEAD_DIM of them.
struct Partitions {
    float *exp_sums, *max_logits, *tmp_out;
};
__device__ __forceinline__ Partitions partitions_of(const Decode &a, const Query &query) {
    const long long places = (long long)askers(a) * a.tokens * a.heads * partitions(a),
                    first = query.place * partitions(a);
    float *const all = static_cast<float *>(a.workspace);
    return {all + first, all + places + first, all + 2 * places + first * HEAD_DIM};
}

extern "C" __global__ void __launch_bounds__(THREADS) paged_v2(const Decode a) {
    __shared__ __align__(16) float logits[larger(PARTITION, NUM_WARPS / 2 * HEAD_DIM)];
    const int partition = blockIdx.x % partitions(a), first_page = partition * PAGES_PER_PARTITION;
    const Query query = query_of(a, blockIdx.x / partitions(a));
    const int from = max(first_page, query.first / PAGE);
    const int until = min(first_page + PAGES_PER_PARTITION, ceil_div_large(max(query.end, 0), PAGE));
    if (from >= until) return;
    Attended found = attend(a, query, from, until, logits);

    const Partitions to = partitions_of(a, query);
    if (threadIdx.x == 0) to.exp_sums[partition] = found.exp_sum, to.max_logits[partition] = found.qk_max;
    if (threadIdx.x < WARP_SIZE)
        found.accs.for_each([&](int d, float acc) { to.tmp_out[(long long)partition * HEAD_DIM + d] = acc; });
}

extern __shared__ __align__(16) float weights[];  // of the partitions, up to a multiple of four

// One block a query, a thread for each number of the head.
extern "C" __global__ void __launch_bounds__(THREADS) reduce(const Decode a) {
    const Query query = query_of(a, blockIdx.x);
    const Partitions of = partitions_of(a, query);
    const int from = query.first / PARTITION, until = ceil_div_large(max(query.end, 0), PARTITION);

    float max_logit = NEG_INF, exp_sum = 0;
    for (int i = from + threadIdx.x; i < until; i += THREADS) max_logit = fmaxf(max_logit, of.max_logits[i]);
    max_logit = block_max(max_logit);
    const float shift = finite_or_zero(max_logit);
    for (int i = from + threadIdx.x; i < until; i += THREADS)
        exp_sum += weights[i - from] = of.exp_sums[i] * exp2_fast(of.max_logits[i] - shift);
    exp_sum = block_sum(exp_sum);

    const float factor = exp_sum == 0 ? 0 : v_scale_of(a) / exp_sum;
    for (int d = threadIdx.x; d < HEAD_DIM; d += THREADS) {
        float out = 0;
        for (int i = from; i < until; ++i) out += weights[i - from] * of.tmp_out[(long long)i * HEAD_DIM + d];
        store_answer(a, query.place * HEAD_DIM + d, out * factor);
    }
    store_lse(a, query, max_logit, exp_sum);
}
