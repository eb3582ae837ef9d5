// Short sequences on Hopper: K and V are split in shared memory, without a pre-pass.
//
// What changed: the copies bring K, V and Q in fp32, and two warpgroups split K and V in place, one each, where there was
// one that only copied. There is no workspace.
// Why it is faster: up to some 256 keys few blocks read the same K and V; to write both split to memory and to read them
// again would be most of the traffic.
// What it costs: each block splits for itself, which more than a few row tiles of a long sequence would do over and over;
// the two warpgroups take registers from those that multiply; and copies move 16 bytes at a time: heads of 4, 8, .. 64
// numbers whose rows start on 16 bytes.
//
// Launch: `attention` with any number of blocks.
#include "warpgroup.cuh"

constexpr int PRODUCERS = 2;
static_assert(WARPGROUPS == 2 && THREADS == 128 * (PRODUCERS + WARPGROUPS), "two split, two multiply");
static_assert(BC * D <= 4096, "a splitting thread has registers for 32 floats");
static_assert(ALIGNED && STAGES >= 3, "bulk copies move 16 bytes; tiles are copied ahead");
// An SM has 512 for each of 128 threads. Copies of rows that do not follow one another want more.
constexpr int PRODUCER_REGISTERS = !DENSE && BC == 64 ? 88 : 72, CONSUMER_REGISTERS = 256 - PRODUCER_REGISTERS;

// A slot holds the fp32 tile first, then the split one. K and V have slots of one size: their producers run the same code.
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int Q_SLOT = larger(Q_TILE, round_up(64 * HEAD_DIM * 4, 1024));
constexpr int SLOT = larger(larger(K_TILE, V_TILE), round_up(BC * HEAD_DIM * 4, 1024));
constexpr int NEEDED = STAGES * (WARPGROUPS * Q_SLOT + 2 * SLOT);
static_assert(SHARED == NEEDED + 1024, "tiles start on 1024 bytes");
static_assert(SHARED + 2048 <= 227 * 1024, "tiles must fit shared memory");
static_assert(SLOT % 1024 == 0 && Q_SLOT % 1024 == 0, "the swizzle repeats every 1024 bytes");

// Rows of a matrix to shared memory, where they follow one another. If they do so in memory, one thread copies them in one
// piece; else 128 do, 16 bytes at a time.
constexpr int COPIERS = DENSE ? 1 : 128;
__device__ __forceinline__ void copy_rows(unsigned char *to, const float *from, long long stride, int rows,
                                          uint64_t *arrival) {
    if (DENSE) {
        arrive_expecting(arrival, rows * HEAD_DIM * 4);
        if (rows > 0) bulk_copy(shared_address(to), from, rows * HEAD_DIM * 4, arrival);
        return;
    }
    constexpr int PIECES = HEAD_DIM / 4, ACROSS = PIECES > 8   ? 16
                                                  : PIECES > 4 ? 8
                                                               : 4;  // threads for the pieces of a row
    const int piece = threadIdx.x % ACROSS, first = threadIdx.x % 128 / ACROSS;
    uint32_t target = shared_address(to) + (first * PIECES + piece) * 16;
    from += first * stride + piece * 4;
#pragma unroll 1
    for (int r = piece < PIECES ? first : rows; r < rows; r += 128 / ACROSS) {
        copy16(target, from);
        target += 128 / ACROSS * PIECES * 16, from += 128 / ACROSS * stride;
    }
    arrive_after_copies(arrival);
}

// The tiles of all of a block's work, one after the other.
struct Steps {
    unsigned w = blockIdx.x;
    int j = 0, tiles;
    __device__ __forceinline__ Steps(const Attention &a) : tiles(Work(blockIdx.x, a).tiles) {}
    __device__ __forceinline__ void next(const Attention &a) {
        if (++j < tiles) return;
        j = 0, w += gridDim.x;
        if (CAUSAL) tiles = Work(w, a).tiles;  // else all have the same number
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Attention a) {
    extern __shared__ unsigned char unaligned[];
    __shared__ uint64_t K_full[STAGES], K_free[STAGES], V_full[STAGES], V_free[STAGES];
    __shared__ uint64_t K_raw[STAGES], V_raw[STAGES], Q_raw[STAGES][WARPGROUPS], Q_free[STAGES][WARPGROUPS];
    __shared__ int K_exponent[STAGES], V_exponent[STAGES];
    unsigned char *const Q_tiles = unaligned + (-shared_address(unaligned) & 1023);
    unsigned char *const K_tiles = Q_tiles + STAGES * WARPGROUPS * Q_SLOT, *const V_tiles = K_tiles + STAGES * SLOT;
    const Rings rings = {K_full, K_free, V_full, V_free, K_exponent, V_exponent};

    const unsigned work = Work::count(a);
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) {
            barrier_init(&K_full[s], 128), barrier_init(&V_full[s], 128);
            barrier_init(&K_free[s], 4 * WARPGROUPS), barrier_init(&V_free[s], 4 * WARPGROUPS);  // each warp for itself
            barrier_init(&K_raw[s], COPIERS), barrier_init(&V_raw[s], COPIERS);
            for (int g = 0; g < WARPGROUPS; ++g) barrier_init(&Q_raw[s][g], COPIERS), barrier_init(&Q_free[s][g], 4);
        }
        barrier_init_done();
    }
    __syncthreads();

    if (threadIdx.x < 128 * PRODUCERS) {
        registers_down<PRODUCER_REGISTERS>();
        // ---- two producers: one for K (and Q), one for V. First fp32 tiles are copied, then split in place
        __shared__ unsigned scratch[2][2][8];  // two in turn: a slow warp may still read the one before
        const int thread = threadIdx.x % 128;
        const bool values = threadIdx.x >= 128;
        unsigned char *const tiles = values ? V_tiles : K_tiles;
        constexpr int AHEAD = STAGES - 2;  // one slot is read by products, one is split, the others are on their way
        uint64_t *const raw = values ? V_raw : K_raw, *const full = values ? V_full : K_full;
        uint64_t *const free = values ? V_free : K_free;

        Ring ring, Q_ring;
        Steps ahead(a);
        const auto copy_next = [&](Ring to) {
            if (ahead.w >= work) return;
            const Work here(ahead.w, a);
            if (!values && ahead.j == 0) {
                const float *const Q = rows_of(a.Q, a.q, here.head.b, here.head.h);
                for (int g = 0; g < WARPGROUPS; ++g) {
                    const int i = here.i0 + 64 * g;
                    wait(&Q_free[Q_ring.stage][g], Q_ring.parity ^ 1);
                    copy_rows(Q_tiles + (Q_ring.stage * WARPGROUPS + g) * Q_SLOT, Q + i * row_stride(a.q),
                              row_stride(a.q), max(0, min(64, a.M - i)), &Q_raw[Q_ring.stage][g]);
                }
                Q_ring.next();
            }
            const float *const X =
                values ? rows_of(a.V, a.v, here.head.b, here.head.kv) : rows_of(a.K, a.k, here.head.b, here.head.kv);
            const long long stride = values ? row_stride(a.v) : row_stride(a.k);
            const int row = ahead.j * BC;
            wait(&free[to.stage], to.parity ^ 1);
            copy_rows(tiles + to.stage * SLOT, X + row * stride, stride, min(BC, a.N - row), &raw[to.stage]);
            ahead.next(a);
        };
        if (thread < COPIERS)
            for (Ring to; to.stage < AHEAD; to.next()) copy_next(to);
        for (Steps now(a); now.w < work; now.next(a), ring.next()) {
            if (thread < COPIERS) copy_next(ring.ahead(AHEAD));
            __syncwarp();
            wait(&raw[ring.stage], ring.parity);
            unsigned char *const tile = tiles + ring.stage * SLOT;
            const float *const fp32 = reinterpret_cast<const float *>(tile);
            const int rows = min(BC, a.N - now.j * BC);
            const int s = values ? split_V<128, Neighbours::COLUMNS>(fp32, HEAD_DIM, 0, rows, tile,
                                                                     scratch[1][ring.odd()], thread, 8)
                                 : split_K<128>(fp32, HEAD_DIM, 0, rows, tile, scratch[0][ring.odd()], thread, 7);
            if (thread == 0) (values ? V_exponent : K_exponent)[ring.stage] = s;
            fence_for_async();
            arrive(&full[ring.stage]);
        }
        return;
    }

    // ---- a consumer: 64 rows of Q and O
    registers_up<CONSUMER_REGISTERS>();
    const int group = threadIdx.x / 128 - PRODUCERS, q_barrier = 1 + group;
    Consumer<SLOT, SLOT> consumer(rings, K_tiles, V_tiles, group);
    int factor_exponent;
    const float factor = frexpf(a.scale * LOG2E, &factor_exponent);  // S in powers of two: exp(x) = 2^(x log2(e))

    Ring Q_ring;
    for (unsigned w = blockIdx.x; w < work; w += gridDim.x) {
        const Work here(w, a);
        unsigned char *const Q_tile = Q_tiles + (Q_ring.stage * WARPGROUPS + group) * Q_SLOT;
        wait(&Q_raw[Q_ring.stage][group], Q_ring.parity);
        const int2 s = split_Q(reinterpret_cast<const float *>(Q_tile), HEAD_DIM, consumer.row,
                               a.M - here.i0 - group * 64, Q_tile, factor, [&] { named_sync(q_barrier, 128); });
        fence_for_async();
        named_sync(q_barrier, 128);
        consumer.attend(a, here, descriptor(shared_address(Q_tile)), s, factor_exponent, [&] {
            consumer.release(&Q_free[Q_ring.stage][group]);
            Q_ring.next();
        });
    }
}
