// Short sequences on Hopper: K and V are split in shared memory, without a pre-pass.
//
// What changed: the copies bring K and V in fp32, and warpgroups split them in place, where there was one that only copied.
// The others take row tiles of 64 in turn, each for itself, while a head's tiles of K and V stay where they are; each keeps
// its Q in registers, as fragments. There is no workspace.
// Why it is faster: up to some hundred keys few blocks read the same K and V; to write both split to memory and to read
// them again would be most of the traffic. A head is split once, not once a row tile. Of a last tile of few keys only those
// are multiplied. And a row tile waits for nobody before its first product: its Q is on the way while the last one is done.
// What it costs: a head that does not fit is split over and over; splitting takes registers from those that multiply; and
// copies move 16 bytes at a time: heads of 4, 8, .. 64 numbers whose rows start on 16 bytes.
//
// Launch: `attention` with any number of blocks.
#include "warpgroup.cuh"

constexpr int PRODUCERS = 2, CONSUMERS = THREADS / 128 - PRODUCERS;
static_assert(BR == 64 && CONSUMERS == 2, "a row tile is one warpgroup's; two split, two multiply");
static_assert(BC * D <= 4096, "a splitting thread has registers for 32 floats");
static_assert(ALIGNED && STAGES >= 3, "bulk copies move 16 bytes; tiles are copied ahead");
// An SM has 512 for each of 128 threads.
constexpr int PRODUCER_REGISTERS = BC > 64 ? 56 : 64, CONSUMER_REGISTERS = 256 - PRODUCER_REGISTERS;

// A slot holds the fp32 tile first, then the split one. K and V have slots of one size: their producers run the same code.
constexpr int larger(int a, int b) { return a > b ? a : b; }
constexpr int SLOT = larger(larger(K_TILE, V_TILE), round_up(BC * HEAD_DIM * 4, 1024));
constexpr int Q_BYTES = CONSUMERS * 64 * K_STEPS * 16 * 4;
constexpr int CUT = 32;  // keys of the last tile: as many as one product has at full rate
constexpr int NEEDED = STAGES * 2 * SLOT + Q_BYTES;
static_assert(SHARED == NEEDED + 1024, "tiles start on 1024 bytes");
static_assert(SHARED + 2048 <= 227 * 1024, "tiles must fit shared memory");
static_assert(SLOT % 1024 == 0, "the swizzle repeats every 1024 bytes");

// What a block does at a time: `share` row tiles of a head, while the tiles of K and V that they see are brought once. That
// is all of a head's, if K and V fit shared memory, and if whole heads keep nearly all blocks busy to the end; else one for
// each warpgroup that multiplies.
struct Units {
    int Tr, share, parts;  // row tiles of a head, of a unit; units of a head
    unsigned count;
    int ahead;  // so many tiles are copied ahead: one slot is read by products, one is split; or all of a head stay
    __device__ __forceinline__ Units(const Attention &a) : Tr(ceil_div(a.M, BR)) {
        const unsigned heads = unsigned(a.B) * a.H, rounds = (heads + gridDim.x - 1) / gridDim.x;
        const int Tc = ceil_div(a.N, BC);
        const bool whole = Tc < STAGES && rounds * gridDim.x / 8 * 7 <= heads;
        share = whole ? Tr : min(CONSUMERS, (heads * Tr + gridDim.x - 1) / gridDim.x);
        parts = ceil_div(Tr, share);
        count = heads * parts;
        ahead = share > CONSUMERS ? min(STAGES - 2, STAGES - Tc) : STAGES - 2;
    }
    __device__ __forceinline__ int part(unsigned unit) const { return parts == 1 ? 0 : unit % parts; }
    __device__ __forceinline__ int row_tiles(unsigned unit) const { return min(share, Tr - part(unit) * share); }
    // A row tile of a unit. Number 0 sees as many tiles of K as any.
    __device__ __forceinline__ Work work(unsigned unit, int row_tile, const Attention &a) const {
        const int tile = part(unit) * share + row_tile;
        return Work(parts == 1 ? unit : unit / parts, (CAUSAL ? Tr - 1 - tile : tile) * BR, a);
    }
};

// The tiles of K and V of all of a block's units, one after the other.
struct Steps {
    unsigned unit = blockIdx.x;
    int j = 0;
    __device__ __forceinline__ void next(const Units &units, const Attention &a) {
        // Not causal, all units have the same number.
        if (++j == units.work(CAUSAL ? unit : 0, 0, a).tiles) j = 0, unit += gridDim.x;
    }
};

// The row tiles of a block's units that are for one of the warpgroups: they take turns.
struct Turns {
    unsigned unit = blockIdx.x;
    int row_tile;
    __device__ __forceinline__ Turns(int group, const Units &units) : row_tile(group) { into(units); }
    __device__ __forceinline__ void next(const Units &units) { row_tile += CONSUMERS, into(units); }
    __device__ __forceinline__ void into(const Units &units) {  // the unit in which that row tile is
        for (int n; unit < units.count && row_tile >= (n = units.row_tiles(unit)); unit += gridDim.x) row_tile -= n;
    }
};

// Rows of a matrix to shared memory, where they follow one another. If they do so in memory, one thread copies them in one
// piece; else 128 do, 16 bytes at a time.
constexpr int COPIERS = DENSE ? 1 : 128;
__device__ __forceinline__ void copy_rows(unsigned char *to, const float *from, long long stride, int rows,
                                          uint64_t *arrival) {
    if (DENSE) {
        arrive_expecting(arrival, rows * HEAD_DIM * 4);
        bulk_copy(shared_address(to), from, rows * HEAD_DIM * 4, arrival);
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

// A producer, of K or of V: tiles are copied in fp32 first, then split in place. The barriers tell that one was copied,
// was split, and is free again.
__device__ __forceinline__ void split_tiles(const Attention &a, const Units &units, bool values, unsigned char *tiles,
                                            uint64_t *raw, uint64_t *full, uint64_t *free, int *exponent) {
    __shared__ unsigned scratch[2][2][8];  // two in turn: a slow warp may still read the one before
    const int thread = threadIdx.x % 128;
    const long long stride = row_stride(values ? a.v : a.k);

    Ring ring;
    Steps ahead;
    const auto copy_next = [&](Ring to) {
        if (ahead.unit >= units.count) return;
        const Head head = units.work(ahead.unit, 0, a).head;
        const float *const X = values ? rows_of(a.V, a.v, head.b, head.kv) : rows_of(a.K, a.k, head.b, head.kv);
        const int row = ahead.j * BC;
        wait(&free[to.stage], to.parity ^ 1);
        copy_rows(tiles + to.stage * SLOT, X + row * stride, stride, min(BC, a.N - row), &raw[to.stage]);
        ahead.next(units, a);
    };
    if (thread < COPIERS)
        for (Ring to; to.stage < units.ahead; to.next()) copy_next(to);
    for (Steps now; now.unit < units.count; now.next(units, a), ring.next()) {
        if (thread < COPIERS) copy_next(ring.ahead(units.ahead));
        __syncwarp();
        wait(&raw[ring.stage], ring.parity);
        unsigned char *const tile = tiles + ring.stage * SLOT;
        const float *const fp32 = reinterpret_cast<const float *>(tile);
        const int rows = min(BC, a.N - now.j * BC);
        const int s =
            values ? split_V<128, Neighbours::COLUMNS>(fp32, HEAD_DIM, 0, rows, tile, scratch[1][ring.odd()], thread, 8)
                   : split_K<128>(fp32, HEAD_DIM, 0, rows, tile, scratch[0][ring.odd()], thread, 7);
        if (thread == 0) exponent[ring.stage] = s;
        fence_for_async();
        arrive(&full[ring.stage]);
    }
}

// The numbers of Q that a thread wants as fragments, in shared memory: copied there, by itself and for itself, while it
// still works on the ones before.
struct Queries {
    float2 *const mine;
    __device__ __forceinline__ Queries(unsigned char *all)
        : mine(reinterpret_cast<float2 *>(all) + (threadIdx.x - 128 * PRODUCERS)) {}
    static __device__ __forceinline__ constexpr int at(int k, int f) { return (4 * k + f) * 128 * CONSUMERS; }

    // Of rows i and i + 8.
    __device__ __forceinline__ void copy(const Attention &a, Head head, int i) const {
        const int t = threadIdx.x % 4 * 2;
        const float *const Q = rows_of(a.Q, a.q, head.b, head.h) + t;
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int row = i + 8 * r;
            const float *const from = Q + min(row, a.M - 1) * row_stride(a.q);
#pragma unroll
            for (int c = 0; c < 2 * K_STEPS; ++c)
                copy8(shared_address(mine + at(c / 2, c % 2 * 2 + r)), from + 8 * c,
                      row < a.M && (8 * c + 8 <= HEAD_DIM || 8 * c + t < HEAD_DIM));
        }
    }

    // `factor` in [0.5, 1) is the mantissa of scale * log2(e). Returns the exponents of the two rows' scales.
    __device__ __forceinline__ int2 split(QFragments &to, float factor) const {
        wait_for_copies();
        int s[2];
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float x[K_STEPS][2][2];
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
                for (int f = 0; f < 2; ++f) {
                    const float2 two = mine[at(k, 2 * f + r)];
                    x[k][f][0] = two.x, x[k][f][1] = two.y;
                }
            s[r] = row_scale<K_STEPS * 4>(&x[0][0][0]);
            const float scale = power_of_two(s[r]) * factor;
#pragma unroll
            for (int k = 0; k < K_STEPS; ++k)
#pragma unroll
                for (int f = 0; f < 2; ++f)
                    split_scaled(x[k][f][0], x[k][f][1], scale, to.hi[k][2 * f + r], to.lo[k][2 * f + r]);
        }
        return make_int2(s[0], s[1]);
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) attention(const Attention a) {
    extern __shared__ unsigned char unaligned[];
    __shared__ uint64_t raw[2][STAGES], full[2][STAGES], free[2][STAGES];  // of K, and of V
    __shared__ int exponent[2][STAGES];
    unsigned char *const tiles = unaligned + (-shared_address(unaligned) & 1023);

    if (threadIdx.x == 0) {
        for (int x = 0; x < 2; ++x)
            for (int s = 0; s < STAGES; ++s) {
                barrier_init(&raw[x][s], COPIERS), barrier_init(&full[x][s], 128);
                barrier_init(&free[x][s], 4 * CONSUMERS);  // each warp for itself
            }
        barrier_init_done();
    }
    __syncthreads();
    const Units units(a);

    // From one lane, so that ptxas sees that all of a warp have the same, and keeps what follows from it but once a warp.
    const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0);
    if (warpgroup < PRODUCERS) {
        registers_down<PRODUCER_REGISTERS>();
        const int x = warpgroup;
        split_tiles(a, units, x == 1, tiles + x * STAGES * SLOT, raw[x], full[x], free[x], exponent[x]);
        return;
    }

    // ---- a consumer: 64 rows of Q and O at a time
    registers_up<CONSUMER_REGISTERS>();
    const Rings rings = {full[0], free[0], full[1], free[1], exponent[0], exponent[1]};
    Consumer<SLOT, SLOT, CUT> consumer(rings, tiles, tiles + STAGES * SLOT, 0);
    const Queries Q(tiles + 2 * STAGES * SLOT);
    int factor_exponent;
    const float factor = frexpf(a.scale * LOG2E, &factor_exponent);  // S in powers of two: exp(x) = 2^(x log2(e))

    Turns mine(warpgroup - PRODUCERS, units);
    const auto copy_Q = [&] {
        if (mine.unit >= units.count) return;
        const Work next = units.work(mine.unit, mine.row_tile, a);
        Q.copy(a, next.head, next.i0 + consumer.row);
    };
    copy_Q();
    for (unsigned unit = blockIdx.x; unit < units.count; unit += gridDim.x) {
        const Ring first = consumer.K_ring;
        int seen = 0;
        while (mine.unit == unit) {
            QFragments fragments;
            const int2 s = Q.split(fragments, factor);
            const Work here = units.work(unit, mine.row_tile, a);
            mine.next(units);
            copy_Q();
            consumer.K_ring = consumer.V_ring = first;
            consumer.attend(a, here, fragments, s, factor_exponent, AllKeys(), mine.unit == unit);
            seen = here.tiles;
        }
        consumer.pass_by(units.work(unit, 0, a).tiles - seen);
    }
}
