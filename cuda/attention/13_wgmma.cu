// Tensor cores at fp32 accuracy on Hopper: every number split into two fp16, warps specialised, copies in the background.
//
// What changed: the matrix products run on wgmma, three fp16 products for one in fp32 (split.cuh). `prepare` writes K and
// V once as scaled, split, swizzled tiles. In `attention` one warpgroup only copies tiles to shared memory; each of the
// other BR / 64 owns 64 rows of Q and O. While the tensor cores do a warpgroup's O += P V of the tile before, it takes
// the exponentials of the present one, and the products of its neighbour fill the gaps.
// Why it is accurate: small products are added first; P V of each tile starts from zero and is added to O in fp32, so the
// tensor core's truncating adder never sees a large running sum; the scales are powers of two.
// What it costs: three times the products, hi and lo of K and V in memory (as many bytes as fp32), and a pre-pass.
//
// Macros beyond those of common.cuh: PRODUCTS (split.cuh); STAGES, tiles of K and of V in flight; PINGPONG 1: warpgroups
// take turns at issuing products; SPLIT_IN_KERNEL 1: no pre-pass and no workspace, the copies bring fp32 and two
// warpgroups split K and V in place. That is for short sequences, where few blocks read the same K and V and the pre-pass
// would be most of the traffic. Launches: `prepare` as in split.cuh (not with SPLIT_IN_KERNEL), then `attention` with any
// number of blocks.
#include "split.cuh"
#include "hopper.cuh"

#ifndef STAGES
#define STAGES 2
#endif
#ifndef PINGPONG
#define PINGPONG 0
#endif

constexpr int WARPGROUPS = BR / 64, PRODUCERS = SPLIT_IN_KERNEL ? 2 : 1;
static_assert(BR % 64 == 0 && THREADS == 128 * (PRODUCERS + WARPGROUPS), "a consuming warpgroup has 64 rows");
static_assert(!SPLIT_IN_KERNEL || WARPGROUPS == 2 && BC * D <= 4096, "a splitting thread has registers for 32 floats");
constexpr int BLOCKS_PER_SM = WARPGROUPS == 1 && D <= 64 ? 2 : 1;
// An SM has 512 registers for each of 128 threads.
constexpr int PRODUCER_REGISTERS = SPLIT_IN_KERNEL ? 72 : WARPGROUPS == 3 ? 32 : 24;
constexpr int CONSUMER_REGISTERS = SPLIT_IN_KERNEL ? 184 : WARPGROUPS == 3 ? 160 : WARPGROUPS == 2 ? 240 : 232;
constexpr bool MOVE_REGISTERS = WARPGROUPS > 1 || BLOCKS_PER_SM == 2;  // else 256 threads have all they can address

constexpr int T_COLUMNS = D <= 128 ? D : 64, T_CHUNKS = D / T_COLUMNS;  // T = P V of one tile, some columns at a time
constexpr int S_REGISTERS = BC / 2, T_REGISTERS = T_COLUMNS / 2;
constexpr int K_STEPS = ceil_div(HEAD_DIM, 16);  // of S = Q Kᵀ: beyond HEAD_DIM all is zero
constexpr int V_STEPS = BC / 16;
constexpr int Q_TILE = split_bytes(64, D);

// Shared memory. Tiles that are split in place hold fp32 first; then Q too is copied ahead, into slots of its own.
constexpr int slot(int tile, int rows) {
    const int fp32 = round_up(rows * HEAD_DIM * 4, 1024);
    return SPLIT_IN_KERNEL && fp32 > tile ? fp32 : tile;
}
constexpr int Q_SLOT = slot(Q_TILE, 64), K_SLOT = slot(K_TILE, BC), V_SLOT = slot(V_TILE, BC);
constexpr int Q_SLOTS = SPLIT_IN_KERNEL ? STAGES : 1;
constexpr int SHARED = Q_SLOTS * WARPGROUPS * Q_SLOT + STAGES * (K_SLOT + V_SLOT);  // and 1024 to align it
static_assert((SHARED + 2048) * BLOCKS_PER_SM <= 227 * 1024, "tiles must fit shared memory");
static_assert(K_SLOT % 1024 == 0 && V_SLOT % 1024 == 0 && Q_SLOT % 1024 == 0, "the swizzle repeats every 1024 bytes");
static_assert(!SPLIT_IN_KERNEL || ALIGNED && STAGES >= 3, "bulk copies move 16 bytes; tiles are copied ahead");
static_assert(!SPLIT_IN_KERNEL || K_SLOT == V_SLOT, "both producers run the same code");

// p = 2^(x - m + P_BIAS) instead of 2^(x - m): with the largest p near 2^6, lo of a small p is still a normal fp16.
// The row sum l has the same factor, so it cancels.
constexpr float P_BIAS = 6;

// A position in a ring of STAGES tiles and the parity of its present round.
struct Ring {
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    __device__ __forceinline__ Ring ahead(int steps) const {  // fewer than STAGES
        const bool wraps = stage + steps >= STAGES;
        return {wraps ? stage + steps - STAGES : stage + steps, parity ^ wraps};
    }
    __device__ __forceinline__ int odd() const { return (stage + STAGES * parity) % 2; }  // 0, 1, 0, 1, ...
};

// The w-th piece of work: batch b and the rows from i0. Causal: long rows first, so that short ones fill the end.
struct Work {
    int b, i0, tiles;
    __device__ __forceinline__ Work(unsigned w, int M, int N, int first_row) {
        const unsigned Tr = ceil_div(M, BR);
        b = w / Tr;
        i0 = (CAUSAL ? Tr - 1 - w % Tr : w % Tr) * BR;
        tiles = ceil_div(keys_seen(first_row + i0 + BR - 1, N), BC);  // Tc, or those that some row sees
    }
};

// The quad of lanes that will own rows g and g + 8 of its warp's 16 loads, scales, splits and stores them; `factor` in
// [0.5, 1) is the mantissa of scale * log2(e). Returns the exponents of the two rows' scales. Between reading and
// writing comes all_read().
template <class Barrier>
__device__ __forceinline__ int2 split_Q(const float *Q, int i, int rows, unsigned char *tile, float factor, Barrier all_read) {
    constexpr int CHUNKS = D / 32;  // of 8 columns, for each lane of the quad
    const int t = threadIdx.x % 4, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    float x[2][CHUNKS][8];
#pragma unroll
    for (int r = 0; r < 2; ++r)
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            *reinterpret_cast<float4 *>(&x[r][c][0]) = load4(Q, i + 8 * r, (4 * c + t) * 8, rows);
            *reinterpret_cast<float4 *>(&x[r][c][4]) = load4(Q, i + 8 * r, (4 * c + t) * 8 + 4, rows);
        }
    all_read();
    int s[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float largest = largest_of<CHUNKS * 8>(&x[r][0][0], true);
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));
        s[r] = scale_exponent(largest);
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
#pragma unroll
            for (int e = 0; e < 8; ++e) x[r][c][e] *= power_of_two(s[r]);
            store_split<64, D>(tile, row + 8 * r, (4 * c + t) * 8, x[r][c], factor);
        }
    }
    return make_int2(s[0], s[1]);
}

// S = Q Kᵀ of one tile, small products first.
__device__ __forceinline__ void issue_S(float (&S)[S_REGISTERS], uint64_t Q, uint64_t K) {
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

// T = P V of one tile, from zero, small products first; V is the descriptor of the chunk of columns wanted.
__device__ __forceinline__ void issue_T(float (&T)[T_REGISTERS], const uint32_t (&P_hi)[V_STEPS][4],
                                        const uint32_t (&P_lo)[V_STEPS][4], uint64_t V) {
    pin(T);
    wgmma_fence();
    if (PRODUCTS == 3) {
#pragma unroll
        for (int k = 0; k < V_STEPS; ++k) wgmma(T, P_lo[k], V + split_offset<D>(0, 16 * k) / 16, k > 0);
#pragma unroll
        for (int k = 0; k < V_STEPS; ++k) wgmma(T, P_hi[k], V + split_offset<D>(0, BC + 16 * k) / 16, 1);
    }
#pragma unroll
    for (int k = 0; k < V_STEPS; ++k) wgmma(T, P_hi[k], V + split_offset<D>(0, 16 * k) / 16, PRODUCTS == 3 || k > 0);
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
__device__ __forceinline__ void softmax(float (&S)[S_REGISTERS], Rows &row, int k_exponent, bool masked,
                                        const int (&visible)[2]) {
    if (masked) {
#pragma unroll
        for (int j = 0; j < BC / 8; ++j)
#pragma unroll
            for (int e = 0; e < 4; ++e)
                if (8 * j + e % 2 >= visible[e / 2]) S[4 * j + e] = NEG_INF;
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        float largest = S[2 * r];
#pragma unroll
        for (int j = 0; j < BC / 8; ++j) largest = fmaxf(largest, fmaxf(S[4 * j + 2 * r], S[4 * j + 2 * r + 1]));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, 2));

        // The scale back to powers of two is itself one: exact, so the largest p is 2^P_BIAS even where scores are huge.
        // Beyond the clamps all scores differ by nothing, or by far more than p can show.
        const float factor = power_of_two(max(-126, min(row.q_exponent[r] - k_exponent, 89)));
        const float shift = fmaxf(row.shift[r], fmaf(largest, factor, -P_BIAS));
        row.rescale[r] = exp2_fast(row.shift[r] - shift);
        row.shift[r] = shift;
        float sum = 0;
#pragma unroll
        for (int j = 0; j < BC / 8; ++j)
#pragma unroll
            for (int e = 2 * r; e < 2 * r + 2; ++e) {
                S[4 * j + e] = exp2_fast(fmaf(S[4 * j + e], factor, -shift));
                sum += S[4 * j + e];
            }
        row.l[r] = fmaf(row.l[r], row.rescale[r], sum);
    }
}

// P as A operands: an accumulator's layout is that of A, so it never leaves the thread.
__device__ __forceinline__ void split_P(const float (&S)[S_REGISTERS], uint32_t (&P_hi)[V_STEPS][4],
                                        uint32_t (&P_lo)[V_STEPS][4]) {
#pragma unroll
    for (int k = 0; k < V_STEPS; ++k)
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
        return moved == s ? 1 : moved - s < -126 ? 0 : power_of_two(moved - s);
    }
};

// O = O * rescale + T
__device__ __forceinline__ void add_T(float (&O)[T_REGISTERS], float (&T)[T_REGISTERS], const float (&rescale)[2],
                                      float T_factor) {
    if (T_factor != 1) {
#pragma unroll
        for (int x = 0; x < T_REGISTERS; ++x) T[x] *= T_factor;
    }
#pragma unroll
    for (int x = 0; x < T_REGISTERS; ++x) O[x] = fmaf(O[x], rescale[x / 2 % 2], T[x]);
}

// The tiles of all of a block's work, one after the other.
struct Steps {
    unsigned w = blockIdx.x;
    int j = 0;
    __device__ __forceinline__ void next(int M, int N, int first_row) {
        if (++j == Work(w, M, N, first_row).tiles) j = 0, w += gridDim.x;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS_PER_SM) attention(ATTENTION_ARGUMENTS) {
    extern __shared__ unsigned char unaligned[];
    __shared__ uint64_t K_full[STAGES], K_free[STAGES], V_full[STAGES], V_free[STAGES];
    __shared__ int K_exponent[STAGES], V_exponent[STAGES];
#if SPLIT_IN_KERNEL
    __shared__ uint64_t K_raw[STAGES], V_raw[STAGES], Q_raw[STAGES][WARPGROUPS], Q_free[STAGES][WARPGROUPS];
#endif
    unsigned char *const Q_tiles = unaligned + (-shared_address(unaligned) & 1023);
    unsigned char *const K_tiles = Q_tiles + Q_SLOTS * WARPGROUPS * Q_SLOT, *const V_tiles = K_tiles + STAGES * K_SLOT;

    const unsigned work = unsigned(B) * ceil_div(M, BR);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&K_full[s], SPLIT_IN_KERNEL ? 128 : 1), barrier_init(&V_full[s], SPLIT_IN_KERNEL ? 128 : 1);
            barrier_init(&K_free[s], 4 * WARPGROUPS), barrier_init(&V_free[s], 4 * WARPGROUPS);  // each warp for itself
#if SPLIT_IN_KERNEL
            barrier_init(&K_raw[s], 1), barrier_init(&V_raw[s], 1);
            for (int g = 0; g < WARPGROUPS; ++g) barrier_init(&Q_raw[s][g], 1), barrier_init(&Q_free[s][g], 4);
#endif
        }
        barrier_init_done();
    }
    __syncthreads();

    if (threadIdx.x < 128 * PRODUCERS) {
        if (MOVE_REGISTERS) registers_down<PRODUCER_REGISTERS>();
        Ring ring;
#if SPLIT_IN_KERNEL
        // ---- two producers: one for K (and Q), one for V. Thread 0 has fp32 tiles copied, all split them in place
        __shared__ unsigned scratch[2][2][8];  // two in turn: a slow warp may still read the one before
        const int thread = threadIdx.x % 128;
        const bool values = threadIdx.x >= 128;
        const float *const X = values ? V : K;
        unsigned char *const tiles = values ? V_tiles : K_tiles;
        constexpr int AHEAD = STAGES - 2;  // one slot is read by products, one is split, the others are on their way
        uint64_t *const raw = values ? V_raw : K_raw, *const full = values ? V_full : K_full;
        uint64_t *const free = values ? V_free : K_free;

        Ring Q_ring;
        Steps ahead;
        const auto copy_next = [&](Ring to) {
            if (ahead.w >= work) return;
            const Work here(ahead.w, M, N, first_row);
            if (!values && ahead.j == 0) {
                for (int g = 0; g < WARPGROUPS; ++g) {
                    const int i = here.i0 + 64 * g, bytes = max(0, min(64, M - i)) * HEAD_DIM * 4;
                    wait(&Q_free[Q_ring.stage][g], Q_ring.parity ^ 1);
                    arrive_expecting(&Q_raw[Q_ring.stage][g], bytes);
                    if (bytes > 0)
                        bulk_copy(shared_address(Q_tiles + (Q_ring.stage * WARPGROUPS + g) * Q_SLOT),
                                  Q + here.b * q_stride + (long long)i * HEAD_DIM, bytes, &Q_raw[Q_ring.stage][g]);
                }
                Q_ring.next();
            }
            const int row = ahead.j * BC, bytes = min(BC, N - row) * HEAD_DIM * 4;
            wait(&free[to.stage], to.parity ^ 1);
            arrive_expecting(&raw[to.stage], bytes);
            bulk_copy(shared_address(tiles + to.stage * K_SLOT), X + here.b * kv_stride + (long long)row * HEAD_DIM,
                      bytes, &raw[to.stage]);
            ahead.next(M, N, first_row);
        };
        if (thread == 0)
            for (Ring to; to.stage < AHEAD; to.next()) copy_next(to);
        for (Steps now; now.w < work; now.next(M, N, first_row), ring.next()) {
            if (thread == 0) copy_next(ring.ahead(AHEAD));
            __syncwarp();
            wait(&raw[ring.stage], ring.parity);
            unsigned char *const tile = tiles + ring.stage * K_SLOT;
            const float *const fp32 = reinterpret_cast<const float *>(tile);
            const int rows = min(BC, N - now.j * BC);
            const int s = values ? split_V<128>(fp32, 0, rows, tile, scratch[1][ring.odd()], thread, 8)
                                 : split_K<128>(fp32, 0, rows, tile, scratch[0][ring.odd()], thread, 7);
            if (thread == 0) (values ? V_exponent : K_exponent)[ring.stage] = s;
            fence_for_async();
            arrive(&full[ring.stage]);
        }
#else
        // ---- the producer: one thread keeps both rings full
        if (threadIdx.x != 0) return;
        const int Tc = ceil_div(N, BC);
        const int *exponents = tile_exponents(workspace, B, Tc);
        for (unsigned w = blockIdx.x; w < work; w += gridDim.x) {
            const Work here(w, M, N, first_row);
            for (int j = 0; j < here.tiles; ++j, ring.next()) {
                const long long tile = (long long)here.b * Tc + j;
                const unsigned char *from = workspace + tile * (K_TILE + V_TILE);
                const int k = exponents[2 * tile], v = exponents[2 * tile + 1];

                wait(&K_free[ring.stage], ring.parity ^ 1);
                K_exponent[ring.stage] = k;
                arrive_expecting(&K_full[ring.stage], K_TILE);
                bulk_copy(shared_address(K_tiles + ring.stage * K_SLOT), from, K_TILE, &K_full[ring.stage]);

                wait(&V_free[ring.stage], ring.parity ^ 1);
                V_exponent[ring.stage] = v;
                arrive_expecting(&V_full[ring.stage], V_TILE);
                bulk_copy(shared_address(V_tiles + ring.stage * V_SLOT), from + K_TILE, V_TILE, &V_full[ring.stage]);
            }
        }
#endif
        return;
    }

    // ---- a consumer: 64 rows of Q and O
    if (MOVE_REGISTERS) registers_up<CONSUMER_REGISTERS>();
    const int group = WARPGROUPS == 1 ? 0 : threadIdx.x / 128 - PRODUCERS;
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    const int q_barrier = 1 + group, turn = 4 + group, next_turn = 4 + (group + 1) % WARPGROUPS;
    const uint64_t K_desc = descriptor(shared_address(K_tiles)), V_desc = descriptor(shared_address(V_tiles));
    int factor_exponent;
    const float factor = frexpf(scale * LOG2E, &factor_exponent);  // S in powers of two: exp(x) = 2^(x log2(e))

    if (PINGPONG && WARPGROUPS > 1 && group == WARPGROUPS - 1) named_arrive(next_turn, 256);
    Ring K_ring, V_ring;
#if SPLIT_IN_KERNEL
    Ring Q_ring;
#endif
    for (unsigned w = blockIdx.x; w < work; w += gridDim.x) {
        const Work here(w, M, N, first_row);
        const int first = here.i0 + group * 64, row_in_group = 16 * warp + lane / 4;
        const int i = first + row_in_group;  // and i + 8: this thread's rows

        // Q, scaled and split
#if SPLIT_IN_KERNEL
        unsigned char *const Q_tile = Q_tiles + (Q_ring.stage * WARPGROUPS + group) * Q_SLOT;
        wait(&Q_raw[Q_ring.stage][group], Q_ring.parity);
        const int2 s = split_Q(reinterpret_cast<const float *>(Q_tile), row_in_group, M - first, Q_tile, factor,
                               [&] { named_sync(q_barrier, 128); });
#else
        // The tile was last read by products for which each thread has waited before this barrier.
        unsigned char *const Q_tile = Q_tiles + group * Q_SLOT;
        named_sync(q_barrier, 128);
        const int2 s = split_Q(Q + here.b * q_stride, i, M, Q_tile, factor, [] {});
#endif
        const uint64_t Q_desc = descriptor(shared_address(Q_tile));
        fence_for_async();
        named_sync(q_barrier, 128);

        float S[S_REGISTERS], T[T_REGISTERS], acc[T_CHUNKS][T_REGISTERS] = {};
        uint32_t P_hi[V_STEPS][4], P_lo[V_STEPS][4];
        Rows row = {{NEG_INF, NEG_INF}, {0, 0}, {0, 0}, {factor_exponent - s.x, factor_exponent - s.y}};
        Unit unit;

        // Keys below this are visible to row i, and to row i + 8.
        const int end = keys_seen(first_row + i, N), end8 = keys_seen(first_row + i + 8, N);
        const int all_see = keys_seen(first_row + first, N);  // keys below this, all rows of the warpgroup
        const auto softmax_of_tile = [&](int j, int k_exponent) {
            const int column = j * BC + lane % 4 * 2;
            softmax(S, row, k_exponent, (j + 1) * BC > all_see, {end - column, end8 - column});
        };

        // S of tile 0
        wait(&K_full[K_ring.stage], K_ring.parity);
        int k_exponent = K_exponent[K_ring.stage];
        issue_S(S, Q_desc, K_desc + K_ring.stage * (K_SLOT / 16));
        wgmma_wait<0>();
        pin(S);
        __syncwarp();
        if (lane == 0) arrive(&K_free[K_ring.stage]);
        K_ring.next();
        softmax_of_tile(0, k_exponent);
        split_P(S, P_hi, P_lo);

        // O += P V of the tile at V_ring, whose first columns are on their way
        const auto finish_O = [&](const float (&rescale)[2]) {
            float O_factor;
            const float T_factor = unit.next(V_exponent[V_ring.stage], &O_factor);
            const float c[2] = {rescale[0] * O_factor, rescale[1] * O_factor};
            wgmma_wait<0>();
            pin(T);
            add_T(acc[0], T, c, T_factor);
#pragma unroll
            for (int x = 1; x < T_CHUNKS; ++x) {
                issue_T(T, P_hi, P_lo, V_desc + V_ring.stage * (V_SLOT / 16) + x * (T_COLUMNS * 128 / 16));
                wgmma_wait<0>();
                pin(T);
                add_T(acc[x], T, c, T_factor);
            }
            __syncwarp();
            if (lane == 0) arrive(&V_free[V_ring.stage]);
            V_ring.next();
        };

        for (int j = 1; j < here.tiles; ++j) {  // S of tile j, and O += P V of tile j - 1
            const float rescale[2] = {row.rescale[0], row.rescale[1]};
            wait(&K_full[K_ring.stage], K_ring.parity);
            k_exponent = K_exponent[K_ring.stage];
            wait(&V_full[V_ring.stage], V_ring.parity);
            if (PINGPONG && WARPGROUPS > 1) named_sync(turn, 256);
            issue_S(S, Q_desc, K_desc + K_ring.stage * (K_SLOT / 16));
            issue_T(T, P_hi, P_lo, V_desc + V_ring.stage * (V_SLOT / 16));
            if (PINGPONG && WARPGROUPS > 1) named_arrive(next_turn, 256);
            wgmma_wait<1>();  // S is there, T still runs
            pin(S);
            __syncwarp();
            if (lane == 0) arrive(&K_free[K_ring.stage]);
            K_ring.next();
            softmax_of_tile(j, k_exponent);
            finish_O(rescale);
            split_P(S, P_hi, P_lo);  // only now: until T was there, P was an operand
        }
#if SPLIT_IN_KERNEL
        __syncwarp();
        if (lane == 0) arrive(&Q_free[Q_ring.stage][group]);
        Q_ring.next();
#endif
        wait(&V_full[V_ring.stage], V_ring.parity);
        issue_T(T, P_hi, P_lo, V_desc + V_ring.stage * (V_SLOT / 16));
        finish_O(row.rescale);

        // O / l
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float l = row.l[r];
            l += __shfl_xor_sync(~0u, l, 1);
            l += __shfl_xor_sync(~0u, l, 2);
            const float inverse = 1 / l, undo = power_of_two(-unit.exponent);
            if (i + 8 * r >= M) continue;
            float *const out = O + ((long long)here.b * M + i + 8 * r) * HEAD_DIM;
#pragma unroll
            for (int x = 0; x < T_CHUNKS; ++x)
#pragma unroll
                for (int j = 0; j < T_COLUMNS / 8; ++j) {
                    const int column = x * T_COLUMNS + 8 * j + lane % 4 * 2;
                    const float2 o = {acc[x][4 * j + 2 * r] * inverse * undo, acc[x][4 * j + 2 * r + 1] * inverse * undo};
                    if (HEAD_DIM % 2 == 0 && column < HEAD_DIM) *reinterpret_cast<float2 *>(out + column) = o;
                    if (HEAD_DIM % 2 == 1 && column < HEAD_DIM) out[column] = o.x;
                    if (HEAD_DIM % 2 == 1 && column + 1 < HEAD_DIM) out[column + 1] = o.y;
                }
        }
    }
    if (PINGPONG && WARPGROUPS > 1 && group == 0) named_sync(turn, 256);  // the turn that nobody took
}
