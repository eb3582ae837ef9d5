// The keys of a row tile in chunks of some tiles, each with O, m and l of its own, which merge in the order of the
// keys.
//
// What changed: a chunk starts from nothing, and two merge by the same arithmetic wherever they are, in registers or
// through memory: so a row's bytes depend on where its keys are cut, and not on which block has computed which chunk.
// Why it is faster: where row tiles are fewer than multiprocessors, or do not go round evenly, several blocks have
// chunks of the same one. Who has which, and where they merge, is SHARING (attention.cuh), and there is a policy for
// each value.
// What it costs: memory and time for what chunks have come to.
//
// After the tiles and exponents (prepare.cuh), the workspace holds an int for each warpgroup of each row tile: how many
// of its chunks are there, which `prepare` sets to zero; then, from the next multiple of 16 bytes, sets of slots, one
// slot for each warpgroup of each chunk of a row tile.
//
// Macro: CLUSTER, with SHARING MEET or JOIN: how many blocks have the chunks or tiles of a row tile, one each.
#pragma once
#include "warpgroup.cuh"

#include "prepare.cuh"

#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif
static_assert((SHARING == MEET || SHARING == JOIN) == (CLUSTER > 1), "a cluster has several blocks");
static_assert(SHARING != MEET || (!CAUSAL && WARPGROUPS == 1), "each block has a chunk of the same 64 rows");

// ---- which chunks a block has

// Chunks of a row tile, at most: with the causal mask, some row tiles have fewer.
__device__ __forceinline__ unsigned most_chunks(const Attention &a) {
    return ceil_div(ceil_div(opaque(a.N), BC), a.chunk);
}

// How the chunks of all row tiles are shared out: `each` or one more to a block, in order. Causal: a block has a single
// one, so that the hardware balances what is whole, in part, or not there at all.
struct Share {
    unsigned row_tiles, chunks, each, more;  // the first `more` blocks have one more
    __device__ __forceinline__ explicit Share(const Attention &a)
        : row_tiles(opaque(RowTile::count(a))), chunks(most_chunks(a)) {
        each = CAUSAL ? 1 : row_tiles * chunks / gridDim.x;
        more = CAUSAL ? 0 : row_tiles * chunks - each * gridDim.x;
    }
    __device__ __forceinline__ unsigned first_of(unsigned block) const { return block * each + min(block, more); }
    __device__ __forceinline__ unsigned block_with(unsigned chunk) const {
        const unsigned before = more * (each + 1);
        return chunk < before ? chunk / (each + 1) : more + (chunk - before) / each;
    }
};

// A block's task at a time: of a row tile chunks `first` to before `end`, of `all`.
struct Assignment {
    unsigned number;  // of the row tile
    int first, end, all;
    unsigned next;  // what is looked at for the one after it: a row tile, or a chunk
    RowTile rows;
    float4 *slots;  // of the warpgroup that asks: for these chunks, or for what has been merged of them

    __device__ __forceinline__ bool whole() const { return first == 0 && end == all; }
    __device__ __forceinline__ int first_tile(const Attention &a) const {
        return SHARING == WHOLE ? 0 : first * a.chunk;
    }
    __device__ __forceinline__ int end_tile(const Attention &a, const RowTile &here) const {
        return SHARING == WHOLE ? here.tiles : min(here.tiles, end * a.chunk);
    }
};

// ---- slots

// A slot: of each of 128 threads what it holds of O, shift and l of its two rows, and the units of O; in float4s, first
// all threads' first ones. In a cluster the four warps of a slot go different ways: there, each has its part of it.
constexpr int SLOT_NUMBERS = T_CHUNKS * T_REGISTERS / 4;  // of O
constexpr int SLOT_BYTES = 128 * 16 * (SLOT_NUMBERS + 2);
constexpr int SLOT_THREADS = SHARING == MEET ? 32 : 128;
// float4s from a chunk's slot to the next
constexpr int NEXT_SLOT = SHARING == MEET ? SLOT_BYTES / 64 : WARPGROUPS * SLOT_BYTES / 16;
constexpr int PARKED =
    SHARING == FOLD_SHARED || SHARING == MEET ? WARPGROUPS * SLOT_BYTES : 0;  // bytes in shared memory

// The first slot of a warpgroup in the workspace, behind `tickets`.
__device__ __forceinline__ float4 *first_slot(const int *tickets, int group) {
    return reinterpret_cast<float4 *>((reinterpret_cast<uintptr_t>(tickets) + 15) / 16 * 16 + group * SLOT_BYTES);
}

__device__ __forceinline__ void save(const Partial &sum, float4 *slot) {
    slot += threadIdx.x % SLOT_THREADS;
#pragma unroll
    for (int x = 0; x < SLOT_NUMBERS; ++x) {
        const float *const o = &sum.O[0][0] + 4 * x;
        slot[SLOT_THREADS * x] = make_float4(o[0], o[1], o[2], o[3]);
    }
    slot[SLOT_THREADS * SLOT_NUMBERS] = make_float4(sum.shift[0], sum.shift[1], sum.l[0], sum.l[1]);
    slot[SLOT_THREADS * (SLOT_NUMBERS + 1)] =
        make_float4(__int_as_float(sum.unit.exponent), __int_as_float(sum.unit.smallest), 0, 0);
}

// The content of a slot, or as much of it as there are registers for.
constexpr int HELD = SLOT_NUMBERS <= 16 ? SLOT_NUMBERS : 8;
struct Held {
    float4 O[HELD], state;
    Unit unit;
    __device__ __forceinline__ void read(const float4 *slot) {
        read_O(slot, 0);
        slot += threadIdx.x % SLOT_THREADS;
        state = slot[SLOT_THREADS * SLOT_NUMBERS];
        const float4 units = slot[SLOT_THREADS * (SLOT_NUMBERS + 1)];
        unit = {__float_as_int(units.x), __float_as_int(units.y)};
    }
    __device__ __forceinline__ void read_O(const float4 *slot, int from) {
#pragma unroll
        for (int x = 0; x < HELD; ++x) O[x] = slot[SLOT_THREADS * (from + x) + threadIdx.x % SLOT_THREADS];
    }
};

__device__ __forceinline__ void load(Partial &sum, const float4 *slot) {
    Held held;
    held.read(slot);
    sum.unit = held.unit;
    sum.shift[0] = held.state.x, sum.shift[1] = held.state.y, sum.l[0] = held.state.z, sum.l[1] = held.state.w;
#pragma unroll
    for (int x = 0; x < SLOT_NUMBERS; ++x) {
        const float4 four = slot[SLOT_THREADS * x + threadIdx.x % SLOT_THREADS];
        float *const o = &sum.O[0][0] + 4 * x;
        o[0] = four.x, o[1] = four.y, o[2] = four.z, o[3] = four.w;
    }
}

// Adds what another chunk has come to: the same whichever of the two is in registers.
__device__ __forceinline__ void merge(Partial &sum, Held &held, const float4 *slot) {
    const Unit unit = sum.unit;
    sum.unit = Unit::common(unit, held.unit);
    const float shifts[2] = {held.state.x, held.state.y}, l[2] = {held.state.z, held.state.w};
    float mine[2], other[2];
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const float m = fmaxf(sum.shift[r], shifts[r]), shift = finite_or_zero(m);
        mine[r] = exp2_fast(sum.shift[r] - shift), other[r] = exp2_fast(shifts[r] - shift);
        sum.shift[r] = m;
        sum.l[r] = __fadd_rn(__fmul_rn(sum.l[r], mine[r]), __fmul_rn(l[r], other[r]));
        mine[r] *= Unit::factor(sum.unit.exponent - unit.exponent);
        other[r] *= Unit::factor(sum.unit.exponent - held.unit.exponent);
    }
#pragma unroll
    for (int from = 0; from < SLOT_NUMBERS; from += HELD) {
        if (from > 0) {
            __syncwarp();
            held.read_O(slot, from);
        }
#pragma unroll
        for (int x = 0; x < 4 * HELD; ++x) {
            const float4 &four = held.O[x / 4];
            const float o = x % 4 == 0 ? four.x : x % 4 == 1 ? four.y : x % 4 == 2 ? four.z : four.w;
            float &sum_o = (&sum.O[0][0])[4 * from + x];
            sum_o = __fadd_rn(__fmul_rn(sum_o, mine[x / 2 % 2]), __fmul_rn(o, other[x / 2 % 2]));
        }
    }
}
__device__ __forceinline__ void merge(Partial &sum, const float4 *slot) {
    Held held;
    held.read(slot);
    merge(sum, held, slot);
}

// The sum of all chunks, some at a time if there are registers: then one need not wait for memory after the other.
constexpr int AT_ONCE = SLOT_NUMBERS <= 8 ? 3 : SLOT_NUMBERS == HELD ? 2 : 1;
__device__ __forceinline__ void merge_all(Partial &sum, const float4 *slot, int count) {
    load(sum, slot);
    if (AT_ONCE < 3) __syncwarp();  // the compiler reads no more ahead, so that registers suffice
    int left = count - 1;
    slot += NEXT_SLOT;
#pragma unroll 1
    for (; AT_ONCE > 1 && left >= AT_ONCE; left -= AT_ONCE, slot += AT_ONCE * NEXT_SLOT) {
        Held held[AT_ONCE];
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) held[x].read(slot + x * NEXT_SLOT);
#pragma unroll
        for (int x = 0; x < AT_ONCE; ++x) merge(sum, held[x], slot + x * NEXT_SLOT);
        __syncwarp();
    }
#pragma unroll 1
    for (; left > 0; --left, slot += NEXT_SLOT) merge(sum, slot);
}

// ---- the policies

// The base of all policies: the chunks of an assignment, as one warpgroup sees them.
struct Chunks {
    const Attention &a;
    const volatile Assignment &assigned;  // in shared memory: it is needed seldom, and registers are few
    volatile int *const message;          // in shared memory: from the thread that draws a ticket to the others
    const int group, barrier;
    const int first_tile, end_tile;
    int c;  // the present chunk

    // A block's assignments: row tiles as far apart as there are blocks; in a cluster, a chunk of each.
    static __device__ __forceinline__ unsigned begin(const Attention &) { return blockIdx.x; }
    static __device__ __forceinline__ bool find(Assignment &next, const Attention &a) {
        next.number = next.next / CLUSTER, next.first = next.next % CLUSTER, next.next += gridDim.x;
        if (next.number >= RowTile::count(a)) return false;
        next.rows = RowTile(next.number, a), next.all = SHARING == WHOLE ? 1 : ceil_div(next.rows.tiles, a.chunk);
        next.end = CLUSTER > 1 ? next.first + 1 : next.all;
        return true;
    }

    __device__ __forceinline__ int next_chunk() const { return (c + 1) * a.chunk; }  // its first tile
    __device__ __forceinline__ FirstRow recall(const RowTile &) const {  // rather than to keep it in registers
        const volatile FirstRow &first = assigned.rows;
        return {{first.head.b, first.head.h, first.head.kv}, first.i0};
    }
};

// A block has whole row tiles, whose keys are not cut; or a tile of the keys of one (joined.cuh).
struct Whole : Chunks {
    static __device__ __forceinline__ float4 *slots_of(const Attention &, const Assignment &, int, unsigned char *) {
        return nullptr;
    }
    __device__ __forceinline__ int next_chunk() const { return end_tile; }
    __device__ __forceinline__ FirstRow recall(const RowTile &here) const { return here; }
    __device__ __forceinline__ void close(Partial &) {}
    __device__ __forceinline__ bool finish(Partial &) const { return true; }
};

// A block has all chunks of its row tiles, and merges each as it ends: one slot is enough.
struct Fold : Chunks {
    static __device__ __forceinline__ float4 *slots_of(const Attention &a, const Assignment &, int group,
                                                       unsigned char *parked) {
        if (PARKED) return reinterpret_cast<float4 *>(parked + group * SLOT_BYTES);
        return first_slot(tickets(a), group) + (long long)blockIdx.x * NEXT_SLOT;
    }
    // A chunk has ended, and another one follows.
    __device__ __forceinline__ void close(Partial &sum) {
        if (c > 0) merge(sum, assigned.slots);
        save(sum, assigned.slots);
        ++c;
    }
    // The last chunk has ended. Returns whether `sum` now is that of all keys; else another block will have it.
    __device__ __forceinline__ bool finish(Partial &sum) const {
        if (assigned.all > 1) merge(sum, assigned.slots);
        return true;
    }
};

// Blocks may have chunks of the same row tile, in the order of all chunks. The one that comes last merges them.
struct Spread : Chunks {
    static __device__ __forceinline__ unsigned begin(const Attention &a) { return Share(a).first_of(blockIdx.x); }
    // With the causal mask a block has a single chunk, and long ones come first: those that are followed by others, of
    // all row tiles the first, then the second, and so on; then each row tile's last one. Where there are two, those of
    // a row tile follow one another, which is about as good and takes fewer divisions.
    static __device__ __forceinline__ bool find_longest(Assignment &next, const Attention &a, const Share &share) {
        const bool of_two = share.chunks == 2;
        const unsigned level = of_two ? blockIdx.x % 2 : blockIdx.x / share.row_tiles;
        const unsigned place = of_two ? blockIdx.x / 2 : blockIdx.x - level * share.row_tiles;
        const bool ends = !of_two && level + 1 == share.chunks;
        next.number = ends ? by_last_chunk(a, place) : place;
        next.rows = RowTile(next.number, a), next.all = ceil_div(next.rows.tiles, a.chunk);
        next.first = ends ? next.all - 1 : level, next.end = next.first + 1;
        return ends || next.end < next.all + of_two;
    }
    // The number of a row tile from its place among those of all heads, the longest last chunk first: these are as long
    // where row tiles are whole chunks apart.
    static __device__ __forceinline__ unsigned by_last_chunk(const Attention &a, unsigned place) {
        const unsigned Tr = ceil_div(a.M, BR), heads = unsigned(a.B) * a.H, rank = place / heads;
        const unsigned apart = max(1, a.chunk * BC / BR), rounds = Tr / apart, more = Tr % apart;
        const unsigned of_fewer = (apart - more) * rounds;  // row tiles of the lengths that `rounds` have, not one more
        const bool fewer = rank < of_fewer;
        const unsigned within = fewer ? rank : rank - of_fewer, as_long = rounds + !fewer;
        const unsigned tile = (fewer ? apart : more) - 1 - within / as_long + within % as_long * apart;
        return (Tr - 1 - tile) * heads + (place - rank * heads);
    }
    static __device__ __forceinline__ bool find(Assignment &next, const Attention &a) {
        const Share share(a);
        if (CAUSAL) return find_longest(next, a, share);
        const unsigned stop = share.first_of(blockIdx.x + 1);
        while (next.next < stop) {
            next.number = next.next / share.chunks, next.first = next.next - next.number * share.chunks;
            const unsigned wanted = min(share.chunks - next.first, stop - next.next);
            next.rows = RowTile(next.number, a), next.all = ceil_div(next.rows.tiles, a.chunk);
            next.end = min(next.all, next.first + int(wanted));
            next.next += wanted;
            if (next.first < next.end) return true;
        }
        return false;
    }
    // Each row tile has a set of slots; or, if that were more, each block has one for the row tile that others go on
    // with, and one for those that are all its own.
    static __device__ __forceinline__ float4 *slots_of(const Attention &a, const Assignment &mine, int group,
                                                       unsigned char *) {
        float4 *const slots = first_slot(tickets(a) + opaque(ticket_count(a)), group);
        const Share share(a);
        unsigned set = blockIdx.x;
        if (CAUSAL || share.row_tiles <= gridDim.x) set = mine.number;
        else set = mine.whole() ? gridDim.x + set : share.block_with(mine.number * share.chunks);
        return slots + (long long)set * share.chunks * NEXT_SLOT;
    }
    __device__ __forceinline__ void close(Partial &sum) {
        save(sum, assigned.slots + c * NEXT_SLOT);
        ++c;
    }
    __device__ __forceinline__ bool finish(Partial &sum) const {
        if (assigned.all == 1) return true;
        save(sum, assigned.slots + c * NEXT_SLOT);
        const bool whole = assigned.first == 0 && assigned.end == assigned.all;
        if (!whole && !comes_last()) return false;
        merge_all(sum, assigned.slots, assigned.all);
        return true;
    }

    // Whether all other chunks of the row tile are there.
    __device__ __forceinline__ bool comes_last() const {
        named_sync(barrier, 128);  // all threads have saved
        if (threadIdx.x % 128 == 0) {
            const int mine = assigned.end - assigned.first;
            *message = mine + add_in_order(tickets(a) + opaque(int(assigned.number * WARPGROUPS)) + group, mine);
        }
        named_sync(barrier, 128);
        return *message == assigned.all;
    }
};

// A cluster of blocks has a row tile, a chunk each. Each block merges the rows of some warps, in turn: the first block
// those of the first warp, and so on. Others send it what they have of them. The first block keeps the first chunk in
// registers, so that a slot is enough, however many blocks there are. With one chunk a block, nothing is left to fold.
struct Meet : Fold {
    __device__ __forceinline__ bool finish(Partial &sum) const {
        if (assigned.all == 1) return true;
        const int rank = assigned.first, warp = uniform(threadIdx.x % 128 / 32), owner = warp % CLUSTER;
        const int kept = owner == 0;
        float4 *inbox = assigned.slots + warp / CLUSTER * (CLUSTER - kept) * NEXT_SLOT;
        cluster_wait();  // all blocks have begun
        if (rank > 0 || !kept) save(sum, in_block(inbox + (rank - kept) * NEXT_SLOT, owner));
        cluster_arrive();
        if (rank != owner) return false;
        cluster_wait();
        if (rank > 0) load(sum, inbox), inbox += NEXT_SLOT;
#pragma unroll 1
        for (int left = CLUSTER - 1; left > 0; --left, inbox += NEXT_SLOT) merge(sum, inbox);
        return true;
    }
};

#if SHARING == WHOLE || SHARING == JOIN
using Policy = Whole;
#elif SHARING == SPREAD
using Policy = Spread;
#elif SHARING == MEET
using Policy = Meet;
#else
using Policy = Fold;
#endif
