// Tensor cores at fp32 accuracy on Hopper: products on wgmma, warps specialised, copies in the background.
//
// What changed: a block owns 128 rows of two matrices, two warpgroups 64 each, which multiply with wgmma; a third brings
// what passes by into shared memory, STAGES tiles ahead. S and dP are products of tiles that lie in shared memory; P and
// dS are split in registers, where the next products want them. One tile serves both: K-major to sum over columns, MN-major
// to sum over rows. Scales ask for no look at dS: `dq` bounds it by sums of P that it needs anyway, and keeps the bound for
// `dk_dv`. 1 / the sum of 2^(s - above), by which `dk_dv` would multiply each P, is a factor of dO, before that is split.
// Why it is faster: wgmma reads its right operands, and half of the left ones, from shared memory by itself, at twice the
// rate of mma.sync; and one warpgroup's exponentials run beside the other's products.
// What it costs: no biases; Q and dO are split after `dq`, a launch more; heads of 65 to 127 numbers are padded to 128.
//
// Macros beyond those of backward.cuh: PASS, rows of a tile that passes by; STAGES; BLOCKS of a multiprocessor; TAIL and
// PREPARE_THREADS (records.cuh). Launches: `prepare_keys`, `dq`, `prepare_queries` (records.cuh), `dk_dv`.
#include "hopper.cuh"
#include "records.cuh"

static_assert(BIAS == 0, "it takes no bias");
constexpr int GROUPS = BR / OWN;  // warpgroups of a block that multiply, with OWN rows each
static_assert(PASS == 64 || PASS == 32, "rows of a tile that pass by at a time");
static_assert(THREADS == 128 * (1 + GROUPS), "one warpgroup copies");
// A multiprocessor has 512 registers for each of 128 threads, and BLOCKS blocks.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = GROUPS == 2 ? 240 : BLOCKS == 2 ? 232 : 136;
static_assert(BLOCKS * (PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS) <= 512, "registers for all");

constexpr int PANELS = 2 * D / 64;  // of 64 columns, hi and lo
constexpr int PASS_TILE = split_bytes(PASS, D), STAGE = 2 * PASS_TILE;
static_assert(SHARED == GROUPS * 2 * OWN_TILE + STAGES * STAGE + 1024, "tiles start on 1024 bytes");

constexpr int CHUNKS = ceil_div(D, 64);  // of 64 columns of a sum; with D = 32, hi and lo side by side are 64
constexpr int SUM = D < 64 ? 16 : 32;    // registers a chunk
constexpr int SCORES = PASS / 2, STEPS = PASS / 16;
constexpr float LEAST = 0x1p-30f;  // that a tile's sum of P counts for: smaller ones are nothing beside 2^14

typedef float Scores[SCORES];
typedef float Sum[CHUNKS][SUM];

__device__ __forceinline__ float unit(int exponent) { return power_of_two(max(-126, min(127, -exponent))); }

// ---- shared memory: what the warpgroups own, two tiles each; then stages of what passes by

struct Arrived {  // with each stage
    float above[PASS], D[PASS];
    int4 numbers;  // the end of a Tail
};

using Ring = RingOf<STAGES>;

struct Shared {
    unsigned char *tiles;
    uint64_t *full, *free;
    Arrived *arrived;
    __device__ __forceinline__ unsigned char *own(int group) const { return tiles + group * 2 * OWN_TILE; }
    __device__ __forceinline__ unsigned char *stage(int s) const { return tiles + GROUPS * 2 * OWN_TILE + s * STAGE; }
};

// A slot is free again when each thread of so many warpgroups has said so: its own arrival is what orders what it has read
// there before what comes next.
__device__ __forceinline__ Shared begin(int groups) {
    extern __shared__ unsigned char unaligned[];
    __shared__ uint64_t full[STAGES], free[STAGES];
    __shared__ __align__(16) Arrived arrived[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&full[s], 1), barrier_init(&free[s], 128 * groups);
        barrier_init_done();
    }
    return {unaligned + (-shared_address(unaligned) & 1023), full, free, arrived};
}

// The n-th PASS rows of records that follow one another, to a stage.
template <bool ROWS>
__device__ __forceinline__ void copy_tile(const Shared &shared, Ring &ring, const unsigned char *records, int n) {
    const int row = n * PASS % OWN;
    const unsigned char *const record = records + (long long)(n * PASS / OWN) * RECORD;
    const Tail *const tail = reinterpret_cast<const Tail *>(record + 2 * OWN_TILE);
    uint64_t *const full = &shared.full[ring.stage];
    Arrived *const arrived = &shared.arrived[ring.stage];
    wait(&shared.free[ring.stage], ring.parity ^ 1);
    arrive_expecting(full, STAGE + (ROWS ? sizeof(Arrived) : 16));
    const uint32_t to = shared_address(shared.stage(ring.stage));
#pragma unroll
    for (int panel = 0; panel < 2 * PANELS; ++panel)
        bulk_copy(to + panel * PASS * 128, record + panel * OWN * 128 + row * 128, PASS * 128, full);
    if (ROWS) {
        bulk_copy(shared_address(arrived->above), tail->above + row, sizeof(arrived->above), full);
        bulk_copy(shared_address(arrived->D), tail->D + row, sizeof(arrived->D), full);
    }
    bulk_copy(shared_address(&arrived->numbers), &tail->first, 16, full);
    ring.next();
}

// ---- which rows a block owns: causal, of some heads at a time those with most to do first

constexpr unsigned TOGETHER = 256;  // blocks
struct Place {
    int head, tile;
    __device__ __forceinline__ Place(unsigned w, int heads, int tiles) : head(w / tiles), tile(w % tiles) {
        if (!CAUSAL) return;
        const int together = max(1u, TOGETHER / tiles), first = w / (together * tiles) * together;
        const int some = min(together, heads - first), within = w - first * tiles;
        head = first + within % some, tile = within / some;
    }
};

// ---- products of a warpgroup

constexpr int K_STEPS = ceil_div(HEAD_DIM, 16);  // of S and dP: beyond HEAD_DIM all is zero

// s = own tileᵀ, summed over columns, small products first; `own` is the address of a tile of 64 rows.
__device__ __forceinline__ void multiply(Scores &s, uint32_t own, uint64_t tile) {
    const uint64_t left = descriptor(again(own));  // again: else what describes each step is kept in a register
    pin(s);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        wgmma(s, left + split_offset<OWN>(0, D + 16 * k) / 16, tile + split_offset<PASS>(0, 16 * k) / 16, k > 0);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        wgmma(s, left + split_offset<OWN>(0, 16 * k) / 16, tile + split_offset<PASS>(0, D + 16 * k) / 16, 1);
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        wgmma(s, left + split_offset<OWN>(0, 16 * k) / 16, tile + split_offset<PASS>(0, 16 * k) / 16, 1);
    wgmma_commit();
}

typedef uint32_t Operand[STEPS][4];
constexpr int PANEL = PASS * 128 / 16, STEP = 16 * 128 / 16;  // what a descriptor moves on by

__device__ __forceinline__ void split(const Scores &s, Operand &hi, Operand &lo) {
#pragma unroll
    for (int x = 0; x < SCORES / 2; ++x) split(s[2 * x], s[2 * x + 1], hi[x / 4][x % 4], lo[x / 4][x % 4]);
}

// T = x tile, summed over rows, small products first: 64 columns of it; with D = 32, x hi and x lo side by side.
__device__ __forceinline__ void issue_T(float (&T)[32], const Operand &hi, const Operand &lo, uint64_t tile,
                                        int chunk) {
    pin(T);
    wgmma_fence();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) wgmma_transposed(T, lo[k], tile + chunk * PANEL + k * STEP, k > 0);
    if (D >= 64) {
#pragma unroll
        for (int k = 0; k < STEPS; ++k) wgmma_transposed(T, hi[k], tile + (PANELS / 2 + chunk) * PANEL + k * STEP, 1);
    }
#pragma unroll
    for (int k = 0; k < STEPS; ++k) wgmma_transposed(T, hi[k], tile + chunk * PANEL + k * STEP, 1);
    wgmma_commit();
}

// P_K += P tile by their hi alone, and inside of the tensor core, for it may be rough.
__device__ __forceinline__ void issue_P_K(float (&P_K)[CHUNKS][32], const Operand &P, uint64_t tile) {
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) pin(P_K[c]);
    wgmma_fence();
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
        for (int k = 0; k < STEPS; ++k) wgmma_transposed(P_K[c], P[k], tile + c * PANEL + k * STEP, 1);
    wgmma_commit();
}

// sum += T, times `units` of rows g and g + 8.
__device__ __forceinline__ void add_T(float (&sum)[SUM], const float (&T)[32], float unit, float unit8) {
#pragma unroll
    for (int x = 0; x < SUM; ++x) sum[x] = fmaf(D < 64 ? T[x] + T[x + 16] : T[x], x / 2 % 2 ? unit8 : unit, sum[x]);
}

__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// This thread's columns of row g + 8r of a sum, times `factor`, to memory.
__device__ __forceinline__ void write(float *row, const Sum &sum, int r, float factor) {
#pragma unroll
    for (int x = 0; x < CHUNKS * SUM / 4; ++x) {
        const int column = 8 * x + threadIdx.x % 4 * 2, left = HEAD_DIM - column;
        const float first = sum[x / (SUM / 4)][x % (SUM / 4) * 4 + 2 * r] * factor;
        const float second = sum[x / (SUM / 4)][x % (SUM / 4) * 4 + 2 * r + 1] * factor;
        if (ALIGNED) {
            if (left > 0) *reinterpret_cast<float2 *>(row + column) = make_float2(first, second);
        } else {
            if (left > 0) row[column] = first;
            if (left > 1) row[column + 1] = second;
        }
    }
}

template <bool VALUE>
struct Flag {
    static constexpr bool value = VALUE;
};

// ---- dQ

// Two exponents in a register.
__device__ __forceinline__ int pack_exponents(int low, int high) { return high << 16 | (low & 0xffff); }

// Of a row of a matrix what a lane of the quad has that splits it: of each 32 columns 8.
struct Part {
    float x[D / 32][8];
    __device__ __forceinline__ static int column(int c) { return 32 * c + threadIdx.x % 4 * 8; }
    __device__ __forceinline__ Part(const float *matrix, long long stride, int i, int rows) {
#pragma unroll
        for (int c = 0; c < D / 32; ++c)
#pragma unroll
            for (int e = 0; e < 8; e += 4)
                *reinterpret_cast<float4 *>(&x[c][e]) = load4(matrix, stride, i, column(c) + e, rows);
    }
    __device__ __forceinline__ float dot(const Part &other) const {
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

// The rows of Q that a block owns: of a head those from `first` on.
struct Queries {
    Head head;
    int first;
    __device__ __forceinline__ Queries(const Backward &a, unsigned block) {
        const int Tr = ceil_div(a.M, BR);
        const Place place(block, a.B * a.H, Tr);
        head = head_of(a, place.head), first = (CAUSAL ? Tr - 1 - place.tile : place.tile) * BR;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) dq(const Backward a) {
    const Shared shared = begin(GROUPS);
    __syncthreads();
    const Workspace from(a);
    const Queries queries(a, blockIdx.x);
    const Head head = queries.head;
    const int first = queries.first;
    // Keys that some row of the block sees, of which i is one.
    const auto end_of_keys = [&](int i) { return keys_seen(a, min(i | BR - 1, a.M - 1)); };
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x != 0) return;
        await_launch_before();
        const unsigned char *const records = from.at(from.of_keys(a, head.b, head.kv));
        Ring ring;
        for (int j = 0; j * PASS < end_of_keys(first); ++j) copy_tile<false>(shared, ring, records, j);
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    const int group = threadIdx.x / 128 - 1, t = threadIdx.x % 4;
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, own = first + group * OWN;
    const uint32_t Q = shared_address(shared.own(group));  // and behind it dO

    // Of rows g and g + 8: the exponents of Q and dO; the LSE less P_BIAS, D, the sum of |dO|
    int exponents[2];
    float above[2], D_[2], reach[2];
    float total[2] = {}, sum_ds[2] = {}, bound[2] = {};  // sums of P and of dS, and a bound of |dS|, times 2^P_BIAS
    const auto take = [&](int r, Part &q, Part &d_o, const Part &o) {
        const int i = own + row + 8 * r;
        D_[r] = d_o.dot(o);
        reach[r] = d_o.magnitude();
        unsigned char *const tiles = shared.own(group);
        exponents[r] = pack_exponents(q.store(tiles, row + 8 * r), d_o.store(tiles + OWN_TILE, row + 8 * r));
        above[r] = INFINITY_F;
        if (i >= a.M) return;
        const float lse = a.lse[head.b * a.lse_at.batch + head.h * a.lse_at.head + i * a.lse_at.row];
        D_[r] -= dlse_of(a, head, i);
        above[r] = lse == NEG_INF ? INFINITY_F : lse * LOG2E;
        if (t == 0) row_of(a, head, i).above = above[r], row_of(a, head, i).D = D_[r];
        above[r] -= P_BIAS;
    };
    const auto part = [&](const float *matrix, Strides by, int r) {
        return Part(rows_of(matrix, by, head.b, head.h), by.row, own + row + 8 * r, a.M);
    };
    if (D <= 64) {  // both rows at once, for it is the way from memory that takes the time
        Part q[2] = {part(a.Q, a.q, 0), part(a.Q, a.q, 1)}, d_o[2] = {part(a.dO, a.d_o, 0), part(a.dO, a.d_o, 1)};
        const Part o[2] = {part(a.O, a.o, 0), part(a.O, a.o, 1)};
        take(0, q[0], d_o[0], o[0]);
        take(1, q[1], d_o[1], o[1]);
    } else {
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            Part q = part(a.Q, a.q, r), d_o = part(a.dO, a.d_o, r);
            take(r, q, d_o, part(a.O, a.o, r));
        }
    }
    fence_for_async();
    named_sync(1 + group, 128);

    Sum dS_K = {};
    float P_K[CHUNKS][32] = {};
    int coarse = 126;  // P K is in units of 2^-coarse, and of P's
    Ring ring;
#pragma unroll 1
    for (int j = 0; j * PASS < end_of_keys(CAUSAL ? again(own) : own); ++j, ring.next()) {
        wait(&shared.full[ring.stage], ring.parity);
        if (CAUSAL && j * PASS >= keys_seen(a, own + OWN - 1)) {  // no row of this warpgroup sees any of these
            arrive(&shared.free[ring.stage]);
            continue;
        }
        const uint64_t K = descriptor(shared_address(shared.stage(ring.stage))), V = K + PASS_TILE / 16;
        const int4 numbers = shared.arrived[ring.stage].numbers;
        const int k_exponent = numbers.x, v_exponent = numbers.y;
        Scores p, ds;
        multiply(p, Q, K);
        multiply(ds, Q + OWN_TILE, V);
        float unit_dP[2], unit_D[2], back[2];
        Operand hi, lo, P;
        wgmma_wait<1>();
        pin(p);
        const auto exponentials = [&](auto masked) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                const int seen = keys_seen(a, own + row + 8 * r) - j * PASS - 2 * t;
                const float factor = unit(short(exponents[r]) + k_exponent) * (a.scale * LOG2E);
                float sum = 0;
#pragma unroll
                for (int x = 0; x < SCORES / 2; ++x) {
                    float &p_ = p[x / 2 * 4 + 2 * r + x % 2];
                    p_ = exp2_fast(fmaf(p_, factor, -above[r]));
                    if (masked.value && x / 2 * 8 + x % 2 >= seen) p_ = 0;
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
        if ((j + 1) * PASS > keys_seen(a, own)) exponentials(Flag<true>());
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
        for (int x = 0; x < SCORES / 2; ++x)
            asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(P[x / 4][x % 4]) : "r"(pack(p[2 * x], p[2 * x + 1])), "r"(half_less));
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
        float T[32];
        issue_T(T, hi, lo, K, 0);
        issue_P_K(P_K, P, K);
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
        arrive(&shared.free[ring.stage]);
    }

    const Queries out(a, block_index());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = out.first + group * OWN + row + 8 * r;
        sum_ds[r] = quad_sum(sum_ds[r]);
        if (i >= a.M) continue;
        const Found found(a, out.head, i, above[r], total[r] * P_UNIT, sum_ds[r] * P_UNIT);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c)
#pragma unroll
            for (int x = 0; x < SUM / 2; ++x) {
                const int y = x / 2 * 4 + 2 * r + x % 2;
                const float mended = dS_K[c][y] - found.error * (P_K[c][y] * unit(coarse));
                dS_K[c][y] = found.inverse == 0 ? 0 : mended;
            }
        write(rows_of(a.dQ, a.dq, out.head.b, out.head.h) + i * a.dq.row, dS_K, r, a.scale * found.inverse * P_UNIT);
        if (t == 0) {
            row_of(a, out.head, i).mended = D_[r] + found.error, row_of(a, out.head, i).inverse = found.inverse;
            from.bound(a, out.head, i) = bound[r];
        }
    }
}

// ---- dK, dV

// The keys that a block owns.
struct Keys {
    int b, kv, first;
    __device__ __forceinline__ Keys(const Backward &a, unsigned block) {
        const Place place(block, a.B * a.Hkv, ceil_div(a.N, BR));
        b = place.head / a.Hkv, kv = place.head % a.Hkv, first = place.tile * BR;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) dk_dv(const Backward a) {
    __shared__ uint64_t owned[GROUPS];
    const Workspace from(a);
    const Keys keys(a, blockIdx.x);
    const int b = keys.b, kv = keys.kv, first = keys.first, heads = a.H / a.Hkv;
    const int groups = min(GROUPS, ceil_div(a.N - first, OWN));  // with keys
    const int end = ceil_div(a.M, PASS), begin_ = first_query(a, first) / PASS;
    const Shared shared = begin(groups);
    if (threadIdx.x == 0) {
        for (int g = 0; g < GROUPS; ++g) barrier_init(&owned[g], 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x != 0) return;
        for (int g = 0; g < groups; ++g) {
            arrive_expecting(&owned[g], 2 * OWN_TILE);
            bulk_copy(shared_address(shared.own(g)), from.at(from.of_keys(a, b, kv) + first / OWN + g), 2 * OWN_TILE,
                      &owned[g]);
        }
        await_launch_before();
        Ring ring;
        for (int h = kv * heads; h < (kv + 1) * heads; ++h)
            for (int n = begin_; n < end; ++n) copy_tile<true>(shared, ring, from.at(from.of_queries(a, b, h)), n);
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    const int group = threadIdx.x / 128 - 1, t = threadIdx.x % 4;
    const int row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4, own = first + group * OWN;
    if (group >= groups) return;
    const Tail &tail = from.tail(from.of_keys(a, b, kv) + own / OWN);
    const int k_exponent = tail.first, v_exponent = tail.second;
    wait(&owned[group], 0);
    const uint32_t K = shared_address(shared.own(group));  // and behind it V

    Sum dK = {}, dV = {};
    Ring ring;
    int n = begin_;
#pragma unroll 1
    for (int left = heads * (end - begin_); left > 0; --left, ring.next()) {
        const int i0 = n * PASS;
        if (++n == end) n = begin_;
        wait(&shared.full[ring.stage], ring.parity);
        if (CAUSAL && i0 + PASS <= first_query(a, own)) {  // none of these sees a key of this warpgroup
            arrive(&shared.free[ring.stage]);
            continue;
        }
        const uint64_t Q = descriptor(shared_address(shared.stage(ring.stage))), dO = Q + PASS_TILE / 16;
        Scores p, ds;
        multiply(p, K, Q);
        multiply(ds, K + OWN_TILE, dO);
        const Arrived &arrived = shared.arrived[ring.stage];
        const int4 numbers = arrived.numbers;
        const int q_exponent = numbers.x, do_exponent = numbers.y, s = numbers.z;
        const float factor = unit(k_exponent + q_exponent) * (a.scale * LOG2E);
        const float dP_unit = unit(v_exponent + do_exponent - s);
        const float dV_unit = unit(do_exponent) * P_UNIT;
        const float dK_unit = unit(q_exponent) * unit(s) * P_UNIT;
        wgmma_wait<1>();
        pin(p);
        const auto exponentials = [&](auto masked) {
#pragma unroll
            for (int x = 0; x < SCORES / 4; ++x) {
                const float2 above = *reinterpret_cast<const float2 *>(&arrived.above[8 * x + 2 * t]);
#pragma unroll
                for (int e = 0; e < 4; ++e) {
                    float &p_ = p[4 * x + e];
                    p_ = exp2_fast(fmaf(p_, factor, e % 2 ? -above.y : -above.x));
                    const int i = i0 + 8 * x + 2 * t + e % 2, key = own + row + e / 2 * 8;
                    if (masked.value && key > i + a.q_start) p_ = 0;
                }
            }
        };
        if (CAUSAL && own + OWN - 1 > i0 + a.q_start) exponentials(Flag<true>());
        else exponentials(Flag<false>());
        Operand P_hi, P_lo, dS_hi, dS_lo;
        float T[32];
        split(p, P_hi, P_lo);
        issue_T(T, P_hi, P_lo, dO, 0);
        wgmma_wait<1>();
        pin(ds);
#pragma unroll
        for (int x = 0; x < SCORES / 4; ++x) {
            const float2 D_ = *reinterpret_cast<const float2 *>(&arrived.D[8 * x + 2 * t]);
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
        arrive(&shared.free[ring.stage]);
    }
    const Keys out(a, block_index());
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int key = out.first + group * OWN + row + 8 * r;
        if (key >= a.N) continue;
        write(rows_of(a.dK, a.dk, out.b, out.kv) + key * a.dk.row, dK, r, a.scale);
        write(rows_of(a.dV, a.dv, out.b, out.kv) + key * a.dv.row, dV, r, 1);
    }
}
