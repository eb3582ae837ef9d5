// Tangents by FFMA, with register tiles: for heads of any length, and for what is not finite.
//
// What it computes: the formulas of tangents.cuh, a pair of tiles at a time. S, tS, dP and dO tVᵀ are five products of a
// tile of queries and one of keys, for which both are brought to shared memory, one product after the other. `of_rows`
// finds what rows have in common, then `rows` adds up tO and tdQ of the queries that a block owns, and `keys` tdK and
// tdV of keys. Each block adds up what it owns by itself, in one order: the answer is the same every time.
// What it costs: 15 of 22 products are for scores, which each of the three computes again; for nothing is kept of a
// score. The tiles of a product are read when it begins: a multiprocessor needs two blocks, of which one multiplies
// while the other waits.
#include "register_tiles.cuh"
#include "tangents.cuh"

struct Shared {
    float4 *const own = shared, *const pass = own + OWN_SIZE;
    float4 *const P = pass + PASS_SIZE, *const tP = P + SCORES, *const dS = tP + SCORES, *const tdS = dS + SCORES;
};
static_assert(SHARED == 16 * (OWN_SIZE + PASS_SIZE + 4 * SCORES), "room for these");

// sum += x pass, from zero. SPARED: what P says to be unseen meets nothing, for something is not finite.
template <bool SPARED>
__device__ __forceinline__ void accumulate(Sum &to, const float4 *x, const float4 *P, const float4 *pass,
                                           const Thread &t) {
    constexpr int SOME = COLUMNS % 8 == 0 ? 8 : 4;
    const int x_at = t.r0 * (PASS / 4), swizzle = swizzle_own(t.r0);
#pragma unroll
    for (int from = 0; from < COLUMNS; from += SOME) {
        float sum[OWN_ROWS][SOME] = {};
#pragma unroll 1
        for (int c = 0; c < PASS / 4; ++c) {
            float4 left[OWN_ROWS], p[OWN_ROWS];
#pragma unroll
            for (int i = 0; i < OWN_ROWS; ++i) {
                left[i] = x[x_at + i * (PASS / 4) + (c ^ swizzle)];
                if (SPARED) p[i] = P[x_at + i * (PASS / 4) + (c ^ swizzle)];
            }
#pragma unroll
            for (int j = 0; j < 4; ++j)
#pragma unroll
                for (int y = 0; y < SOME; y += 4) {
                    const int at = (4 * c + j) * CHUNKS + ((t.across + 2 * (from + y)) ^ swizzle_pass(4 * c));
                    const float4 right = pass[at];
#pragma unroll
                    for (int z = 0; z < 4; ++z)
#pragma unroll
                        for (int i = 0; i < OWN_ROWS; ++i)
                            if (!SPARED || !is_unseen(part(p[i], j)))
                                sum[i][y + z] += part(left[i], j) * part(right, z);
                }
        }
#pragma unroll
        for (int e = 0; e < OWN_ROWS * SOME; ++e) to[e / SOME][from + e % SOME] += sum[e / SOME][e % SOME];
    }
}

// A matrix of queries or of keys, as the arguments have it.
struct Matrix {
    const float *data;
    Strides by;
};

// A tile of queries, from i0 on, and one of keys, from j0 on. The block owns the queries, or with OF_KEYS the keys.
template <bool OF_KEYS>
struct Pair {
    const Tangents &a;
    const Head head;
    const int i0, j0;
    const Shared at;
    const Thread t;

    __device__ __forceinline__ int query(int own, int passing) const {
        return i0 + (OF_KEYS ? t.passing(passing) : t.r0 + own);
    }
    __device__ __forceinline__ int key(int own, int passing) const {
        return j0 + (OF_KEYS ? t.r0 + own : t.passing(passing));
    }
    // s = the product of rows of two matrices.
    __device__ __forceinline__ void product(Scores &s, Matrix queries, Matrix keys) const {
        const float *const x = rows_of(queries.data, queries.by, head.b, head.h);
        const float *const y = rows_of(keys.data, keys.by, head.b, head.kv);
        __syncthreads();  // nobody reads the tiles of before any more
        if (OF_KEYS) {
            copy_own(at.own, y, keys.by.row, j0, a.of.N), copy_pass(at.pass, x, queries.by.row, i0, a.of.M);
        } else {
            copy_own(at.own, x, queries.by.row, i0, a.of.M), copy_pass(at.pass, y, keys.by.row, j0, a.of.N);
        }
        await_tiles();
        multiply(s, at.own, at.pass, t);
    }
    // s = Q Kᵀ and ts = tQ Kᵀ + Q tKᵀ.
    __device__ __forceinline__ void products_of_S(Scores &s, Scores &ts) const {
        const Matrix Q = {a.of.Q, a.of.q}, K = {a.of.K, a.of.k};
        product(ts, {a.tQ, a.tq}, K);
        product(s, Q, {a.tK, a.tk});
#pragma unroll
        for (int e = 0; e < OWN_ROWS * PASS_ROWS; ++e)
            ts[e / PASS_ROWS][e % PASS_ROWS] += s[e / PASS_ROWS][e % PASS_ROWS];
        product(s, Q, K);
    }
    // dp = dO Vᵀ and tdp = dO tVᵀ.
    __device__ __forceinline__ void products_of_dP(Scores &dp, Scores &tdp) const {
        const Matrix dO = {a.of.dO, a.of.d_o};
        product(dp, dO, {a.of.V, a.of.v});
        product(tdp, dO, {a.tV, a.tv});
    }
    __device__ __forceinline__ Common common(int x, int y) const {
        return common_of(a.of, head, min(query(x, y), a.of.M - 1));
    }
    // P, tP, dS and tdS of all scores, to shared memory: the first two before the others, for want of registers.
    __device__ __forceinline__ void scores() const {
        Scores first, second;
        products_of_S(first, second);
#pragma unroll
        for (int x = 0; x < OWN_ROWS; ++x)
#pragma unroll
            for (int y = 0; y < PASS_ROWS; ++y) {
                float &p = first[x][y], &tp = second[x][y];
                const Common row = common(x, y);
                p = p_of(a.of, head, query(x, y), key(x, y), p, a.of.scale * LOG2E, row.above, row.inverse);
                tp = is_unseen(p) ? 0 : p * ((tp - row.R) * a.of.scale);
            }
        store(at.P, first, t), store(at.tP, second, t);
        if (!GRADIENTS) return;
        products_of_dP(first, second);
#pragma unroll
        for (int x = 0; x < OWN_ROWS; ++x)
#pragma unroll
            for (int y = 0; y < PASS_ROWS; y += 4) {
                const float4 P = at.P[place(x, y)], tP = at.tP[place(x, y)];
#pragma unroll
                for (int z = 0; z < 4; ++z) {
                    const Common row = common(x, y + z);
                    const float p = part(P, z), dp = first[x][y + z] - row.D, tdp = second[x][y + z] - row.tD;
                    first[x][y + z] = is_unseen(p) ? 0 : p * dp;
                    second[x][y + z] = is_unseen(p) ? 0 : fmaf(part(tP, z), dp, p * tdp);
                }
            }
        store(at.dS, first, t), store(at.tdS, second, t);
    }
    // Where `store` has put four scores of this thread.
    __device__ __forceinline__ int place(int x, int y) const {
        return (t.r0 + x) * (PASS / 4) + ((t.across + 2 * y) ^ swizzle_own(t.r0));
    }
    // sum += x times the rows of a matrix that pass by.
    __device__ __forceinline__ void add(Sum &sum, const float4 *x, Matrix matrix) const {
        const float *const rows = rows_of(matrix.data, matrix.by, head.b, OF_KEYS ? head.h : head.kv);
        __syncthreads();
        copy_pass(at.pass, rows, matrix.by.row, OF_KEYS ? i0 : j0, OF_KEYS ? a.of.M : a.of.N);
        await_tiles();
        if (are_spoilt(at.pass, at.pass)) accumulate<true>(sum, x, at.P, at.pass, t);
        else accumulate<false>(sum, x, at.P, at.pass, t);
    }
};

// The tiles of all heads, by blocks of which there may be fewer: what another kernel leaves is mostly nothing.
template <class Compute>
__device__ __forceinline__ void for_each_tile(const Backward &a, unsigned heads, int rows, Compute compute) {
    if (none_is_wanted(a)) return;
    const unsigned of_head = ceil_div(rows, OWN);
#pragma unroll 1
    for (unsigned tile = blockIdx.x; tile < heads * of_head; tile += gridDim.x) {
        compute(tile / of_head, tile % of_head * OWN);
        __syncthreads();
    }
}
// The tiles of keys that some of the queries from i0 on see: compute(j0) for each.
template <class Compute>
__device__ __forceinline__ void for_tiles_of_keys(const Backward &a, int i0, Compute compute) {
    const int keys = keys_seen(a, min(i0 + OWN, a.M) - 1);
#pragma unroll 1
    for (int j0 = keys_hidden(a, i0) / PASS * PASS; j0 < keys; j0 += PASS) compute(j0);
}

__device__ __forceinline__ void of_rows_of(const Tangents &a, Head head, int i0) {
    const Thread t;
    float above[OWN_ROWS];
    Means means[OWN_ROWS];
#pragma unroll
    for (int x = 0; x < OWN_ROWS; ++x) above[x] = above_of(a.of, head, min(i0 + t.r0 + x, a.of.M - 1));
    for_tiles_of_keys(a.of, i0, [&](int j0) {
        const Pair<false> pair = {a, head, i0, j0, {}, t};
        Scores p, ts, dp, tdp;
        pair.products_of_S(p, ts);
        if (GRADIENTS) pair.products_of_dP(dp, tdp);
#pragma unroll
        for (int x = 0; x < OWN_ROWS; ++x) {
#pragma unroll
            for (int y = 0; y < PASS_ROWS; ++y) {
                p[x][y] = p_of(a.of, head, i0 + t.r0 + x, pair.key(x, y), p[x][y], a.of.scale * LOG2E, above[x], 1);
                const bool unseen = is_unseen(p[x][y]);
                if (a.of.N == 1 && !unseen) p[x][y] = 1;  // exactly: means are then just what they are taken from
                ts[x][y] = unseen ? 0 : ts[x][y];
                if (GRADIENTS) dp[x][y] = unseen ? 0 : dp[x][y], tdp[x][y] = unseen ? 0 : tdp[x][y];
            }
            means[x].add<PASS_ROWS>(p[x], ts[x], dp[x], tdp[x], a.of.scale, [](int y) { return y; });
        }
    });
#pragma unroll
    for (int x = 0; x < OWN_ROWS; ++x) {
        for (int lanes = 1; lanes <= 8; lanes *= lanes == 1 ? 4 : 2) means[x].merge_lanes(lanes, a.of.scale);
        if (t.across == 0 && i0 + t.r0 + x < a.of.M) means[x].keep(a.of, a.tlse, head, i0 + t.r0 + x, above[x]);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) of_rows(const Tangents a) {
    for_each_tile(a.of, a.of.B * a.of.H, a.of.M, [&](int index, int i0) {
        const Head head = head_of(a.of, index);
        if (is_wanted(a.of, head.b, head.kv)) of_rows_of(a, head, i0);
    });
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) rows(const Tangents a) {
    for_each_tile(a.of, a.of.B * a.of.H, a.of.M, [&](int index, int i0) {
        const Head head = head_of(a.of, index);
        if (!is_wanted(a.of, head.b, head.kv)) return;
        const Thread t;
        Sum tO = {}, tdQ = {};
        for_tiles_of_keys(a.of, i0, [&](int j0) {
            const Pair<false> pair = {a, head, i0, j0, {}, t};
            pair.scores();
            pair.add(tO, pair.at.tP, {a.of.V, a.of.v});
            pair.add(tO, pair.at.P, {a.tV, a.tv});
            if (!GRADIENTS) return;
            pair.add(tdQ, pair.at.tdS, {a.of.K, a.of.k});
            pair.add(tdQ, pair.at.dS, {a.tK, a.tk});
        });
#pragma unroll
        for (int x = 0; x < OWN_ROWS; ++x) {
            const int i = i0 + t.r0 + x;
            if (i >= a.of.M) continue;
            write(rows_of(a.tO, a.to, head.b, head.h) + i * a.to.row, tO[x], 1, t);
            if (GRADIENTS) write(rows_of(a.of.dQ, a.of.dq, head.b, head.h) + i * a.of.dq.row, tdQ[x], a.of.scale, t);
        }
    });
}

#if GRADIENTS
extern "C" __global__ void __launch_bounds__(THREADS, 1) keys(const Tangents a) {
    for_each_tile(a.of, a.of.B * a.of.Hkv, a.of.N, [&](int index, int j0) {
        const int b = index / a.of.Hkv, kv = index % a.of.Hkv, group = a.of.H / a.of.Hkv;
        if (!is_wanted(a.of, b, kv)) return;
        const Thread t;
        Sum tdK = {}, tdV = {};
#pragma unroll 1
        for (int h = kv * group; h < (kv + 1) * group; ++h)
#pragma unroll 1
            for (int i0 = first_query(a.of, j0) / PASS * PASS; i0 < end_query(a.of, j0 + OWN - 1); i0 += PASS) {
                const Pair<true> pair = {a, {b, h, kv}, i0, j0, {}, t};
                pair.scores();
                pair.add(tdK, pair.at.tdS, {a.of.Q, a.of.q});
                pair.add(tdK, pair.at.dS, {a.tQ, a.tq});
                pair.add(tdV, pair.at.tP, {a.of.dO, a.of.d_o});
            }
#pragma unroll
        for (int x = 0; x < OWN_ROWS; ++x) {
            const int key = j0 + t.r0 + x;
            if (key >= a.of.N) continue;
            write(rows_of(a.of.dK, a.of.dk, b, kv) + key * a.of.dk.row, tdK[x], a.of.scale, t);
            write(rows_of(a.of.dV, a.of.dv, b, kv) + key * a.of.dv.row, tdV[x], 1, t);
        }
    });
}
#endif
