// The gradients of a head of up to 128 rows in one pass: what 06_mma_short.cu and 07_wgmma_whole.cu share.
//
// A warp has 16 queries, whose scores of all keys are in its registers, and 16 keys. It reads these rows of Q, dO, K and
// V, and leaves halves in shared memory. Room there is short: Q comes once more, from the cache, when V is not needed any
// more; dP waits for D where P's halves are to be; and dS, of which registers keep the halves, follows P there.
#pragma once
#include "exact_head.cuh"
#define FOUR (D <= 32)  // of longer heads too much would be read at once
#include "short.cuh"

#ifndef P_COLUMNS
#define P_COLUMNS BC  // of the tile of P and dS: keys
#endif

constexpr int WARPS = THREADS / 32, ROW_STEPS = BR / 16;
constexpr int OF_Q = split_bytes(BR, D), OF_K = split_bytes(BC, D), OF_P = split_bytes(BR, P_COLUMNS);
constexpr float P_BIAS = 14;  // P, at most 1, is times 2^14

// What truncation takes of sums (split.cuh), and is given back: of those over numbers of a head, over queries, over keys.
constexpr float OF_dP = (0.38f + 0.0175f * HEAD_DIM) * TRUNCATED, OF_QUERIES = 1 + (0.4f + 0.022f * BR) * TRUNCATED,
                OF_KEYS = 1 + (0.4f + 0.022f * BC) * TRUNCATED;

static_assert(!NOTES, "a block computes a head that is not finite itself");
static_assert(16 * WARPS >= BR && 16 * WARPS >= BC && BR % 16 == 0, "a warp has 16 queries and 16 keys");
// All shared memory is dynamic, so that it begins on 1024 bytes, as wgmma wants tiles, without any to spare.
struct Beside {
    uint4 of_warps[2][WARPS];
    int4 exponents;  // of Q, dO, K and V in shared memory: kept there, they take no registers
};
constexpr int TILES = OF_Q + OF_K + larger(OF_Q, OF_K) + OF_P;
static_assert(SHARED == TILES + sizeof(Beside), "dO; K; V, then Q; dP, then P, then dS; and what is beside");
extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ float unit(int exponent) { return power_of_two(max(-126, min(127, -exponent))); }

// Two halves times two others.
__device__ __forceinline__ unsigned times(unsigned a, unsigned b) {
    unsigned y;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(y) : "r"(a), "r"(b));
    return y;
}

// The largest of what each warp has four of, none of them negative. In it is a barrier.
__device__ __forceinline__ uint4 block_max(uint4 x, uint4 (&of_warps)[WARPS]) {
    x = {__reduce_max_sync(~0u, x.x), __reduce_max_sync(~0u, x.y), __reduce_max_sync(~0u, x.z),
         __reduce_max_sync(~0u, x.w)};
    if (threadIdx.x % 32 == 0) of_warps[threadIdx.x / 32] = x;
    __syncthreads();
#pragma unroll
    for (int w = 0; w < WARPS; ++w) {
        const uint4 other = of_warps[w];
        x = {max(x.x, other.x), max(x.y, other.y), max(x.z, other.z), max(x.w, other.w)};
    }
    return x;
}

// Two neighbours of a row, split, to a split tile of R rows and C columns.
template <int R, int C>
__device__ __forceinline__ void store_two(unsigned char *tile, int row, int column, float x, float y, float factor) {
    unsigned hi, lo;
    split_scaled(x, y, factor, hi, lo);
    *reinterpret_cast<unsigned *>(tile + split_offset<R>(row, column)) = hi;
    *reinterpret_cast<unsigned *>(tile + split_offset<R>(row, C + column)) = lo;
}
template <int R>
__device__ __forceinline__ void store_rows(unsigned char *tile, int row, const TwoRows &rows, float factor) {
    if (16 * WARPS > R && row >= R) return;
#pragma unroll
    for (int x = 0; x < D / 4; ++x)
        store_two<R, D>(tile, row + x % 2 * 8, x / 2 * 8 + threadIdx.x % 4 * 2, rows.x[x % 2][x / 2][0],
                        rows.x[x % 2][x / 2][1], factor);
}
// Where the tile of P and dS has the halves of query `row` and of `key` and the next, or before that two floats.
struct Pair {
    unsigned *hi, *lo;
    __device__ __forceinline__ Pair(unsigned char *tile, int row, int key)
        : hi(reinterpret_cast<unsigned *>(tile + split_offset<BR>(row, key))),
          lo(reinterpret_cast<unsigned *>(tile + split_offset<BR>(row, P_COLUMNS + key))) {}
    __device__ __forceinline__ void put(float x, float y) const { *hi = __float_as_uint(x), *lo = __float_as_uint(y); }
    __device__ __forceinline__ float2 get() const { return make_float2(__uint_as_float(*hi), __uint_as_float(*lo)); }
};

// Halves as they are multiplied, each row by a power of two of at most 1, to the tile of P and dS.
__device__ __forceinline__ void store_scaled(unsigned char *tile, int row, const Fragment (&hi)[P_STEPS],
                                             const Fragment (&lo)[P_STEPS], const int (&exponent)[2]) {
    row = opaque(row);  // its address is no other tile's, to be kept
    unsigned factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float power = exponent[r] < -24 ? 0 : power_of_two(min(exponent[r], 0));  // above 0: of a row of zeros
        factor[r] = pack(power, power);
    }
#pragma unroll
    for (int n = 0; n < P_STEPS; ++n)
#pragma unroll
        for (int x = 0; x < 4; ++x) {
            const Pair to(tile, row + x % 2 * 8, 16 * n + x / 2 * 8 + threadIdx.x % 4 * 2);
            *to.hi = times(hi[n].x[x], factor[x % 2]), *to.lo = times(lo[n].x[x], factor[x % 2]);
        }
}

// Rows i and i + 8 of a sum, each times two factors, to memory.
__device__ __forceinline__ void give(Gradient *rows, long long stride, int i, int count,
                                     const float (&sum)[K_STEPS][2][4], float2 factor, float2 factor8) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (i + 8 * r >= count) continue;
        const float2 by = r ? factor8 : factor;
        write_row(rows + (i + 8 * r) * stride, [&](int c) {
            const float *const two = &sum[c / 2][c % 2][2 * r];
            return make_float2(two[0] * by.x * by.y, two[1] * by.x * by.y);
        });
    }
}

// The gradients of a head, by all threads of its block. What multiplies is `Products`, ROWS of a head together, whose
// functions are static:
//   scores   S of 16 queries a warp, from their fragments and K;
//   for_dP   calls a function for each 16 keys with their dP, from fragments and V;
//   dQ       of 16 queries a warp, from fragments of dS and K;
//   of_keys  of 16 keys a warp, from P or dS in shared memory and dO or Q: dV or dK;
//   publish  shows others what this thread has stored: before a barrier.
template <class Products>
__device__ __forceinline__ void one_pass(const Backward &a) {
    Beside &beside = *reinterpret_cast<Beside *>(shared + TILES);
    int4 &exponents = beside.exponents;
    unsigned char *const dO_tile = shared, *const K_tile = dO_tile + OF_Q, *const V_tile = K_tile + OF_K,
                         *const Q_tile = V_tile, *const P_tile = V_tile + larger(OF_Q, OF_K);
    const int b = a.H == 1 ? blockIdx.x : blockIdx.x / a.H, h = blockIdx.x - b * a.H;
    const Head head = {b, h, h};                                            // each head of Q has its own of K
    const int own = threadIdx.x / 32 * 16, i = own + threadIdx.x % 32 / 4;  // rows, of queries and of keys

    Fragment Q_hi[K_STEPS], Q_lo[K_STEPS], dO_hi[K_STEPS], dO_lo[K_STEPS];
    int q_exponent[2], do_exponent[2], factor_exponent;  // of rows
    const float factor = frexpf(a.scale * log2e_given_back(HEAD_DIM), &factor_exponent);
    float dlse[2];
    {
        TwoRows Q, dO, K, V;
        Q.load(rows_of(a.Q, a.q, head.b, head.h), a.q.row, i, a.M);
        dO.load(rows_of(a.dO, a.d_o, head.b, head.h), a.d_o.row, i, a.M);
        K.load(rows_of(a.K, a.k, head.b, head.kv), a.k.row, i, a.N);
        V.load(rows_of(a.V, a.v, head.b, head.kv), a.v.row, i, a.N);
        const float magnitude = Q.magnitude() + dO.magnitude() + (K.magnitude() + V.magnitude());
        const float of_Q = magnitude < INFINITY_F ? Q.largest() : INFINITY_F;
        const auto bits = [](float x) { return __float_as_uint(x); };
        const uint4 largest =
            block_max({bits(of_Q), bits(dO.largest()), bits(K.largest()), bits(V.largest())}, beside.of_warps[0]);
        if (largest.x == bits(INFINITY_F)) return exact_head(a, reinterpret_cast<ExactRow *>(shared));
        const auto exponent = [](unsigned x) { return scale_exponent(__uint_as_float(x)); };
        const int4 s = {exponent(largest.x), exponent(largest.y), exponent(largest.z), exponent(largest.w)};
        if (threadIdx.x == 0) exponents = s;
        store_rows<BC>(K_tile, i, K, power_of_two(s.z)), store_rows<BC>(V_tile, i, V, power_of_two(s.w));
        if (never(-a.M)) return;  // else Q and dO are split while K and V have their registers
#pragma unroll
        for (int r = 0; r < 2; ++r) q_exponent[r] = Q.split(r, factor, Q_hi, Q_lo);
        store_rows<BR>(dO_tile, i, dO, power_of_two(s.y));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            dlse[r] = i + 8 * r < a.M ? dlse_of(a, head, i + 8 * r) : 0;
            do_exponent[r] = dO.split(r, 1, dO_hi, dO_lo, fabsf(dlse[r]));
        }
        Products::publish();
        __syncthreads();
    }

    const int first = own / Products::ROWS * Products::ROWS;  // of those who multiply together, all must, or none
    const bool has_queries = BR == 16 * WARPS || first < BR, has_keys = BC == 16 * WARPS || first < BC;
    Fragment dS_hi[P_STEPS], dS_lo[P_STEPS];
    int e[2];           // exponents of rows of these halves
    unsigned most = 0;  // LEAST minus the exponent that brings the largest dS just below fp16's end
    constexpr int LEAST = 4096;
    if (has_queries) {
        const int steps = CAUSAL ? ceil_div(keys_seen(a, own + 15), 16) : P_STEPS;
        float P[P_STEPS][2][4] = {};
        Products::scores(P, Q_hi, Q_lo, K_tile, steps, exponents.z);
        float unit_S[2], shift[2], l[2];
#pragma unroll
        for (int r = 0; r < 2; ++r)
            unit_S[r] = power_of_two(max(-126, min(factor_exponent - q_exponent[r] - exponents.z, 89)));
        mask_scores(
            P, unit_S, a, head, i, [&](int row) { return keys_hidden(a, row); },
            [&](int row) { return keys_seen(a, row); });
        exponentiate(P, unit_S, P_BIAS, shift, l);
        // P, times 2^P_BIAS, whose halves are for dV
        const float inverse[2] = {l[0] == 0 ? 0 : 0x1p14f / l[0], l[1] == 0 ? 0 : 0x1p14f / l[1]};
#pragma unroll
        for (int x = 0; x < BC / 2; ++x) P[x / 8][x / 4 % 2][x % 4] *= inverse[x / 2 % 2];

        // dP, in units of the row's dO and of V. It waits where P's halves will be for D, the sum of P dP
        const int row = opaque(i), key = threadIdx.x % 4 * 2;
        float sum[2] = {}, D_[2];
        Products::for_dP(dO_hi, dO_lo, V_tile, steps, exponents.w, [&](int n, const float *dP) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const float *const p = &P[n][x / 2][x % 2 * 2];
                sum[x % 2] = fmaf(p[1], dP[2 * x + 1], fmaf(p[0], dP[2 * x], sum[x % 2]));
                Pair(P_tile, row + x % 2 * 8, 16 * n + x / 2 * 8 + key).put(dP[2 * x], dP[2 * x + 1]);
            }
        });
        // dS = P (dP - D)
        float largest[2] = {};
        int row_exponent[2];  // of the scale that it takes beyond these units
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const float to_units = power_of_two(max(-126, min(do_exponent[r] + exponents.w, 127)));
            D_[r] = fmaf(quad_sum(sum[r]), 0x1p-14f, -dlse[r] * to_units);
        }
#pragma unroll
        for (int n = 0; n < P_STEPS; ++n) {
#pragma unroll
            for (int x = 0; x < 4; ++x) {
                const Pair at(P_tile, row + x % 2 * 8, 16 * n + x / 2 * 8 + key);
                float *const p = &P[n][x / 2][x % 2 * 2];
                const float2 dP = at.get();
                split(p[0], p[1], *at.hi, *at.lo);
                p[0] *= dP.x - D_[x % 2], p[1] *= dP.y - D_[x % 2];
                largest[x % 2] = fmaxf(largest[x % 2], fmaxf(fabsf(p[0]), fabsf(p[1])));
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            largest[r] = quad_max(largest[r]);
            row_exponent[r] = scale_exponent(largest[r]);
            e[r] = do_exponent[r] + exponents.w + int(P_BIAS);
            if (largest[r] > 0) most = max(most, unsigned(LEAST - row_exponent[r] - e[r]));
        }
        // dQ
        split_rows(P, {power_of_two(row_exponent[0]), power_of_two(row_exponent[1])}, dS_hi, dS_lo);
        float dQ[K_STEPS][2][4] = {};
        Products::dQ(dQ, dS_hi, dS_lo, K_tile, steps, exponents.z);
        give(rows_of(a.dQ, a.dq, head.b, head.h), a.dq.row, i, a.M, dQ,
             {unit(row_exponent[0] + exponents.z) * (a.scale * (OF_KEYS + OF_dP)), unit(e[0])},
             {unit(row_exponent[1] + exponents.z) * (a.scale * (OF_KEYS + OF_dP)), unit(e[1])});
        e[0] += row_exponent[0], e[1] += row_exponent[1];
    }

    // dV; meanwhile all agree on a scale of dS
    Products::publish();
    most = block_max({most, 0, 0, 0}, beside.of_warps[1]).x;
    const int s = most == 0 ? 0 : LEAST - int(most);
    const int first_step = CAUSAL ? first_query(a, own) / 16 : 0;
    TwoRows Q;  // once more, from the cache
    const int again = opaque(i);
    const auto read = [&] { Q.load(rows_of(a.Q, a.q, head.b, head.h), a.q.row, again, a.M); };
    constexpr bool AHEAD = !CAUSAL && (Products::ROWS == 16 || D > 32);  // else registers would be spilled
    if (AHEAD) read();
    float sum[K_STEPS][2][4] = {};
    if (has_keys) {
        Products::of_keys(sum, P_tile, own, dO_tile, first_step);
        const float2 by = {unit(exponents.y), 0x1p-14f * OF_QUERIES};
        give(rows_of(a.dV, a.dv, head.b, head.kv), a.dv.row, i, a.N, sum, by, by);
    }
    if (!AHEAD) read();
    store_rows<BR>(Q_tile, again, Q, power_of_two(exponents.x));
    __syncthreads();
    if (has_queries) store_scaled(P_tile, i, dS_hi, dS_lo, {s - e[0], s - e[1]});
    Products::publish();
    __syncthreads();

    // dK
    if (has_keys) {
#pragma unroll
        for (int x = 0; x < D / 2; ++x) sum[x / 8][x / 4 % 2][x % 4] = 0;
        Products::of_keys(sum, P_tile, own, Q_tile, first_step);
        const float2 by = {unit(exponents.x) * (a.scale * (OF_QUERIES + OF_dP)), unit(s)};
        give(rows_of(a.dK, a.dk, head.b, head.kv), a.dk.row, i, a.N, sum, by, by);
    }
}
