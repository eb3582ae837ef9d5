// The steps that a warpgroup takes on Hopper (sm_90a): what 15_wgmma.cu, its forms (forms.cuh) and 16_wgmma_short.cu
// share.
//
// A warpgroup owns 64 rows of Q and O. A tile of keys takes it through the functions below in their order: `issue_S`,
// `softmax`, `split_P`, `issue_T`, `add_T`; after the last one `deliver` writes its rows. A thread has two of the rows,
// and shares them with the three other lanes of its quad.
// Why it is accurate: small products are added first; P V of each tile starts from zero and is added to O in fp32, so
// the tensor core's truncating adder never sees a large running sum; the scales are powers of two.
//
// Macros beyond those of common.cuh and attention.cuh: PRODUCTS (split.cuh); STAGES, tiles of K and of V in flight;
// PINGPONG 1: warpgroups take turns at issuing products; BY_FOURS 1: columns of V are where `place_of_V` says, so that a
// thread writes four of O at a time.
#pragma once
#include "exact.cuh"
#include "hopper.cuh"
#include "split.cuh"

#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef BY_FOURS
#define BY_FOURS 0
#endif

constexpr int WARPGROUPS = BR / 64;
static_assert(BR % 64 == 0, "a warpgroup that multiplies has 64 rows");

// T = P V of one tile: all columns at a time, without the padding; of long heads 64 (long.cuh), or T_AT_A_TIME.
#ifndef T_AT_A_TIME
#define T_AT_A_TIME (HEAD_DIM > 128 ? 64 : 128)
#endif
constexpr int T_COLUMNS = smaller(round_up(HEAD_DIM, 8), T_AT_A_TIME), T_CHUNKS = ceil_div(HEAD_DIM, T_COLUMNS);
constexpr int S_REGISTERS = BC / 2, T_REGISTERS = T_COLUMNS / 2;
constexpr int K_STEPS = ceil_div(HEAD_DIM, 16);  // of S = Q Kᵀ: beyond HEAD_DIM all is zero
constexpr int V_STEPS = BC / 16;
constexpr int Q_TILE = split_bytes(64, D);
constexpr int TOGETHER = 8;  // 2^8 row tiles at most, of several heads: a few for each multiprocessor

// p = 2^(x - m + P_BIAS) instead of 2^(x - m): with the largest p near 2^6, lo of a small p is still a normal fp16.
// The row sum l has the same factor, so it cancels.
constexpr float P_BIAS = 6, LARGEST_P = 64;

using Ring = RingOf<STAGES>;  // of tiles

// Where a row tile begins: a head of a batch, and the first of its rows.
struct FirstRow {
    Head head;
    int i0;
};

// BR rows of Q of a head, and how many tiles of keys some of them see: one at least.
struct RowTile : FirstRow {
    int tiles;
    RowTile() = default;
    // The row tile with the number w, of those of all heads. With the causal mask the rows that see most keys come
    // first, so that short ones fill the end; and some heads are taken together, as many as a power of two, so that
    // shifts divide: their K and V stay in the cache. What heads are left over go with the last of these groups: else
    // their long rows would begin when nothing is left beside them.
    __device__ __forceinline__ RowTile(unsigned w, const Attention &a) {
        if (PACKED) {
            const int Tr = ceil_div(a.M, BR);
            head = head_of_block(a, Tr), i0 = (CAUSAL ? Tr - 1 - a.tile : a.tile) * BR, tiles = tiles_seen(i0, a);
            return;
        }
        const unsigned Tr = ceil_div(CAUSAL ? opaque(a.M) : a.M, BR);
        if (CAUSAL) {
            const int shift = max(0, TOGETHER - (32 - __clz(Tr - 1)));
            const unsigned all = unsigned(a.B) * a.H, last = max(1u, all >> shift) - 1;
            const unsigned group = last == 0 ? 0 : min(last, w / (Tr << shift)), first = group << shift;
            const unsigned within = w - first * Tr, heads = group == last ? all - first : 1u << shift;
            const unsigned i = heads == 1u << shift ? within >> shift : within / heads;
            head = head_soon(a, first + (within - i * heads));
            i0 = (Tr - 1 - i) * BR;
        } else {
            head = head_soon(a, w / Tr);
            i0 = w % Tr * BR;
        }
        tiles = tiles_seen(i0, a);
    }
    // The rows from i0 on of the head with the number `index`, of all batches' heads.
    __device__ __forceinline__ RowTile(unsigned index, int i0, const Attention &a)
        : FirstRow{head_soon(a, index), i0}, tiles(tiles_seen(i0, a)) {}
    static __device__ __forceinline__ int tiles_seen(int i0, const Attention &a) {
        return max(1, ceil_div(keys_seen(a.q_start + i0 + BR - 1, a.N), BC));
    }
    static __device__ __forceinline__ unsigned count(const Attention &a) {
        if (PACKED) return gridDim.x;  // a block has one
        return unsigned(a.B) * a.H * ceil_div(a.M, BR);
    }
};

// The scale's exponent for a row of Q, of which each lane of a quad has n numbers.
template <int n>
__device__ __forceinline__ int row_scale(const float *x) {
    float largest = quad_max(largest_of<n>(x));
    if (__any_sync(~0u, largest == INFINITY_F)) largest = quad_max(largest_finite_of<n>(x));
    return scale_exponent(largest);
}

// `row_scale` of two rows at once, so that their exchanges between lanes overlap.
template <int n>
__device__ __forceinline__ int2 row_scales(const float *x, const float *y) {
    float of_x = quad_max(largest_of<n>(x)), of_y = quad_max(largest_of<n>(y));
    if (__any_sync(~0u, fmaxf(of_x, of_y) == INFINITY_F))
        of_x = quad_max(largest_finite_of<n>(x)), of_y = quad_max(largest_finite_of<n>(y));
    return make_int2(scale_exponent(of_x), scale_exponent(of_y));
}

// Rows i and i + 8 of Q, as the quad of lanes that will own them loads them: each lane 8 columns of 32.
struct TwoRows {
    static constexpr int EIGHTS = ceil_div(D, 32);
    float x[2][EIGHTS][8];

    TwoRows() = default;
    __device__ __forceinline__ TwoRows(const Input *Q, long long stride, int i, int rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < EIGHTS; ++c) {
                *reinterpret_cast<float4 *>(&x[r][c][0]) = load4(Q, stride, i + 8 * r, column(c), rows);
                *reinterpret_cast<float4 *>(&x[r][c][4]) = load4(Q, stride, i + 8 * r, column(c) + 4, rows);
            }
    }
    static __device__ __forceinline__ int column(int c) { return (4 * c + threadIdx.x % 4) * 8; }
    // The exponents of the two rows' scales.
    __device__ __forceinline__ int2 scales() const { return row_scales<EIGHTS * 8>(&x[0][0][0], &x[1][0][0]); }
};

// ---- S = Q Kᵀ

// S = Q Kᵀ of a tile, or of its first keys: two for each number that a thread has of S. Small products first.
template <int n>
__device__ __forceinline__ void issue_S(float (&S)[n], uint64_t Q, uint64_t K) {
    asm volatile("" : "+l"(Q));  // else the address of each step is kept in a register of its own
    pin(S);
    wgmma_fence();
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k)
            wgmma(S, Q + split_offset<64>(0, D + 16 * k) / 16, K + split_offset<BC>(0, 16 * k) / 16, k > 0);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k)
            wgmma(S, Q + split_offset<64>(0, 16 * k) / 16, K + split_offset<BC>(0, D + 16 * k) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        wgmma(S, Q + split_offset<64>(0, 16 * k) / 16, K + split_offset<BC>(0, 16 * k) / 16, PRODUCTS == 3 || k > 0);
    wgmma_commit();
}

// Rows of Q as left operands in registers. With MASK_IN_SUMS S has what is to be added to.
struct QFragments {
    uint32_t hi[K_STEPS][4], lo[K_STEPS][4];
};
template <int n>
__device__ __forceinline__ void issue_S(float (&S)[n], const QFragments &Q, uint64_t K) {
    pin(S);
    wgmma_fence();
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k)
            wgmma(S, Q.lo[k], K + split_offset<BC>(0, 16 * k) / 16, MASK_IN_SUMS || k > 0);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) wgmma(S, Q.hi[k], K + split_offset<BC>(0, D + 16 * k) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        wgmma(S, Q.hi[k], K + split_offset<BC>(0, 16 * k) / 16, MASK_IN_SUMS || PRODUCTS == 3 || k > 0);
    wgmma_commit();
}

// ---- softmax

// What brings scores to powers of two, exp(x) = 2^(x log2(e)); where there are biases to add, log2(e) is left for later.
__device__ __forceinline__ float factor_of_scores(const Attention &a) {
    return ADDS ? fmaf(a.scale, float(lost_of_scores(HEAD_DIM)), a.scale) : a.scale * log2e_given_back(HEAD_DIM);
}

// That factor is a power of two times a mantissa, in [0.5, 1) or negative. Q takes it along before it is split. Halves
// would need to be split then: so it is left to the scores, but for its sign, that the largest may stay the largest.
__device__ __forceinline__ float mantissa_of_Q(float mantissa) {
    return PRODUCTS == 2 ? copysignf(1, mantissa) : mantissa;
}
__device__ __forceinline__ float mantissa_of_S(const Attention &a) {
    int exponent;
    return PRODUCTS == 2 ? fabsf(frexpf(factor_of_scores(a), &exponent)) : 1;
}

// The softmax of a thread's two rows so far. Their quad of lanes has the same numbers, but for l: each lane sums its
// own keys.
struct RowState {
    float shift[2];  // m - P_BIAS, in powers of two
    float l[2];
    float rescale[2];  // what O in units of the m before the last must be multiplied with
    int q_exponent[2];
    float mantissa;  // of what brings scores to powers of two, if it is not in Q

    // Before any key. `factor_exponent` is that of `factor_of_scores`, `q_exponent` those of the rows' own scales.
    static __device__ __forceinline__ RowState fresh(int factor_exponent, int2 q_exponent, float mantissa = 1) {
        return {{NEG_INF, NEG_INF},
                {0, 0},
                {0, 0},
                {factor_exponent - q_exponent.x, factor_exponent - q_exponent.y},
                mantissa};
    }
    // Forgets the keys so far.
    __device__ __forceinline__ void restart() {
#pragma unroll
        for (int r = 0; r < 2; ++r) shift[r] = NEG_INF, l[r] = 0;
    }
};

// The biases of a thread's numbers of S. They take long to come: numbers are read a tile ahead, if registers suffice, and
// the mask's bytes while the products run.
using Bias = Biases<S_REGISTERS, OfColumns>;

// Where the biases of a thread's rows i and i + 8 are; they are read from the thread's first key on, which is `key`.
struct BiasRows {
    BiasRow of[2];
    __device__ __forceinline__ BiasRows(const Attention &a, Head head, int i) {
        if (BIAS) of[0] = BiasRow(a, head, i), of[1] = BiasRow(a, head, i + 8);
    }
    template <int n>
    __device__ __forceinline__ void read_numbers(Bias &bias, const Attention &a, Head head, int key) const {
        if (ADDS)
            bias.template read_numbers<n>(
                a, head, [&](int x) { return of[x / 2 % 2]; }, [&](int x) { return key + key_of(x); });
    }
    template <int n>
    __device__ __forceinline__ void read_mask(Bias &bias, const Attention &a, int key) const {
        if (HIDES)
            bias.template read_mask<n>(a, [&](int x) { return of[x / 2 % 2]; }, [&](int x) { return key + key_of(x); });
    }
};

// Beyond this factor scores may be huge, above 2^18: their last bits are no small numbers, and with a factor that is no
// power of two the largest p might be far from 2^P_BIAS. There the scores are multiplied first.
constexpr float HUGE_FACTOR = 0x1p-12f / HEAD_DIM;  // no scaled number of Q or K reaches 2^15

// Scores as they came from the tensor cores: with their biases, and -inf for keys that a row does not see, those from
// `visible[r]` on, counted from this thread's first one; if not `masked`, all rows see all keys. Returns for each row
// the factor that then brings its scores to powers of two: log2(e) where a bias was added; else itself one but for
// `mantissa`, exact, so that the largest p is 2^P_BIAS even where scores are huge. Beyond the clamps all scores differ by
// nothing, or are beyond float's range, which makes NaN of the row.
template <int n>
__device__ __forceinline__ float2 mask_scores(float (&S)[n], const RowState &row, int k_exponent, bool masked,
                                              const int (&visible)[2], const Bias &bias) {
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r)
        factor[r] =
            power_of_two(max(-126, min(row.q_exponent[r] - k_exponent, 127))) * (PRODUCTS == 2 ? row.mantissa : 1);
#pragma unroll
    for (int x = 0; x < (BIAS ? n : 0); ++x) {  // a NaN that a bias of -inf should have hidden is mended in the answer
        if (ADDS) S[x] = fmaf(S[x], factor[x / 2 % 2], bias.numbers[x]);
        if (bias.hides(x)) S[x] = NEG_INF;
    }
    if (ADDS) factor[0] = factor[1] = LOG2E;
#pragma unroll
    for (int r = 0; r < (PRODUCTS == 2 && !ADDS ? 2 : 0); ++r)
        if (factor[r] > HUGE_FACTOR) {
#pragma unroll
            for (int j = 0; j < n / 4; ++j) S[4 * j + 2 * r] *= factor[r], S[4 * j + 2 * r + 1] *= factor[r];
            factor[r] = 1;
        }
    if (masked) {
#pragma unroll
        for (int j = 0; j < n / 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float &score = S[4 * j + e];
                if (key_of(4 * j + e) >= visible[e / 2]) score = NEG_INF;
            }
    }
    return make_float2(factor[0], factor[1]);
}

// -inf for the scores of keys before a window: `visible` is the first that is within it for this thread's first row,
// counted from the thread's first key; that of the second row is 8 keys later.
template <int n>
__device__ __forceinline__ void hide_before(float (&S)[n], int visible) {
#pragma unroll
    for (int x = 0; x < n; ++x)
        if (key_of(x) < visible + x / 2 % 2 * 8) S[x] = NEG_INF;
}

// The largest score of row r in this tile, in powers of two, less P_BIAS. Where scores with biases are so large that what
// is left of them after the multiplication might be far from P_BIAS, or that it might overflow, they are multiplied here.
constexpr float HUGE_SCORE = 0x1p17f;
template <int n>
__device__ __forceinline__ float maximum_of_row(float (&S)[n], int r, float &factor) {
    float largest = S[2 * r];
#pragma unroll
    for (int j = 0; j < n / 4; ++j) largest = fmaxf(largest, fmaxf(S[4 * j + 2 * r], S[4 * j + 2 * r + 1]));
    largest = quad_max(largest);
    if (ADDS && fabsf(largest) > HUGE_SCORE && largest != NEG_INF) {
        largest = in_powers_of_two(largest), factor = 1;
#pragma unroll
        for (int x = 0; x < n; ++x)
            if (x / 2 % 2 == r) S[x] = in_powers_of_two(S[x]);
    }
    return fmaf(largest, factor, -P_BIAS);
}

// Row r of S := P = 2^(S - m), and its m and l, the tile's maximum being known.
template <int n>
__device__ __forceinline__ void exponentiate_row(float (&S)[n], RowState &row, int r, float maximum, float factor) {
    const float m = fmaxf(row.shift[r], maximum);
    // A maximum beyond float's range is no shift either: p = 0 of all keys would be that of a row that sees none.
    const float shift = (CAUSAL || BIAS || PACKED) && fabsf(m) == INFINITY_F ? 0 : m;  // else every row sees a key
    row.rescale[r] = exp2_fast(row.shift[r] - shift);
    row.shift[r] = m;
    float sum = 0;
#pragma unroll
    for (int j = 0; j < n / 4; ++j)
#pragma unroll
        for (int e = 2 * r; e < 2 * r + 2; ++e) {
            S[4 * j + e] = exp2_fast(fmaf(S[4 * j + e], factor, -shift));
            sum += S[4 * j + e];
        }
    row.l[r] = fmaf(row.l[r], row.rescale[r], sum);
}

// S := P, and m, l, of a tile whose scores are there; the arguments are those of `mask_scores`.
template <int n>
__device__ __forceinline__ void softmax(float (&S)[n], RowState &row, int k_exponent, bool masked,
                                        const int (&visible)[2], const Bias &bias) {
    float2 factor = mask_scores(S, row, k_exponent, masked, visible, bias);
    const float first = maximum_of_row(S, 0, factor.x);
    exponentiate_row(S, row, 0, first, factor.x);
    const float second = maximum_of_row(S, 1, factor.y);
    exponentiate_row(S, row, 1, second, factor.y);
}

// ---- O += P V

// P as left operands: these have the layout of accumulators, so that P never leaves the thread.
template <int steps>
__device__ __forceinline__ void split_P(const float (&S)[8 * steps], uint32_t (&P_hi)[steps][4],
                                        uint32_t (&P_lo)[steps][4]) {
#pragma unroll
    for (int k = 0; k < steps; ++k)
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const float x = S[8 * k + 2 * a], y = S[8 * k + 2 * a + 1];
            if (PRODUCTS >= 2) split(x, y, P_hi[k][a], P_lo[k][a]);
            else P_hi[k][a] = pack(x, y);
        }
}

// T = P V of a tile, from zero, small products first; V is the descriptor of the columns that are wanted.
template <int steps>
__device__ __forceinline__ void issue_T(float (&T)[T_REGISTERS], const uint32_t (&P_hi)[steps][4],
                                        const uint32_t (&P_lo)[steps][4], uint64_t V) {
    pin(T);
    wgmma_fence();
    if (PRODUCTS >= 2) {
#pragma unroll
        for (int k = 0; k < steps; ++k) wgmma(T, P_lo[k], V + split_offset<D>(0, 16 * k) / 16, k > 0);
    }
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < steps; ++k) wgmma(T, P_hi[k], V + split_offset<D>(0, BC + 16 * k) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) wgmma(T, P_hi[k], V + split_offset<D>(0, 16 * k) / 16, PRODUCTS >= 2 || k > 0);
    wgmma_commit();
}

// The units of O: V is scaled by 2^s per tile, and O is kept in units of the present tile's 2^s, which makes O = O * c
// + T one FFMA. Unless that would let O overflow: then O keeps to 2^64 times the unit of the largest tile seen.
struct Unit {
    int exponent = 0, smallest = 127;
    // Moves to a tile of exponent s: *O_factor for O, returned: the factor for T, nearly always 1.
    __device__ __forceinline__ float next(int s, float *O_factor) {
        smallest = min(smallest, s);
        const int moved = min(s, smallest + 64), change = moved - exponent;
        exponent = moved;
        *O_factor = change < -126 ? 0 : power_of_two(min(change, 127));
        return moved == s ? 1 : factor(moved - s);
    }
    // 2^change, or 0 where that is too small.
    static __device__ __forceinline__ float factor(int change) { return change < -126 ? 0 : power_of_two(change); }

    // The unit of a sum of two numbers that are in units of their own.
    static __device__ __forceinline__ Unit common(Unit x, Unit y) {
        const int smallest = min(x.smallest, y.smallest);
        return {min(max(x.exponent, y.exponent), smallest + 64), smallest};
    }
};

// A partial answer, the sum over some keys, as a thread has it of its two rows: O in units, m - P_BIAS, and its share
// of l.
struct Partial {
    float O[T_CHUNKS][T_REGISTERS];
    float shift[2], l[2];
    Unit unit;

    __device__ __forceinline__ void take(const RowState &rows) {
#pragma unroll
        for (int r = 0; r < 2; ++r) shift[r] = rows.shift[r], l[r] = rows.l[r];
    }
};

// O = O * rescale + T
template <int n>
__device__ __forceinline__ void add_T(float (&O)[n], float (&T)[n], const float (&rescale)[2], float T_factor) {
    if (T_factor != 1) {
#pragma unroll
        for (int x = 0; x < n; ++x) T[x] *= T_factor;
    }
#pragma unroll
    for (int x = 0; x < n; ++x) O[x] = fmaf(O[x], rescale[x / 2 % 2], T[x]);
}

// ---- the epilogue

// Columns of O from `column` on, of a row at `out` that is the one with the number r in O: times both factors.
template <int n>
__device__ __forceinline__ void give_columns(Answer *out, int column, const float (&O)[n], int r, float factor,
                                             float undo, Finiteness &finiteness) {
    const int t = threadIdx.x % 4;
    float2 before;  // of four
#pragma unroll
    for (int j = 0; j < n / 4; ++j) {
        const float2 two = {O[4 * j + 2 * r] * factor * undo, O[4 * j + 2 * r + 1] * factor * undo};
        finiteness.add(two.x, two.y);
        const int first = column + 8 * j, of_four = first - 8 + 4 * t;
        if (!BY_FOURS || first >= IN_FOURS) store2(out, first + 2 * t, two.x, two.y);
        else if (j % 2 == 0) before = two;
        else if (of_four < HEAD_DIM) put(out + of_four, make_float4(before.x, before.y, two.x, two.y));
    }
}

// Row i of O that a thread has a part of, the one with the number r in `sum`: O / l, and its LSE. Whether it is finite.
__device__ __forceinline__ bool give_row(const Attention &a, Head head, int i, int r, const Partial &sum) {
    const float inverse_l = inverse(a, i, quad_sum(sum.l[r])), factor = given_back(inverse_l, LARGEST_P);
    const float undo = power_of_two(-sum.unit.exponent);
    if (i >= a.M) return true;
    Finiteness finiteness;
    Answer *const out = rows_of(a.O, a.o, head.b, head.h) + opaque(i) * row_stride(a.o);
#pragma unroll
    for (int x = 0; x < T_CHUNKS; ++x) give_columns(out, x * T_COLUMNS, sum.O[x], r, factor, undo, finiteness);
    const bool finite = finiteness.finite();
    if (threadIdx.x % 4 == 0) give_lse(a, head, i, sum.shift[r], inverse_l);
    return finite;
}

// The two rows of O from row i on that a thread has a part of, and their LSE. Whether they are finite.
__device__ __forceinline__ bool give_rows(const Attention &a, Head head, int i, const Partial &sum) {
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) finite &= give_row(a, head, i + 8 * r, r, sum);
    return finite;
}

// ---- a warpgroup that multiplies, as one of its threads sees it
struct Warpgroup {
    const int group, lane, row;  // `row` of the group's 64, and row + 8, are this thread's

    __device__ __forceinline__ explicit Warpgroup(int group)
        : group(group), lane(threadIdx.x % 32), row(threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4) {}

    // Turns at issuing products: named barriers 4 to 6, one a warpgroup.
    static constexpr bool TURNS = PINGPONG && WARPGROUPS > 1;
    __device__ __forceinline__ void await_turn() const {
        if (TURNS) named_sync(4 + group, 256);
    }
    __device__ __forceinline__ void pass_turn() const {
        if (TURNS) named_arrive(4 + (group + 1) % WARPGROUPS, 256);
    }

    // The slot is free again, as far as this warp is concerned.
    __device__ __forceinline__ void release(uint64_t *free) const {
        __syncwarp();
        if (lane == 0) arrive(free);
    }

    // Two rows of Q, scaled, split and stored by the threads that will own them; `factor` is the mantissa of
    // `factor_of_scores`. Returns the exponents of the two rows' scales.
    __device__ __forceinline__ int2 split_Q(TwoRows &two, unsigned char *tile, float factor) const {
        const int2 s = two.scales();
#pragma unroll
        for (int r = 0; r < 2; ++r)
#pragma unroll
            for (int c = 0; c < TwoRows::EIGHTS; ++c) {
#pragma unroll
                for (int e = 0; e < 8; ++e) two.x[r][c][e] *= power_of_two(r == 0 ? s.x : s.y);
                if (D % 32 == 0 || two.column(c) < D)
                    store_split<64, D>(tile, row + 8 * r, two.column(c), two.x[r][c], mantissa_of_Q(factor));
            }
        return s;
    }

    // How many keys a row sees: keys 0 to that many - 1.
    __device__ __forceinline__ int keys_of(const Attention &a, int row) const {
        return keys_seen(a.q_start + (SHARING == WHOLE ? row : opaque(row)), a.N);
    }

    // Writes O and the LSE of this thread's rows of a row tile. Rows that are not finite are computed once more.
    __device__ __forceinline__ void deliver(const Attention &a, const FirstRow &there, const Partial &sum) const {
        const int i = there.i0 + group * 64 + row;
        const bool finite = give_rows(a, there.head, i, sum);
        if (IN_PLACE && !__all_sync(~0u, finite)) redo_rows(a, there.head, i - lane / 4, 16);
    }
};
