// Work for blocks that take many query rows at a time: row tiles of sequences, found on the device.
//
// A sequence has any number of query tokens, its last ones. Its rows for one head of the cache are cut into tiles of
// ROWS; and its keys into pieces where rows are few, so that a long text behind a short question is shared by many
// blocks. How both are cut depends on nothing but the sequence's own lengths. Each item of work is a row tile, a head of
// the cache, and a piece.
//
// Items are of two kinds: those of few rows wait for memory, those of many for tensor cores. A block draws numbers of
// one kind as long as there are any, then of the other; so at any time some blocks do this and others that.
//
// Macros: SHARE, the largest number of query tokens times pieces of a sequence that is cut into several. FROM_ROWS and
// TO_ROWS, of a sequence and head of the cache: those with other numbers of rows are another launch's.
#pragma once
#include "pieces.cuh"

enum Kind { MANY, FEW, KINDS, ANY = KINDS };
constexpr int ROWS_OF_FEW = 64;  // of a sequence and head of the cache at most: those of one warpgroup

// The query tokens of a sequence, or those that none has.
struct Asker {
    int s, start, tokens, length;  // `start`: its first query token, among those of all

    __device__ __forceinline__ int rows(const Decode &a) const { return tokens * a.group; }
    // Where its first piece begins, and how many tokens are in pieces.
    __device__ __forceinline__ int begin(const Decode &a) const {
        return a.window ? max(0, length - tokens + 1 - a.window) / PIECE * PIECE : 0;
    }
    // The number of its pieces, and of tokens in each: of more where partial answers have more rows.
    __device__ __forceinline__ int2 pieces(const Decode &a) const {
        const int used = length - begin(a), most = max(1, SHARE / max(1, tokens));
        int size = piece_size(used, rows(a) > 8 ? 2 * PIECE : PIECE), count = max(1, ceil_div_large(used, size));
        if (count > most) {
            size = ceil_div_large(ceil_div_large(used, most), PIECE / 2) * (PIECE / 2);
            count = most == 1 ? 1 : ceil_div_large(used, size);
        }
        return make_int2(count, count == 1 ? max(used, 1) : size);
    }
    __device__ __forceinline__ Kind kind(const Decode &a) const { return rows(a) <= ROWS_OF_FEW ? FEW : MANY; }
    // How many items it has of a kind.
    __device__ __forceinline__ int items(const Decode &a, Kind wanted) const {
        if (tokens <= 0 || rows(a) < FROM_ROWS || rows(a) > TO_ROWS || (wanted != ANY && kind(a) != wanted)) return 0;
        return a.kv_heads * ceil_div_large(rows(a), ROWS) * pieces(a).x;
    }
};

// Query tokens before the first sequence's, or after the last one's, count as a sequence of no tokens.
__device__ __forceinline__ int askers_of(const Decode &a) { return RAGGED ? a.sequences + 2 : a.sequences; }

__device__ __forceinline__ Asker asker_of(const Decode &a, int which) {
    if (which >= askers_of(a)) return {0, 0, 0, 0};
    const int s = RAGGED ? which - 1 : which;
    const bool is_there = s >= 0 && s < a.sequences;
    const int length = is_there ? (int)min((long long)max(a.seq_lens[s], 0), room_of(a)) : 0;
    if (!RAGGED) return {s, s * a.tokens, a.tokens, length};
    const int start = s < 0 ? 0 : min(max(a.query_starts[s], 0), a.total);
    const int end = s < a.sequences ? min(max(a.query_starts[s + 1], 0), a.total) : a.total;
    return {s, start, max(0, end - start), length};
}

// A row tile, a head of the cache, and keys. It lies in shared memory, for all warps.
struct Item : Asker {
    int kv_head, row0;
    int first, end;    // keys that some of its rows see
    int index, count;  // its piece, among how many
    bool is_none;      // there is no more work
};

// A row of an item: its query token among the sequence's, its head, and its place in the sequence.
struct ItemRow {
    int token, head, position;
    __device__ __forceinline__ ItemRow(const Decode &a, const Item &item, int row) {
        token = (unsigned)row / (unsigned)a.group;
        head = (item.kv_head - token) * a.group + row;
        position = RAGGED && !a.causal ? item.length - 1 : item.length - item.tokens + token;
    }
    // Among [total, H].
    __device__ __forceinline__ long long place(const Decode &a, const Item &item) const {
        return (long long)(item.start + token) * a.heads + head;
    }
};

// Things that askers have, such as one kind of items, by their numbers, which only grow; for a whole warp.
struct Finder {
    int which, before;  // the first of 32 askers, and how many things those before it have

    __device__ __forceinline__ bool find(const Decode &a, Kind kind, int number, Item &item) {
        unsigned left;
        if (!find([&](const Asker &one) { return one.items(a, kind); }, a, number, item, left)) return false;
        choose(a, left, item);
        return true;
    }
    // The asker of the thing with that number, where each has count(asker) of them; and its number among its asker's.
    template <typename Count>
    __device__ __forceinline__ bool find(Count count, const Decode &a, int number, Asker &asker, unsigned &left) {
        for (; which < askers_of(a); which += 32) {
            const Asker mine = asker_of(a, which + threadIdx.x % 32);
            const int own = count(mine), end = before + sum_up_to_lane(own);
            const int low = __popc(__ballot_sync(~0u, end <= number));
            if (low < 32) {
                asker = {__shfl_sync(~0u, mine.s, low), __shfl_sync(~0u, mine.start, low),
                         __shfl_sync(~0u, mine.tokens, low), __shfl_sync(~0u, mine.length, low)};
                left = number - __shfl_sync(~0u, end - own, low);
                return true;
            }
            before = __shfl_sync(~0u, end, 31);
        }
        return false;
    }

    // The item of that number among its asker's. Neighbours have different heads of the same pages. The last rows, which
    // see most, come first, so that short ones fill the end.
    static __device__ __forceinline__ void choose(const Decode &a, unsigned number, Item &item) {
        const int2 pieces = item.pieces(a);
        const int tiles = ceil_div_large(item.rows(a), ROWS), begin = item.begin(a);
        item.count = pieces.x;
        item.kv_head = take_digit(number, a.kv_heads);
        item.index = take_digit(number, item.count);
        item.row0 = (tiles - 1 - (int)number) * ROWS;
        const int lowest = ItemRow(a, item, item.row0).position;
        const int highest = ItemRow(a, item, min(item.row0 + ROWS, item.rows(a)) - 1).position;
        const long long from = begin + (long long)item.index * pieces.y;
        item.first = max(from, (long long)(a.window ? max(0, lowest - a.window + 1) : 0));
        item.end = item.count == 1 ? highest + 1 : (int)min(from + pieces.y, highest + 1LL);
        item.end = max(item.end, 0);
    }
};

// The scratch: numbers drawn of each kind, or by each launch that draws of any; then partial answers.
constexpr int DRAWN = ANY + (FROM_ROWS > 0);
static_assert(ANY + 1 < LAUNCH_COUNTERS, "two launches draw numbers of their own");
// The next number of a kind, for one thread: the compiler would have a warp add together, and wait for the sum at once.
__device__ __forceinline__ int next_number(const Decode &a, int kind) {
    return atomicInc(static_cast<unsigned *>(a.workspace) + kind, 0x7fffffff);
}
// The partial answers of a row, as many as the sequence has pieces. They are kept for all query tokens there are; or for
// SHARE a sequence, where that is less.
__device__ __forceinline__ float *partials_of(const Decode &a, const Item &item, const ItemRow &row) {
    const int most = most_pieces(a);
    float *const partials = static_cast<float *>(a.workspace) + LAUNCH_COUNTERS;
    const bool of_all = (long long)a.total * most <= (long long)a.sequences * SHARE;
    const long long first =
        of_all ? ((long long)(item.start + row.token) * a.heads + row.head) * most
               : (long long)item.s * SHARE * a.heads + ((long long)row.token * a.heads + row.head) * item.count;
    return partials + first * PARTIAL;
}

// Rows of sequences that are cut, each merged by a warp: a launch of its own, which begins while pieces are computed,
// and waits for their end.
__device__ __forceinline__ void merge_cut_rows(const Decode &a) {
    const auto rows = [&](const Asker &one) {
        return one.tokens > 0 && one.pieces(a).x > 1 ? one.rows(a) * a.kv_heads : 0;
    };
    const int warps = gridDim.x * (blockDim.x / 32);
    int number = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    Finder finder = {0, 0};
    Item item;
    unsigned left;
    bool is_there = finder.find(rows, a, number, item, left);
    const float v_scale = v_scale_of(a);
    await_launch_before();
    for (; is_there; is_there = finder.find(rows, a, number += warps, item, left)) {
        item.count = item.pieces(a).x;
        item.kv_head = take_digit(left, a.kv_heads);
        const ItemRow known(a, item, left);
        const float *const partials = partials_of(a, item, known);
        for (int quad = threadIdx.x % 32; quad < QUADS; quad += 32)
            answer_quad(a, known.place(a, item), quad, merged(partials, 0, item.count, quad), v_scale);
    }
}
