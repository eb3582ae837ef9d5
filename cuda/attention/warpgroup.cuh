// Attention on Hopper's warpgroups (sm_90a): what the kernels share in which some warpgroups bring tiles of K and V to
// shared memory and each of the other BR / 64 owns 64 rows of Q and O. How tiles get there is each kernel's own. Long heads
// have another loop over tiles (long.cuh).
//
// While the tensor cores do a warpgroup's O += P V of the tile before, it takes the exponentials of the present one, and
// the products of its neighbour fill the gaps.
// Why it is accurate: small products are added first; P V of each tile starts from zero and is added to O in fp32, so the
// tensor core's truncating adder never sees a large running sum; the scales are powers of two.
//
// Macros beyond those of common.cuh and attention.cuh: PRODUCTS (split.cuh); STAGES, tiles of K and of V in flight;
// PINGPONG 1: warpgroups take turns at issuing products; PAIRED 1: two have the same 64 rows (paired.cuh).
#pragma once
#include "exact.cuh"
#include "hopper.cuh"
#include "split.cuh"

#ifndef PINGPONG
#define PINGPONG 0
#endif
#ifndef PAIRED
#define PAIRED 0
#endif

constexpr int WARPGROUPS = BR / 64;
static_assert(BR % 64 == 0, "a warpgroup that multiplies has 64 rows");

constexpr bool IS_LONG = D > 128;              // heads
constexpr int K_STAGES = PAIRED ? 2 : STAGES;  // as many as there are warpgroups: a tile of K is soon free again
constexpr int T_COLUMNS = D <= 128 ? D : 64,
              T_CHUNKS = D / T_COLUMNS;  // T = P V of one tile, some columns at a time (long.cuh)
constexpr int S_REGISTERS = BC / 2, T_REGISTERS = T_COLUMNS / 2;
constexpr int K_STEPS = ceil_div(HEAD_DIM, 16);  // of S = Q Kᵀ: beyond HEAD_DIM all is zero
constexpr int V_STEPS = BC / 16;
constexpr int Q_TILE = split_bytes(64, D);
constexpr int WORK_TOGETHER = 8;  // 2^8 row tiles at most: a few for each multiprocessor

// p = 2^(x - m + P_BIAS) instead of 2^(x - m): with the largest p near 2^6, lo of a small p is still a normal fp16.
// The row sum l has the same factor, so it cancels.
constexpr float P_BIAS = 6, LARGEST_P = 64;

template <bool B>
struct Bool {
    static constexpr bool value = B;
};

template <bool FIRST, class A, class B>
struct Choose {
    using Type = A;
};
template <class A, class B>
struct Choose<false, A, B> {
    using Type = B;
};

using Ring = RingOf<STAGES>;  // of tiles

// A head of a batch, and its rows from i0.
struct Place {
    Head head;
    int i0;
};

// As head_of, which divides where there is one batch, too, or a head of K and V for each: 100 ns a division.
__device__ __forceinline__ Head head_soon(const Attention &a, unsigned index) {
    if (!IN_PLACE || a.H == 1) return {int(index), 0, 0};
    const int b = index < a.H ? 0 : index / a.H, h = index - b * a.H;
    return {b, h, a.Hkv == a.H ? h : h / (a.H / a.Hkv)};
}

// The w-th piece of work. Causal: of some heads at a time, whose K and V stay in the cache, long rows first, so that short
// ones fill the end. A block waits until it knows its place: so heads are together by powers of two, and shifts divide.
struct Work : Place {
    int tiles;
    Work() = default;
    __device__ __forceinline__ Work(unsigned w, const Attention &a) {
        const unsigned Tr = ceil_div(CAUSAL ? again(a.M) : a.M, BR);
        if (CAUSAL) {
            const int shift = max(0, WORK_TOGETHER - (32 - __clz(Tr - 1)));
            const unsigned all = unsigned(a.B) * a.H, first = all >> shift == 0 ? 0 : w / (Tr << shift) << shift;
            const unsigned within = w - first * Tr, heads = min(1u << shift, all - first);
            const unsigned i = heads >> shift == 0 ? within / heads : within >> shift;
            head = head_soon(a, first + (within - i * heads));
            i0 = (Tr - 1 - i) * BR;
        } else {
            head = head_soon(a, w / Tr);
            i0 = w % Tr * BR;
        }
        tiles = tiles_seen(i0, a);
    }
    // A head of all batches', and its rows from i0.
    __device__ __forceinline__ Work(unsigned index, int i0, const Attention &a)
        : Place{head_of(a, index), i0}, tiles(tiles_seen(i0, a)) {}
    static __device__ __forceinline__ int tiles_seen(int i0, const Attention &a) {  // Tc, or those that some row sees
        return max(1, ceil_div(keys_seen(a.q_start + i0 + BR - 1, a.N), BC));
    }
    static __device__ __forceinline__ unsigned count(const Attention &a) {
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

// Those of two rows, of which neither waits for the other.
template <int n>
__device__ __forceinline__ int2 row_scales(const float *x, const float *y) {
    float of_x = quad_max(largest_of<n>(x)), of_y = quad_max(largest_of<n>(y));
    if (__any_sync(~0u, fmaxf(of_x, of_y) == INFINITY_F))
        of_x = quad_max(largest_finite_of<n>(x)), of_y = quad_max(largest_finite_of<n>(y));
    return make_int2(scale_exponent(of_x), scale_exponent(of_y));
}

// The quad of lanes that will own rows g and g + 8 of its warp's 16 loads, scales, splits and stores them; `factor` in
// [0.5, 1) is the mantissa of scale * log2(e). Returns the exponents of the two rows' scales. Between reading and
// writing comes all_read().
template <class Barrier>
__device__ __forceinline__ int2 split_Q(const float *Q, long long stride, int i, int rows, unsigned char *tile,
                                        float factor, Barrier all_read) {
    constexpr int CHUNKS = ceil_div(D, 32);  // of 8 columns, for each lane of the quad
    const int t = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float x[2][CHUNKS][8];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            *reinterpret_cast<float4 *>(&x[r][c][0]) = load4(Q, stride, i + 8 * r, (4 * c + t) * 8, rows);
            *reinterpret_cast<float4 *>(&x[r][c][4]) = load4(Q, stride, i + 8 * r, (4 * c + t) * 8 + 4, rows);
        }
    all_read();
    const int2 s = row_scales<CHUNKS * 8>(&x[0][0][0], &x[1][0][0]);
#pragma unroll
    for (int r = 0; r < 2 && !PAIRED; ++r)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < 8; ++e) x[r][c][e] *= power_of_two(r == 0 ? s.x : s.y);
            const int column = (4 * c + t) * 8;
            if (D % 32 == 0 || column < D) store_split<64, D>(tile, row + 8 * r, column, x[r][c], factor);
        }
    if (PAIRED) {  // two warpgroups have the same rows: each stores one of two
        const bool second = threadIdx.x / 128 == 2;
        const float scale = power_of_two(second ? s.y : s.x);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            float mine[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) mine[e] = (second ? x[1][c][e] : x[0][c][e]) * scale;
            store_split<64, D>(tile, row + 8 * second, (4 * c + t) * 8, mine, factor);
        }
    }
    return s;
}

// S = Q Kᵀ of one tile, or of its first keys: two for each number that S has. Small products first.
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

// Rows of Q as A operands in registers: those of a warpgroup need no place in shared memory.
struct QFragments {
    uint32_t hi[K_STEPS][4], lo[K_STEPS][4];
};
template <int n>
__device__ __forceinline__ void issue_S(float (&S)[n], const QFragments &Q, uint64_t K) {
    pin(S);
    wgmma_fence();
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) wgmma(S, Q.lo[k], K + split_offset<BC>(0, 16 * k) / 16, k > 0);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) wgmma(S, Q.hi[k], K + split_offset<BC>(0, D + 16 * k) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) wgmma(S, Q.hi[k], K + split_offset<BC>(0, 16 * k) / 16, PRODUCTS == 3 || k > 0);
    wgmma_commit();
}

// T = P V of one tile, from zero, small products first; V is the descriptor of the chunk of columns wanted.
template <int steps>
__device__ __forceinline__ void issue_T(float (&T)[T_REGISTERS], const uint32_t (&P_hi)[steps][4],
                                        const uint32_t (&P_lo)[steps][4], uint64_t V) {
    pin(T);
    wgmma_fence();
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < steps; ++k) wgmma(T, P_lo[k], V + split_offset<D>(0, 16 * k) / 16, k > 0);
#pragma unroll
        for (int k = 0; k < steps; ++k) wgmma(T, P_hi[k], V + split_offset<D>(0, BC + 16 * k) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < steps; ++k) wgmma(T, P_hi[k], V + split_offset<D>(0, 16 * k) / 16, PRODUCTS == 3 || k > 0);
    wgmma_commit();
}

// The rows' state: two rows a thread, shared by the quad except for l, of which each lane sums its own columns.
struct Rows {
    float shift[2];  // m - P_BIAS, in powers of two
    float l[2];
    float rescale[2];  // what O in units of the m before the last must be multiplied with
    int q_exponent[2];
};

// S := P = 2^(S - m), and m, l. Visible are the columns (keys) below `visible[r]`, counted from this thread's first one.
// PAIRED: as soon as the tile's maxima are there, they are told, which may change those that the rows have.
template <int n, class Tell>
__device__ __forceinline__ void softmax(float (&S)[n], Rows &row, int k_exponent, bool masked, const int (&visible)[2],
                                        const float (&bias)[S_REGISTERS], Tell tell) {
    // The scale back to powers of two is itself one: exact, so the largest p is 2^P_BIAS even where scores are huge.
    // Beyond the clamps all scores differ by nothing, or by far more than p can show.
    float factor[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) factor[r] = power_of_two(max(-126, min(row.q_exponent[r] - k_exponent, 89)));

    if (BIAS || masked) {
#pragma unroll
        for (int j = 0; j < n / 4; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                float &score = S[4 * j + e];
                if (BIAS) score = biased(score * factor[e / 2], bias[4 * j + e]);
                if (8 * j + e % 2 >= visible[e / 2]) score = NEG_INF;
            }
        if (BIAS) factor[0] = factor[1] = 1;
    }
    const auto maximum = [&](int r) {
        float largest = S[2 * r];
#pragma unroll
        for (int j = 0; j < n / 4; ++j) largest = fmaxf(largest, fmaxf(S[4 * j + 2 * r], S[4 * j + 2 * r + 1]));
        return fmaf(quad_max(largest), factor[r], -P_BIAS);
    };
    float maxima[2];
    if (PAIRED) maxima[0] = maximum(0), maxima[1] = maximum(1), tell(maxima);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float m = fmaxf(row.shift[r], PAIRED ? maxima[r] : maximum(r));
        const float shift = CAUSAL || BIAS ? finite_or_zero(m) : m;  // else every row sees a key
        row.rescale[r] = exp2_fast(row.shift[r] - shift);
        row.shift[r] = m;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < n / 4; ++j)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                S[4 * j + e] = exp2_fast(fmaf(S[4 * j + e], factor[r], -shift));
                sum += S[4 * j + e];
            }
        row.l[r] = fmaf(row.l[r], row.rescale[r], sum);
    }
}
template <int n>
__device__ __forceinline__ void softmax(float (&S)[n], Rows &row, int k_exponent, bool masked, const int (&visible)[2],
                                        const float (&bias)[S_REGISTERS]) {
    softmax(S, row, k_exponent, masked, visible, bias, [](const float (&)[2]) {});
}

// P as A operands: an accumulator's layout is that of A, so it never leaves the thread.
template <int steps>
__device__ __forceinline__ void split_P(const float (&S)[8 * steps], uint32_t (&P_hi)[steps][4],
                                        uint32_t (&P_lo)[steps][4]) {
#pragma unroll
    for (int k = 0; k < steps; ++k)
#pragma unroll
        for (int a = 0; a < 4; ++a) {
            const float x = S[8 * k + 2 * a], y = S[8 * k + 2 * a + 1];
            if (PRODUCTS == 3) split(x, y, P_hi[k][a], P_lo[k][a]);
            else P_hi[k][a] = pack(x, y);
        }
}

// The units of O: V is scaled by 2^s per tile, and O is kept in units of the present tile's 2^s, which makes
// O = O * c + T one FFMA. Unless that would let O overflow: then O keeps to 2^64 times the unit of the largest tile seen.
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

    // The unit of a sum of two that are in units of their own.
    static __device__ __forceinline__ Unit common(Unit x, Unit y) {
        const int smallest = min(x.smallest, y.smallest);
        return {min(max(x.exponent, y.exponent), smallest + 64), smallest};
    }
};

// What a thread holds of some keys' part in its two rows: O in units, of each row m - P_BIAS, and its share of l.
struct Sum {
    float O[T_CHUNKS][T_REGISTERS];
    float shift[2], l[2];
    Unit unit;
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

// Two neighbouring numbers of a row of O, those that are within it.
__device__ __forceinline__ void store2(float *row, int column, float x, float y) {
    if (ALIGNED) {
        if (column < HEAD_DIM) *reinterpret_cast<float2 *>(row + column) = make_float2(x, y);
        return;
    }
    if (column < HEAD_DIM) row[column] = x;
    if (column + 1 < HEAD_DIM) row[column + 1] = y;
}

// The two rows of O from row i on that a thread has a part of, O / l, and their LSE. Whether they are finite.
__device__ __forceinline__ bool give_rows(const Attention &a, Head head, int i, const Sum &sum) {
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float inverse_l = inverse(a, i + 8 * r, quad_sum(sum.l[r])), factor = given_back(inverse_l, LARGEST_P);
        const float undo = power_of_two(-sum.unit.exponent);
        if (i + 8 * r >= a.M) continue;
        Magnitude magnitude;
        float *const out = rows_of(a.O, a.o, head.b, head.h) + again(i + 8 * r) * row_stride(a.o);
#pragma unroll
        for (int x = 0; x < T_CHUNKS; ++x)
#pragma unroll
            for (int j = 0; j < T_COLUMNS / 8; ++j) {
                const int column = x * T_COLUMNS + 8 * j + threadIdx.x % 4 * 2;
                const float first = sum.O[x][4 * j + 2 * r] * factor * undo,
                            second = sum.O[x][4 * j + 2 * r + 1] * factor * undo;
                magnitude.add(first, second);
                store2(out, column, first, second);
            }
        finite &= magnitude.finite();
        if (threadIdx.x % 4 == 0) give_lse(a, head, i + 8 * r, sum.shift[r], inverse_l);
    }
    return finite;
}

// The rings of tiles in shared memory: what tells that a tile is there, or free again, and the exponents of their scales.
struct Rings {
    uint64_t *K_full, *K_free, *V_full, *V_free;
    const int4 *K_exponent, *V_exponent;  // of each the same number four times
};

// A warpgroup that multiplies, one thread's view of it.
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
};

// One that takes whole tiles. Slots of K and V in shared memory are K_SLOT and V_SLOT bytes apart.
template <int K_SLOT, int V_SLOT>
struct Consumer : Warpgroup {
    const Rings rings;
    const uint64_t K_desc, V_desc;
    Ring K_ring, V_ring;

    __device__ __forceinline__ Consumer(const Rings &rings, const unsigned char *K_tiles, const unsigned char *V_tiles,
                                        int group)
        : Warpgroup(group),
          rings(rings),
          K_desc(descriptor(shared_address(K_tiles))),
          V_desc(descriptor(shared_address(V_tiles))) {}

    // Attention of this group's rows of a piece of work. Q is an operand, where its split tile is or fragments; its rows'
    // exponents are q_exponent; `factor_exponent` is that of scale * log2(e). `keys` says which of the keys, and what else
    // there is to do where some of them end.
    template <class Query, class Keys>
    __device__ __forceinline__ void attend(const Attention &a, const Work &here, const Query &Q, int2 q_exponent,
                                           int factor_exponent, Keys keys) {
        const int first = here.i0 + group * 64, i = first + row;
        float S[S_REGISTERS], T[T_REGISTERS];
        float bias[S_REGISTERS];
        uint32_t P_hi[V_STEPS][4], P_lo[V_STEPS][4];
        Rows rows = {
            {NEG_INF, NEG_INF}, {0, 0}, {0, 0}, {factor_exponent - q_exponent.x, factor_exponent - q_exponent.y}};
        Sum sum = {};

        // Keys below this are visible to row x.
        const auto end_of = [&](int x) { return keys_seen(a.q_start + (Keys::MANY ? again(x) : x), a.N); };
        const auto softmax_of_tile = [&](int j, int k_exponent) {
            const int column = j * BC + lane % 4 * 2;
            softmax(S, rows, k_exponent, (j + 1) * BC > end_of(first), {end_of(i) - column, end_of(i + 8) - column},
                    bias);
        };
        const auto read_bias = [&](int j) {  // while the products run
            if (!BIAS) return;
            const int key = j * BC + lane % 4 * 2;
#pragma unroll
            for (int x = 0; x < S_REGISTERS; ++x)
                bias[x] = bias_of(a, here.head, i + x / 2 % 2 * 8, key + x / 4 * 8 + x % 2);
        };

        const auto K_done = [&] {
            release(&rings.K_free[K_ring.stage]);
            K_ring.next();
        };

        // S of the first tile
        const int first_tile = keys.first_tile(), end_tile = keys.end_tile(here);
        wait(&rings.K_full[K_ring.stage], K_ring.parity);
        int k_exponent = read_by_lane_0(rings.K_exponent[K_ring.stage].x);
        issue_S(S, Q, K_desc + K_ring.stage * (K_SLOT / 16));
        read_bias(first_tile);
        wgmma_wait<0>();
        pin(S);
        K_done();
        softmax_of_tile(first_tile, k_exponent);
        split_P(S, P_hi, P_lo);

        // O += P V of the tile at V_ring, which is on its way
        const auto finish_O = [&](const float (&rescale)[2]) {
            float O_factor;
            const float T_factor = sum.unit.next(read_by_lane_0(rings.V_exponent[V_ring.stage].x), &O_factor);
            const float c[2] = {rescale[0] * O_factor, rescale[1] * O_factor};
            wgmma_wait<0>();
            pin(T);
            add_T(sum.O[0], T, c, T_factor);
            release(&rings.V_free[V_ring.stage]);
            V_ring.next();
        };

        // S := P of tile j, and O += P V of tile j - 1. Where tile j begins a chunk of keys, what is before it is closed.
        const auto step = [&](int j, auto begins) {
            const float rescale[2] = {rows.rescale[0], rows.rescale[1]};
            wait(&rings.K_full[K_ring.stage], K_ring.parity);
            k_exponent = read_by_lane_0(rings.K_exponent[K_ring.stage].x);
            wait(&rings.V_full[V_ring.stage], V_ring.parity);
            await_turn();
            issue_S(S, Q, K_desc + K_ring.stage * (K_SLOT / 16));
            issue_T(T, P_hi, P_lo, V_desc + V_ring.stage * (V_SLOT / 16));
            pass_turn();
            read_bias(j);
            wgmma_wait<1>();  // S is there, T still runs
            pin(S);
            K_done();
            if (begins.value) {
#pragma unroll
                for (int r = 0; r < 2; ++r) {
                    sum.shift[r] = rows.shift[r], sum.l[r] = rows.l[r];
                    rows.shift[r] = NEG_INF, rows.l[r] = 0;
                }
            }
            softmax_of_tile(j, k_exponent);
            finish_O(rescale);  // until T is there, P is an operand
            if (begins.value) {
                keys.close(sum);
                sum = {};
            }
        };
        for (int j = first_tile + 1;; ++j) {
            const int stop = min(keys.next_chunk(), end_tile);
            for (; j < stop; ++j) {
                step(j, Bool<false>());
                split_P(S, P_hi, P_lo);
            }
            if (!Keys::MANY || j == end_tile) break;
            step(j, Bool<true>());
            split_P(S, P_hi, P_lo);
        }
        wait(&rings.V_full[V_ring.stage], V_ring.parity);
        issue_T(T, P_hi, P_lo, V_desc + V_ring.stage * (V_SLOT / 16));
        finish_O(rows.rescale);
#pragma unroll
        for (int r = 0; r < 2; ++r) sum.shift[r] = rows.shift[r], sum.l[r] = rows.l[r];
        if (!keys.finish(sum)) return;

        const Place there = keys.recall(here);  // rather than to keep it in registers
        const int i_there = there.i0 + group * 64 + row;
        const bool finite = give_rows(a, there.head, i_there, sum);
        if (IN_PLACE && !__all_sync(~0u, finite)) redo_rows(a, there.head, i_there - lane / 4, 16);
    }
};
