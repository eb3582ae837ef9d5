// vLLM's paged attention of one query token and head: what V1 does with a whole sequence, and V2 with a partition.
//
// Names are vLLM's, but for its word block: here a page is a page, and a block is a block of threads. A vec is some
// numbers that are fetched together, a row of values is one number of the head for all tokens of a page. Four things
// differ: scores are in powers of two, so that exp is one instruction; logits stay float where vLLM rounds them to the
// query's type; a scale of the cache is a factor on scores and answers, not on each number; and the sum of exponentials
// has no 1e-6 added to it.
#pragma once
#include "answer.cuh"

constexpr int WARP_SIZE = 32, NUM_WARPS = THREADS / WARP_SIZE, SCALAR_BYTES = bytes_of(QUERY_TYPE);

// A group of threads meets a token: thread t of it has vecs t, t + THREAD_GROUP_SIZE and so on of query and key. With
// pages of up to 32 tokens, a warp has a group for each token of one.
constexpr int THREAD_GROUP_SIZE = larger(WARP_SIZE / PAGE, 1);
constexpr int NUM_THREAD_GROUPS = THREADS / THREAD_GROUP_SIZE;
constexpr int NUM_TOKENS_PER_THREAD_GROUP = ceil_div(PAGE, WARP_SIZE);
constexpr int VEC_SIZE = larger(16 / (THREAD_GROUP_SIZE * SCALAR_BYTES), 1);  // a group fetches 16 bytes at a time
constexpr int NUM_VECS_PER_THREAD = HEAD_DIM / THREAD_GROUP_SIZE / VEC_SIZE;

// For values there are no groups: a thread fetches V_VEC_SIZE tokens of a row at a time.
constexpr int V_VEC_SIZE = smaller(16 / SCALAR_BYTES, PAGE);
constexpr int NUM_V_VECS_PER_ROW = PAGE / V_VEC_SIZE;
constexpr int NUM_ROWS_PER_ITER = WARP_SIZE / NUM_V_VECS_PER_ROW;
constexpr int NUM_ROWS_PER_THREAD = ceil_div(HEAD_DIM, NUM_ROWS_PER_ITER);

static_assert(ROWS == 1 && TRANSPOSED, "a block has one row of queries, the cache vLLM's layout");
static_assert(HEAD_DIM % (THREAD_GROUP_SIZE * VEC_SIZE) == 0, "threads of a group have as many vecs each");
static_assert(NUM_V_VECS_PER_ROW <= WARP_SIZE, "a warp reaches over a page");
static_assert((NUM_WARPS & (NUM_WARPS - 1)) == 0, "warps are halved until one is left");

// A query token and head, and the tokens that it sees: from `first` to `end` - 1, but for pages that a block-sparse
// head leaves out.
struct Query {
    Sequence of;
    int head, first, end;
    long long place;  // see place_of_row
};

__device__ __forceinline__ Query query_of(const Decode &a, int which) {
    const int rows = rows_of(a), rest = which / rows;
    Query query = {sequence_of(a, rest / a.kv_heads, rest % a.kv_heads, which % rows)};
    const int row = query.of.row0, position = position_of_row(a, query.of, row);
    query.head = head_of_row(a, query.of.kv_head, row);
    query.first = a.window ? max(0, position - a.window + 1) : 0;
    query.end = position + 1;
    query.place = place_of_row(a, query.of, row);
    return query;
}

// Whether a page is read at all. Blocks of block-sparse attention are whole pages.
__device__ __forceinline__ bool sees_page(const Decode &a, const Query &query, int page) {
    return a.sparse_stride <= 1 || sees(a, query.of, query.of.row0, max(page * PAGE, query.first));
}

// What all threads have of the block's largest, or summed, x.
template <typename Join>
__device__ __forceinline__ float over_block(float x, float *red_smem, Join join) {
#pragma unroll
    for (int mask = WARP_SIZE / 2; mask >= 1; mask /= 2) x = join(x, __shfl_xor_sync(~0u, x, mask));
    if (threadIdx.x % WARP_SIZE == 0) red_smem[threadIdx.x / WARP_SIZE] = x;
    __syncthreads();
    x = red_smem[threadIdx.x % NUM_WARPS];
#pragma unroll
    for (int mask = NUM_WARPS / 2; mask >= 1; mask /= 2) x = join(x, __shfl_xor_sync(~0u, x, mask));
    return x;
}
__device__ __forceinline__ float block_max(float x) {
    __shared__ float red_smem[NUM_WARPS];
    return over_block(x, red_smem, [](float a, float b) { return fmaxf(a, b); });
}
__device__ __forceinline__ float block_sum(float x) {
    __shared__ float red_smem[NUM_WARPS];
    return over_block(x, red_smem, [](float a, float b) { return a + b; });
}

// The query in shared memory, for each thread of a group a row of vecs.
struct QVecs {
    float of[THREAD_GROUP_SIZE][NUM_VECS_PER_THREAD][VEC_SIZE];
};

__device__ __forceinline__ void load_query(const Decode &a, const Query &query, QVecs &q_vecs) {
    const int thread_group = threadIdx.x / THREAD_GROUP_SIZE, offset = threadIdx.x % THREAD_GROUP_SIZE;
    const long long q =
        query.of.s * a.query_sequence + token_of_row(a, query.of.row0) * a.query_token + query.head * HEAD_DIM;
    for (int i = thread_group; i < NUM_VECS_PER_THREAD; i += NUM_THREAD_GROUPS)
#pragma unroll
        for (int x = 0; x < VEC_SIZE; ++x)
            q_vecs.of[offset][i][x] = query_number(a, q + (offset + i * THREAD_GROUP_SIZE) * VEC_SIZE + x);
    __syncthreads();
}

// q · k of the token in a slot of a page, which all threads of the group get.
__device__ __forceinline__ float qk_dot(const unsigned char *k_ptr, const QVecs &q_vecs) {
    constexpr int VEC_BYTES = VEC_SIZE * CACHE_BYTES;
    const int offset = threadIdx.x % THREAD_GROUP_SIZE;
    Words<VEC_BYTES> k_vecs[NUM_VECS_PER_THREAD];
#pragma unroll
    for (int j = 0; j < NUM_VECS_PER_THREAD; ++j) {
        const int at = (offset + j * THREAD_GROUP_SIZE) * VEC_SIZE;  // the vec's first number in the head
        k_vecs[j] = load<VEC_BYTES>(k_ptr + (at / X * PAGE * X + at % X) * CACHE_BYTES);
    }
    float sums[VEC_SIZE] = {}, qk = 0;
#pragma unroll
    for (int j = 0; j < NUM_VECS_PER_THREAD; ++j) {
        float k[VEC_SIZE];
        unpack(k_vecs[j].word, k);
#pragma unroll
        for (int x = 0; x < VEC_SIZE; ++x) sums[x] += q_vecs.of[offset][j][x] * k[x];
    }
#pragma unroll
    for (int x = 0; x < VEC_SIZE; ++x) qk += sums[x];
#pragma unroll
    for (int mask = THREAD_GROUP_SIZE / 2; mask >= 1; mask /= 2) qk += __shfl_xor_sync(~0u, qk, mask);
    return qk;
}

// The scores of the tokens in pages `from` to `until` - 1, in order; -inf for those that are not seen. A warp takes
// every NUM_WARPS-th page. Returns the largest.
__device__ __forceinline__ float qk_max_and_logits(const Decode &a, const Query &query, const QVecs &q_vecs, int from,
                                                   int until, float *logits) {
    const int thread_group = threadIdx.x % WARP_SIZE / THREAD_GROUP_SIZE, offset = threadIdx.x % THREAD_GROUP_SIZE;
    const float factor = factor_of(a);
    const float slope = a.alibi_slopes ? a.alibi_slopes[query.head] * LOG2E : 0;
    float qk_max = NEG_INF;
    for (int page = from + threadIdx.x / WARP_SIZE; page < until; page += NUM_WARPS) {
        const bool read = sees_page(a, query, page);
        const unsigned char *const keys = key_of(a, query.of, page * PAGE);
#pragma unroll 1
        for (int i = 0; i < NUM_TOKENS_PER_THREAD_GROUP; ++i) {
            const int slot = thread_group + i * WARP_SIZE, token = page * PAGE + slot;
            float qk = NEG_INF;
            if (read) {
                qk = score_of(a, factor * qk_dot(keys + slot * X * CACHE_BYTES, q_vecs));
                if (a.alibi_slopes) qk += slope * (token - query.end + 1);
                if (token < query.first || token >= query.end) qk = NEG_INF;
            }
            if (offset == 0) logits[token - from * PAGE] = qk;
            qk_max = fmaxf(qk_max, qk);
        }
    }
    return block_max(qk_max);
}

// logits become exp(logits - qk_max) over the sum of those, which is returned.
__device__ __forceinline__ float softmax(float *logits, int count, float qk_max) {
    const float shift = finite_or_zero(qk_max);
    float exp_sum = 0;
    for (int i = threadIdx.x; i < count; i += THREADS) exp_sum += logits[i] = exp2_fast(logits[i] - shift);
    exp_sum = block_sum(exp_sum);
    const float inv_sum = exp_sum == 0 ? 0 : 1 / exp_sum;  // vLLM: 1 / (exp_sum + 1e-6)
    for (int i = threadIdx.x; i < count; i += THREADS) logits[i] *= inv_sum;
    __syncthreads();
    return exp_sum;
}

// Sums over tokens, of the rows that a thread has of a page: lane / NUM_V_VECS_PER_ROW, and every NUM_ROWS_PER_ITER
// further on.
struct Accs {
    float of[NUM_ROWS_PER_THREAD];

    __device__ __forceinline__ static int row(int i) {
        return threadIdx.x % WARP_SIZE / NUM_V_VECS_PER_ROW + i * NUM_ROWS_PER_ITER;
    }
    __device__ __forceinline__ static bool there(int i) {
        return HEAD_DIM % NUM_ROWS_PER_ITER == 0 || row(i) < HEAD_DIM;
    }
    // Calls what(row of the head, its sum) in the first of the lanes that share a row.
    template <typename Do>
    __device__ __forceinline__ void for_each(Do what) {
#pragma unroll
        for (int i = 0; i < NUM_ROWS_PER_THREAD; ++i)
            if (there(i) && threadIdx.x % NUM_V_VECS_PER_ROW == 0) what(row(i), of[i]);
    }
};

// Values times logits, summed over the pages of this warp.
__device__ __forceinline__ void add_values(const Decode &a, const Query &query, int from, int until,
                                           const float *logits, Accs &accs) {
    const int slot = threadIdx.x % NUM_V_VECS_PER_ROW * V_VEC_SIZE;
    for (int page = from + threadIdx.x / WARP_SIZE; page < until; page += NUM_WARPS) {
        if (!sees_page(a, query, page)) continue;
        const unsigned char *const values = value_of(a, query.of, page * PAGE);
        const int token = page * PAGE + slot;
        const bool whole = page * PAGE >= query.first && page * PAGE + PAGE <= query.end;
        float logits_vec[V_VEC_SIZE];
#pragma unroll
        for (int x = 0; x < V_VEC_SIZE; ++x) logits_vec[x] = logits[token - from * PAGE + x];
#pragma unroll
        for (int i = 0; i < NUM_ROWS_PER_THREAD; ++i) {
            if (!Accs::there(i)) break;
            float v_vec[V_VEC_SIZE];
            unpack(load<V_VEC_SIZE * CACHE_BYTES>(values + (Accs::row(i) * PAGE + slot) * CACHE_BYTES).word, v_vec);
#pragma unroll
            for (int x = 0; x < V_VEC_SIZE; ++x) {
                if (!whole && (token + x < query.first || token + x >= query.end)) v_vec[x] = 0;  // 0 * NaN is NaN
                accs.of[i] += logits_vec[x] * v_vec[x];
            }
        }
    }
}

// The sums of all threads, in the first warp: over the lanes that share a row, then again and again the upper half of
// the warps hands its sums to the lower half.
__device__ __forceinline__ void sum_over_block(Accs &accs, float *out_smem) {
#pragma unroll
    for (int i = 0; i < NUM_ROWS_PER_THREAD; ++i)
#pragma unroll
        for (int mask = NUM_V_VECS_PER_ROW / 2; mask >= 1; mask /= 2)
            accs.of[i] += __shfl_xor_sync(~0u, accs.of[i], mask);
    const int warp = threadIdx.x / WARP_SIZE;
#pragma unroll
    for (int half = NUM_WARPS / 2; half >= 1; half /= 2) {
        __syncthreads();  // the first time, all have read logits, which are in the same place
        float *const sums = out_smem + warp % half * HEAD_DIM;
        if (warp >= half && warp < 2 * half) accs.for_each([&](int row, float &acc) { sums[row] = acc; });
        __syncthreads();
        if (warp < half) accs.for_each([&](int row, float &acc) { acc += sums[row]; });
    }
}

// What V1 and V2 do: the answer of one query from the tokens in some pages. Row d of it is in the first warp, see
// Accs::for_each. `logits` has room for those tokens, and for HEAD_DIM numbers for each of half the warps.
struct Attended {
    float qk_max, exp_sum;
    Accs accs;
};
__device__ __forceinline__ Attended attend(const Decode &a, const Query &query, int from, int until, float *logits) {
    __shared__ QVecs q_vecs;
    load_query(a, query, q_vecs);
    Attended found = {};
    found.qk_max = qk_max_and_logits(a, query, q_vecs, from, until, logits);
    found.exp_sum = softmax(logits, (until - from) * PAGE, found.qk_max);
    add_values(a, query, from, until, logits, found.accs);
    sum_over_block(found.accs, logits);
    return found;
}

__device__ __forceinline__ void store_lse(const Decode &a, const Query &query, float qk_max, float exp_sum) {
    if (threadIdx.x == 0) a.lse[query.place] = exp_sum == 0 ? NEG_INF : qk_max * LN2 + logf(exp_sum);
}
