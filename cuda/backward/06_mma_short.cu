// The shortest heads: all of one in a block, rows of P and dS whole in a warp's registers, one pass.
//
// What changed: back to mma.sync, whose 16 rows are a warp's own. Each warp reads 16 rows of Q, dO, K and V, and leaves
// their halves in shared memory. Then it has 16 queries, with the scores of all their keys in registers, as in the
// attention kernel of this name, by the same lines: so it finds P anew, to the last bit, and needs neither the LSE, nor
// O: D is the sum of P dP. It writes their dQ. P and then dS go through shared memory, in one place, for each warp also
// has 16 keys, and dV and dK are sums over queries.
// Why it is faster: five products of a pair instead of seven, seven matrices moved instead of eight, each once; and
// warps enough to fill each other's gaps, where with wgmma a multiprocessor has eight.
// What it costs: mma.sync has two thirds of wgmma's rate. A head has up to 128 queries and 128 keys, each head of Q its
// own of K.
//
// Macro: BLOCKS, of a multiprocessor. BR is M, and BC is N, both padded. Launch: `gradients`, a block a head.
#define PAD 16
#include "backward.cuh"
#include "short.cuh"

constexpr int WARPS = THREADS / 32, ROW_STEPS = BR / 16;
constexpr int OF_Q = split_bytes(BR, D), OF_K = split_bytes(BC, D), OF_P = split_bytes(BR, BC);
constexpr float P_BIAS = 14;  // P, at most 1, is times 2^14

// What truncation takes of sums (split.cuh), and is given back: of those over numbers of a head, over queries, over keys.
constexpr float OF_dP = (0.38f + 0.0175f * HEAD_DIM) * TRUNCATED, OF_QUERIES = 1 + (0.4f + 0.022f * BR) * TRUNCATED,
                OF_KEYS = 1 + (0.4f + 0.022f * BC) * TRUNCATED;

static_assert(16 * WARPS >= BR && 16 * WARPS >= BC && BR % 16 == 0, "a warp has 16 queries and 16 keys");
static_assert(SHARED == 2 * (OF_Q + OF_K) + OF_P, "Q, dO, K, V; P, and dS in its place");
extern __shared__ __align__(1024) unsigned char shared[];

__device__ __forceinline__ float unit(int exponent) { return power_of_two(max(-126, min(127, -exponent))); }

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
// Rows of P or dS, of queries `row` and `row` + 8, each times its factor.
__device__ __forceinline__ void store_scores(unsigned char *tile, int row, const float (&s)[P_STEPS][2][4],
                                             const float (&factor)[2]) {
    row = opaque(row);  // its address is no other tile's, to be kept
#pragma unroll
    for (int x = 0; x < BC / 4; ++x) {
        const float *const two = &s[x / 4][x / 2 % 2][x % 2 * 2];
        store_two<BR, BC>(tile, row + x % 2 * 8, x / 2 * 8 + threadIdx.x % 4 * 2, two[0], two[1], factor[x % 2]);
    }
}

// c = Aᵀ B: of 16 keys from `key` on, all columns of a head; A, of P or dS, and B have a row for each query.
__device__ __forceinline__ void multiply_queries(float (&c)[K_STEPS][2][4], const unsigned char *A, int key,
                                                 const unsigned char *B, int first_step) {
    float small[K_STEPS][2][4] = {};
#pragma unroll 1
    for (int k = first_step; k < ROW_STEPS; ++k) {
        const Fragment hi = left_operand_transposed<BR>(A, 16 * k, key);
        const Fragment lo = left_operand_transposed<BR>(A, 16 * k, BC + key);
#pragma unroll
        for (int n = 0; n < K_STEPS; ++n) {
            const Fragment b = right_operand_transposed<BR>(B, 16 * k, 16 * n);
            const Fragment b_lo = right_operand_transposed<BR>(B, 16 * k, D + 16 * n);
            multiply(small[n], lo, b), multiply(small[n], hi, b_lo), multiply(c[n], hi, b);
        }
    }
#pragma unroll
    for (int x = 0; x < D / 2; ++x) c[x / 8][x / 4 % 2][x % 4] += small[x / 8][x / 4 % 2][x % 4];
}

// Rows i and i + 8 of a sum, each times two factors, to memory.
__device__ __forceinline__ void give(Gradient *rows, long long stride, int i, int count,
                                     const float (&sum)[K_STEPS][2][4], float2 factor, float2 factor8) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        if (i + 8 * r >= count) continue;
        const float2 by = r ? factor8 : factor;
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const float *const two = &sum[c / 2][c % 2][2 * r];
            store2(rows + (i + 8 * r) * stride, 8 * c + threadIdx.x % 4 * 2, two[0] * by.x * by.y,
                   two[1] * by.x * by.y);
        }
    }
}

// Keeps what the kernel needs that computes a head that is not finite.
__device__ __forceinline__ void keep_rows(const Backward &a, Head head) {
#pragma unroll 1
    for (int i = threadIdx.x; i < a.M; i += THREADS) {
        const Answer *const o = rows_of(a.O, a.o, head.b, head.h) + i * a.o.row;
        const Answer *const d_o = rows_of(a.dO, a.d_o, head.b, head.h) + i * a.d_o.row;
        float sum = 0;
#pragma unroll 1
        for (int c = 0; c < HEAD_DIM; ++c) sum = fmaf(float(o[c]), float(d_o[c]), sum);
        const float lse = a.lse[head.b * a.lse_at.batch + head.h * a.lse_at.head + i * a.lse_at.row];
        Row &row = row_of(a, head, i);
        row.above = lse == NEG_INF ? INFINITY_F : lse * LOG2E, row.D = sum - dlse_of(a, head, i);
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const Backward a) {
    __shared__ uint4 of_warps[2][WARPS];
    __shared__ int4 exponents;  // of Q, dO, K and V in shared memory: kept there, they take no registers
    unsigned char *const Q_tile = shared, *const dO_tile = Q_tile + OF_Q, *const K_tile = dO_tile + OF_Q,
                         *const V_tile = K_tile + OF_K, *const P_tile = V_tile + OF_K;
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
            block_max({bits(of_Q), bits(dO.largest()), bits(K.largest()), bits(V.largest())}, of_warps[0]);
        if (largest.x == bits(INFINITY_F)) {
            if (threadIdx.x == 0) note_not_finite(a, head.b, head.kv);
            return keep_rows(a, head);
        }
        const auto exponent = [](unsigned x) { return scale_exponent(__uint_as_float(x)); };
        const int4 s = {exponent(largest.x), exponent(largest.y), exponent(largest.z), exponent(largest.w)};
        if (threadIdx.x == 0) exponents = s;
        store_rows<BC>(K_tile, i, K, power_of_two(s.z)), store_rows<BC>(V_tile, i, V, power_of_two(s.w));
        store_rows<BR>(Q_tile, i, Q, power_of_two(s.x));
#pragma unroll
        for (int r = 0; r < 2; ++r) q_exponent[r] = Q.split(r, factor, Q_hi, Q_lo);
        store_rows<BR>(dO_tile, i, dO, power_of_two(s.y));
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            dlse[r] = i + 8 * r < a.M ? dlse_of(a, head, i + 8 * r) : 0;
            do_exponent[r] = dO.split(r, 1, dO_hi, dO_lo, fabsf(dlse[r]));
        }
        __syncthreads();
    }

    const bool has_queries = own < BR, has_keys = own < BC;
    float P[P_STEPS][2][4] = {}, dS[P_STEPS][2][4] = {};
    int e[2];           // exponents of rows of dS as they are
    unsigned most = 0;  // LEAST minus the exponent that brings the largest dS just below fp16's end
    constexpr int LEAST = 4096;
    if (has_queries) {
        const int steps = CAUSAL ? ceil_div(keys_seen(a, own + 15), 16) : P_STEPS;
        multiply_rows(P, Q_hi, Q_lo, K_tile, steps, exponents.z);
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
        store_scores(P_tile, i, P, {1, 1});

        // dS = P (dP - D), all in units of the row's dO and of V
        int row_exponent[2];  // of the scale that it takes beyond that
        multiply_rows(dS, dO_hi, dO_lo, V_tile, steps, exponents.w);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = 0, largest = 0;
#pragma unroll
            for (int x = 0; x < BC / 4; ++x)
                sum = fmaf(P[x / 4][x / 2 % 2][2 * r + x % 2], dS[x / 4][x / 2 % 2][2 * r + x % 2], sum);
            const float to_units = power_of_two(max(-126, min(do_exponent[r] + exponents.w, 127)));
            const float D_ = fmaf(quad_sum(sum), 0x1p-14f, -dlse[r] * to_units);
#pragma unroll
            for (int x = 0; x < BC / 4; ++x) {
                float &ds = dS[x / 4][x / 2 % 2][2 * r + x % 2];
                ds = P[x / 4][x / 2 % 2][2 * r + x % 2] * (ds - D_);
                largest = fmaxf(largest, fabsf(ds));
            }
            largest = quad_max(largest);
            row_exponent[r] = scale_exponent(largest);
            e[r] = do_exponent[r] + exponents.w + int(P_BIAS);
            if (largest > 0) most = max(most, unsigned(LEAST - row_exponent[r] - e[r]));
        }
        // dQ
        Fragment hi[P_STEPS], lo[P_STEPS];
        split_rows(dS, {power_of_two(row_exponent[0]), power_of_two(row_exponent[1])}, hi, lo);
        float dQ[K_STEPS][2][4] = {};
        multiply_keys(dQ, hi, lo, K_tile, steps, exponents.z);
        give(rows_of(a.dQ, a.dq, head.b, head.h), a.dq.row, i, a.M, dQ,
             {unit(row_exponent[0] + exponents.z) * (a.scale * (OF_KEYS + OF_dP)), unit(e[0])},
             {unit(row_exponent[1] + exponents.z) * (a.scale * (OF_KEYS + OF_dP)), unit(e[1])});
    }

    // dV; meanwhile all agree on a scale of dS
    most = block_max({most, 0, 0, 0}, of_warps[1]).x;
    const int s = most == 0 ? 0 : LEAST - int(most);
    const int first_step = CAUSAL ? first_query(a, own) / 16 : 0;
    float sum[K_STEPS][2][4] = {};
    if (has_keys) {
        multiply_queries(sum, P_tile, own, dO_tile, first_step);
        const float2 by = {unit(exponents.y), 0x1p-14f * OF_QUERIES};
        give(rows_of(a.dV, a.dv, head.b, head.kv), a.dv.row, i, a.N, sum, by, by);
    }
    __syncthreads();
    if (has_queries) store_scores(P_tile, i, dS, {unit(e[0] - s), unit(e[1] - s)});
    __syncthreads();

    // dK
    if (has_keys) {
#pragma unroll
        for (int x = 0; x < D / 2; ++x) sum[x / 8][x / 4 % 2][x % 4] = 0;
        multiply_queries(sum, P_tile, own, Q_tile, first_step);
        const float2 by = {unit(exponents.x) * (a.scale * (OF_QUERIES + OF_dP)), unit(s)};
        give(rows_of(a.dK, a.dk, head.b, head.kv), a.dk.row, i, a.N, sum, by, by);
    }
}
