// Tensor cores at fp32 accuracy on Hopper: products on wgmma, warps specialised, copies in the background.
//
// What changed: a warpgroup owns 64 rows of two matrices, and multiplies with wgmma (warpgroup.cuh); a thread of
// another one brings what passes by into shared memory, STAGES tiles ahead. K and V are split beforehand, Q and dO at
// the end of `dq`, by the warpgroup that has their rows. Blocks of `dk_dv` begin while the last ones of `dq` compute,
// and wait for their heads.
// Why it is faster: wgmma reads its right operands, and half of the left ones, from shared memory by itself, at twice
// the rate of mma.sync; and one warpgroup's exponentials run beside the other's products: two blocks of a
// multiprocessor have one each, or, for heads of more than 64 numbers, which are padded to 128, one block has two.
// What it costs: as much scratch as the matrices take, and 10 % and more of the time to fill it where heads are short.
//
// Macros beyond those of warpgroup.cuh: STAGES; BLOCKS of a multiprocessor; PREPARE_THREADS. Launches: `prepare_keys`,
// `dq`, `dk_dv`, and those of dbias.cuh.
//
// The arguments of one of packed sequences lie behind the tiles, where 1024 bytes are left: with heads of more than 64
// numbers there is no other room.
#define WHERE_ONE                                            \
    extern __shared__ __align__(1024) unsigned char tiles[]; \
    Backward &one = *reinterpret_cast<Backward *>(tiles + SHARED - 1024)
#include "warpgroup.cuh"
static_assert(sizeof(Backward) <= 1024, "behind the tiles");

constexpr int GROUPS = BR / OWN;  // warpgroups of a block that multiply, with OWN rows each
static_assert(THREADS == 128 * (1 + GROUPS), "one warpgroup copies");
// A multiprocessor has 512 registers for each of 128 threads, and BLOCKS blocks.
constexpr int PRODUCER_REGISTERS = 24, CONSUMER_REGISTERS = GROUPS == 2 ? 240 : BLOCKS == 2 ? 232 : 136;
static_assert(BLOCKS * (PRODUCER_REGISTERS + GROUPS * CONSUMER_REGISTERS) <= 512, "registers for all");

constexpr int STAGE = 2 * PASS_TILE;
static_assert(SHARED == GROUPS * 2 * OWN_TILE + STAGES * STAGE + 1024, "tiles start on 1024 bytes");

// ---- K and V, split beforehand

// K and V: a block a tile, even ones K.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare_keys(const Backward a) {
    __shared__ unsigned scratch[2 * PREPARE_THREADS / 32];
    let_next_launch_begin();
    const Workspace to(a);
    const int index = blockIdx.x / 2, tiles = to.of_key_rows(a), kv = index / tiles % a.Hkv, b = index / tiles / a.Hkv;
    Slice of = {b, 0, a.N, index % tiles};
    if (PACKED) of = slice_with(a.k_starts, a.S, a.N, OWN, of.tile);
    if (PACKED && !of.has_tile(OWN)) return;
    const bool values = blockIdx.x % 2;
    const Strides by = values ? a.v : a.k;
    const Input *const matrix = rows_of(values ? a.V : a.K, by, b, kv) + of.first * by.row;
    const Taken taken = split_tile<PREPARE_THREADS, true>(matrix, by.row, of.tile * OWN, of.rows,
                                                          to.at(to.first_of_keys + index) + values * OWN_TILE, scratch,
                                                          threadIdx.x, 0, [](int) { return 1.0f; });
    if (!(taken.sum < INFINITY_F)) note_not_finite(a, of.sequence, kv);
    const bool zero = __syncthreads_and(taken.sum == 0);
    if (threadIdx.x != 0) return;
    Tail &tail = to.tail(to.first_of_keys + index);
    if (values) tail.second = taken.exponent, tail.other = __float_as_int(largest_of_scale(taken.exponent, zero));
    else tail.first = taken.exponent, tail.dS = 0;
}

// ---- shared memory: what the warpgroups own, two tiles each; then stages of what passes by

struct Arrived {  // with each stage
    OfRows rows;
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

// A slot is free again when each thread of so many warpgroups has said so: its own arrival is what orders what it has
// read there before what comes next.
//
// Quick builds (compiler.py) have no regard for the alignment. There it is made here, and there is room for it, but not
// for the arguments of one of packed sequences behind the tiles, too.
#ifdef QUICK
static_assert(!PACKED, "no room");
#define BEFORE_TILES (-shared_address(tiles) & 1023)
#else
#define BEFORE_TILES 0
#endif
__device__ __forceinline__ Shared begin(int groups) {
    extern __shared__ __align__(1024) unsigned char tiles[];
    __shared__ uint64_t full[STAGES], free[STAGES];
    __shared__ __align__(16) Arrived arrived[STAGES];
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(&full[s], 1), barrier_init(&free[s], 128 * groups);
        barrier_init_done();
    }
    return {tiles + BEFORE_TILES, full, free, arrived};
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
        bulk_copy(to + (panel / PANELS * PANELS + place_of_panel(panel % PANELS)) * PASS * 128,
                  record + panel * OWN * 128 + row * 128, PASS * 128, full);
    if (ROWS) bulk_copy(shared_address(&arrived->rows), &tail->rows[row / PASS], sizeof(arrived->rows), full);
    bulk_copy(shared_address(&arrived->numbers), &tail->first, 16, full);
    ring.next();
}

// ---- which rows a block owns: causal, of some heads at a time those with most to do first

constexpr unsigned TOGETHER = 256;  // blocks
struct HeadAndTile {
    int head, tile;
    __device__ __forceinline__ HeadAndTile(unsigned w, int heads, int tiles) : head(w / tiles), tile(w % tiles) {
        if (!CAUSAL) return;
        const int together = max(1u, TOGETHER / tiles), first = w / (together * tiles) * together;
        const int some = min(together, heads - first), within = w - first * tiles;
        head = first + within % some, tile = within / some;
    }
};

// ---- from `dq` to `dk_dv`: of each head of Q how many records are whole, behind the notes of heads

__device__ __forceinline__ int *rows_done(const Backward &a, int b, int h) {
    if (PACKED) return a.notes + 1 + a.S * a.Hkv + a.sequence * a.H + h;
    return a.notes + 1 + a.B * a.Hkv + b * a.H + h;
}

// Blocks of `dk_dv` begin when all of `dq` have begun, so that none of these waits for one that waits for it.
__device__ __forceinline__ void await_rows(const Backward &a, int b, int h) {
    await_number(rows_done(a, b, h), ceil_div(a.M, OWN));
    fence_for_async_global();
}

// Which of the warpgroups that multiply a thread is of; the compiler knows that it is the same for a warp.
__device__ __forceinline__ int group_of_thread() { return uniform(threadIdx.x / 128) - 1; }

// ---- dQ

// The rows of Q that a block owns: of a head those from `first` on.
struct Queries {
    Head head;
    int first;
    __device__ __forceinline__ Queries(const Backward &a, unsigned block) {
        const int Tr = ceil_div(a.M, BR);
        if (PACKED) {
            head = head_of(a, block / tiles_of_head<false>(a, BR)), first = (CAUSAL ? Tr - 1 - a.tile : a.tile) * BR;
            return;
        }
        const HeadAndTile at(block, a.B * a.H, Tr);
        head = head_of(a, at.head), first = (CAUSAL ? Tr - 1 - at.tile : at.tile) * BR;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) dq(const Backward all) {
    __shared__ float inverses[GROUPS][OWN];
    __shared__ unsigned scratch[GROUPS][24];
    let_next_launch_begin();
    const Backward &a = of_tile<false>(all, BR, PACKED ? blockIdx.x % tiles_of_head<false>(all, BR) : 0);
    if (!has_tile(a)) return;
    const Shared shared = begin(GROUPS);
    __syncthreads();
    const Queries queries(a, blockIdx.x);
    const Head head = queries.head;
    const int first = queries.first;
    // Keys that some row of the block sees, of which i is one.
    const auto end_of_keys = [&](int i) { return keys_seen(a, min(i | BR - 1, a.M - 1)); };
    // The first tile of keys that some row of the block sees.
    const auto first_tile = [&](int i) { return keys_hidden(a, i / BR * BR) / PASS; };
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x != 0) return;
        await_launch_before();
        const Workspace from(a);
        const unsigned char *const records = from.at(from.of_keys(a, head.b, head.kv));
        Ring ring;
        for (int j = first_tile(first); j * PASS < end_of_keys(first); ++j) copy_tile<false>(shared, ring, records, j);
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    const int group = group_of_thread(), own = first + group * OWN;
    const uint32_t Q = shared_address(shared.own(group));  // and behind it dO
    OfQueries rows(a, head, own, shared.own(group), scratch[group], 1 + group);
    Ring ring;
#pragma unroll 1
    for (int j = first_tile(own); j * PASS < end_of_keys(CAUSAL ? opaque(own) : own); ++j, ring.next()) {
        wait(&shared.full[ring.stage], ring.parity);
        if (!CAUSAL || j * PASS < keys_seen(a, own + OWN - 1)) {  // else no row of this warpgroup sees any of these
            const uint64_t K = descriptor(shared_address(shared.stage(ring.stage))), V = K + PASS_TILE / 16;
            rows.multiply_with(a, head, Q, K, V, shared.arrived[ring.stage].numbers, j * PASS);
        }
        arrive(&shared.free[ring.stage]);
    }

    const Queries out(a, block_index());
    const int tile = out.first + group * OWN;
    if (tile >= a.M) return;
    const Workspace to(a);
    const int record = to.of_queries(a, out.head.b, out.head.h) + tile / OWN;
    const bool finite =
        rows.finish(a, out.head, tile, to.at(record), to.tail(record), inverses[group], scratch[group], 1 + group);
    if (!finite) note_not_finite(a, out.head.b, out.head.kv);
    await_launch_before();  // there may have been nothing to multiply, and `dk_dv` takes K and V for split, too
    fence_for_async_global();
    named_sync(1 + group, 128);
    if (threadIdx.x % 128 == 0) add_in_order(rows_done(a, out.head.b, out.head.h), 1);
}

// ---- dK, dV

// The keys that a block owns.
struct OwnedKeys {
    int b, kv, first;
    __device__ __forceinline__ OwnedKeys(const Backward &a, unsigned block) {
        if (PACKED) {
            b = 0, kv = block / tiles_of_head<true>(a, BR), first = a.tile * BR;
            return;
        }
        const HeadAndTile at(block, a.B * a.Hkv, ceil_div(a.N, BR));
        b = at.head / a.Hkv, kv = at.head % a.Hkv, first = at.tile * BR;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) dk_dv(const Backward all) {
    __shared__ uint64_t owned[GROUPS];
    const Backward &a = of_tile<true>(all, BR, PACKED ? blockIdx.x % tiles_of_head<true>(all, BR) : 0);
    if (!has_tile(a)) return;
    const OwnedKeys keys(a, blockIdx.x);
    const int b = keys.b, kv = keys.kv, first = keys.first, heads = a.H / a.Hkv;
    const int groups = min(GROUPS, ceil_div(a.N - first, OWN));  // with keys
    const int end = ceil_div(end_query(a, first + BR - 1), PASS), begin_ = first_query(a, first) / PASS;
    const Shared shared = begin(groups);
    if (threadIdx.x == 0) {
        for (int g = 0; g < GROUPS; ++g) barrier_init(&owned[g], 1);
        barrier_init_done();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        registers_down<PRODUCER_REGISTERS>();
        if (threadIdx.x != 0) return;
        const Workspace from(a);
        Ring ring;
        await_rows(a, b, kv * heads);
        for (int g = 0; g < groups; ++g) {
            arrive_expecting(&owned[g], 2 * OWN_TILE);
            bulk_copy(shared_address(shared.own(g)), from.at(from.of_keys(a, b, kv) + first / OWN + g), 2 * OWN_TILE,
                      &owned[g]);
        }
        for (int h = kv * heads; h < (kv + 1) * heads; ++h) {
            if (h > kv * heads) await_rows(a, b, h);
            for (int n = begin_; n < end; ++n) copy_tile<true>(shared, ring, from.at(from.of_queries(a, b, h)), n);
        }
        await_launch_before();  // what is launched next comes after `dq`, too
        return;
    }
    registers_up<CONSUMER_REGISTERS>();
    const int group = group_of_thread(), own = first + group * OWN;
    if (group >= groups) return;
    const Workspace from(a);
    const Tail &tail = from.tail(from.of_keys(a, b, kv) + own / OWN);
    wait(&owned[group], 0);
    const uint32_t K = shared_address(shared.own(group));  // and behind it V

    OfKeys rows = {own, tail.first, tail.second};
    Ring ring;
    int n = begin_, h = kv * heads;
#pragma unroll 1
    for (int left = heads * (end - begin_); left > 0; --left, ring.next()) {
        const Head head = {b, h, kv};
        const int i0 = n * PASS;
        if (++n == end) n = begin_, ++h;
        wait(&shared.full[ring.stage], ring.parity);
        if (!CAUSAL || i0 + PASS > first_query(a, own)) {  // else none of these sees a key of this warpgroup
            const uint64_t Q = descriptor(shared_address(shared.stage(ring.stage))), dO = Q + PASS_TILE / 16;
            const Arrived &arrived = shared.arrived[ring.stage];
            rows.multiply_with(a, head, K, Q, dO, arrived.rows, arrived.numbers, arrived.numbers.w & LONE, i0);
        }
        arrive(&shared.free[ring.stage]);
    }
    const OwnedKeys out(a, block_index());
    rows.finish(a, out.b, out.kv, out.first + group_of_thread() * OWN);
}

#ifdef DBIAS_SLOTS
#include "dbias.cuh"
#endif
