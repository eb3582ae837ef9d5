// The work of a warpgroup on tiles, in the kernels that multiply with wgmma: it splits 64 rows of two matrices,
// multiplies rows of Q and dO with tiles of K and V (`OfQueries`: dQ), and keys with tiles of Q and dO (`OfKeys`: dK,
// dV). How tiles get to shared memory is each kernel's own; the arithmetic is one, and so are the bytes.
//
// Each number is two fp16 halves, each product three; of halves P and dS are split alone, and of 22 products of a pair of
// tiles 11 are left (PRODUCTS 2, split.cuh). S and dP are products of tiles that lie in shared
// memory; P and dS are split in registers, where the next products want them. One tile serves both: K-major to sum over
// columns, MN-major to sum over rows. Scales ask for no look at dS: `OfQueries` bounds it by sums of P that it needs
// anyway, and hands the bound to `OfKeys`. 1 / the sum of 2^(s - above), by which `OfKeys` would multiply each P, is a
// factor of dO, before that is split; or of P, where dO need not be split, or where little would be left of dS (LONE).
//
// Macros beyond those of backward.cuh: PASS, rows of a tile that is multiplied with; TAIL, bytes.
#pragma once
#ifndef INTERLEAVES                   // as where tangents.cuh comes first: its keys are in order
#define INTERLEAVES (HEAD_DIM <= 64)  // keys, where biases are read: longer heads lack the registers
#endif
#ifndef NOTES    // where a kernel does not choose
#define NOTES 1  // another kernel follows, for heads that are not finite: rows' numbers are kept for it
#endif
#include "backward.cuh"
#include "hopper.cuh"
#include "split.cuh"

constexpr int OWN = 64;  // rows of a warpgroup, and of a record
static_assert(BC == OWN, "as the registry counts them");
static_assert(PRODUCTS >= 2 && D % 32 == 0 && D != 96 && D <= 128, "tiles of 32, 64 or 128 columns");
static_assert(PRODUCTS == 3 || D >= 64, "a panel of hi is whole");
static_assert(PASS == 64 || PASS == 32, "rows of a tile that is multiplied with");
constexpr int OWN_TILE = split_bytes(OWN, D), PASS_TILE = split_bytes(PASS, D);
constexpr int PANELS = (PRODUCTS == 3 ? 2 : 1) * D / 64;  // of 64 columns, hi and lo

constexpr int CHUNKS = ceil_div(D, 64);  // of 64 columns of a sum; with D = 32, hi and lo side by side are 64
constexpr int SUM = D < 64 ? 16 : 32;    // registers a chunk
constexpr int SCORES = PASS / 2, STEPS = PASS / 16;
constexpr float P_BIAS = 14, P_UNIT = 0x1p-14f;  // P, at most 1, is times 2^14
constexpr float LEAST = 0x1p-30f;  // that a tile's sum of P counts for: smaller ones are nothing beside 2^14

typedef float Scores[SCORES];
typedef float Sum[CHUNKS][SUM];

// What `OfKeys` needs of rows of queries.
struct OfRows {
    float above[PASS], D[PASS], inverse[PASS];
};

// The end of a record of 64 rows, behind its two split tiles.
struct Tail {
    OfRows rows[OWN / PASS];
    int first, second;  // exponents of the tiles' scales
    int dS;             // of queries: the exponent that brings all dS of these rows just below fp16's end
    int other;          // of keys: the bits of what no number of V is larger than; of queries: HUGE, LONE
};
static_assert(sizeof(Tail) == TAIL && TAIL % 16 == 0, "as the scratch has room for, and copies want");

// What some row of a record has: an LSE so huge that biases are added otherwise; or a key with next to all weight, whose
// dP - D is next to 0. Had dO a factor there, with which D was not found, dS would be what dP is rounded by.
constexpr int HUGE = 1, LONE = 2;
constexpr bool TIMES_P = PRODUCTS == 2;  // the factor is always one of P

// ---- the workspace, where tiles lie in memory: records are two tiles of 64 rows, and what is known of them

constexpr int RECORD = 2 * OWN_TILE + TAIL;

struct Workspace : Records<OWN, RECORD> {
    using Records::Records;
    __device__ __forceinline__ Tail &tail(int record) const {
        return *reinterpret_cast<Tail *>(at(record) + 2 * OWN_TILE);
    }
};

__device__ __forceinline__ float unit(int exponent) { return power_of_two(max(-126, min(127, -exponent))); }

// ---- splitting 64 rows

// A tile of 64 rows of a matrix, of which each thread of a group reads as much. Keys change places (bias.cuh).
struct Taken {
    int exponent;
    float sum;  // of the magnitudes that this thread has read
};
template <int GROUP, bool KEYS>
struct Unsplit {
    static constexpr int PIECES = OWN * D / 8, EACH = PIECES / GROUP;
    static_assert(PIECES % GROUP == 0, "as many pieces for each thread");
    float x[EACH][8];
    static __device__ __forceinline__ int row(int e, int thread) { return (e * GROUP + thread) / (D / 8); }
    static __device__ __forceinline__ int column(int e, int thread) { return (e * GROUP + thread) % (D / 8) * 8; }

    template <class Number>
    __device__ __forceinline__ void load(const Number *matrix, long long stride, int first, int rows, int thread) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int from = first + (KEYS ? key_in(row(e, thread)) : row(e, thread)), c = column(e, thread);
            *reinterpret_cast<float4 *>(&x[e][0]) = load4(matrix, stride, from, c, rows);
            *reinterpret_cast<float4 *>(&x[e][4]) = load4(matrix, stride, from, c + 4, rows);
        }
    }
    // Splits row i times factor(i); the group meets at a barrier of its own, and `scratch` is two words a warp.
    template <class Factor>
    __device__ __forceinline__ Taken split(unsigned char *tile, unsigned *scratch, int thread, int barrier,
                                           Factor factor) {
        float sum = 0;
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const float by = factor(row(e, thread));
#pragma unroll
            for (int c = 0; c < 8; ++c) sum += fabsf(x[e][c]), x[e][c] *= by;
        }
        const int s = group_scale<GROUP, EACH * 8>(&x[0][0], scratch, thread, barrier);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            store_split<OWN, D>(tile, row(e, thread), column(e, thread), x[e], power_of_two(s));
        return {s, sum};
    }
};
template <int GROUP, bool KEYS, class Number, class Factor>
__device__ __forceinline__ Taken split_tile(const Number *matrix, long long stride, int first, int rows,
                                            unsigned char *tile, unsigned *scratch, int thread, int barrier,
                                            Factor factor) {
    Unsplit<GROUP, KEYS> mine;
    mine.load(matrix, stride, first, rows, thread);
    return mine.split(tile, scratch, thread, barrier, factor);
}

// A bound on the numbers of a tile of V, from the exponent of its scale: none is larger.
__device__ __forceinline__ float largest_of_scale(int exponent, bool zero) {
    return zero ? 0 : ldexpf(1, 15 - exponent);
}

// ---- products of a warpgroup

constexpr int K_STEPS = ceil_div(HEAD_DIM, 16);  // of S and dP: beyond HEAD_DIM all is zero

// Each wgmma reads its left operand anew, and with 32 rows as the right one shared memory cannot feed it. So hi and lo
// of these lie side by side, a panel of hi and then that of lo, and S is multiplied with both as one operand of 64
// rows; the registers for it are those that biases would want.
constexpr bool SIDE_BY_SIDE = PASS == 32 && BIAS == 0 && PRODUCTS == 3;

// Where in a tile that passes by a panel of its record lies.
__host__ __device__ constexpr int place_of_panel(int panel) {
    return SIDE_BY_SIDE ? panel % (PANELS / 2) * 2 + panel / (PANELS / 2) : panel;
}
// The steps of such a tile's descriptor to a panel, and to a column.
__host__ __device__ constexpr int panel_offset(int panel) { return place_of_panel(panel) * PASS * 128 / 16; }
__host__ __device__ constexpr int column_offset(int column) { return panel_offset(column / 64) + column % 64 * 2 / 16; }

// s += own tileᵀ, summed over columns, which are hi's from 0 on, lo's from D on; or s = it, if it comes `first`.
template <int OF_OWN, int OF_TILE, int n>
__device__ __forceinline__ void issue_products(float (&s)[n], uint64_t own, uint64_t tile, bool first) {
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        wgmma(s, own + split_offset<OWN>(0, OF_OWN + 16 * k) / 16, tile + column_offset(OF_TILE + 16 * k),
              !first || k > 0);
}

// The descriptor of a tile of own rows; of long heads, a lane's registers are enough for those of all steps.
__device__ __forceinline__ uint64_t descriptor_of(uint32_t own) {
    return D <= 64 ? uniform_descriptor(descriptor(own)) : descriptor(own);
}

// s = own tileᵀ, summed over columns, small products first; `own` is the address of a tile of 64 rows. Of these, those
// with the lo of queries come before those with the lo of keys, whichever are OWN_KEYS: `OfQueries` and `OfKeys` round
// S and dP alike, and what `OfQueries` finds that a row has in common holds for both.
template <bool OWN_KEYS = false>
__device__ __forceinline__ void multiply(Scores &s, uint32_t own, uint64_t tile) {
    constexpr int OF_OWN = OWN_KEYS ? 0 : D, OF_TILE = D - OF_OWN;
    const uint64_t left = descriptor_of(own);
    pin(s);
    wgmma_fence();
    if (PRODUCTS == 3) issue_products<OF_OWN, OF_TILE>(s, left, tile, true);
    if (PRODUCTS == 3) issue_products<OF_TILE, OF_OWN>(s, left, tile, false);
    issue_products<0, 0>(s, left, tile, PRODUCTS == 2);
    wgmma_commit();
}

// `multiply` for S, of which `both` is a part until it is collected: products with hi, then those with lo, each by
// itself, so that their order is one for `OfQueries` and `OfKeys`.
typedef float Both[2 * SCORES];
template <bool OWN_KEYS = false>
__device__ __forceinline__ void multiply_S(Scores &s, Both &both, uint32_t own, uint64_t tile) {
    if constexpr (!SIDE_BY_SIDE) return multiply<OWN_KEYS>(s, own, tile);
    const uint64_t left = descriptor_of(own);
    pin(s), pin(both);
    wgmma_fence();
    issue_products<D, 0>(s, left, tile, true);
    issue_products<0, 0>(both, left, tile, true);
    wgmma_commit();
}
__device__ __forceinline__ void collect_S(Scores &s, Both &both) {
    pin(s);
    if constexpr (SIDE_BY_SIDE) {
        pin(both);
#pragma unroll
        for (int x = 0; x < SCORES; ++x) s[x] = both[x] + (both[SCORES + x] + s[x]);
    }
}

typedef uint32_t Operand[STEPS][4];
constexpr int STEP = 16 * 128 / 16;  // what a descriptor moves on by for 16 rows

__device__ __forceinline__ void split(const Scores &s, Operand &hi, Operand &lo) {
#pragma unroll
    for (int x = 0; x < SCORES / 2; ++x) split(s[2 * x], s[2 * x + 1], hi[x / 4][x % 4], lo[x / 4][x % 4]);
}

// T = x tile, summed over rows, small products first: 64 columns of it; with D = 32, x hi and x lo side by side. The k-th
// 16 rows are where tile(k) says.
template <int steps, class Tile>
__device__ __forceinline__ void issue_T(float (&T)[32], const uint32_t (&hi)[steps][4], const uint32_t (&lo)[steps][4],
                                        Tile tile, int chunk) {
    pin(T);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < steps; ++k) wgmma_transposed(T, lo[k], tile(k) + panel_offset(chunk), k > 0);
    if (D >= 64 && PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < steps; ++k) wgmma_transposed(T, hi[k], tile(k) + panel_offset(PANELS / 2 + chunk), 1);
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) wgmma_transposed(T, hi[k], tile(k) + panel_offset(chunk), 1);
    wgmma_commit();
}
__device__ __forceinline__ void issue_T(float (&T)[32], const Operand &hi, const Operand &lo, uint64_t tile,
                                        int chunk) {
    issue_T(T, hi, lo, [=](int k) { return tile + k * STEP; }, chunk);
}

// P_K += P tile by the hi of a tile, and inside of the tensor core, for it may be rough: what it is multiplied with is
// the error of D. That is small, but for an O that was rounded to 8 bits: with it, P's lo is multiplied, too.
constexpr bool FINE = ANSWER == 2;
__device__ __forceinline__ void issue_P_K(float (&P_K)[CHUNKS][32], const Operand &P, const Operand &P_lo,
                                          uint64_t tile) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) pin(P_K[c]);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int k = 0; k < STEPS; ++k) {
            if (FINE) wgmma_transposed(P_K[c], P_lo[k], tile + panel_offset(c) + k * STEP, 1);
            wgmma_transposed(P_K[c], P[k], tile + panel_offset(c) + k * STEP, 1);
        }
    wgmma_commit();
}

// sum += T, times `units` of rows g and g + 8.
__device__ __forceinline__ void add_T(float (&sum)[SUM], const float (&T)[32], float unit, float unit8) {
#pragma unroll
    for (int x = 0; x < SUM; ++x) sum[x] = fmaf(D < 64 ? T[x] + T[x + 16] : T[x], x / 2 % 2 ? unit8 : unit, sum[x]);
}

// This thread's columns of row g + 8r of a sum, times `factor`, to memory.
__device__ __forceinline__ void write(Gradient *row, const Sum &sum, int r, float factor) {
#pragma unroll
    for (int x = 0; x < CHUNKS * SUM / 4; ++x) {
        const int column = 8 * x + threadIdx.x % 4 * 2, left = HEAD_DIM - column;
        const float first = sum[x / (SUM / 4)][x % (SUM / 4) * 4 + 2 * r] * factor;
        const float second = sum[x / (SUM / 4)][x % (SUM / 4) * 4 + 2 * r + 1] * factor;
        if (ALIGNED) {
            if (left > 0) put(row + column, make_float2(first, second));
        } else {
            if (left > 0) row[column] = first;
            if (left > 1) row[column + 1] = second;
        }
    }
}

// Where the thread's rows are of keys, the first of the two, and how many keys the second is on.
constexpr int NEXT_ROW = INTERLEAVED ? 1 : 8;

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// A warpgroup's threads: its row g of 64, and 8 on; its columns 2t, 2t + 1 of each 8.
__device__ __forceinline__ int row_of_thread() {
    const int thread = BIAS ? threadIdx.x : opaque(threadIdx.x);  // kept through a loop, it would take a register
    return thread % 128 / 32 * 16 + thread % 32 / 4;
}
__device__ __forceinline__ int key_of_thread() { return key_in(row_of_thread()); }

// ---- biases

// Scores, their biases added, to be brought to powers of two: returns by what they are to be multiplied for that. Where
// an LSE is huge, what is left of scores after a multiplication might overflow; there, of those that are `mine`, they are
// multiplied here, by all at once: a branch for each would cost more than the arithmetic.
constexpr float HUGE_SCORE = 0x1p17f;
__device__ __forceinline__ bool is_huge(float above) {
    return ADDS && above != INFINITY_F && fabsf(above) > HUGE_SCORE;
}
__device__ __forceinline__ float factor_of_scores(const Backward &a) {
    return ADDS ? fmaf(a.scale, float(lost_of_scores(HEAD_DIM)), a.scale) : a.scale * log2e_given_back(HEAD_DIM);
}
template <class Mine>
__device__ __forceinline__ float to_powers_of_two(Scores &s, bool huge, Mine mine) {
    if (!huge) return LOG2E;
#pragma unroll
    for (int x = 0; x < SCORES; ++x)
        if (mine(x)) s[x] = in_powers_of_two(s[x]);
    return 1;
}
// That of products, which `factor` makes scores, in powers of two if there are no biases to add.
template <class Biases, class Mine>
__device__ __forceinline__ float add_biases(Scores &s, float factor, const Biases &biases, bool huge, Mine mine) {
#pragma unroll
    for (int x = 0; x < (ADDS ? SCORES : 0); ++x)
        if (mine(x)) s[x] = fmaf(s[x], factor, biases.numbers[x]);
    return ADDS ? to_powers_of_two(s, huge, mine) : factor;
}

// Biases of the scores of rows of queries, and of rows of keys: if these are interleaved, the next key is in the other
// row of a thread.
using BiasesOfQueries = Biases<SCORES, OfColumns>;
using BiasesOfKeys = Biases<SCORES, Neighbours<2, 0, INTERLEAVED>>;

// ---- dQ

// Two exponents in a register.
__device__ __forceinline__ int pack_exponents(int low, int high) { return high << 16 | (low & 0xffff); }

// A quarter of a row of a matrix, as a lane of the quad that splits it has it: of each 32 columns 8.
struct QuarterRow {
    float x[D / 32][8];
    __device__ __forceinline__ static int column(int c) { return 32 * c + threadIdx.x % 4 * 8; }
    template <class Number>
    __device__ __forceinline__ QuarterRow(const Number *matrix, long long stride, int i, int rows) {
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
#pragma unroll
            for (int e = 0; e < 8; e += 4)
                *reinterpret_cast<float4 *>(&x[c][e]) = load4(matrix, stride, i, column(c) + e, rows);
    }
    __device__ __forceinline__ float dot(const QuarterRow &other) const {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum = fmaf(x[c][e], other.x[c][e], sum);
        return quad_sum(sum);
    }
    __device__ __forceinline__ float magnitude() const {
        float sum = 0;
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
#pragma unroll
            for (int e = 0; e < 8; ++e) sum += fabsf(x[c][e]);
        return quad_sum(sum);
    }
    // Into a split tile; returns the exponent of the row's scale.
    __device__ __forceinline__ int store(unsigned char *tile, int row) {
        const int s = scale_exponent(quad_max(largest_of<D / 4>(&x[0][0])));
#pragma unroll
        for (int c = 0; c < D / 32; ++c) store_split<OWN, D>(tile, row, column(c), x[c], power_of_two(s));
        return s;
    }
};

// 64 rows of Q and dO, which lie in two split tiles, each row with a scale of its own, and their dQ.
struct OfQueries {
    int own;           // the first of them
    int exponents[2];  // of rows g and g + 8: of Q and dO; the LSE less P_BIAS, D, the sum of |dO|
    float above[2], D_[2], reach[2];
    bool huge;  // whether an LSE of the 64 rows is: of these, `OfKeys` adds all biases alike
    float total[2] = {}, sum_ds[2] = {}, bound[2] = {};  // sums of P and of dS, and a bound of |dS|, times 2^P_BIAS
    BiasRow bias_rows[2];
    Sum dS_K = {};
    float P_K[CHUNKS][32] = {};
    int coarse = 126;  // P K is in units of 2^-coarse, and of P's

    // Splits them into `tiles`, for all of the warpgroup to multiply with.
    __device__ __forceinline__ OfQueries(const Backward &a, Head head, int own, unsigned char *tiles, unsigned *scratch,
                                         int barrier)
        : own(own) {
        const auto quarter = [&](const auto *matrix, Strides by, int r) {
            return QuarterRow(rows_of(matrix, by, head.b, head.h), by.row, own + row_of_thread() + 8 * r, a.M);
        };
        // `above` is the LSE until a row is taken.
        const auto lse = [&](int r) { return lse_of(a, head, min(own + row_of_thread() + 8 * r, a.M - 1)); };
        if (D <= 64) {  // both rows at once, for it is the way from memory that takes the time
            QuarterRow q[2] = {quarter(a.Q, a.q, 0), quarter(a.Q, a.q, 1)},
                       d_o[2] = {quarter(a.dO, a.d_o, 0), quarter(a.dO, a.d_o, 1)};
            const QuarterRow o[2] = {quarter(a.O, a.o, 0), quarter(a.O, a.o, 1)};
            above[0] = lse(0), above[1] = lse(1);
            if (never(-a.M)) return;  // else ptxas waits for the first row before it asks for the second
            take(a, head, tiles, 0, q[0], d_o[0], o[0]);
            take(a, head, tiles, 1, q[1], d_o[1], o[1]);
        } else {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                QuarterRow q = quarter(a.Q, a.q, r), d_o = quarter(a.dO, a.d_o, r);
                above[r] = lse(r);
                take(a, head, tiles, r, q, d_o, quarter(a.O, a.o, r));
            }
        }
        fence_for_async();
        const bool own_huge = is_huge(above[0]) || is_huge(above[1]);
        if (ADDS)  // beside what `finish` writes first, of which a warp may be a step ahead
            huge = group_max<128>(own_huge, scratch + 4, threadIdx.x % 128, barrier) > 0;
        else named_sync(barrier, 128);
    }
    __device__ __forceinline__ void take(const Backward &a, Head head, unsigned char *tiles, int r, QuarterRow &q,
                                         QuarterRow &d_o, const QuarterRow &o) {
        const int row = row_of_thread() + 8 * r, i = own + row;
        D_[r] = d_o.dot(o);
        above[r] = i < a.M ? above_of(above[r]) : INFINITY_F;
        reach[r] = d_o.magnitude();
        exponents[r] = pack_exponents(q.store(tiles, row), d_o.store(tiles + OWN_TILE, row));
        if (BIAS) bias_rows[r] = BiasRow(a, head, i);
        if (i >= a.M) return;
        D_[r] -= dlse_of(a, head, i);
        Row &kept = row_of(a, head, i);
        if (NOTES && threadIdx.x % 4 == 0) kept.above = above[r], kept.D = D_[r];
        // Where nothing keeps the product, a compiler might join it with this sum.
        above[r] = NOTES ? above[r] - P_BIAS : __fsub_rn(above[r], P_BIAS);
    }

    // With the keys from j0 on: descriptors of their tiles, whose `numbers` are the end of a Tail. Q is the address of
    // these rows' tiles.
    __device__ __forceinline__ void multiply_with(const Backward &a, Head head, uint32_t Q, uint64_t K, uint64_t V,
                                                  int4 numbers, int j0) {
        const int row = row_of_thread(), t = threadIdx.x % 4;
        const int k_exponent = numbers.x, v_exponent = numbers.y;
        Both both;
        Scores p, ds;
        multiply_S(p, both, Q, K);
        multiply(ds, Q + OWN_TILE, V);
        BiasesOfQueries biases;  // fetched while the tensor cores multiply
        if (BIAS)
            biases.read<SCORES>(
                a, head, [&](int x) { return bias_rows[x / 2 % 2]; },
                [&](int x) { return (D > 64 ? opaque(j0) : j0) + first_key_of_lane(t) + key_of(x); });
        float unit_dP[2], unit_D[2], back[2];
        Operand hi, lo, P, P_lo;
        wgmma_wait<1>();
        collect_S(p, both);
        const auto exponentials = [&](auto masked) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int first = j0 + first_key_of_lane(t);
                const int seen = keys_seen(a, own + row + 8 * r) - first;
                const int hidden = keys_hidden(a, own + row + 8 * r) - first;
                const float factor = add_biases(p, unit(short(exponents[r]) + k_exponent) * factor_of_scores(a), biases,
                                                huge, [&](int x) { return x / 2 % 2 == r; });
                float sum = 0;
#pragma unroll
                for (int x = 0; x < SCORES / 2; ++x) {
                    const int y = x / 2 * 4 + 2 * r + x % 2;
                    float &p_ = p[y];
                    p_ = biases.hides(y) ? 0 : exp2_fast(fmaf(p_, factor, -above[r]));
                    if (masked.value && key_of(y) >= seen) p_ = 0;
                    if (WINDOW && masked.value && key_of(y) < hidden) p_ = 0;
                    sum += p_;
                }
                sum = quad_sum(sum);
                total[r] += sum;
                const float largest = fmaxf(sum, LEAST) * fmaf(reach[r], __int_as_float(numbers.w), fabsf(D_[r]));
                bound[r] = fmaxf(bound[r], largest);
                const int s = max(-126, scale_exponent(largest));
                unit_dP[r] = unit((exponents[r] >> 16) + v_exponent - s), unit_D[r] = D_[r] * power_of_two(s);
                back[r] = unit(s);
            }
        };
        if (j0 + PASS > keys_seen(a, own) || (WINDOW && j0 < keys_hidden(a, own + OWN - 1))) exponentials(Flag<true>());
        else exponentials(Flag<false>());
        if (k_exponent < coarse) {  // a unit that is as large as this tile asks for, and for good
            const float less = k_exponent - coarse < -126 ? 0 : power_of_two(k_exponent - coarse);
            coarse = k_exponent;
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int x = 0; x < 32; ++x) P_K[c][x] *= less;
        }
        const float less = coarse - k_exponent < -24 ? 0 : power_of_two(coarse - k_exponent);
        const unsigned half_less = pack(less, less);
#pragma unroll
        for (int x = 0; x < (FINE ? 0 : SCORES / 2); ++x)
            asm("mul.rn.f16x2 %0, %1, %2;"
                : "=r"(P[x / 4][x % 4])
                : "r"(pack_finite(p[2 * x], p[2 * x + 1])), "r"(half_less));
        wgmma_wait<0>();
        pin(ds);
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float sum = 0;
#pragma unroll
            for (int x = 0; x < SCORES / 2; ++x) {
                float &ds_ = ds[x / 2 * 4 + 2 * r + x % 2];
                ds_ = p[x / 2 * 4 + 2 * r + x % 2] * fmaf(ds_, unit_dP[r], -unit_D[r]);
                sum += ds_;
            }
            sum_ds[r] = fmaf(sum, back[r], sum_ds[r]);
            back[r] *= unit(k_exponent);
        }
        split(ds, hi, lo);
#pragma unroll
        for (int x = 0; x < (FINE ? SCORES / 2 : 0); ++x)
            split_scaled(p[2 * x], p[2 * x + 1], less, P[x / 4][x % 4], P_lo[x / 4][x % 4]);
        float T[32];
        issue_T(T, hi, lo, K, 0);
        issue_P_K(P_K, P, P_lo, K);
        wgmma_wait<1>();
        pin(T);
        add_T(dS_K[0], T, back[0], back[1]);
#pragma unroll
        for (int c = 1; c < CHUNKS; ++c) {
            issue_T(T, hi, lo, K, c);
            wgmma_wait<0>();
            pin(T);
            add_T(dS_K[c], T, back[0], back[1]);
        }
        wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) pin(P_K[c]);
    }

    // Writes dQ; then splits the rows once more, as `OfKeys` wants them, into `record`, with `tail`. Returns whether all
    // that this thread has split is finite. `scratch` is 24 words.
    __device__ __forceinline__ bool finish(const Backward &a, Head head, int own, unsigned char *record, Tail &tail,
                                           float *inverses, unsigned *scratch, int barrier) {
        const int row = row_of_thread(), t = threadIdx.x % 4, thread = threadIdx.x % 128;
        float mended[2] = {}, inverse[2] = {}, largest = 0;
        float most[2] = {};  // the largest number of dS K, in some columns
        Unsplit<128, false> Q, dO;
        const auto read = [&] {
            Q.load(rows_of(a.Q, a.q, head.b, head.h), a.q.row, own, a.M, thread);
            dO.load(rows_of(a.dO, a.d_o, head.b, head.h), a.d_o.row, own, a.M, thread);
        };
        if (D <= 64) read();  // on their way while dQ is written; longer heads' sums leave no registers
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = own + row + 8 * r;
            sum_ds[r] = quad_sum(sum_ds[r]);
            if (i >= a.M) continue;
            const Found found(a, head, i, above[r], total[r] * P_UNIT, sum_ds[r] * P_UNIT);
            if (NOTES && BIAS && t == 0) found.keep(row_of(a, head, i));  // for dbias
#pragma unroll
            for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
                for (int x = 0; x < SUM / 2; ++x) {
                    const int y = x / 2 * 4 + 2 * r + x % 2;
                    const float of_tile = fmaf(-found.error, P_K[c][y] * unit(coarse), dS_K[c][y]);
                    dS_K[c][y] = found.inverse == 0 ? 0 : of_tile;
                    if (c == 0 && x < 4) most[r] = fmaxf(most[r], fabsf(dS_K[c][y]));
                }
            write(rows_of(a.dQ, a.dq, head.b, head.h) + i * a.dq.row, dS_K, r, a.scale * found.inverse * P_UNIT);
            inverse[r] = found.inverse, mended[r] = D_[r] + found.error;
            largest = fmaxf(largest, bound[r] * found.inverse);
        }
        if (D > 64) read();
        const int s = scale_exponent(group_max<128>(largest, scratch, thread, barrier));
        const auto is_lone = [&](int r) {  // no number of K passes 2^15 units; and this is 2^-17 of D
            return quad_max(most[r]) * inverse[r] * P_UNIT < 0x1p-2f * fabsf(D_[r]) * unit(coarse);
        };
        const bool either = is_lone(0) | is_lone(1);
        const bool lone = TIMES_P || group_max<128>(either, scratch + 4, thread, barrier) > 0;
        const float by[2] = {lone ? 1 : inverse[0], lone ? 1 : inverse[1]};  // dO
        if (t == 0) inverses[row] = by[0], inverses[row + 8] = by[1];
        const Taken of_Q = Q.split(record, scratch + 8, thread, barrier, [](int) { return 1.0f; });
        const Taken of_dO = dO.split(record + OWN_TILE, scratch + 16, thread, barrier,
                                     [&](int i) { return TIMES_P ? 1 : inverses[i]; });
        const bool finite = of_Q.sum + of_dO.sum < INFINITY_F;
        if (thread == 0)
            tail.first = of_Q.exponent, tail.second = of_dO.exponent, tail.dS = s,
            tail.other = ADDS * huge * HUGE | lone * LONE;
        if (t != 0) return finite;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = row + 8 * r;
            OfRows &rows = tail.rows[i / PASS];
            rows.above[i % PASS] = above[r], rows.D[i % PASS] = mended[r] * by[r] * power_of_two(max(-126, s));
            rows.inverse[i % PASS] = lone ? inverse[r] : 1;
        }
        return finite;
    }
};

// ---- dK, dV

// 64 keys: their dK and dV.
struct OfKeys {
    int own;                     // the first of them
    int k_exponent, v_exponent;  // of their tiles
    Sum dK = {}, dV = {};

    // With the queries from i0 on: descriptors of their tiles, and what there is of their rows in shared memory. K is the
    // address of these keys' tiles.
    __device__ __forceinline__ void multiply_with(const Backward &a, Head head, uint32_t K, uint64_t Q, uint64_t dO,
                                                  const OfRows &rows, int4 numbers, bool lone, int i0) {
        const float *const above = rows.above, *const mended = rows.D;
        const int t = threadIdx.x % 4;
        Both both;
        Scores p, ds;
        multiply_S<true>(p, both, K, Q);
        multiply<true>(ds, K + OWN_TILE, dO);
        BiasesOfKeys biases;
        if (BIAS) {
            const BiasRow first = BiasRow(a, head, i0);
            biases.read<SCORES>(
                a, head, [&](int x) { return first.down(a, x / 4 * 8 + 2 * t + x % 2); },
                [&](int x) { return own + key_of_thread() + x / 2 % 2 * NEXT_ROW; });
        }
        const int q_exponent = numbers.x, do_exponent = numbers.y, s = numbers.z;
        const float unit_S = unit(k_exponent + q_exponent) * factor_of_scores(a);
        const float dP_unit = unit(v_exponent + do_exponent - s);
        const float dV_unit = unit(do_exponent) * P_UNIT;
        const float dK_unit = unit(q_exponent) * unit(s) * P_UNIT;
        wgmma_wait<1>();
        collect_S(p, both);
        const float factor = add_biases(p, unit_S, biases, numbers.w & HUGE, [](int) { return true; });
        const auto exponentials = [&](auto masked) {
#pragma unroll
            for (int x = 0; x < SCORES / 4; ++x) {
                const float2 above_ = *reinterpret_cast<const float2 *>(&above[8 * x + 2 * t]);
                const float2 inverse = *reinterpret_cast<const float2 *>(&rows.inverse[8 * x + 2 * t]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &p_ = p[4 * x + e];
                    p_ = biases.hides(4 * x + e) ? 0 : exp2_fast(fmaf(p_, factor, e % 2 ? -above_.y : -above_.x));
                    if (TIMES_P || masked.value) p_ *= e % 2 ? inverse.y : inverse.x;
                    const int i = i0 + 8 * x + 2 * t + e % 2, key = own + key_of_thread() + e / 2 * NEXT_ROW;
                    if (CAUSAL && masked.value && (key > i + a.q_start || (WINDOW && key < i + a.first))) p_ = 0;
                }
            }
        };
        if ((!TIMES_P && lone) ||
            (CAUSAL && (own + OWN - 1 > i0 + a.q_start || (WINDOW && own < i0 + PASS - 1 + a.first))))
            exponentials(Flag<true>());
        else exponentials(Flag<false>());
        Operand P_hi, P_lo, dS_hi, dS_lo;
        float T[32];
        split(p, P_hi, P_lo);
        issue_T(T, P_hi, P_lo, dO, 0);
        wgmma_wait<1>();
        pin(ds);
#pragma unroll
        for (int x = 0; x < SCORES / 4; ++x) {
            const float2 D_ = *reinterpret_cast<const float2 *>(&mended[8 * x + 2 * t]);
#pragma unroll
            for (int e = 0; e < 4; ++e)
                ds[4 * x + e] = p[4 * x + e] * fmaf(ds[4 * x + e], dP_unit, e % 2 ? -D_.y : -D_.x);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            if (c == CHUNKS - 1) split(ds, dS_hi, dS_lo);
            wgmma_wait<0>();
            pin(T);
            add_T(dV[c], T, dV_unit, dV_unit);
            if (c < CHUNKS - 1) issue_T(T, P_hi, P_lo, dO, c + 1);
        }
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            issue_T(T, dS_hi, dS_lo, Q, c);
            wgmma_wait<0>();
            pin(T);
            add_T(dK[c], T, dK_unit, dK_unit);
        }
    }

    __device__ __forceinline__ void finish(const Backward &a, int b, int kv, int own) {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int key = own + key_of_thread() + NEXT_ROW * r;
            if (key >= a.N) continue;
            write(rows_of(a.dK, a.dk, b, kv) + key * a.dk.row, dK, r, a.scale);
            write(rows_of(a.dV, a.dv, b, kv) + key * a.dv.row, dV, r, 1);
        }
    }
};
