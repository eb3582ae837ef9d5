// Grouped: all heads of a group together.
//
// What changed: a block takes ROWS query rows that share a head of the cache: the heads of its group, and all query
// tokens. A number of a key that has come from memory meets all of them while it is in a register, and so does one of a
// value. How threads share tokens no longer depends on the page or the layout (see piece.cuh).
// Why it is faster: with 32 heads on 8 of the cache, keys and values are read once instead of four times; decoding does
// hardly anything but read.
// What it costs: registers for the sums of all rows, and shared memory for their queries and scores, so fewer blocks to
// a multiprocessor. More than ROWS rows take several blocks, which read the same keys and values again.
#include "piece.cuh"

constexpr int PARTITION = 512;

__device__ __forceinline__ int partitions(const Decode &a) {
    return (int)(((long long)a.table_width * PAGE + PARTITION - 1) / PARTITION);
}

extern "C" __global__ void __launch_bounds__(THREADS, FEWER_BLOCKS ? 2 : 3) grouped(const Decode a) {
    __shared__ __align__(16) float q[ROWS * HEAD_DIM];
    __shared__ float S[ROWS * PARTITION], O[ROWS * HEAD_DIM];
    __shared__ unsigned char seen[PARTITION];
    __shared__ Running running;
    const int count = partitions(a), of_sequence = STEP ? STEP : count, which = blockIdx.x / a.kv_heads / of_sequence;
    int partition = blockIdx.x / a.kv_heads % of_sequence;
    const int tiles = ceil_div_large(rows_of(a), ROWS);
    const int asker = asker_with(a, which / tiles);
    if (asker < 0) return;
    // Neighbouring blocks have neighbouring heads of the cache, which are neighbours in a page.
    Sequence of = sequence_of(a, asker, blockIdx.x % a.kv_heads, which % tiles * ROWS);
    if (STEP) partition += first_used(a, of.length) / PARTITION;
    do {
        const int first = max((long long)first_used(a, of.length), (long long)partition * PARTITION);
        const int end = min((long long)of.length, (partition + 1LL) * PARTITION);
        if (first >= end) return;

        load_queries(a, of, q, running);
        scores(a, of, q, first, end, S, PARTITION, seen);
        softmax(S, PARTITION, end - first, running);
        float o[ROWS][OWN] = {};
        add_values(a, of, first, end, S, PARTITION, seen, running, o);
        collect(o, O);
        of.s = which / tiles;  // partial answers have room for those that blocks are for
        keep_partials(a, of, static_cast<float *>(a.workspace), count, partition, running, O);
        of.s = asker, partition += STEP;
        if (STEP) __syncthreads();  // before shared memory is written anew
    } while (STEP);
}

extern "C" __global__ void __launch_bounds__(QUADS) merge(const Decode a) {
    const int asker = asker_with(a, blockIdx.x / a.heads / a.tokens), count = partitions(a);
    if (asker < 0) return;
    const int length = length_of(a, asker), row = blockIdx.x % (a.heads * a.tokens);
    const float *const partials = static_cast<const float *>(a.workspace) + (long long)blockIdx.x * count * PARTIAL;
    const int from = first_used(a, length) / PARTITION, until = ceil_div_large(length, PARTITION);
    answer_quad(a, (long long)asker * a.heads * a.tokens + row, threadIdx.x, merged(partials, from, until, threadIdx.x),
                v_scale_of(a));
}
