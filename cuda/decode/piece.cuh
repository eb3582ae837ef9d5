// The three steps of attention for some tokens of one sequence, with CUDA cores: scores, softmax, the sum of values.
// `grouped` and `split` differ in which tokens a block takes, not in these.
//
// Scores are in powers of two: their factor is scale * k_scale * log2(e). What a block keeps in shared memory:
//   q [ROWS][HEAD_DIM]    the queries           S [ROWS][stride]   scores, then P = 2^(S - m)
//   m, l [ROWS]           running maximum and sum      rescale [ROWS]  2^(m_old - m), for what was summed before
#pragma once
#include "answer.cuh"

constexpr int LANES = 2;  // threads that share a token's key
constexpr int TOKENS_AT_ONCE = THREADS / LANES;
static_assert(THREADS % 32 == 0 && THREADS >= 32, "whole warps");

// Long heads, and fp8 that is converted by hand, take registers: then fewer blocks have a multiprocessor's, and spill
// none.
constexpr bool FEWER_BLOCKS = HEAD_DIM > 128 || (CACHE_TYPE >= E4M3 && CACHE_TYPE <= E5M2 && !CONVERTS_FP8);

struct Running {
    float m[ROWS], l[ROWS], rescale[ROWS];
};

__device__ __forceinline__ void load_queries(const Decode &a, const Sequence &of, float *q, Running &running) {
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int row = of.row0 + i / HEAD_DIM;
        if (row < rows_of(a)) {
            const long long at = of.s * a.query_sequence + token_of_row(a, row) * a.query_token;
            q[i] = query_number(a, at + head_of_row(a, of.kv_head, row) * HEAD_DIM + i % HEAD_DIM);
        } else q[i] = 0;
    }
    for (int r = threadIdx.x; r < ROWS; r += THREADS) running.m[r] = NEG_INF, running.l[r] = 0;
    __syncthreads();
}

// S[r][j] = q_r · k_(first + j) + ALiBi's share, for tokens first to end - 1; -inf where row r does not see the token.
// Tokens that no row sees are not read. seen[j] says whether some row does.
__device__ __forceinline__ void scores(const Decode &a, const Sequence &of, const float *q, int first, int end,
                                       float *S, int stride, unsigned char *seen) {
    const int lane = threadIdx.x % LANES;
    const float factor = factor_of(a);  // on scores: on q it would round D numbers
    for (int j0 = 0; j0 < end - first; j0 += TOKENS_AT_ONCE) {
        const int j = j0 + threadIdx.x / LANES, token = first + j;
        bool some = false, sees_it[ROWS];
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
            sees_it[r] = j < end - first && of.row0 + r < rows_of(a) && sees(a, of, of.row0 + r, token);
            some |= sees_it[r];
        }
        float s[ROWS] = {};
        if (some) {
            const unsigned char *const key = key_of(a, of, token);
#pragma unroll
            for (int i = 0; i < ceil_div(CHUNKS, LANES); ++i) {
                const int c = i * LANES + lane;
                if (CHUNKS % LANES != 0 && c >= CHUNKS) break;
                float k[X];
                unpack(load<VECTOR_BYTES>(key + c * a.key_chunk * CACHE_BYTES).word, k);
#pragma unroll
                for (int r = 0; r < ROWS; ++r) {
                    float sum = 0;  // of this vector alone: fewer additions to a large sum, smaller errors
#pragma unroll
                    for (int x = 0; x < X; ++x) sum += q[r * HEAD_DIM + c * X + x] * k[x];
                    s[r] += sum;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < ROWS; ++r) {
#pragma unroll
            for (int other = 1; other < LANES; other *= 2) s[r] += __shfl_xor_sync(~0u, s[r], other);
            s[r] = score_of(a, s[r] * factor);
            if (a.alibi_slopes && sees_it[r]) {
                const int row = of.row0 + r, distance = token - position_of_row(a, of, row);
                s[r] += a.alibi_slopes[head_of_row(a, of.kv_head, row)] * LOG2E * distance;
            }
            if (lane == 0 && j < end - first) S[r * stride + j] = sees_it[r] ? s[r] : NEG_INF;
        }
        if (lane == 0 && j < end - first) seen[j] = some;
    }
    __syncthreads();
}

// S becomes P = 2^(S - m), and m, l and rescale are those after these tokens too. A warp takes a row.
__device__ __forceinline__ void softmax(float *S, int stride, int count, Running &running) {
    const int lane = threadIdx.x % 32;
    for (int r = threadIdx.x / 32; r < ROWS; r += THREADS / 32) {
        float *const row = S + r * stride, old = running.m[r];
        float m = old, l = 0;
        for (int j = lane; j < count; j += 32) m = row[j] > m || row[j] != row[j] ? row[j] : m;  // NaN is not lost
        for (int other = 16; other > 0; other /= 2) {
            const float theirs = __shfl_xor_sync(~0u, m, other);
            m = theirs > m || theirs != theirs ? theirs : m;
        }
        for (int j = lane; j < count; j += 32) {
            row[j] = exp2_fast(row[j] - finite_or_zero(m));
            l += row[j];
        }
        for (int other = 16; other > 0; other /= 2) l += __shfl_xor_sync(~0u, l, other);
        __syncwarp();  // all have read the old maximum
        if (lane == 0) {
            running.rescale[r] = exp2_fast(old - finite_or_zero(m));
            running.l[r] = running.l[r] * running.rescale[r] + l;
            running.m[r] = m;
        }
    }
    __syncthreads();
}

// O += P V. How threads share the work depends on how values lie; `collect` adds up what they have.
#if !TRANSPOSED
// A row of a token's value is CHUNKS vectors: that many threads take a token, and as many tokens at once as there are
// threads for.
constexpr int TEAMS = THREADS / CHUNKS, OWN = X;
#else
// A vector is some slots of one number d: four threads take a number, vectors of tokens in turn, each several numbers.
constexpr int V_SLOTS = smaller(X, PAGE), V_LANES = 4, D_AT_ONCE = THREADS / V_LANES,
              OWN = ceil_div(HEAD_DIM, D_AT_ONCE);
#endif

__device__ __forceinline__ void add_values(const Decode &a, const Sequence &of, int first, int end, const float *P,
                                           int stride, const unsigned char *seen, const Running &running,
                                           float (&o)[ROWS][OWN]) {
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int x = 0; x < OWN; ++x) o[r][x] *= running.rescale[r];
#if !TRANSPOSED
    const int c = threadIdx.x % CHUNKS, team = threadIdx.x / CHUNKS;
    if (team >= TEAMS) return;
#pragma unroll 4
    for (int j = team; j < end - first; j += TEAMS) {
        if (!seen[j]) continue;  // it may hold anything: 0 * NaN is NaN
        float v[X];
        unpack(load<VECTOR_BYTES>(value_of(a, of, first + j) + c * VECTOR_BYTES).word, v);
#pragma unroll
        for (int r = 0; r < ROWS; ++r)
#pragma unroll
            for (int x = 0; x < X; ++x) o[r][x] += P[r * stride + j] * v[x];
    }
#else
    const int lane = threadIdx.x % V_LANES, d0 = threadIdx.x / V_LANES;
    for (int token = first / V_SLOTS * V_SLOTS + lane * V_SLOTS; token < end; token += V_LANES * V_SLOTS) {
        const unsigned char *const values = value_of(a, of, token);
        float p[ROWS][V_SLOTS];
        bool kept[V_SLOTS], some = false;
#pragma unroll
        for (int x = 0; x < V_SLOTS; ++x) {
            const int j = token + x - first;
            kept[x] = token + x < end && j >= 0 && seen[j];  // others may hold anything: 0 * NaN is NaN
            some |= kept[x];
#pragma unroll
            for (int r = 0; r < ROWS; ++r) p[r][x] = kept[x] ? P[r * stride + j] : 0;
        }
        if (!some) continue;
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            const int d = d0 + i * D_AT_ONCE;
            if (HEAD_DIM % D_AT_ONCE != 0 && d >= HEAD_DIM) break;
            float v[V_SLOTS];
            unpack(load<V_SLOTS * CACHE_BYTES>(values + d * PAGE * CACHE_BYTES).word, v);
#pragma unroll
            for (int x = 0; x < V_SLOTS; ++x)
#pragma unroll
                for (int r = 0; r < ROWS; ++r) o[r][i] += p[r][x] * (kept[x] ? v[x] : 0);
        }
    }
#endif
}

// The sums of all threads as O [ROWS][HEAD_DIM] in shared memory, added in a fixed order.
__device__ __forceinline__ void collect(const float (&o)[ROWS][OWN], float *O) {
    __syncthreads();  // O may be where P was
#if !TRANSPOSED
    const int c = threadIdx.x % CHUNKS, own = threadIdx.x / CHUNKS;
    for (int team = 0; team < TEAMS; ++team) {
        if (own == team)
#pragma unroll
            for (int r = 0; r < ROWS; ++r)
#pragma unroll
                for (int x = 0; x < X; ++x) {
                    float &sum = O[r * HEAD_DIM + c * X + x];
                    sum = team == 0 ? o[r][x] : sum + o[r][x];
                }
        __syncthreads();
    }
#else
    const int lane = threadIdx.x % V_LANES, d0 = threadIdx.x / V_LANES;
#pragma unroll
    for (int r = 0; r < ROWS; ++r)
#pragma unroll
        for (int i = 0; i < OWN; ++i) {
            float sum = o[r][i];
            for (int other = 1; other < V_LANES; other *= 2) sum += __shfl_xor_sync(~0u, sum, other);
            if (lane == 0 && d0 + i * D_AT_ONCE < HEAD_DIM) O[r * HEAD_DIM + d0 + i * D_AT_ONCE] = sum;
        }
    __syncthreads();
#endif
}

__device__ __forceinline__ void answer(const Decode &a, const Sequence &of, const Running &running, const float *O) {
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int r = i / HEAD_DIM, row = of.row0 + r;
        if (row < rows_of(a))
            answer_number(a, place_of_row(a, of, row), i % HEAD_DIM, running.m[r], running.l[r], O[i]);
    }
}

// The partial answer of each of the block's rows, with this number among `count`.
__device__ __forceinline__ void keep_partials(const Decode &a, const Sequence &of, float *partials, int count,
                                              int number, const Running &running, const float *O) {
    for (int i = threadIdx.x; i < ROWS * HEAD_DIM; i += THREADS) {
        const int r = i / HEAD_DIM, row = of.row0 + r;
        if (row >= rows_of(a)) break;
        keep_number(partials, place_of_row(a, of, row) * count + number, i % HEAD_DIM, running.m[r], running.l[r],
                    O[i]);
    }
}
