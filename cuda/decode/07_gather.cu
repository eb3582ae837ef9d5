// Gather: float32 prompts and chunks by the kernels of packed sequences.
//
// What changed: sequences of more than SHORT query tokens have their keys and values copied out of the pages, one
// sequence after the other, [tokens, Hkv, D] in float32. Attention of packed sequences does the rest
// (cuda/attention/), on tensor cores at fp32 accuracy. Shorter sequences are left to `grouped`.
// Why it is faster: `grouped` goes past all keys for each query token, on CUDA cores; here a key that has been copied
// serves 64 rows of queries or more, and what copying takes is little beside that.
// What it costs: scratch for these keys and values, and as much again for the parts that they are split into. The host
// knows no lengths, so each of a pass's sequences has room for as many tokens as its row of the table; what there is no
// room for is another pass.
//
// Launches: `lay_out`, one block; for each pass `gather`, any number of blocks, and then attention's; `finish`, any
// number of blocks. The workspace has, as struct Layout says, what they hand on.
#include "decode.cuh"

constexpr int TOKENS_AT_ONCE = 32;  // that a block copies, of one head

// Where things are in the workspace. Of each pass, the first row of each sequence among those of Q, and its first key
// among those that are gathered. Sequences that are not in the pass have no rows, or no keys.
struct Layout {
    int *q_starts, *k_starts;  // [passes][S + 1]
    int *low, *high;           // [passes]: the pass's first row, and the one after its last
    long long *begin;          // [passes + 1]: the tokens of longer sequences before the pass's first one
    long long *before;         // [S + 1]: those before each sequence
    float *lse;                // [H, total]
    float *keys, *values;      // [together * room, Hkv, D]

    __device__ __forceinline__ explicit Layout(const Decode &a) {
        const long long starts = (long long)a.passes * (a.sequences + 1), lses = (long long)a.heads * a.total;
        unsigned char *at = static_cast<unsigned char *>(a.workspace);
        const auto take = [&](long long bytes) {
            unsigned char *const from = at;
            at += (bytes + 15) / 16 * 16;
            return from;
        };
        q_starts = reinterpret_cast<int *>(take(4 * starts));
        k_starts = reinterpret_cast<int *>(take(4 * starts));
        low = reinterpret_cast<int *>(take(4LL * a.passes));
        high = reinterpret_cast<int *>(take(4LL * a.passes));
        begin = reinterpret_cast<long long *>(take(8LL * (a.passes + 1)));
        before = reinterpret_cast<long long *>(take(8LL * (a.sequences + 1)));
        lse = reinterpret_cast<float *>(take(4 * lses));
        keys = reinterpret_cast<float *>(take(4 * a.together * room_of(a) * a.kv_heads * HEAD_DIM));
        values = reinterpret_cast<float *>(at);
    }
};

__device__ __forceinline__ int cut(const Decode &a, int start) { return min(max(start, 0), a.total); }
__device__ __forceinline__ bool is_longer(const Decode &a, int s) {
    return a.query_starts[s + 1] - (long long)a.query_starts[s] > SHORT;
}

// The first warp goes past the sequences, 32 at a time: those that are longer are counted, and `together` of them in turn
// are a pass's. Then all threads write the starts. A pass takes the rows from its first sequence to its last; what is
// between them and shorter has no keys there, and so zeros for an answer, until `grouped` answers it.
extern "C" __global__ void __launch_bounds__(THREADS) lay_out(const Decode a) {
    const Layout to(a);
    for (int pass = threadIdx.x; pass < a.passes; pass += THREADS)
        to.begin[pass] = -1, to.low[pass] = to.high[pass] = 0;
    __syncthreads();
    if (threadIdx.x < 32) {
        long long tokens = 0;
        int longer = 0;
        for (int s0 = 0; s0 < a.sequences; s0 += 32) {
            const int s = s0 + threadIdx.x;
            const bool counts = s < a.sequences && is_longer(a, s);
            const int length = counts ? (int)min((long long)max(a.seq_lens[s], 0), room_of(a)) : 0;
            const unsigned all = __ballot_sync(~0u, counts);
            const int rank = longer + __popc(all & ((1u << threadIdx.x) - 1)), pass = rank / a.together;
            long long until = length;  // the sum up to this lane
#pragma unroll
            for (int apart = 1; apart < 32; apart *= 2) {
                const long long more = __shfl_up_sync(~0u, until, apart);
                if (threadIdx.x >= apart) until += more;
            }
            if (s < a.sequences) to.before[s] = tokens + until - length;
            if (counts && pass < a.passes) {
                if (rank % a.together == 0)
                    to.begin[pass] = tokens + until - length, to.low[pass] = cut(a, a.query_starts[s]);
                atomicMax(&to.high[pass], cut(a, a.query_starts[s + 1]));
            }
            longer += __popc(all), tokens += __shfl_sync(~0u, until, 31);
        }
        __syncwarp();
        if (threadIdx.x == 0) to.before[a.sequences] = to.begin[a.passes] = tokens;
        for (int pass = threadIdx.x; pass < a.passes; pass += 32)  // those without sequences begin where all have ended
            if (to.begin[pass] < 0) to.begin[pass] = tokens;
    }
    __syncthreads();
    for (int i = threadIdx.x; i < a.passes * (a.sequences + 1); i += THREADS) {
        const int pass = i / (a.sequences + 1), s = i % (a.sequences + 1);
        const long long begin = to.begin[pass], end = to.begin[pass + 1];
        to.q_starts[i] = max(to.low[pass], min(cut(a, a.query_starts[s]), to.high[pass]));
        to.k_starts[i] = (int)(max(begin, min(to.before[s], end)) - begin);
    }
}

// The sequence that has the gathered token of this number: the last one that starts at it or before.
__device__ __forceinline__ int sequence_with(const int *starts, int sequences, int token) {
    int low = 0, high = sequences;
    while (high - low > 1) {
        const int middle = low + (high - low) / 2;
        if (__ldg(starts + middle) <= token) low = middle;
        else high = middle;
    }
    return low;
}

// Keys and values of the pass, each number times its scale.
extern "C" __global__ void __launch_bounds__(THREADS) gather(const Decode a) {
    __shared__ const unsigned char *keys[TOKENS_AT_ONCE], *values[TOKENS_AT_ONCE];
    const Layout to(a);
    const int *const starts = to.k_starts + a.pass * (long long)(a.sequences + 1);
    const int count = starts[a.sequences];
    const float k_scale = a.k_scale ? *a.k_scale : 1, v_scale = a.v_scale ? *a.v_scale : 1;
    const int tiles = ceil_div_large(count, TOKENS_AT_ONCE) * a.kv_heads;
    for (int tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        const int first = tile / a.kv_heads * TOKENS_AT_ONCE, kv_head = tile % a.kv_heads;
        const int here = min(TOKENS_AT_ONCE, count - first);
        __syncthreads();  // all have copied
        if (threadIdx.x < here) {
            const int s = sequence_with(starts, a.sequences, first + threadIdx.x),
                      token = first + threadIdx.x - starts[s];
            const Sequence of = {s, kv_head, 0, token + 1, a.block_tables + s * a.table_row};
            keys[threadIdx.x] = key_of(a, of, token), values[threadIdx.x] = value_of(a, of, token);
        }
        __syncthreads();
        const auto place = [&](int i) { return ((long long)(first + i) * a.kv_heads + kv_head) * HEAD_DIM; };
        const auto copy = [&](const unsigned char *from, float scale, float *into) {
            float x[X];
            unpack(load<VECTOR_BYTES>(from).word, x);
#pragma unroll
            for (int n = 0; n < X; ++n) into[n] = x[n] * scale;
        };
        for (int u = threadIdx.x; u < here * CHUNKS; u += THREADS) {
            const int i = u / CHUNKS, c = u % CHUNKS;
            copy(keys[i] + c * a.key_chunk * CACHE_BYTES, k_scale, to.keys + place(i) + c * X);
            if (!TRANSPOSED) copy(values[i] + c * VECTOR_BYTES, v_scale, to.values + place(i) + c * X);
        }
        for (int u = threadIdx.x; u < (TRANSPOSED ? here * HEAD_DIM : 0); u += THREADS) {
            const int i = u / HEAD_DIM, d = u % HEAD_DIM;
            float x[1];
            unpack(load<CACHE_BYTES>(values[i] + d * PAGE * CACHE_BYTES).word, x);
            to.values[place(i) + d] = x[0] * v_scale;
        }
    }
}

// The LSE of longer sequences, which attention has [H, total], and zeros and -inf for the query tokens of none. A warp
// takes a token.
extern "C" __global__ void __launch_bounds__(THREADS) finish(const Decode a) {
    const Layout from(a);
    const int lane = threadIdx.x % 32, warps = gridDim.x * (THREADS / 32);
    for (int token = blockIdx.x * (THREADS / 32) + threadIdx.x / 32; token < a.total; token += warps) {
        const int s = owner_of(a, token);
        const bool is_there = s >= 0 && s < a.sequences;
        if (is_there && !is_longer(a, s)) continue;
        for (int h = lane; h < a.heads; h += 32)
            a.lse[(long long)token * a.heads + h] = is_there ? from.lse[(long long)h * a.total + token] : NEG_INF;
        if (is_there) continue;
        for (int x = lane; x < a.heads * HEAD_DIM; x += 32)
            store_answer(a, (long long)token * a.heads * HEAD_DIM + x, 0);
    }
}
