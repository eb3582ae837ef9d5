// dbias on wgmma: dS, summed over the axes along which the bias is broadcast, for 04_wgmma.cu and 05_wgmma_short.cu.
//
// A block owns 128 x 128 numbers of dbias and meets, in steps, the queries and keys whose scores have these biases: of
// one batch after the other, where it is broadcast over batches. A step brings their records, split already, to shared
// memory, and S and dP are multiplied once more. What is added up stays in registers, in one order: nothing is added to
// memory by several blocks, and the bytes are the same every time. The biases of the block are those of all its steps,
// so that they are read once.
// Where there are few such tiles, their steps are cut into as many chunks for as many blocks, and the launch after this
// one, `sum_dbias`, adds the chunks up, in order.
// What it costs: two products of nine, and scratch for the chunks.
//
// Macros beyond those of warpgroup.cuh: DBIAS_SLOTS, records in flight; DBIAS_SHARED, bytes. Launches: `dbias`, `sum_dbias`.
#pragma once
#include "warpgroup.cuh"

static_assert(PASS == OWN && D <= 64, "a tile that is multiplied with is all of a record");
static_assert(INTERLEAVED, "a thread has four neighbouring keys of 16");

constexpr int DBIAS_TILE = 2 * OWN;                  // rows, and columns, of a block: two warpgroups, two tiles each
constexpr int DBIAS_SLOT = 2 * OWN_TILE + 1024;      // a record, at a multiple of 1024 bytes
constexpr int DBIAS_AT_ONCE = 2 * DBIAS_TILE / OWN;  // records that a step needs: two of queries, then two of keys
static_assert(DBIAS_SLOTS >= DBIAS_AT_ONCE && TAIL <= 1024, "room for a step");

// Tiles of dbias, and the steps of each.
struct DbiasTiles {
    bool of_rows, of_keys;
    int heads, Tr, Tc;                         // of dbias
    int sum_heads, sum_rows, sum_keys, steps;  // that are summed up
    int group;                                 // heads of Q for one of K and V
    unsigned count;
    __device__ __forceinline__ explicit DbiasTiles(const Backward &a)
        : of_rows(a.dbias_at.row), of_keys(a.dbias_column), group(a.H / a.Hkv) {
        const int all_rows = ceil_div(a.M, DBIAS_TILE), all_keys = ceil_div(a.N, DBIAS_TILE);
        const bool of_heads = a.dbias_at.head, of_batches = a.dbias_at.batch;
        heads = of_heads ? a.H : 1, Tr = of_rows ? all_rows : 1, Tc = of_keys ? all_keys : 1;
        sum_heads = of_heads ? 1 : a.H, sum_rows = of_rows ? 1 : all_rows, sum_keys = of_keys ? 1 : all_keys;
        steps = (of_batches ? 1 : a.B) * sum_heads * sum_rows * sum_keys;
        count = unsigned(of_batches ? a.B : 1) * heads * Tr * Tc;
    }
};

// A tile of dbias: of a batch and a head, the first ones where it has none, and its numbers in rows and columns.
struct DbiasTile {
    int b, h, i, j;
    __device__ __forceinline__ DbiasTile(const DbiasTiles &tiles, unsigned index) {
        j = take_digit(index, tiles.Tc), i = take_digit(index, tiles.Tr);
        h = take_digit(index, tiles.heads), b = index;
    }
};

// What a step of a tile multiplies: queries of a head from i0 on, and keys from j0 on.
struct DbiasStep {
    Head head;
    int i0, j0;
    __device__ __forceinline__ DbiasStep(const Backward &a, const DbiasTiles &tiles, const DbiasTile &tile,
                                         unsigned step) {
        j0 = (tile.j + take_digit(step, tiles.sum_keys)) * DBIAS_TILE;
        i0 = (tile.i + take_digit(step, tiles.sum_rows)) * DBIAS_TILE;
        const int h = tile.h + take_digit(step, tiles.sum_heads);
        unsigned kv = h;
        take_digit(kv, tiles.group);
        head = {tile.b + int(step), h, int(kv)};
    }
    __device__ __forceinline__ bool is_seen(const Backward &a) const {
        return j0 < keys_seen(a, min(i0 + DBIAS_TILE, a.M) - 1);
    }
};

// Which steps of a tile a block does: a chunk of them.
struct DbiasChunk {
    int chunks, number, begin, end;
    __device__ __forceinline__ explicit DbiasChunk(const DbiasTiles &tiles) {
        chunks = gridDim.x / tiles.count, number = blockIdx.x / tiles.count;
        begin = (long long)tiles.steps * number / chunks, end = (long long)tiles.steps * (number + 1) / chunks;
    }
};

// Behind the records, the number of chunks, and then their sums, of one tile after the other.
struct DbiasSums {
    int *chunks;
    float *first;
    __device__ __forceinline__ explicit DbiasSums(const Backward &a) {
        const Workspace of(a);
        unsigned char *const end = of.at(of.first_of_keys + a.B * a.Hkv * ceil_div(a.N, OWN));
        chunks = reinterpret_cast<int *>(end), first = reinterpret_cast<float *>(end + 128);
    }
    __device__ __forceinline__ float *of(unsigned tile, int chunk, int chunks) const {
        return first + ((long long)tile * chunks + chunk) * (DBIAS_TILE * DBIAS_TILE);
    }
};

// Slots for records in shared memory, filled and emptied in turn; `turn` is the one of a step's first record.
struct DbiasSlots {
    unsigned char *tiles;
    uint64_t *full, *free;
    unsigned turn = 0;
    __device__ __forceinline__ int slot(int n) const { return (turn + n) % DBIAS_SLOTS; }
    __device__ __forceinline__ unsigned parity(int n) const { return (turn + n) / DBIAS_SLOTS % 2; }
    __device__ __forceinline__ unsigned char *record(int n) const { return tiles + slot(n) * DBIAS_SLOT; }
    __device__ __forceinline__ const Tail &tail(int n) const {
        return *reinterpret_cast<const Tail *>(record(n) + 2 * OWN_TILE);
    }
    __device__ __forceinline__ void next() { turn += DBIAS_AT_ONCE; }
    __device__ __forceinline__ void await(int n) const { wait(&full[slot(n)], parity(n)); }

    // Called by one thread.
    __device__ __forceinline__ void copy(int n, const unsigned char *from) const {
        wait(&free[slot(n)], parity(n) ^ 1);
        arrive_expecting(&full[slot(n)], RECORD);
        bulk_copy(shared_address(record(n)), from, RECORD, &full[slot(n)]);
    }
};

// The biases of a block: short heads leave room for them in shared memory, where each thread finds its
// own; else they are read over and over.
constexpr bool KEEPS_BIAS = D <= 32;
constexpr int BIAS_BYTES = KEEPS_BIAS ? DBIAS_TILE * DBIAS_TILE * 4 : 0;

static_assert(DBIAS_SHARED == DBIAS_SLOTS * DBIAS_SLOT + BIAS_BYTES + 1024, "tiles start on 1024 bytes");

// A warpgroup's 64 x 128 numbers.
struct DbiasOfGroup {
    static constexpr int TILES = DBIAS_TILE / OWN;
    float4 *const kept;
    const int row = row_of_thread(), first_key = first_key_of_lane(threadIdx.x % 4);
    Scores sum[TILES] = {};

    __device__ __forceinline__ explicit DbiasOfGroup(unsigned char *kept)
        : kept(reinterpret_cast<float4 *>(kept) + threadIdx.x - 128) {}

    // The four biases from the x-th on of tile t.
    __device__ __forceinline__ float4 &kept_at(int t, int x) const {
        return kept[(t * SCORES + x) / 4 * (128 * DBIAS_TILE / OWN)];
    }
    // The biases of a tile's scores; and which of these the mask takes away.
    template <class Read>
    __device__ __forceinline__ void read(const Backward &a, Head head, int i, int j, Read by) const {
        const BiasRow rows[2] = {BiasRow(a, head, i + row), BiasRow(a, head, i + row + 8)};
        by([&](int x) { return rows[x / 2 % 2]; }, [&](int x) { return j + first_key + key_of(x); });
    }
    __device__ __forceinline__ void read_bias(Scores &bias, const Backward &a, Head head, int i, int j) const {
        BiasesOfQueries biases;
        read(a, head, i, j, [&](auto row, auto key) { biases.read_numbers<SCORES>(a, head, row, key); });
#pragma unroll
        for (int x = 0; x < SCORES; ++x) bias[x] = biases.numbers[x];
    }
    __device__ __forceinline__ BiasesOfQueries mask_of(const Backward &a, Head head, int i, int j) const {
        BiasesOfQueries biases;
        read(a, head, i, j, [&](auto row, auto key) { biases.read_mask<SCORES>(a, row, key); });
        return biases;
    }
    __device__ __forceinline__ void keep_bias(const Backward &a, const DbiasStep &at, int i0) const {
#pragma unroll
        for (int t = 0; t < (KEEPS_BIAS ? TILES : 0); ++t) {
            Scores bias;
            read_bias(bias, a, at.head, i0, at.j0 + t * OWN);
#pragma unroll
            for (int x = 0; x < SCORES; x += 4)
                kept_at(t, x) = make_float4(bias[x], bias[x + 1], bias[x + 2], bias[x + 3]);
        }
    }

    // P of the queries from i0 on and of tile t's keys, of which `of_q` and `of_k` tell, from products.
    __device__ __forceinline__ void exponentiate(Scores &p, const Backward &a, Head head, const Tail &of_q,
                                                 const Tail &of_k, const BiasesOfQueries &mask, int t, int i0,
                                                 int j0) const {
        const float factor = unit(of_q.first + of_k.first) * factor_of_scores(a);
        const float above[2] = {of_q.rows[0].above[row], of_q.rows[0].above[row + 8]};
        Scores read;
        if (!KEEPS_BIAS) read_bias(read, a, head, i0, j0);
#pragma unroll
        for (int x = 0; x < SCORES; x += 4) {
            const float4 four =
                KEEPS_BIAS ? kept_at(t, x) : make_float4(read[x], read[x + 1], read[x + 2], read[x + 3]);
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const float bias = e == 0 ? four.x : e == 1 ? four.y : e == 2 ? four.z : four.w;
                p[x + e] = fmaf(p[x + e], factor, bias);
            }
        }
        const float left = to_powers_of_two(p, of_q.other & HUGE, [](int) { return true; });
#pragma unroll
        for (int x = 0; x < SCORES; ++x) p[x] = mask.hides(x) ? 0 : exp2_fast(fmaf(p[x], left, -above[x / 2 % 2]));
        if (j0 + OWN > keys_seen(a, i0)) {
#pragma unroll
            for (int x = 0; x < SCORES; ++x)
                if (j0 + first_key + key_of(x) >= keys_seen(a, i0 + row + x / 2 % 2 * 8)) p[x] = 0;
        }
    }

    // Adds dS = P (dP - D).
    __device__ __forceinline__ void add(const Scores &p, const Scores &dP, const Tail &of_q, const Tail &of_k, int t) {
        const int s = of_q.dS;
        const float dP_unit = unit(of_q.second + of_k.second - s), back = unit(s) * P_UNIT;
        const float by[2] = {of_q.rows[0].inverse[row] * back, of_q.rows[0].inverse[row + 8] * back};
        const float D_[2] = {of_q.rows[0].D[row], of_q.rows[0].D[row + 8]};
#pragma unroll
        for (int x = 0; x < SCORES; ++x)
            sum[t][x] = fmaf(p[x] * fmaf(dP[x], dP_unit, -D_[x / 2 % 2]), by[x / 2 % 2], sum[t][x]);
    }

    // Adds the dS of a step, of the queries from i0 on, in slot `q`: exponentials of one tile of keys beside products of
    // the other.
    __device__ __forceinline__ void step(const Backward &a, const DbiasSlots &slots, const DbiasStep &at, int i0,
                                         int q) {
        static_assert(TILES == 2, "two tiles of keys take turns");
        constexpr bool EARLY = KEEPS_BIAS;  // the second S, beside the first exponentials: else registers end
        const auto tile = [&](int t) { return shared_address(slots.record(TILES + t)); };
        const uint32_t Q = shared_address(slots.record(q));
        const Tail &of_q = slots.tail(q), &of_k = slots.tail(TILES), &of_k1 = slots.tail(TILES + 1);
        Both both;
        Scores p, p1, dP;
        multiply_S(p, both, Q, descriptor(tile(0)));
        multiply(dP, Q + OWN_TILE, descriptor(tile(0) + OWN_TILE));
        const BiasesOfQueries mask = mask_of(a, at.head, i0, at.j0);
        if (EARLY) slots.await(TILES + 1), multiply_S(p1, both, Q, descriptor(tile(1)));
        wgmma_wait<EARLY ? 2 : 1>();
        collect_S(p, both);
        exponentiate(p, a, at.head, of_q, of_k, mask, 0, i0, at.j0);
        wgmma_wait<EARLY ? 1 : 0>();
        pin(dP);
        add(p, dP, of_q, of_k, 0);
        if (!EARLY) slots.await(TILES + 1), multiply_S(p1, both, Q, descriptor(tile(1)));
        multiply(dP, Q + OWN_TILE, descriptor(tile(1) + OWN_TILE));
        const BiasesOfQueries mask1 = mask_of(a, at.head, i0, at.j0 + OWN);
        wgmma_wait<1>();
        collect_S(p1, both);
        exponentiate(p1, a, at.head, of_q, of_k1, mask1, 1, i0, at.j0 + OWN);
        wgmma_wait<0>();
        pin(dP);
        add(p1, dP, of_q, of_k1, 1);
    }

    // To memory: as what is to be summed further, or as the answer.
    __device__ __forceinline__ void write(float *sums, int first_row) const {
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int x = 0; x < SCORES; x += x % 8 == 2 ? 6 : 2) {
                const Scores &of = sum[t];
                float *const to =
                    sums + (first_row + row + x / 2 % 2 * 8) * DBIAS_TILE + t * OWN + first_key + key_of(x);
                *reinterpret_cast<float4 *>(to) = make_float4(of[x], of[x + 4], of[x + 1], of[x + 5]);
            }
    }
    __device__ __forceinline__ void write(const Backward &a, const DbiasTile &tile, int first_row) const {
        float *const to = a.dbias + tile.b * a.dbias_at.batch + tile.h * a.dbias_at.head;
#pragma unroll
        for (int t = 0; t < TILES; ++t)
#pragma unroll
            for (int x = 0; x < SCORES; ++x) {
                const int i = tile.i * DBIAS_TILE + first_row + row + x / 2 % 2 * 8;
                const int j = tile.j * DBIAS_TILE + t * OWN + first_key + key_of(x);
                if (i < a.M && j < a.N) to[i * a.dbias_at.row + j * a.dbias_column] = sum[t][x];
            }
    }
};

constexpr int DBIAS_GROUPS = DBIAS_TILE / OWN;

extern "C" __global__ void __launch_bounds__(128 * (1 + DBIAS_GROUPS), 1) dbias(const Backward a) {
    extern __shared__ unsigned char unaligned[];
    __shared__ uint64_t full[DBIAS_SLOTS], free[DBIAS_SLOTS];
    DbiasSlots slots = {unaligned + (-shared_address(unaligned) & 1023), full, free};
    if (threadIdx.x == 0) {
        for (int s = 0; s < DBIAS_SLOTS; ++s) barrier_init(&full[s], 1), barrier_init(&free[s], 128 * DBIAS_GROUPS);
        barrier_init_done();
    }
    __syncthreads();
    const DbiasTiles tiles(a);
    const DbiasChunk chunk(tiles);
    const DbiasTile tile(tiles, blockIdx.x % tiles.count);
    if (threadIdx.x < 128) {
        registers_down<24>();
        if (threadIdx.x != 0) return;
        const Workspace from(a);
        for (int step = chunk.begin; step < chunk.end; ++step) {
            const DbiasStep at(a, tiles, tile, step);
            if (!at.is_seen(a)) continue;
            const int query = at.i0 / OWN, key = at.j0 / OWN;
            for (int n = 0; n < DBIAS_AT_ONCE; ++n) {
                const bool of_query = n < DBIAS_GROUPS;
                // In place of one beyond the last comes the last: 0, of what nobody sees, times NaN were NaN in a sum.
                const int last = ceil_div(of_query ? a.M : a.N, OWN) - 1;
                const int which = min(of_query ? query + n : key + n - DBIAS_GROUPS, last);
                const int record =
                    of_query ? from.of_queries(a, at.head.b, at.head.h) : from.of_keys(a, at.head.b, at.head.kv);
                slots.copy(n, from.at(record + which));
            }
            slots.next();
        }
        return;
    }
    registers_up<240>();
    const int group = uniform(threadIdx.x / 128) - 1;
    DbiasOfGroup mine(slots.tiles + DBIAS_SLOTS * DBIAS_SLOT);
    bool unread = true;
#pragma unroll 1
    for (int step = chunk.begin; step < chunk.end; ++step) {
        const DbiasStep at(a, tiles, tile, step);
        if (!at.is_seen(a)) continue;
        const int i0 = at.i0 + group * OWN;
        // Along batches and heads that are summed up biases do not change.
        if (unread || tiles.sum_rows * tiles.sum_keys > 1) mine.keep_bias(a, at, i0), unread = false;
        slots.await(group);
        slots.await(DBIAS_GROUPS);
        if (i0 < a.M) mine.step(a, slots, at, i0, group);
        for (int n = 0; n < DBIAS_AT_ONCE; ++n) arrive(&slots.free[slots.slot(n)]);
        slots.next();
    }
    const DbiasTile out(tiles, block_index() % tiles.count);
    if (chunk.chunks == 1 && tiles.of_rows && tiles.of_keys) return mine.write(a, out, group * OWN);
    const DbiasSums sums(a);
    mine.write(sums.of(block_index() % tiles.count, chunk.number, chunk.chunks), group * OWN);
    if (block_index() == 0 && threadIdx.x == 128) *sums.chunks = chunk.chunks;
}

// Adds up the chunks of each number of dbias, and the rows or the columns of a tile where dbias has none: a thread a
// number. Launched where `dbias` has not written the answer itself.
extern "C" __global__ void __launch_bounds__(ROW_THREADS) sum_dbias(const Backward a) {
    const DbiasTiles tiles(a);
    const DbiasSums sums(a);
    const int rows = tiles.of_rows ? DBIAS_TILE : 1, columns = tiles.of_keys ? DBIAS_TILE : 1, chunks = *sums.chunks;
    const long long number = blockIdx.x * (long long)ROW_THREADS + threadIdx.x;
    const unsigned index = number / (rows * columns);
    if (index >= tiles.count) return;
    const DbiasTile tile(tiles, index);
    const int r = number / columns % rows, c = number % columns;
    const int i = tile.i * DBIAS_TILE + r, j = tile.j * DBIAS_TILE + c;
    if (i >= (tiles.of_rows ? a.M : 1) || j >= (tiles.of_keys ? a.N : 1)) return;
    float sum = 0;
    if (tiles.of_rows && tiles.of_keys) {
#pragma unroll 8
        for (int chunk = 0; chunk < chunks; ++chunk) sum += sums.of(index, chunk, chunks)[r * DBIAS_TILE + c];
    } else
        for (int chunk = 0; chunk < chunks; ++chunk) {
            const float *const from = sums.of(index, chunk, chunks);
            float of_chunk = 0;
            for (int x = r; x < (tiles.of_rows ? r + 1 : DBIAS_TILE); ++x)
                for (int y = c; y < (tiles.of_keys ? c + 1 : DBIAS_TILE); ++y) of_chunk += from[x * DBIAS_TILE + y];
            sum += of_chunk;
        }
    a.dbias[tile.b * a.dbias_at.batch + tile.h * a.dbias_at.head + i * a.dbias_at.row + j * a.dbias_column] = sum;
}
