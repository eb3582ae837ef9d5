// Tensor cores: each fp32 product becomes three fp16 products on mma.sync (sm_80 and later).
//
// What changed: the products no longer run as FFMA. Every number is scaled by a power of two and split into fp16 hi +
// lo (split.cuh), x y = lo hi + hi lo + hi hi, and a warp multiplies 16 x 8 x 16 blocks (mma.cuh). `prepare` splits Q,
// dO, K and V once, into tiles of PASS rows that lie in global memory just as shared memory wants them. A warp owns 16
// rows of two matrices, the left operands; the others pass by. One tile in shared memory serves both products that it
// is in: read as it lies to sum over columns (S, dP), read transposed to sum over rows (dQ, dK, dV). The accumulator of
// one product has the layout of the other's left operand: P and dS never leave the warp's registers.
// Why it is faster: fp16 tensor cores do 8 to 15 times the rate of FFMA, so three products instead of one still win.
// While one pair of tiles is multiplied, the next one travels.
// What it costs: a pass over the matrices before the first product, as much scratch as they take; and care for the last
// bits, as in the attention kernel of this name. dS may be of any size: in each tile a row takes its power of two from
// the row's largest. P K, with which dQ is mended by a millionth, is one product of hi.
#include "backward.cuh"
#include "mma.cuh"

constexpr int OWN = BR, PASS = BC, WARPS = THREADS / 32;
constexpr int TILE = split_bytes(PASS, D), PAIR = 2 * TILE;  // Q and dO, or K and V, of the same rows
constexpr int DEPTH = D <= 64 ? D : 32;                      // columns summed inside the tensor core
constexpr int STRIP = D <= 64 ? 32 : 16;                     // columns of a product at a time: chains of mma
constexpr float P_UNIT = 1.0f / 16384;                       // P, at most 1, is multiplied by 2^14

static_assert(OWN == 16 * WARPS && PASS % STRIP == 0 && D % STRIP == 0 && D % DEPTH == 0, "a warp owns 16 rows");
static_assert(PREPARE_THREADS % 32 == 0, "whole warps");

// Blocks of a multiprocessor that leave registers enough for a thread; biases want some more.
constexpr int DQ_BLOCKS = D <= 32 ? 3 : D <= 64 ? 2 : 1, DK_DV_BLOCKS = D <= 32 ? 3 : D <= 64 ? (BIAS ? 2 : 3) : 1;

// Shared memory: two pairs of tiles, and what the warps own, each thread's fragments apart.
constexpr int OWNED = (D / 16) * 2 * THREADS;  // fragments of one matrix, hi and lo
static_assert(SHARED == 2 * PAIR + 2 * OWNED * 16, "room for these");
extern __shared__ __align__(1024) unsigned char shared[];

// ---- the workspace: records are pairs of tiles; behind them are their exponents

struct Workspace : Records<PASS, PAIR> {
    int *exponents;  // two of each pair
    __device__ __forceinline__ explicit Workspace(const Backward &a) : Records(a) {
        exponents = reinterpret_cast<int *>(at(first_of_keys + a.B * a.Hkv * of_key_rows(a)));
    }
};

// A block a tile: even ones split Q and K, odd ones dO and V.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare(const Backward a) {
    __shared__ unsigned scratch[2 * PREPARE_THREADS / 32];
    const Workspace to(a);
    const int pair = blockIdx.x / 2;
    const bool second = blockIdx.x % 2, keys = pair >= to.first_of_keys;
    const int heads = keys ? a.Hkv : a.H, tiles = keys ? to.of_key_rows(a) : to.of_rows(a);
    const int index = keys ? pair - to.first_of_keys : pair, h = index / tiles % heads, b = index / tiles / heads;
    Slice of = {b, 0, keys ? a.N : a.M, index % tiles};
    if (PACKED) of = slice_with(keys ? a.k_starts : a.q_starts, a.S, of.rows, PASS, of.tile);
    if (PACKED && !of.has_tile(PASS)) return;
    const int first = of.tile * PASS, rows = of.rows;
    const Strides by = keys ? (second ? a.v : a.k) : (second ? a.d_o : a.q);
    float sum = 0;
    const auto split_rows = [&](const auto *matrix) {
        matrix = rows_of(matrix, by, b, h) + of.first * by.row;
        const int s =
            split_K<PREPARE_THREADS>(matrix, by.row, first, rows, to.at(pair) + second * TILE, scratch, threadIdx.x, 0);
        if (threadIdx.x == 0) to.exponents[2ll * pair + second] = s;
        for (int e = threadIdx.x; e < PASS * D / 4; e += PREPARE_THREADS) {
            const float4 x = load4(matrix, by.row, first + e / (D / 4), e % (D / 4) * 4, rows);
            sum += fabsf(x.x) + fabsf(x.y) + (fabsf(x.z) + fabsf(x.w));
        }
    };
#if INPUT == ANSWER
    split_rows(keys ? (second ? a.V : a.K) : (second ? a.dO : a.Q));
#else
    if (second && !keys) split_rows(a.dO);
    else split_rows(keys ? (second ? a.V : a.K) : a.Q);
#endif
    if (!(sum < INFINITY_F)) note_not_finite(a, of.sequence, keys ? h : h / (a.H / a.Hkv));
}

// ---- what a warp owns

// 16 rows of a matrix as left operands, hi and lo, each row with a power of two of its own.
template <int WHICH>
struct Owned {
    int exponent[2];  // of rows g and g + 8

    __device__ __forceinline__ static uint4 *place(int k, int lo) {
        return reinterpret_cast<uint4 *>(shared + 2 * PAIR) + WHICH * OWNED + (2 * k + lo) * THREADS + threadIdx.x;
    }
    __device__ __forceinline__ Fragment operator()(int k, bool lo) const {
        Fragment f;  // volatile: else ptxas fetches more of them ahead than there are registers for
        asm volatile("ld.shared.v4.b32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(f.x[0]), "=r"(f.x[1]), "=r"(f.x[2]), "=r"(f.x[3])
                     : "r"((unsigned)__cvta_generic_to_shared(place(k, lo))));
        return f;
    }
    template <class Number>
    __device__ __forceinline__ Owned(const Number *matrix, long long stride, int first, int rows) {
        const int lane = threadIdx.x % 32, t = lane % 4;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = first + lane / 4 + 8 * r;
            const Number *const row = matrix + i * stride;
            float2 x[D / 8];
            float largest = 0;
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                const int column = 8 * c + 2 * t, left = i < rows ? HEAD_DIM - column : 0;
                x[c] = make_float2(left > 0 ? float(row[column]) : 0, left > 1 ? float(row[column + 1]) : 0);
                largest = fmaxf(largest, fmaxf(fabsf(x[c].x), fabsf(x[c].y)));
            }
            exponent[r] = scale_exponent(quad_max(largest));
            const float factor = power_of_two(exponent[r]);
#pragma unroll
            for (int c = 0; c < D / 8; ++c) {
                unsigned hi, lo;
                split(x[c].x * factor, x[c].y * factor, hi, lo);
                const int k = c / 2, word = c % 2 * 2 + r;
                reinterpret_cast<unsigned *>(place(k, 0))[word] = hi;
                reinterpret_cast<unsigned *>(place(k, 1))[word] = lo;
            }
        }
    }
};

__device__ __forceinline__ float unit(int exponent) { return power_of_two(max(-126, min(127, -exponent))); }

// ---- products of a warp

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

typedef float Scores[PASS / 8][4];
typedef float Sum[D / 8][4];

// s = own tileᵀ, summed over columns, in units of both.
template <class Left>
__device__ __forceinline__ void multiply(Scores &s, const Left &own, const unsigned char *tile) {
    constexpr int STEPS = DEPTH / 16;
#pragma unroll
    for (int n = 0; n < PASS; n += STRIP)
#pragma unroll 1
        for (int first = 0; first < D; first += DEPTH) {
            float c[STRIP / 8][4] = {};
            Fragment hi[STEPS][STRIP / 16];
#pragma unroll
            for (int k = 0; k < STEPS; ++k)  // lo hi + hi lo
#pragma unroll
                for (int x = 0; x < STRIP / 16; ++x) {
                    hi[k][x] = right_operand<PASS>(tile, n + 16 * x, first + 16 * k);
                    const Fragment lo = right_operand<PASS>(tile, n + 16 * x, D + first + 16 * k);
#pragma unroll
                    for (int y = 0; y < 4; ++y)
                        mma(c[2 * x + y % 2], own(first / 16 + k, y < 2), (y < 2 ? hi[k][x] : lo).x + y % 2 * 2);
                }
#pragma unroll
            for (int k = 0; k < STEPS; ++k)  // hi hi
#pragma unroll
                for (int x = 0; x < STRIP / 8; ++x) mma(c[x], own(first / 16 + k, false), hi[k][x / 2].x + x % 2 * 2);
#pragma unroll
            for (int x = 0; x < STRIP / 2; ++x) {
                float &to = s[n / 8 + x / 4][x % 4];
                to = first ? to + c[x / 4][x % 4] : c[x / 4][x % 4];
            }
        }
}

// Scores as left operands: hi and lo.
struct Split {
    Fragment fragments[PASS / 16][2];
    // Splits the scores of row g times factor[0], and those of row g + 8 times factor[1]. P may be far beyond 1 where an
    // LSE of millions is rounded; it is rough then, but not Inf.
    __device__ __forceinline__ Split(const Scores &s, const float (&factor)[2]) {
#pragma unroll
        for (int x = 0; x < PASS / 8; ++x)
#pragma unroll
            for (int r = 0; r < 2; ++r)
                split<true>(s[x][2 * r] * factor[r], s[x][2 * r + 1] * factor[r], fragments[x / 2][0].x[x % 2 * 2 + r],
                            fragments[x / 2][1].x[x % 2 * 2 + r]);
    }
};

// sum += x tile, summed over rows, times `units` of rows g and g + 8; with MEND, coarse += rough tile, by their hi
// alone; but where O was rounded to 8 bits, so that D is far off, by both parts of `rough`.
template <bool MEND>
__device__ __forceinline__ void accumulate(Sum &sum, const Split &x, const float (&units)[2], const unsigned char *tile,
                                           Sum &coarse, const Split &rough, float coarse_unit) {
    constexpr int STEPS = PASS / 16;
#pragma unroll
    for (int n = 0; n < D; n += STRIP) {
        if (never(n)) break;
        float c[STRIP / 8][4] = {}, m[STRIP / 8][4] = {};
        Fragment hi[STEPS][STRIP / 16];
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
#pragma unroll
            for (int y = 0; y < STRIP / 16; ++y) {
                hi[k][y] = right_operand_transposed<PASS>(tile, 16 * k, n + 16 * y);
                const Fragment lo = right_operand_transposed<PASS>(tile, 16 * k, D + n + 16 * y);
#pragma unroll
                for (int z = 0; z < 4; ++z)
                    mma(c[2 * y + z % 2], x.fragments[k][z < 2], (z < 2 ? hi[k][y] : lo).x + z % 2 * 2);
            }
#pragma unroll
        for (int k = 0; k < STEPS; ++k)
#pragma unroll
            for (int y = 0; y < STRIP / 8; ++y) {
                mma(c[y], x.fragments[k][0], hi[k][y / 2].x + y % 2 * 2);
                if (MEND && ANSWER == 2) mma(m[y], rough.fragments[k][1], hi[k][y / 2].x + y % 2 * 2);
                if (MEND) mma(m[y], rough.fragments[k][0], hi[k][y / 2].x + y % 2 * 2);
            }
#pragma unroll
        for (int y = 0; y < STRIP / 2; ++y) {
            float &of_x = sum[n / 8 + y / 4][y % 4], &of_rough = coarse[n / 8 + y / 4][y % 4];
            of_x = fmaf(c[y / 4][y % 4], units[y % 4 / 2], of_x);
            if (MEND) of_rough = fmaf(coarse_unit, m[y / 4][y % 4], of_rough);
        }
    }
}

// The exponents that bring dS of rows g and g + 8 just below fp16's end; the four threads of a quad share these rows.
__device__ __forceinline__ void row_exponents(int (&exponent)[2], const Scores &s) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float largest = 0;
#pragma unroll
        for (int x = 0; x < PASS / 8; ++x) largest = fmaxf(largest, fmaxf(fabsf(s[x][2 * r]), fabsf(s[x][2 * r + 1])));
        exponent[r] = scale_exponent(quad_max(largest));
    }
}

// This thread's columns of row g + 8r of a sum, times `factor`, to memory.
__device__ __forceinline__ void write(Gradient *row, const Sum &sum, int r, float factor) {
#pragma unroll
    for (int x = 0; x < D / 8; ++x) {
        const int column = 8 * x + threadIdx.x % 4 * 2, left = HEAD_DIM - column;
        const float first = sum[x][2 * r] * factor, second = sum[x][2 * r + 1] * factor;
        if (ALIGNED) {
            if (left > 0) put(row + column, make_float2(first, second));
        } else {
            if (left > 0) row[column] = first;
            if (left > 1) row[column + 1] = second;
        }
    }
}

// The next pair of tiles, on its way to shared memory.
__device__ __forceinline__ void copy_pair(unsigned char *to, const unsigned char *from) {
#pragma unroll
    for (int x = 0; x < PAIR; x += 16 * THREADS)
        if (PAIR % (16 * THREADS) == 0 || x + 16 * threadIdx.x < PAIR)
            copy16(to + x + 16 * threadIdx.x, from + x + 16 * threadIdx.x);
}

extern "C" __global__ void __launch_bounds__(THREADS, DQ_BLOCKS) dq(const Backward all) {
    const int tiles = tiles_of_head<false>(all, OWN), number = blockIdx.x % tiles, lane = threadIdx.x % 32;
    const Backward &a = of_tile<false>(all, OWN, number);
    if (!has_tile(a)) return;
    const Workspace from(a);
    const int Tr = PACKED ? ceil_div(a.M, OWN) : tiles, tile = tile_with(a, number);
    const int first = (CAUSAL ? Tr - 1 - tile : tile) * OWN;  // causal: the longest rows first
    const int own = first + threadIdx.x / 32 * 16, t = lane % 4;
    const Head head = head_of(a, blockIdx.x / tiles);
    const int keys = keys_seen(a, min(first + OWN, a.M) - 1);  // that some row of this tile sees
    const int first_j = WINDOW ? min(keys_hidden(a, first), max(keys - 1, 0)) / PASS : 0;  // the first tile of them
    const int pair = from.of_keys(a, head.b, head.kv) + first_j;
    if (keys > 0) copy_pair(shared, from.at(pair));

    const Owned<0> Q(rows_of(a.Q, a.q, head.b, head.h), a.q.row, own, a.M);
    const Owned<1> dO(rows_of(a.dO, a.d_o, head.b, head.h), a.d_o.row, own, a.M);
    Sum dS_K = {}, P_K = {};
    float above[2], D_[2], total[2] = {}, sum_ds[2] = {};
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const Row row = row_of(a, head, min(own + lane / 4 + 8 * r, a.M - 1));
        above[r] = row.above, D_[r] = row.D;
    }
#pragma unroll 1
    for (int n = 0, j = first_j; j * PASS < keys; ++n, ++j) {
        const int2 exponents = reinterpret_cast<const int2 *>(from.exponents)[pair + n];  // of K and of V
        await_copies();
        __syncthreads();
        if ((j + 1) * PASS < keys) copy_pair(shared + (n + 1) % 2 * PAIR, from.at(pair + n + 1));
        const unsigned char *const K = shared + n % 2 * PAIR, *const V = K + TILE;
        Scores p, ds;
        multiply(p, Q, K);
        multiply(ds, dO, V);
        // P and dS, with the mask only where some row of this warp does not see all of the tile.
        const auto finish = [&](auto masked) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int i = own + lane / 4 + 8 * r, seen = keys_seen(a, i), hidden = keys_hidden(a, i);
                const float factor = unit(Q.exponent[r] + exponents.x) * (a.scale * log2e_given_back(HEAD_DIM));
                const float dP_unit = unit(dO.exponent[r] + exponents.y);
                float of_p = 0, of_ds = 0;
#pragma unroll
                for (int x = 0; x < PASS / 4; ++x) {
                    if (BIAS && x % 4 == 0 && never(x)) break;  // biases are fetched by fours
                    float &p_ = p[x / 2][2 * r + x % 2], &ds_ = ds[x / 2][2 * r + x % 2];
                    const int key = j * PASS + x / 2 * 8 + 2 * t + x % 2;
                    p_and_ds(p_, ds_, factor, above[r], D_[r], bias_of(a, head, i, key),
                             !masked.value || (key < seen && (!WINDOW || key >= hidden)), dP_unit);
                    of_p += p_, of_ds += ds_;
                }
                total[r] += of_p, sum_ds[r] += of_ds;
            }
        };
        if (BIAS || (j + 1) * PASS > keys_seen(a, own) || (WINDOW && j * PASS < keys_hidden(a, own + 15)))
            finish(Flag<true>());
        else finish(Flag<false>());
        int exponent[2];
        row_exponents(exponent, ds);
        const Split dS(ds, {power_of_two(exponent[0]), power_of_two(exponent[1])});
        const Split P(p, {1 / P_UNIT, 1 / P_UNIT});
        accumulate<true>(dS_K, dS, {unit(exponent[0] + exponents.x), unit(exponent[1] + exponents.x)}, K, P_K, P,
                         unit(exponents.x) * P_UNIT);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        total[r] = quad_sum(total[r]), sum_ds[r] = quad_sum(sum_ds[r]);
        // opaque: kept, it would take registers
        const Head out =
            head_of(a, blockIdx.x / (PACKED ? tiles_of_head<false>(all, OWN) : ceil_div(opaque(a.M), OWN)));
        const int i = opaque(own + lane / 4) + 8 * r;
        if (i >= a.M) continue;
        const Found found(a, out, i, above[r], total[r], sum_ds[r]);
#pragma unroll
        for (int x = 0; x < D / 8; ++x)
#pragma unroll
            for (int y = 2 * r; y < 2 * r + 2; ++y)
                dS_K[x][y] = found.inverse == 0 ? 0 : fmaf(-found.error, P_K[x][y], dS_K[x][y]);
        write(rows_of(a.dQ, a.dq, out.b, out.h) + i * a.dq.row, dS_K, r, a.scale * found.inverse);
        if (t == 0) found.keep(row_of(a, out, i));
    }
}

extern "C" __global__ void __launch_bounds__(THREADS, DK_DV_BLOCKS) dk_dv(const Backward all) {
    const int Tc = tiles_of_head<true>(all, OWN);
    const Backward &a = of_tile<true>(all, OWN, blockIdx.x % Tc);
    if (!has_tile(a)) return;
    const Workspace from(a);
    const int first = tile_with(a, blockIdx.x % Tc) * OWN, lane = threadIdx.x % 32, t = lane % 4;
    const int b = blockIdx.x / Tc / a.Hkv, kv = blockIdx.x / Tc % a.Hkv, group = a.H / a.Hkv;
    const int own = first + threadIdx.x / 32 * 16;
    const int Tr = ceil_div(end_query(a, first + OWN - 1), PASS), first_tile = first_query(a, first) / PASS;
    const int of_head = WINDOW ? max(0, Tr - first_tile) : Tr - first_tile;
    const int count = group * of_head;  // pairs that pass by: of each head of Q those that see some key of this tile
    const auto pair_of = [&](int n) {
        return from.of_queries(a, b, kv * group + n / of_head) + first_tile + n % of_head;
    };
    if (count > 0) copy_pair(shared, from.at(pair_of(0)));

    const Owned<0> K(rows_of(a.K, a.k, b, kv), a.k.row, own, a.N);
    const Owned<1> V(rows_of(a.V, a.v, b, kv), a.v.row, own, a.N);
    Sum dK = {}, dV = {};
#pragma unroll 1
    for (int n = 0; n < count; ++n) {
        const Head head = {b, kv * group + n / of_head, kv};
        const int i0 = (first_tile + n % of_head) * PASS;
        const int2 exponents = reinterpret_cast<const int2 *>(from.exponents)[pair_of(n)];  // of Q and of dO
        await_copies();
        __syncthreads();
        if (n + 1 < count) copy_pair(shared + (n + 1) % 2 * PAIR, from.at(pair_of(n + 1)));
        const unsigned char *const Q = shared + n % 2 * PAIR, *const dO = Q + TILE;
        Scores p, ds;
        multiply(p, K, Q);
        multiply(ds, V, dO);
        float factor[2], dP_unit[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            factor[r] = unit(K.exponent[r] + exponents.x) * (a.scale * log2e_given_back(HEAD_DIM));
            dP_unit[r] = unit(V.exponent[r] + exponents.y);
        }
        const auto finish = [&](auto masked) {
#pragma unroll
            for (int x = 0; x < PASS / 4; ++x) {
                if (BIAS && x % 4 == 0 && never(x)) break;
                const int i = i0 + x / 2 * 8 + 2 * t + x % 2, seen = i < a.M ? keys_seen(a, i) : 0;
                const int hidden = keys_hidden(a, i);
                const Row row = row_of(a, head, masked.value ? min(i, a.M - 1) : i);
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    const int key = own + lane / 4 + 8 * r;
                    p_and_ds(p[x / 2][2 * r + x % 2], ds[x / 2][2 * r + x % 2], factor[r], row.above, row.mended,
                             bias_of(a, head, i, key), !masked.value || (key < seen && (!WINDOW || key >= hidden)),
                             dP_unit[r], row.inverse);
                }
            }
        };
        if (BIAS || i0 + PASS > a.M || own + 16 > keys_seen(a, i0) || (WINDOW && own < keys_hidden(a, i0 + PASS - 1)))
            finish(Flag<true>());
        else finish(Flag<false>());
        const Split P(p, {1 / P_UNIT, 1 / P_UNIT});
        const float p_unit = unit(exponents.y) * P_UNIT;
        accumulate<false>(dV, P, {p_unit, p_unit}, dO, dV, P, 0);
        int exponent[2];
        row_exponents(exponent, ds);
        const Split dS(ds, {power_of_two(exponent[0]), power_of_two(exponent[1])});
        accumulate<false>(dK, dS, {unit(exponent[0] + exponents.x), unit(exponent[1] + exponents.x)}, Q, dK, dS, 0);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = opaque(own + lane / 4) + 8 * r;
        if (key >= a.N) continue;
        write(rows_of(a.dK, a.dk, b, kv) + key * a.dk.row, dK, r, a.scale);
        write(rows_of(a.dV, a.dv, b, kv) + key * a.dv.row, dV, r, 1);
    }
}
