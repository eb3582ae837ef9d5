// Keys and values of 16 tokens in a warp's registers, straight from memory, where tensor cores want them.
//
// Lane 4g + t has of tokens g and g + 8 every fourth 16 bytes of the keys, from the t-th on; and of four tokens, 2t, 2t + 1,
// 2t + 8 and 2t + 9, every eighth 16 bytes of the values, from the g-th on. So a warp's load takes whole sectors of memory,
// and each number is in the lane that multiplies it: how columns of Q and rows of O are numbered is ours to choose.
//
// With TRANSPOSED, values of neighbouring tokens are neighbours: the lane has tokens 4t to 4t + 3 of numbers g, g + 8, ..
#pragma once
#include "pieces.cuh"

constexpr int WARPS = THREADS / 32, TILE = 16;
constexpr int KEY_CHUNK = TRANSPOSED ? PAGE * X : X;  // what a.key_chunk is, without a register for each multiple of it
constexpr int KEY_VECTORS = div_up(CHUNKS, 4);      // of a token, in a lane
constexpr int VALUE_BYTES = TRANSPOSED ? 4 * CACHE_BYTES : 16, VALUE_WORDS = VALUE_BYTES / 4;
constexpr int VALUE_VECTORS = TRANSPOSED ? 2 * div_up(HEAD_DIM, 16) : div_up(CHUNKS, 8);  // TRANSPOSED: of all four
constexpr int VALUE_LOADS = TRANSPOSED ? VALUE_VECTORS : 4 * VALUE_VECTORS;
static_assert(VECTOR_BYTES == 16, "rows are read 16 bytes at a time");
static_assert(!TRANSPOSED || PAGE >= 4, "a lane's tokens have one page");

struct Keys {
    unsigned of[2][KEY_VECTORS][4];
};
struct Values {
    unsigned of[VALUE_LOADS][VALUE_WORDS];
};

// Which token of the tile is row i of S, and which is the i-th of a lane's four.
__device__ __forceinline__ int token_of_row_of_tile(int i) {
    return TRANSPOSED ? i % 8 / 2 * 4 + i / 8 * 2 + i % 2 : i;
}
__device__ __forceinline__ int token_of_lane(int t, int i) {
    return TRANSPOSED ? 4 * t + i : 2 * t + i % 2 + i / 2 * 8;
}

// What is read once only need not stay in the first-level cache.
template <int BYTES>
__device__ __forceinline__ void stream(const unsigned char *from, unsigned *to) {
    if constexpr (BYTES == 16)
        asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                     : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                     : "l"(from));
    else if constexpr (BYTES == 8)
        asm volatile("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];" : "=r"(to[0]), "=r"(to[1]) : "l"(from));
    else asm volatile("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(to[0]) : "l"(from));
}

// A warp's way through a piece: every WARPS-th tile. Its lanes know the pages of AHEAD tiles, and those of as many more.
constexpr int PAGES = PAGE < TILE ? TILE / PAGE : 1, AHEAD = 32 / PAGES;  // pages that a tile has tokens of

struct Way {
    int s, kv_head, from, end, count;  // its first token, and how many tiles
    int pages, more;

    // Not kept: registers are full, and these are computed in no time.
    __device__ __forceinline__ static int lane() { return threadIdx.x % 32; }
    __device__ __forceinline__ static int g() { return threadIdx.x % 32 / 4; }
    __device__ __forceinline__ static int t() { return threadIdx.x % 4; }

    __device__ __forceinline__ int token0(int i) const { return from + i * WARPS * TILE; }

    // Of the lane's tile of those from the i-th on; a page that the cache has not is replaced by one that it has.
    __device__ __forceinline__ int page(const Decode &a, int i) const {
        i += lane() / PAGES;
        const int token = token0(i) + lane() % PAGES * PAGE;
        if (i >= count || (unsigned)token >= (unsigned)end) return 0;
        const int page = __ldg(a.block_tables + (long long)s * a.table_width + token / PAGE);
        return (unsigned)page < (unsigned)a.pages ? page : 0;
    }
    __device__ __forceinline__ void start(const Decode &a, const Piece &piece) {
        s = piece.of.s, kv_head = piece.of.kv_head, end = piece.end;
        from = piece.first / TILE * TILE + threadIdx.x / 32 * TILE;
        count = from < end ? div_up(end - from, WARPS * TILE) : 0;
        pages = page(a, 0), more = page(a, AHEAD);
    }
    // To be called before tile i is loaded, for each in turn.
    __device__ __forceinline__ void reach(const Decode &a, int i) {
        if (i % AHEAD == 0 && i > 0) pages = more, more = page(a, i + AHEAD);
    }
    __device__ __forceinline__ long long page_of_token(int i, int token) const {
        return __shfl_sync(~0u, pages, i % AHEAD * PAGES + (PAGES > 1 ? token / PAGE : 0));
    }

    // What lies after the end of the sequence, or before the window, is loaded too, and may be anything.
    __device__ __forceinline__ void load(const Decode &a, int i, Keys &keys) const {
        const unsigned char *const cache =
            static_cast<const unsigned char *>(a.key_cache) + kv_head * a.key_head * CACHE_BYTES;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int token = token_of_row_of_tile(g() + half * 8), slot = (token0(i) + token) % PAGE;
            const unsigned char *const row =
                cache + (page_of_token(i, token) * a.key_page + slot * a.key_slot + t() * KEY_CHUNK) * CACHE_BYTES;
#pragma unroll
            for (int j = 0; j < KEY_VECTORS; ++j) {
                unsigned *const to = keys.of[half][j];
                if (CHUNKS % 4 == 0 || j * 4 + t() < CHUNKS) stream<16>(row + j * 4 * KEY_CHUNK * CACHE_BYTES, to);
                else to[0] = to[1] = to[2] = to[3] = 0;
            }
        }
    }
    __device__ __forceinline__ void load(const Decode &a, int i, Values &values) const {
        const unsigned char *const cache =
            static_cast<const unsigned char *>(a.value_cache) + kv_head * a.value_head * CACHE_BYTES;
#pragma unroll
        for (int n = 0; n < VALUE_LOADS; ++n) {
            const int token = token_of_lane(t(), n / VALUE_VECTORS), slot = (token0(i) + token) % PAGE;
            const int which = n % VALUE_VECTORS * 8 + g(), of_row = TRANSPOSED ? HEAD_DIM : CHUNKS;
            const unsigned char *const row =
                cache + (page_of_token(i, token) * a.value_page + slot * a.value_slot) * CACHE_BYTES;
            if (of_row % 8 == 0 || which < of_row)
                stream<VALUE_BYTES>(row + which * (TRANSPOSED ? PAGE * CACHE_BYTES : 16), values.of[n]);
            else
#pragma unroll
                for (int word = 0; word < VALUE_WORDS; ++word) values.of[n][word] = 0;
        }
    }
    // Zeros in place of values of tokens that are not among those from `first` to the end: 0 * NaN is NaN.
    __device__ __forceinline__ void clear(int i, int first, Values &values) const {
#pragma unroll
        for (int n = 0; n < VALUE_LOADS; ++n)
#pragma unroll
            for (int word = 0; word < VALUE_WORDS; ++word) {
                unsigned kept = 0;
#pragma unroll
                for (int x = 0; x < 4 / CACHE_BYTES; ++x) {
                    const int which = TRANSPOSED ? word * (4 / CACHE_BYTES) + x : n / VALUE_VECTORS;
                    const int token = token0(i) + token_of_lane(t(), which);
                    if (token >= first && token < end) kept |= (~0u >> (32 - 8 * CACHE_BYTES)) << 8 * CACHE_BYTES * x;
                }
                values.of[n][word] &= kept;
            }
    }
};
