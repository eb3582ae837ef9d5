// Prompt: many query tokens of a sequence, on the tensor cores of Hopper (sm_90a).
//
// What changed: a block takes 128 query rows of a head of the cache, tokens times the heads of its group, past all keys
// that they see, instead of 8 or 16. Four warps, the producer, copy keys and values from their pages into shared memory,
// tile after tile (staged.cuh); two warpgroups multiply on wgmma, each 64 of the rows: S = Q Kᵀ of a tile while P V of
// the one before still runs. Rows are found on the device (work.cuh), so that prompts, chunks, drafts and single tokens
// share a launch: blocks draw numbers of items until there are none. Sequences of few rows are cut into pieces, which
// a launch of its own merges.
// Why it is faster: each key that has been fetched serves 128 rows, not 16; wgmma reads it from shared memory by
// itself, at twice the rate of mma.sync; and copies run ahead by STAGES tiles, also across items.
// What it costs: P and the query are rounded to 16 bits as in `tensor`, and tiles have other shapes, so that bytes part
// from that one's. A row's bytes depend on nothing but its own sequence. A single token wastes 15 of 16 rows, which its
// keys' way from memory hides.
#include "staged.cuh"

constexpr int WARPGROUPS = ROWS / 64, CONSUMER_WARPS = 4 * WARPGROUPS;
// Threads begin with 168 each. Copies of numbers of 8 bits take most, for their loads are waited for in registers.
constexpr int PRODUCER_REGISTERS = HEAD_DIM > 192 ? 56 : WIDENS && !TRANSPOSED ? 104 : 88;
constexpr int CONSUMER_REGISTERS = (3 * 168 - PRODUCER_REGISTERS) / 2;
static_assert(ROWS == 128 && THREADS == COPIERS + ROWS * 2, "four warps copy, and so many multiply 64 rows");
static_assert(SHARED == WARPGROUPS * Q_TILE + 2 * STAGES * TILE_BYTES + 1024, "tiles start on 1024 bytes");

using Ring = RingOf<STAGES>;
constexpr int ITEMS = 4;  // known at a time
using ItemRing = RingOf<ITEMS>;

// Who multiplies an item's rows: a warpgroup, by its number, or all.
constexpr int ALL = WARPGROUPS;

// What threads wait for: tiles of K and of V that are there (full), told to those who multiply them, or that may be
// overwritten (free); so for items.
struct Barriers {
    uint64_t K_full[ALL + 1][STAGES], V_full[ALL + 1][STAGES], K_free[STAGES], V_free[STAGES];
    uint64_t item_full[ITEMS], item_free[ITEMS];

    __device__ __forceinline__ void init() {
        for (int s = 0; s < STAGES; ++s) {
            for (int who = 0; who <= ALL; ++who)
                barrier_init(&K_full[who][s], COPIERS), barrier_init(&V_full[who][s], COPIERS);
            barrier_init(&K_free[s], CONSUMER_WARPS), barrier_init(&V_free[s], CONSUMER_WARPS);
        }
        for (int s = 0; s < ITEMS; ++s) barrier_init(&item_full[s], 1), barrier_init(&item_free[s], THREADS);
    }
};

// An item of at most 64 rows is one warpgroup's alone, and the next such item the other one's: these take them in turn,
// and neither waits for the other.
__device__ __forceinline__ int who_multiplies(const Decode &a, const Item &item, const ItemRing &at) {
    return item.rows(a) - item.row0 <= 64 ? at.odd() : ALL;
}

// A warp's way around the tiles: a parity for each place, of tiles that are its warpgroup's alone, and of those of all.
struct TileRing {
    int stage = 0;
    uint32_t parities = 0;
    __device__ __forceinline__ int bit(int who) const { return who == ALL ? stage + STAGES : stage; }
    __device__ __forceinline__ uint32_t parity(int who) const { return parities >> bit(who) & 1; }
    __device__ __forceinline__ void next(int who) {
        parities ^= 1u << bit(who);
        skip(1);
    }
    __device__ __forceinline__ void skip(unsigned count) { stage = (stage + count) % STAGES; }
};

// ---- the producer

// Draws items and tells all warps of them; the first warp does, and its first lane has what is drawn ahead. Which kind a
// block begins with depends on its number.
struct Drawer {
    Finder finder;  // of a kind
    int kind, tried;

    // The next number of a kind. The answer takes a while, so it is asked for ahead.
    static __device__ __forceinline__ void ask(const Decode &a, int kind, int &drawn) {
        if (threadIdx.x == 0) drawn = next_number(a, kind);
    }
    // How many blocks begin with a kind, whose first numbers are theirs.
    static __device__ __forceinline__ int beginners(int kind) {
        const int few = ceil_div_large(gridDim.x, FEW_OF);
        return kind == FEW ? few : gridDim.x - few;
    }
    __device__ __forceinline__ void begin(int &drawn) {
        const int few = blockIdx.x / FEW_OF, first = blockIdx.x % FEW_OF == 0 ? FEW : MANY;
        drawn = (first == FEW ? few : blockIdx.x - few - 1) - beginners(first);
        if (threadIdx.x == 0) finder = {0, 0}, kind = first, tried = 0;
        __syncwarp();
    }
    __device__ __forceinline__ void draw(const Decode &a, Item &to, int &drawn) {
        Item item;
        Finder now = finder;
        int of = kind, times = tried;
        for (; times < KINDS; ++times, of = KINDS - 1 - of, now = {0, 0}, ask(a, of, drawn)) {
            const int number = uniform(drawn) + beginners(of);
            ask(a, of, drawn);
            if (now.find(a, (Kind)of, number, item)) break;
        }
        item.is_none = times == KINDS;
        __syncwarp();
        if (threadIdx.x == 0) finder = now, kind = of, tried = times, to = item;
        __syncwarp();
    }
};

// This thread's part of a tile is there, or will be.
__device__ __forceinline__ void tell(uint64_t *full) {
    if (WIDENS) arrive(full);
    else arrive_after_copies(full);
}

// A warp of the warpgroup that does not want a tile need not say so: each copying warp does for one.
static_assert(COPIERS == 128, "as many warps");
__device__ __forceinline__ void release_for_other(uint64_t *free) {
    if (threadIdx.x % 32 == 0) arrive(free);
}

__device__ __forceinline__ void produce(const Decode &a, Item *items, Barriers &barriers, unsigned char *K_tiles,
                                        unsigned char *V_tiles) {
    __shared__ Drawer drawer;  // registers are few here
    const bool draws = uniform(threadIdx.x / 32) == 0;
    int drawn = 0;
    ItemRing from;
    Ring ring;
    const auto draw = [&](ItemRing to) {
        wait(&barriers.item_free[to.stage], to.parity ^ 1);
        drawer.draw(a, items[to.stage], drawn);
        if (threadIdx.x == 0) arrive(&barriers.item_full[to.stage]);
    };
    if (draws) drawer.begin(drawn), draw(from);
    for (;; from.next()) {
        wait(&barriers.item_full[from.stage], from.parity);
        const Item &item = items[from.stage];
        if (item.is_none) break;
        if (draws) draw(from.after());
        const int who = who_multiplies(a, item, from);
        Copier copier(a, item);
#pragma unroll 1
        for (int j = first_tile(item); j < last_tile(item); ++j, ring.next()) {
            copier.begin(j);
            wait(&barriers.K_free[ring.stage], ring.parity ^ 1);
            if (BOXES && copier.is_whole(j))
                copier.copy_boxes<true>(K_tiles + ring.stage * TILE_BYTES, j, &barriers.K_full[who][ring.stage]);
            else copier.copy_keys(K_tiles + ring.stage * TILE_BYTES, j), tell(&barriers.K_full[who][ring.stage]);
            if (who != ALL) release_for_other(&barriers.K_free[ring.stage]);
            wait(&barriers.V_free[ring.stage], ring.parity ^ 1);
            if (BOXES && copier.is_whole(j))
                copier.copy_boxes<false>(V_tiles + ring.stage * TILE_BYTES, j, &barriers.V_full[who][ring.stage]);
            else copier.copy_values(V_tiles + ring.stage * TILE_BYTES, j), tell(&barriers.V_full[who][ring.stage]);
            if (who != ALL) release_for_other(&barriers.V_free[ring.stage]);
        }
        arrive(&barriers.item_free[from.stage]);
    }
}

// A descriptor so many units further on. For long heads only the low word changes: so steps have a register each.
__device__ __forceinline__ uint64_t further(uint64_t descriptor, int units) {
    return HEAD_DIM <= 192 ? descriptor + units : descriptor >> 32 << 32 | (uint32_t)descriptor + (uint32_t)units;
}

// ---- a consumer: a warpgroup, as one of its threads sees it, which has rows `row` and `row` + 8 of its 64

constexpr float SLACK = 8;  // as in tensor.cuh

struct Consumer {
    const Decode &a;
    Barriers &barriers;
    const int group, lane = threadIdx.x % 32, row = threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const uint64_t Q, K, V;
    TileRing K_ring, V_ring;
    uint32_t V_free;  // of the tile of V that is there
    int who;          // multiplies the item's rows
    int part;         // of an item's rows, 64 each, that this warpgroup has
    float factor;     // from products to scores in powers of two, but for what `transform` does
    bool is_plain;    // that does nothing

    float S[BC / 2], O[O_CHUNKS][O_COLUMNS / 2];
    uint32_t P[V_STEPS][4];
    float m[2], l[2], rescale[2];
    int seen_from[2], seen_until[2];  // by this thread's rows: keys
    int all_from, all_until;          // all rows of the warp see keys from here to there
    float slope[2];
    int position[2];

    // ---- the rings

    // What threads have copied is seen by the tensor cores after a fence.
    __device__ __forceinline__ void await_K() const { wait(&barriers.K_full[who][K_ring.stage], K_ring.parity(who)); }
    __device__ __forceinline__ void await_V() {
        V_free = opaque(shared_address(&barriers.V_free[V_ring.stage]));  // known before it is needed
        wait(&barriers.V_full[who][V_ring.stage], V_ring.parity(who));
    }
    __device__ __forceinline__ void release(uint32_t free, TileRing &ring) const {
        __syncwarp();
        if (threadIdx.x % 32 == 0) arrive_at(free);
        ring.next(who);
    }
    __device__ __forceinline__ void release_K() { release(shared_address(&barriers.K_free[K_ring.stage]), K_ring); }
    __device__ __forceinline__ void release_V() { release(V_free, V_ring); }
    // Turns at issuing products, by named barriers 4 and 5.
    __device__ __forceinline__ void await_turn() const { named_sync(4 + group, 128 * WARPGROUPS); }
    __device__ __forceinline__ void pass_turn() const { named_arrive(4 + (group + 1) % WARPGROUPS, 128 * WARPGROUPS); }

    // ---- an item

    // The 64 rows of Q; those that there are none of are zeros.
    __device__ __forceinline__ void load_Q(const Item &item, unsigned char *tile) const {
        constexpr int ACROSS = power_of_two_from(K_STEPS * 2), DOWN = 128 / ACROSS;
        const int chunk = threadIdx.x % ACROSS, rows = item.rows(a);
        const unsigned char *const query = static_cast<const unsigned char *>(a.query);
        const bool is_aligned = (((unsigned long long)query | (a.query_sequence | a.query_token) * 2) & 15) == 0;
        named_sync(1 + group, 128);  // all have waited for the products that read the tile last
        if (chunk < K_STEPS * 2) {
#pragma unroll 4
            for (int r = threadIdx.x % 128 / ACROSS; r < 64; r += DOWN) {
                const int i = item.row0 + part * 64 + r;
                const bool wanted = i < rows && chunk < HEAD_DIM / 8;
                const ItemRow known(a, item, wanted ? i : 0);
                const long long at = RAGGED ? (item.start + known.token) * a.query_sequence
                                            : item.s * a.query_sequence + known.token * a.query_token;
                const unsigned char *const from = wanted ? query + (at + known.head * HEAD_DIM + chunk * 8) * 2 : query;
                const uint32_t to = shared_address(tile) + chunk_at<64>(r, chunk);
                if (is_aligned) copy_some<16>(to, from, wanted ? 16 : 0);
                else {
#pragma unroll
                    for (int x = 0; x < 16; x += 4) copy_some<4>(to + x, from + (wanted ? x : 0), wanted ? 4 : 0);
                }
            }
        }
        await_copies();
        fence_for_async();
        named_sync(1 + group, 128);
    }

    // Which keys this thread's rows see, of those of the item.
    __device__ __forceinline__ void know_rows(const Item &item) {
        const int last = item.rows(a) - 1, first = item.row0 + part * 64;
        const auto from_of = [&](int at) { return max(item.first, a.window ? at - a.window + 1 : 0); };
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const ItemRow known(a, item, min(first + row + 8 * r, last));
            position[r] = known.position;
            seen_from[r] = from_of(known.position), seen_until[r] = min(known.position + 1, item.end);
            slope[r] = a.alibi_slopes ? a.alibi_slopes[known.head] * LOG2E : 0;
        }
        all_until = min(ItemRow(a, item, min(first + row - lane / 4, last)).position + 1, item.end);
        all_from = from_of(ItemRow(a, item, min(first + row - lane / 4 + 15, last)).position);
    }

    // ---- S = Q Kᵀ
    __device__ __forceinline__ void issue_S() {
        uint64_t left = Q;
        asm volatile("" : "+l"(left));  // else the address of each step is kept in a register of its own
        const uint64_t right = further(K, K_ring.stage * (TILE_BYTES / 16));
        pin(S);
        wgmma_fence();
#pragma unroll
        for (int step = 0; step < K_STEPS; ++step)
            multiply(S, further(left, Q_step(step)), further(right, K_step(step)), step > 0);
        wgmma_commit();
    }

    // ---- softmax

    // Scores in powers of two, where that takes more than a factor: a bound, ALiBi, a scale below zero.
    __device__ __forceinline__ void transform(int key) {
#pragma unroll
        for (int x = 0; x < BC / 2; ++x) {
            float score = S[x] * factor;
            if (SOFTCAP) {  // tanh(s) = 1 - 2 / (exp(2 s) + 1)
                const float e = exp2_fast(score * (2 * LOG2E));
                score = a.softcap * LOG2E * (1 - __fdividef(2, e + 1));
            }
            S[x] = fmaf(slope[x / 2 % 2], (float)(key + x / 4 * 8 + x % 2 - position[x / 2 % 2]), score);
        }
    }
    // m, l, and S := P, of tile j; `rescale` is what O is to be multiplied with.
    __device__ __forceinline__ void exponentiate(int j) {
        const int key = j * BC + lane % 4 * 2;  // this thread's first one
        float scale = factor;
        if (!is_plain) transform(key), scale = 1;
        if (j * BC < all_from || (j + 1) * BC > all_until) {
#pragma unroll
            for (int x = 0; x < BC / 2; ++x) {
                const int which = x / 4 * 8 + x % 2;
                if (which < seen_from[x / 2 % 2] - key || which >= seen_until[x / 2 % 2] - key) S[x] = NEG_INF;
            }
        }
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            float largest = S[2 * r];
#pragma unroll
            for (int x = 0; x < BC / 2; x += 4) largest = fmaxf(largest, fmaxf(S[x + 2 * r], S[x + 2 * r + 1]));
            // Most tiles need not rescale O: P has room for that.
            float now = fmaxf(m[r], quad_max(largest) * scale);
            if (now < m[r] + SLACK) now = m[r];
            const float shift = finite_or_zero(now);
            rescale[r] = exp2_fast(m[r] - shift);
            m[r] = now;
            float sum = 0;
#pragma unroll
            for (int x = 0; x < BC / 2; x += 4)
#pragma unroll
                for (int e = 2 * r; e < 2 * r + 2; ++e) {
                    S[x + e] = exp2_fast(fmaf(S[x + e], scale, -shift));
                    sum += S[x + e];
                }
            l[r] = fmaf(l[r], rescale[r], sum);
        }
    }
    // P as left operands: these have the layout of accumulators, so that P never leaves the thread.
    __device__ __forceinline__ void round_P() {
#pragma unroll
        for (int step = 0; step < V_STEPS; ++step)
#pragma unroll
            for (int i = 0; i < 4; ++i) P[step][i] = pack(S[8 * step + 2 * i], S[8 * step + 2 * i + 1]);
    }

    // ---- O += P V
    __device__ __forceinline__ void issue_O() {
        const uint64_t right = further(V, V_ring.stage * (TILE_BYTES / 16));
#pragma unroll
        for (int c = 0; c < O_CHUNKS; ++c) pin(O[c]);
        wgmma_fence();
#pragma unroll
        for (int c = 0; c < O_CHUNKS; ++c)
#pragma unroll
            for (int step = 0; step < V_STEPS; ++step)
                multiply<!TRANSPOSED>(O[c], P[step], further(right, V_step(step, c)), 1);
        wgmma_commit();
    }
    __device__ __forceinline__ void await_O() {
        wgmma_wait<0>();
#pragma unroll
        for (int c = 0; c < O_CHUNKS; ++c) pin(O[c]);
        release_V();
    }
    __device__ __forceinline__ void rescale_O() {
        if (!__any_sync(~0u, rescale[0] != 1 || rescale[1] != 1)) return;
#pragma unroll
        for (int c = 0; c < O_CHUNKS; ++c)
#pragma unroll
            for (int x = 0; x < O_COLUMNS / 2; ++x) O[c][x] *= rescale[x / 2 % 2];
    }

    // All tiles of an item.
    __device__ __forceinline__ void pass_tiles(const Item &item) {
        const int first = first_tile(item), last = last_tile(item);
#pragma unroll
        for (int r = 0; r < 2; ++r) m[r] = NEG_INF, l[r] = 0;
        // Also so that O of the item before needs no registers while this one is prepared.
#pragma unroll
        for (int c = 0; c < O_CHUNKS; ++c)
#pragma unroll
            for (int x = 0; x < O_COLUMNS / 2; ++x) O[c][x] = 0;
        if (first == last) return;
        await_K();
        fence_for_async();
        issue_S();
        wgmma_wait<0>();
        pin(S);
        release_K();
        exponentiate(first);
        round_P();
#pragma unroll 1
        for (int j = first + 1; j < last; ++j) {
            await_K();
            await_V();
            fence_for_async();
            if (who == ALL) await_turn();
            issue_S();
            issue_O();
            if (who == ALL) pass_turn();
            wgmma_wait<1>();
            pin(S);
            release_K();
            exponentiate(j);
            await_O();
            rescale_O();
            round_P();
        }
        await_V();
        fence_for_async();
        issue_O();
        await_O();
    }
    // Past the tiles of an item that this warpgroup has no rows of.
    __device__ __forceinline__ void skip_tiles(const Item &item) {
        const int tiles = last_tile(item) - first_tile(item);
        K_ring.skip(tiles), V_ring.skip(tiles);
    }

    // ---- answers

    // Calls what(column, two numbers of O) for all that this thread has of row r, its columns less its first.
    template <typename Do>
    __device__ __forceinline__ void for_each_pair(int r, Do what) const {
#pragma unroll
        for (int c = 0; c < O_CHUNKS; ++c)
#pragma unroll
            for (int x = 0; x < O_COLUMNS / 8; ++x) {
                const int column = c * O_COLUMNS + x * 8;
                if (column < HEAD_DIM) what(column, O[c][4 * x + 2 * r], O[c][4 * x + 2 * r + 1]);
            }
    }
    __device__ __forceinline__ void deliver(const Item &item) {
        const float v_scale = v_scale_of(a);
        const int column = lane % 4 * 2;  // its first
#pragma unroll
        for (int r = 0; r < 2; ++r) {
            const int i = item.row0 + part * 64 + row + 8 * r;
            float sum = quad_sum(l[r]), largest = m[r];
            if (i >= item.rows(a)) continue;
            const ItemRow known(a, item, i);
            if (item.count > 1) {
                float *const partial = partials_of(a, item, known) + item.index * PARTIAL;
                if (lane % 4 == 0) partial[0] = largest, partial[1] = sum;
                float *const to = partial + 4 + column;
                for_each_pair(
                    r, [&](int d, float x, float y) { *reinterpret_cast<float2 *>(to + d) = make_float2(x, y); });
                continue;
            }
            const long long place = known.place(a, item);
            const float weight = count_sink(a, place, largest, sum), factor = sum == 0 ? 0 : v_scale / sum * weight;
            unsigned *const out = static_cast<unsigned *>(a.out) + (place * HEAD_DIM + column) / 2;
            for_each_pair(r,
                          [&](int d, float x, float y) { out[d / 2] = sum == 0 ? 0 : pack(x * factor, y * factor); });
            if (lane % 4 == 0) a.lse[place] = sum == 0 ? NEG_INF : (largest + __log2f(sum)) * LN2;
        }
    }
};

__device__ __forceinline__ void consume(const Decode &a, const Item *items, Barriers &barriers, unsigned char *Q_tile,
                                        unsigned char *K_tiles, unsigned char *V_tiles) {
    const int group = uniform(threadIdx.x / 128) - 1;
    Consumer consumer{a,
                      barriers,
                      group,
                      (int)threadIdx.x % 32,
                      (int)threadIdx.x % 128 / 32 * 16 + (int)threadIdx.x % 32 / 4,
                      descriptor(shared_address(Q_tile + group * Q_TILE)),
                      K_descriptor(shared_address(K_tiles)),
                      V_descriptor(shared_address(V_tiles))};
    consumer.factor = factor_of(a);
    consumer.is_plain = !SOFTCAP && !a.alibi_slopes && consumer.factor > 0;
    if (group == WARPGROUPS - 1) consumer.pass_turn();
    for (ItemRing from;; from.next()) {
        wait(&barriers.item_full[from.stage], from.parity);
        const Item &item = items[from.stage];
        if (item.is_none) break;
        consumer.who = who_multiplies(a, item, from);
        consumer.part = consumer.who == ALL ? group : 0;
        if (consumer.who == 1 - group) consumer.skip_tiles(item);
        else {
            consumer.load_Q(item, Q_tile + group * Q_TILE);
            consumer.know_rows(item);
            consumer.pass_tiles(item);
            consumer.deliver(item);
        }
        arrive(&barriers.item_free[from.stage]);
    }
    if (group == 0) consumer.await_turn();  // the turn that nobody took
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prompt(const __grid_constant__ Decode a) {
    let_next_launch_begin();
    extern __shared__ unsigned char unaligned[];
    __shared__ Barriers barriers;
    __shared__ Item items[ITEMS];
    unsigned char *const Q_tiles = unaligned + (-shared_address(unaligned) & 1023);
    unsigned char *const K_tiles = Q_tiles + WARPGROUPS * Q_TILE, *const V_tiles = K_tiles + STAGES * TILE_BYTES;
    if (threadIdx.x == 0) {
        barriers.init();
        barrier_init_done();
    }
    if (HEAD_DIM % 16) {  // what is multiplied beyond the head's end is zero
        for (int i = threadIdx.x; i < STAGES * BC; i += THREADS)
            *reinterpret_cast<uint4 *>(K_tiles + i / BC * TILE_BYTES + key_chunk_at(i % BC, HEAD_DIM / 8)) = uint4();
        fence_for_async();
    }
    __syncthreads();
    if (threadIdx.x < COPIERS) {
        registers_down<PRODUCER_REGISTERS>();
        produce(a, items, barriers, K_tiles, V_tiles);
    } else {
        registers_up<CONSUMER_REGISTERS>();
        consume(a, items, barriers, Q_tiles, K_tiles, V_tiles);
    }
}

extern "C" __global__ void __launch_bounds__(MERGING) merge(const __grid_constant__ Decode a) { merge_cut_rows(a); }
