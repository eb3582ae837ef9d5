// The keys of a row tile in chunks of some tiles, each with O, m and l of its own, which merge in the order of the keys.
//
// A chunk starts from nothing, and two merge by the same arithmetic wherever they are, in registers or through memory: so
// a row's bytes depend on where its keys are cut, and not on which block has computed which chunk. Where blocks have whole
// row tiles, each merges a chunk as it ends. Where several blocks may have chunks of one, all are put into the workspace,
// and who comes last merges them. Where there are so few row tiles that a cluster of blocks can have one, a chunk each, they
// merge through each other's shared memory.
//
// After the tiles and exponents (prepare.cuh), the workspace holds an int for each warpgroup of each row tile: how many of
// its chunks are there, which `prepare` sets to zero; then, from the next multiple of 16 bytes, sets of slots, one slot for
// each warpgroup of each chunk of a row tile.
//
// Macros: SPLIT 1: there may be several chunks; SPREAD 1: several blocks may have those of one row tile; CLUSTER: it is so
// many, a cluster, or 1; PARK_SHARED 1: shared memory has room for what a block, or those of a cluster, have merged.
#pragma once
#include "warpgroup.cuh"

#include "prepare.cuh"

#ifndef SPLIT
#define SPLIT 0
#endif
#ifndef PARK_SHARED
#define PARK_SHARED 0
#endif
#ifndef CLUSTER
#define CLUSTER 1
#endif
#if CLUSTER > 1
#define IN_CLUSTERS __cluster_dims__(CLUSTER, 1, 1)
#else
#define IN_CLUSTERS
#endif
static_assert(SPLIT || !(SPREAD || PARK_SHARED || CLUSTER > 1), "these are for chunks");
static_assert(CLUSTER == 1 || (PARK_SHARED && !SPREAD && !CAUSAL && WARPGROUPS == 1), "its blocks have a chunk each");

// A slot: of each of 128 threads what it holds of O, shift and l of its two rows, and the units of O; in float4s, first all
// threads' first ones. In a cluster the four warps of a slot go different ways: there, each has its part of it.
constexpr int SLOT_NUMBERS = T_CHUNKS * T_REGISTERS / 4;  // of O
constexpr int SLOT_BYTES = 128 * 16 * (SLOT_NUMBERS + 2);
constexpr int SLOT_THREADS = CLUSTER > 1 ? 32 : 128;
constexpr int NEXT_SLOT =
    CLUSTER > 1 ? SLOT_BYTES / 64 : WARPGROUPS * SLOT_BYTES / 16;  // float4s from a chunk's to the next

// Chunks of a row tile, at most: with the causal mask, some row tiles have fewer.
__device__ __forceinline__ unsigned most_chunks(const Attention &a) {
    return SPLIT ? ceil_div(ceil_div(again(a.N), BC), a.chunk) : 1;
}

// How the chunks of all row tiles are shared out: `each` or one more to a block, in order. Causal: a block has a single
// one, so that the hardware balances what is whole, in part, or not there at all.
struct Share {
    unsigned row_tiles, chunks, each, more;  // the first `more` blocks have one more
    __device__ __forceinline__ explicit Share(const Attention &a)
        : row_tiles(again(Work::count(a))), chunks(most_chunks(a)) {
        each = CAUSAL ? 1 : row_tiles * chunks / gridDim.x;
        more = CAUSAL ? 0 : row_tiles * chunks - each * gridDim.x;
    }
    __device__ __forceinline__ unsigned first_of(unsigned block) const { return block * each + min(block, more); }
    __device__ __forceinline__ unsigned block_with(unsigned chunk) const {
        const unsigned before = more * (each + 1);
        return chunk < before ? chunk / (each + 1) : more + (chunk - before) / each;
    }
};

// The first piece of a block: a chunk; or, if not SPREAD, a row tile.
__device__ __forceinline__ unsigned first_piece(const Attention &a) {
    return SPREAD ? Share(a).first_of(blockIdx.x) : blockIdx.x;
}

// A part of a block's work: of one row tile chunks `first` to before `end`, of `all`.
struct Part {
    unsigned row_tile;
    int first, end, all;
    unsigned next;  // piece after it
    Work work;      // the row tile
    float4 *slots;  // of the warpgroup that asks: for these chunks, or for what has been merged of them

    // The part that begins with the next piece; false if there is none.
    __device__ __forceinline__ bool find(const Attention &a) {
        if (!SPREAD) {
            row_tile = next / CLUSTER, first = next % CLUSTER, next += gridDim.x;
            if (row_tile >= Work::count(a)) return false;
            work = Work(row_tile, a), all = SPLIT ? ceil_div(work.tiles, a.chunk) : 1,
            end = CLUSTER > 1 ? first + 1 : all;
            return true;
        }
        const Share share(a);
        const unsigned stop = share.first_of(blockIdx.x + 1);
        while (next < stop) {
            row_tile = next / share.chunks, first = next - row_tile * share.chunks;
            const unsigned wanted = min(share.chunks - first, stop - next);
            work = Work(row_tile, a), all = ceil_div(work.tiles, a.chunk), end = min(all, first + int(wanted));
            next += wanted;
            if (first < end) return true;
        }
        return false;
    }
    __device__ __forceinline__ bool whole() const { return first == 0 && end == all; }
    __device__ __forceinline__ int first_tile(const Attention &a) const { return SPLIT ? first * a.chunk : 0; }
    __device__ __forceinline__ int end_tile(const Attention &a, const Work &here) const {
        return SPLIT ? min(here.tiles, end * a.chunk) : here.tiles;
    }
};

// A block that has all chunks of each of its row tiles merges them as they end: a single slot, in shared memory if there is
// room.
constexpr bool FOLDS = SPLIT && !SPREAD;
constexpr int PARKED = FOLDS && PARK_SHARED ? WARPGROUPS * SLOT_BYTES : 0;

// Where a warpgroup has its slots for a part. SPREAD: each row tile has a set of them; or, if that were more, each block has
// one for the row tile that others go on with, and one for those that are all its own. Else each block has a set.
__device__ __forceinline__ float4 *slots_of(const Attention &a, const Part &part, int group, unsigned char *parked) {
    if (PARKED) return reinterpret_cast<float4 *>(parked + group * SLOT_BYTES);
    const uintptr_t before = reinterpret_cast<uintptr_t>(tickets(a) + (SPREAD ? again(ticket_count(a)) : 0));
    float4 *const all = reinterpret_cast<float4 *>((before + 15) / 16 * 16 + group * SLOT_BYTES);
    if (FOLDS) return all + (long long)blockIdx.x * NEXT_SLOT;
    const Share share(a);
    unsigned set = blockIdx.x;
    if (SPREAD && (CAUSAL || share.row_tiles <= gridDim.x)) set = part.row_tile;
    else if (SPREAD) set = part.whole() ? gridDim.x + set : share.block_with(part.row_tile * share.chunks);
    return all + (long long)set * share.chunks * NEXT_SLOT;
}

// The chunks of one part, as one warpgroup sees them: what is to be done where one ends.
struct Chunks {
    static constexpr bool MANY = SPLIT;
    const Attention &a;
    const volatile Part &part;    // in shared memory: it is needed seldom, and registers are few
    volatile int *const message;  // in shared memory: from the thread that draws a ticket to the others
    const int group, barrier;
    const int first, end;  // tiles
    int c;                 // the present chunk

    __device__ __forceinline__ int first_tile() const { return first; }
    __device__ __forceinline__ int end_tile(const Work &) const { return end; }
    __device__ __forceinline__ int next_chunk() const { return SPLIT ? (c + 1) * a.chunk : end; }
    __device__ __forceinline__ Place recall(const Work &here) const {
        if (!SPLIT) return here;
        const volatile Place &place = part.work;
        return {{place.head.b, place.head.h, place.head.kv}, place.i0};
    }

    // A chunk has ended, and another one follows.
    __device__ __forceinline__ void close(Sum &sum) {
        if (FOLDS && c > 0) merge(sum, part.slots);
        save(sum, part.slots + (FOLDS ? 0 : c * NEXT_SLOT));
        ++c;
    }

    // The last chunk of the part has ended. Returns whether `sum` now is that of all keys; else somebody else will have it.
    __device__ __forceinline__ bool finish(Sum &sum) const {
        if (!SPLIT || part.all == 1) return true;
        if (CLUSTER > 1) return meet(sum);
        if (FOLDS) {
            merge(sum, part.slots);
            return true;
        }
        save(sum, part.slots + c * NEXT_SLOT);
        const bool whole = !SPREAD || (part.first == 0 && part.end == part.all);
        if (!whole && !comes_last()) return false;
        merge_all(sum, part.slots, part.all);
        return true;
    }

    // Of a cluster's row tile each block merges the rows of some warps, in turn: the first block those of the first one, and
    // so on. Others send it what they have of them. The first block keeps the first chunk in registers, so that a slot is
    // enough, however many blocks there are. Returns whether `sum` now is that of all keys.
    __device__ __forceinline__ bool meet(Sum &sum) const {
        const int rank = part.first, warp = uniform(threadIdx.x % 128 / 32), owner = warp % CLUSTER, kept = owner == 0;
        float4 *inbox = part.slots + warp / CLUSTER * (CLUSTER - kept) * NEXT_SLOT;
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

    // Whether all other chunks of the row tile are there.
    __device__ __forceinline__ bool comes_last() const {
        named_sync(barrier, 128);  // all threads have saved
        if (threadIdx.x % 128 == 0) {
            const int mine = part.end - part.first;
            *message = mine + add_in_order(tickets(a) + again(int(part.row_tile * WARPGROUPS)) + group, mine);
        }
        named_sync(barrier, 128);
        return *message == part.all;
    }

    static __device__ __forceinline__ void save(const Sum &sum, float4 *slot) {
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

    // What is in a slot, or as much of it as there are registers for.
    static constexpr int HELD = SLOT_NUMBERS <= 16 ? SLOT_NUMBERS : 8;
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

    static __device__ __forceinline__ void load(Sum &sum, const float4 *slot) {
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
    static __device__ __forceinline__ void merge(Sum &sum, Held &held, const float4 *slot) {
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
    static __device__ __forceinline__ void merge(Sum &sum, const float4 *slot) {
        Held held;
        held.read(slot);
        merge(sum, held, slot);
    }

    // The sum of all chunks, some at a time if there are registers: then one need not wait for memory after the other.
    static constexpr int AT_ONCE = SLOT_NUMBERS <= 8 ? 3 : SLOT_NUMBERS == HELD ? 2 : 1;
    static __device__ __forceinline__ void merge_all(Sum &sum, const float4 *slot, int count) {
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
};
