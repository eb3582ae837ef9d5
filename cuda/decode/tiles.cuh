// Which numbers of a tile of 16 tokens a lane multiplies, and where in memory they are.
//
// Lane 4g + t has of tokens g and g + 8 every fourth 16 bytes of the keys, from the t-th on; and of four tokens, 2t, 2t
// + 1, 2t + 8 and 2t + 9, every eighth 16 bytes of the values, from the g-th on. So a warp's load takes whole sectors
// of memory, and each number is in the lane that multiplies it: how columns of Q and rows of O are numbered is ours to
// choose.
//
// With TRANSPOSED, values of neighbouring tokens are neighbours: the lane has tokens 4t to 4t + 3 of numbers g, g + 8,
// ..
#pragma once
#include "pieces.cuh"

constexpr int WARPS = THREADS / 32, TILE = 16;
constexpr int KEY_CHUNK = TRANSPOSED ? PAGE * X : X;  // what a.key_chunk is, without a register for each multiple of it
constexpr int KEY_VECTORS = ceil_div(CHUNKS, 4);      // of a token, in a lane
constexpr int VALUE_BYTES = TRANSPOSED ? 4 * CACHE_BYTES : 16, VALUE_WORDS = VALUE_BYTES / 4;
constexpr int VALUE_VECTORS = TRANSPOSED ? 2 * ceil_div(HEAD_DIM, 16) : ceil_div(CHUNKS, 8);  // TRANSPOSED: of all four
constexpr int VALUE_LOADS = TRANSPOSED ? VALUE_VECTORS : 4 * VALUE_VECTORS;
static_assert(VECTOR_BYTES == 16, "rows are read 16 bytes at a time");
static_assert(!TRANSPOSED || PAGE >= 4, "a lane's tokens have one page");

struct Keys {
    unsigned of[2 * KEY_VECTORS][4];  // of token g's column, then of column g + 8
};
struct Values {
    unsigned of[VALUE_LOADS][VALUE_WORDS];
};

// Which token of the tile is column i of S, and which is the i-th of a lane's four.
__device__ __forceinline__ int token_of_column(int i) { return TRANSPOSED ? i % 8 / 2 * 4 + i / 8 * 2 + i % 2 : i; }
__device__ __forceinline__ int token_of_lane(int t, int i) {
    return TRANSPOSED ? 4 * t + i : 2 * t + i % 2 + i / 2 * 8;
}

// 16, 8 or 4 bytes into registers that keep what they have if it is not wanted: a branch would be a copy of each after
// it, which waits for what has just been asked for. What is read once only need not stay in the first-level cache; and
// memory gives whole lines of 128 bytes sooner than their halves, one for this load and one for the next.
#if !BY_ROWS
template <int BYTES>
__device__ __forceinline__ void stream(const unsigned char *from, bool wanted, unsigned *to) {
    if constexpr (BYTES == 16)
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
            "@p ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "l"(from), "r"((unsigned)wanted));
    else if constexpr (BYTES == 8)
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
            "@p ld.global.nc.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2]; }"
            : "+r"(to[0]), "+r"(to[1])
            : "l"(from), "r"((unsigned)wanted));
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %2, 0;\n"
            "@p ld.global.nc.L1::no_allocate.L2::128B.u32 %0, [%1]; }"
            : "+r"(to[0])
            : "l"(from), "r"((unsigned)wanted));
}
#else  // where other warps read the same soon after
template <int BYTES>
__device__ __forceinline__ void stream(const unsigned char *from, bool wanted, unsigned *to) {
    if constexpr (BYTES == 16)
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %5, 0;\n"
            "@p ld.global.nc.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4]; }"
            : "+r"(to[0]), "+r"(to[1]), "+r"(to[2]), "+r"(to[3])
            : "l"(from), "r"((unsigned)wanted));
    else if constexpr (BYTES == 8)
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %3, 0;\n"
            "@p ld.global.nc.L2::128B.v2.u32 {%0, %1}, [%2]; }"
            : "+r"(to[0]), "+r"(to[1])
            : "l"(from), "r"((unsigned)wanted));
    else
        asm volatile(
            "{ .reg .pred p; setp.ne.u32 p, %2, 0;\n"
            "@p ld.global.nc.L2::128B.u32 %0, [%1]; }"
            : "+r"(to[0])
            : "l"(from), "r"((unsigned)wanted));
}
#endif

// ---- copies to shared memory, which no register waits for

// Four bytes, or zeros in their place.
__device__ __forceinline__ void copy(void *to, const void *from, bool wanted) {
    const unsigned at = (unsigned)__cvta_generic_to_shared(to);
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(at), "l"(from), "r"(wanted ? 4 : 0) : "memory");
}
// All of a thread's since the last time are a group.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until all groups of this thread but the last N have arrived.
template <int N>
__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(N) : "memory");
}

// ---- a warp's tiles

// Where a lane is in a warp. Not kept: registers are full, and these are computed in no time.
__device__ __forceinline__ int lane_of() { return threadIdx.x % 32; }
__device__ __forceinline__ int lane_g() { return threadIdx.x % 32 / 4; }
__device__ __forceinline__ int lane_t() { return threadIdx.x % 4; }

constexpr int PAGES = PAGE < TILE ? TILE / PAGE : 1;  // that a tile has tokens of
constexpr int AHEAD = 32 / PAGES;                     // tiles whose pages a warp asks for at a time, a lane each
constexpr int TURNS = BY_ROWS ? 1 : WARPS;            // warps that take tiles of a piece in turn
constexpr int APART = TURNS * TILE;                   // tokens from one tile of a warp to its next
__device__ __forceinline__ int turn_of_warp() { return BY_ROWS ? 0 : threadIdx.x / 32; }

// A tile, as a warp needs to know it to ask for it.
struct Tile {
    const int *pages;
    int kv_head, first;  // its first token
    bool wanted;         // or there is none
};

// The pages of the tiles that each warp has of a piece, as far as they are known: those of AHEAD tiles, a run, and of
// the next.
struct Pages {
    int of[WARPS][2 * AHEAD * PAGES];

    __device__ __forceinline__ const int *of_tile(int token0) const {
        return of[threadIdx.x / 32] + (unsigned)token0 / APART % (2 * AHEAD) * PAGES;
    }
    // A group of copies: the first run and the one after it.
    __device__ __forceinline__ void start(const Piece &piece) {
        ask(piece.of, piece.first, piece.end), ask(piece.of, piece.first + AHEAD * APART, piece.end);
        commit_copies();
    }
    // Before the tile at token0: if a run begins, the next one is asked for.
    __device__ __forceinline__ void go_on(const Piece &piece, int token0) {
        if ((unsigned)token0 / APART % AHEAD != 0 || piece.end - token0 <= AHEAD * APART) return;
        __syncwarp();  // all have read what is overwritten
        ask(piece.of, token0 + AHEAD * APART, piece.end);
        commit_copies();
    }
    // Asks for the pages of the run that token0 is in.
    __device__ __forceinline__ void ask(const Sequence &sequence, int token0, int end) {
        const unsigned run = (unsigned)token0 / (AHEAD * APART), at = turn_of_warp() * TILE + run * AHEAD * APART;
        const unsigned token = at + lane_of() / PAGES * APART + lane_of() % PAGES * PAGE;
        const bool wanted = token < (unsigned)end;
        copy(of[threadIdx.x / 32] + run % 2 * AHEAD * PAGES + lane_of(), sequence.table + (wanted ? token / PAGE : 0),
             wanted);
    }
};

// The first token of a warp's first tile; beyond the piece's end if it has none.
__device__ __forceinline__ int first_tile(const Piece &piece) {
    return piece.first / APART * APART + turn_of_warp() * TILE;
}

// The page of a token of a tile; one that the cache has not is replaced by one that it has.
__device__ __forceinline__ unsigned page_of_token(const Decode &a, const Tile &tile, int token) {
    const unsigned page = tile.pages[PAGES > 1 ? token / PAGE : 0];
    return page < (unsigned)a.pages ? page : 0;
}

// The slot of a token of a tile, which starts on a multiple of TILE.
__device__ __forceinline__ unsigned slot_of_token(const Tile &tile, int token) {
    return (unsigned)(tile.first + token) % PAGE;
}

// Loads what the lane multiplies of a tile. What lies after the end of the sequence, or before the window, is loaded
// too, and may be anything.
__device__ __forceinline__ void load_keys(const Decode &a, const Tile &tile, Keys &keys) {
    const unsigned char *const cache =
        static_cast<const unsigned char *>(a.key_cache) + tile.kv_head * a.key_head * CACHE_BYTES;
    const int g = lane_g(), t = lane_t();
    unsigned page = PAGES == 1 ? page_of_token(a, tile, 0) : 0;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int token = token_of_column(g + half * 8);
        if (PAGES > 1) page = page_of_token(a, tile, token);
        const unsigned char *const from =
            cache + (page * a.key_page + slot_of_token(tile, token) * a.key_slot + t * KEY_CHUNK) * CACHE_BYTES;
#pragma unroll
        for (int j = 0; j < KEY_VECTORS; ++j)
            stream<16>(from + j * 4 * KEY_CHUNK * CACHE_BYTES, tile.wanted && (CHUNKS % 4 == 0 || j * 4 + t < CHUNKS),
                       keys.of[half * KEY_VECTORS + j]);
    }
}
__device__ __forceinline__ void load_values(const Decode &a, const Tile &tile, Values &values) {
    constexpr int OF_ROW = TRANSPOSED ? HEAD_DIM : CHUNKS, APART = TRANSPOSED ? PAGE * CACHE_BYTES : 16;
    const unsigned char *const cache =
        static_cast<const unsigned char *>(a.value_cache) + tile.kv_head * a.value_head * CACHE_BYTES;
    const int g = lane_g(), t = lane_t();
    unsigned page = PAGES == 1 ? page_of_token(a, tile, 0) : 0;
#pragma unroll
    for (int n = 0; n < VALUE_LOADS; n += VALUE_VECTORS) {
        const int token = token_of_lane(t, n / VALUE_VECTORS);
        if (PAGES > 1) page = page_of_token(a, tile, token);
        const unsigned char *const from =
            cache + (page * a.value_page + slot_of_token(tile, token) * a.value_slot) * CACHE_BYTES + g * APART;
#pragma unroll
        for (int v = 0; v < VALUE_VECTORS; ++v)
            stream<VALUE_BYTES>(from + v * 8 * APART, tile.wanted && (OF_ROW % 8 == 0 || v * 8 + g < OF_ROW),
                                values.of[n + v]);
    }
}

// Zeros in place of values of tokens of the tile at token0 that are not among those from `first` to the end: 0 * NaN is
// NaN.
__device__ __forceinline__ void clear(int token0, int first, int end, Values &values) {
#pragma unroll
    for (int n = 0; n < VALUE_LOADS; ++n)
#pragma unroll
        for (int word = 0; word < VALUE_WORDS; ++word) {
            unsigned kept = 0;
#pragma unroll
            for (int x = 0; x < 4 / CACHE_BYTES; ++x) {
                const int which = TRANSPOSED ? word * (4 / CACHE_BYTES) + x : n / VALUE_VECTORS;
                const int token = token0 + token_of_lane(lane_t(), which);
                if (token >= first && token < end) kept |= (~0u >> (32 - 8 * CACHE_BYTES)) << 8 * CACHE_BYTES * x;
            }
            values.of[n][word] &= kept;
        }
}
