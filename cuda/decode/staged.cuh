// Tiles of keys and values, from pages to shared memory as wgmma reads them (sm_90a), and those products.
//
// Operands lie in panels of rows of 128 bytes whose chunks of 16 are swizzled: chunk c of row r is at c ^ (r % 8). A
// tile of K has a row a key, and a panel for each 64 numbers of the head. So has a tile of V, and the product reads it
// the other way. In vLLM's layout what lies together in a page stays together, for such copies are fast: a page of keys
// has a chunk of several rows together, and a tile of K each chunk of eight rows, without swizzling; a page of values
// has a row for each number of the head, and a tile of V panels of such rows, swizzled as far as these are long. Chunks
// of 16 bytes are whole in either, whatever the page: threads copy them one by one, and no register waits for them
// (cp.async). Tiles that are all an item's come as boxes, which the copy engine lays down so, 16 rows and more at a time
// (BOXES): a thread asks for each, and the others are free. What a page has beyond an item's keys must not come along.
#pragma once
#include "../hopper.cuh"
#include "work.cuh"

constexpr int D = round_up(HEAD_DIM, 64), K_STEPS = ceil_div(HEAD_DIM, 16), V_STEPS = BC / 16;
constexpr int TILE_BYTES = BC * D * 2, Q_TILE = 64 * D * 2;
constexpr int COPIERS = 128, KEYS_OF_WARP = BC / (COPIERS / 32);
static_assert(KEYS_OF_WARP == 32 || KEYS_OF_WARP == 16, "a lane knows where a key is");
static_assert(QUERY_TYPE != FP32 && VECTOR_BYTES == 16, "what tensor cores and copies take");

// Where a chunk of 8 numbers is, in an operand of R rows.
template <int R>
__device__ __forceinline__ int chunk_at(int row, int chunk) {
    return chunk / 8 * (R * 128) + row * 128 + (chunk % 8 ^ row % 8) * 16;
}

// The same in a tile of K.
__device__ __forceinline__ int key_chunk_at(int key, int chunk) {
    return TRANSPOSED ? key / 8 * (D * 16) + chunk * 128 + key % 8 * 16 : chunk_at<BC>(key, chunk);
}

// Keys of a page that a warp copies; and bytes of a row of vLLM's values in a tile, those of so many keys.
constexpr int KEYS_OF_PAGE = smaller(PAGE, KEYS_OF_WARP);
constexpr int PAGES_OF_WARP = KEYS_OF_WARP / KEYS_OF_PAGE, TILES_KNOWN = 32 / PAGES_OF_WARP;  // a lane has a page
constexpr int V_ROW = larger(8, KEYS_OF_PAGE) * 2, V_ROW_CHUNKS = V_ROW / 16;
static_assert(V_ROW <= 64, "what rows are swizzled by");
// Where 8 keys' values are, of number d of the head.
__device__ __forceinline__ int value_chunk_at(int d, int chunk) {
    const int swizzle = V_ROW == 64 ? d / 2 % 4 : V_ROW == 32 ? d / 4 % 2 : 0;
    return chunk / V_ROW_CHUNKS * (D * V_ROW) + d * V_ROW + (chunk % V_ROW_CHUNKS ^ swizzle) * 16;
}

// The tiles that hold an item's keys, up to the last one's end.
__device__ __forceinline__ int first_tile(const Item &item) { return item.first / BC; }
__device__ __forceinline__ int last_tile(const Item &item) {
    return item.end > item.first ? ceil_div_large(item.end, BC) : item.first / BC;
}

// ---- numbers

// Numbers of fp8 or int8 become such of 16 bits on their way, through registers.
constexpr bool WIDENS = CACHE_BYTES == 1;

// One number of the cache.
__device__ __forceinline__ unsigned short number(const unsigned char *from, int i) {
    return WIDENS ? half_of(widened(from[i], 0), 0) : reinterpret_cast<const unsigned short *>(from)[i];
}

// ---- copies

// Bytes of the cache to a place in a tile, of which `bytes` are wanted, and zeros in the place of the others.
struct Copy {
    const unsigned char *from;
    uint32_t to;
    int bytes;
    bool wanted;
};

// The smallest power of two that is not less.
__host__ __device__ constexpr int power_of_two_from(int x) { return x <= 1 ? 1 : 2 * power_of_two_from((x + 1) / 2); }

// A chunk of 16 of these becomes two.
constexpr int PARTS = WIDENS ? 2 : 1;
constexpr int UNIT =
    smaller(PAGE, 16 / CACHE_BYTES);  // keys that are neighbours in vLLM's values, and are copied together
constexpr int TOGETHER = HEAD_DIM > 192 ? 2 : WIDENS ? 8 : 4;  // copies under way in registers
// Lanes for the chunks of a row, and rows that are certainly of one page, eight if there are as many.
constexpr int ACROSS_ROW = smaller(32, power_of_two_from(CHUNKS)), EIGHT = larger(8, 32 / ACROSS_ROW);
constexpr int OF_A_PAGE = PAGE >= EIGHT ? EIGHT : 1;

// A chunk of a tile at a time, so that eight lanes' stores reach all banks.
template <int BYTES, int APART>
__device__ __forceinline__ void store_widened(const Copy &copy, const Words<BYTES> &x) {
#pragma unroll
    for (int chunk = 0; chunk < ceil_div(BYTES, 8); ++chunk) {
        unsigned pairs[4] = {};
#pragma unroll
        for (int i = 0; i < smaller(4, BYTES / 2); ++i) {
            const int count = copy.bytes - chunk * 8 - i * 2;  // of numbers that are wanted
            const unsigned mask = count >= 2 ? ~0u : count == 1 ? 0xffff : 0;
            pairs[i] = widened(x.word[chunk * 2 + i / 2], i % 2) & mask;
        }
        const uint32_t to = APART ? copy.to + chunk * APART : copy.to ^ chunk * 16;
        if constexpr (BYTES == 4)
            asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]) : "memory");
        else
            asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(pairs[0]), "r"(pairs[1]),
                         "r"(pairs[2]), "r"(pairs[3])
                         : "memory");
    }
}

// N copies of BYTES, all of them wanted if WHOLE_TILE, which copy_of(0), copy_of(1) and so on tell. APART: bytes from a
// chunk to the row's next one, or 0 where chunks are swizzled.
template <int N, int BYTES, bool WHOLE_TILE, int APART, typename Of>
__device__ __forceinline__ void copy_all(Of copy_of) {
#pragma unroll(WHOLE_TILE && !WIDENS ? 2 : 1)
    for (int i = 0; i < N; i += TOGETHER) {
        Copy copies[TOGETHER];
        Words<BYTES> x[TOGETHER];
#pragma unroll
        for (int n = 0; n < TOGETHER; ++n) {
            if (N % TOGETHER && i + n >= N) break;
            copies[n] = copy_of(i + n);
            if (!copies[n].wanted) continue;
            if constexpr (!WIDENS && WHOLE_TILE && BYTES == 16) copy16(copies[n].to, copies[n].from);
            else if constexpr (!WIDENS) copy_some<BYTES>(copies[n].to, copies[n].from, copies[n].bytes);
            else x[n] = load<BYTES>(copies[n].from);
        }
#pragma unroll
        for (int n = 0; n < TOGETHER && WIDENS; ++n)
            if ((N % TOGETHER == 0 || i + n < N) && copies[n].wanted) store_widened<BYTES, APART>(copies[n], x[n]);
    }
}

__device__ __forceinline__ long long of_lane(long long x, int lane) {
    const int low = __shfl_sync(~0u, (int)x, lane), high = __shfl_sync(~0u, (int)(x >> 32), lane);
    return (long long)high << 32 | (unsigned)low;
}

// A copying warp's part of the tiles of an item: of each the same KEYS_OF_WARP keys, a lane each (or two). Keys that the
// item has not are zeros in V, for 0 * NaN is NaN, and in K, too.
struct Copier {
    const Decode &a;
    const Item &item;
    const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * KEYS_OF_WARP;  // key of a tile
    unsigned known = 0, next;  // pages of TILES_KNOWN tiles and of as many behind these, each with a lane
    unsigned here;             // the page of this lane's key

    __device__ __forceinline__ Copier(const Decode &a, const Item &item)
        : a(a), item(item), next(asked(first_tile(item))) {}
    // This lane's key.
    __device__ __forceinline__ int key_of(int tile) const { return tile * BC + first + lane % KEYS_OF_WARP; }
    // This lane's page of TILES_KNOWN tiles; 0 if it has none of the item's keys.
    __device__ __forceinline__ unsigned asked(int tile) const {
        const int key = (tile + lane / PAGES_OF_WARP) * BC + first + lane % PAGES_OF_WARP * KEYS_OF_PAGE;
        if (key >= item.end || key + KEYS_OF_PAGE <= item.first) return 0;
        return __ldg(a.block_tables + item.s * a.table_row + (unsigned)key / PAGE);
    }
    // Tells lanes of a tile. A page's way from memory takes as long as a tile's copies, so many are asked for at once.
    __device__ __forceinline__ void begin(int tile) {
        const int which = (tile - first_tile(item)) % TILES_KNOWN;
        if (which == 0) known = next, next = asked(tile + TILES_KNOWN);
        const unsigned page = __shfl_sync(~0u, known, which * PAGES_OF_WARP + lane % KEYS_OF_WARP / KEYS_OF_PAGE);
        here = page < (unsigned)a.pages ? page : 0;
    }
    // Where this lane's key is, in bytes.
    __device__ __forceinline__ long long place(int tile, long long page_apart, long long slot_apart) const {
        const unsigned key = key_of(tile);
        return (here * page_apart + key % PAGE * slot_apart) * CACHE_BYTES;
    }
    __device__ __forceinline__ long long key_at(int tile) const { return place(tile, a.key_page, a.key_slot); }
    __device__ __forceinline__ long long value_at(int tile) const { return place(tile, a.value_page, a.value_slot); }
    // Whether all of this warp's keys of a tile are the item's.
    __device__ __forceinline__ bool is_whole(int tile) const {
        const int from = tile * BC + first;
        return from >= item.first && from + KEYS_OF_WARP <= item.end;
    }
    __device__ __forceinline__ const unsigned char *keys() const {
        return static_cast<const unsigned char *>(a.key_cache) + item.kv_head * a.key_head * CACHE_BYTES;
    }
    __device__ __forceinline__ const unsigned char *values() const {
        return static_cast<const unsigned char *>(a.value_cache) + item.kv_head * a.value_head * CACHE_BYTES;
    }

    // A row of the cache is a row of the tile: neighbouring lanes have neighbouring chunks. It is enough to know
    // where the first of OF_A_PAGE rows is, for slots are `apart` bytes apart.
    template <bool WHOLE_TILE>
    __device__ __forceinline__ void copy_rows(uint32_t to, const unsigned char *cache, long long at, long long apart,
                                              int tile) const {
        // Eight lanes have chunks of two widened rows, which lie in other banks.
        constexpr int ACROSS = ACROSS_ROW, DOWN = 32 / ACROSS,
                      NEAR = WIDENS && HEAD_DIM <= 192 ? smaller(4, ACROSS) : ACROSS;
        const int lane = opaque(this->lane);  // else all is kept
        const int chunk = lane / (NEAR * DOWN) * NEAR + lane % NEAR, down = lane / NEAR % DOWN;
        const int swizzle = (chunk * PARTS % 8 ^ down % 8) * 16, row = first + down, key = tile * BC + row;
        const int begin = item.first - key, end = item.end - key;
        const bool wanted = CHUNKS == ACROSS || chunk < CHUNKS;
        cache += chunk * 16;
        to += chunk * PARTS / 8 * (BC * 128) + row * 128;
        const unsigned char *from = cache;
        copy_all<ceil_div(KEYS_OF_WARP, DOWN), 16, WHOLE_TILE, 0>([&](int n) {
            const int i = n * DOWN;
            if (OF_A_PAGE == 1) from = cache + of_lane(at, i + down);
            else if (i % OF_A_PAGE == 0) from = cache + of_lane(at, i) + down * apart;
            else from += DOWN * apart;
            const int bytes = WHOLE_TILE || (i >= begin && i < end) ? 16 : 0;
            return Copy{bytes ? from : cache, to + i * 128 + (swizzle ^ i % 8 * 16), bytes, wanted};
        });
    }
    // vLLM's keys: neighbouring keys' chunks are neighbours.
    template <bool WHOLE_TILE>
    __device__ __forceinline__ void copy_chunked_keys(uint32_t to, int tile) const {
        constexpr int AT_ONCE = 32 / KEYS_OF_WARP, APART = 128;
        const int lane = opaque(this->lane), down = lane / KEYS_OF_WARP, row = first + lane % KEYS_OF_WARP;
        const bool is_there = WHOLE_TILE || (tile * BC + row >= item.first && tile * BC + row < item.end);
        const long long step = AT_ONCE * a.key_chunk * CACHE_BYTES;
        const unsigned char *from = keys() + key_at(tile) + down * a.key_chunk * CACHE_BYTES;
        to += key_chunk_at(row, down * PARTS);
        copy_all<ceil_div(CHUNKS, AT_ONCE), 16, WHOLE_TILE, APART>([&](int n) {
            const int i = n * AT_ONCE;
            const Copy one = {from, to + i * PARTS * APART, is_there ? 16 : 0,
                              CHUNKS % AT_ONCE == 0 || i + down < CHUNKS};
            from += step;
            return one;
        });
    }
    // vLLM's values: a page's rows are rows of the tile, of which neighbouring lanes have neighbouring units.
    template <bool WHOLE_TILE>
    __device__ __forceinline__ void copy_transposed_values(uint32_t to, unsigned char *tile_at, int tile) const {
#pragma unroll 1
        for (int of_warp = 0; of_warp < KEYS_OF_WARP; of_warp += KEYS_OF_PAGE)
            copy_values_of_page<WHOLE_TILE>(to, tile_at, tile, of_warp);
    }
    template <bool WHOLE_TILE>
    __device__ __forceinline__ void copy_values_of_page(uint32_t to, unsigned char *tile_at, int tile,
                                                        int of_warp) const {
        constexpr int ACROSS = KEYS_OF_PAGE / UNIT, DOWN = 32 / ACROSS, APART = PAGE * CACHE_BYTES;
        const int lane = opaque(this->lane), down = lane / ACROSS;
        of_warp += lane % ACROSS * UNIT;
        const int column = first + of_warp, key = tile * BC + column;
        const int before = max(0, min(item.first - key, UNIT)), until = max(0, min(item.end - key, UNIT));
        const int bytes = WHOLE_TILE ? UNIT * CACHE_BYTES : before >= until ? 0 : until * CACHE_BYTES;
        const unsigned char *from = values() + of_lane(value_at(tile), of_warp) + down * APART;
        if (!WHOLE_TILE && before > 0 && bytes > 0) {  // a window begins here
#pragma unroll 1
            for (int d = down; d < HEAD_DIM; d += DOWN, from += DOWN * APART)
                for (int x = 0; x < UNIT; ++x) {
                    const int there = value_chunk_at(d, (column + x) / 8) + (column + x) % 8 * 2;
                    *reinterpret_cast<unsigned short *>(tile_at + there) =
                        x >= before && x < until ? number(from, x) : 0;
                }
            __threadfence_block();
            return;
        }
        to += value_chunk_at(down, column / 8) + column % 8 * 2;
        static_assert(DOWN % 8 == 0, "rows of a lane are swizzled alike");
        copy_all<ceil_div(HEAD_DIM, DOWN), UNIT * CACHE_BYTES, WHOLE_TILE, 0>([&](int n) {
            const int i = n * DOWN;
            const Copy one = {from, to + i * V_ROW, bytes, HEAD_DIM % DOWN == 0 || down + i < HEAD_DIM};
            from += DOWN * APART;
            return one;
        });
    }

    // This warp's part of a whole tile of K, or of V, by the copy engine: lanes with the first key of a box ask for it.
    // The barrier counts its bytes, and that all threads arrive.
    template <bool KEYS>
    __device__ __forceinline__ void copy_boxes(unsigned char *tile_at, int tile, uint64_t *full) const {
        if (lane == 0) arrive_expecting(full, TILE_BYTES / (COPIERS / 32));
        __syncwarp();
        if (lane != 0) arrive(full);
        if (lane >= KEYS_OF_WARP || lane % KEYS_OF_PAGE != 0) return;
        const int slot = (unsigned)key_of(tile) % PAGE, key = first + lane;
        const uint32_t to = shared_address(tile_at);
        const BoxMap &map = KEYS ? a.key_boxes : a.value_boxes;
        if (!TRANSPOSED)
#pragma unroll
            for (int panel = 0; panel < D / 64; ++panel)
                copy_box(to + panel * (BC * 128) + key * 128, &map, panel * 64, slot, item.kv_head, here, full);
        else if (KEYS)
#pragma unroll
            for (int i = 0; i < KEYS_OF_PAGE; i += 8)
                copy_box(to + (key + i) * (D * 2), &map, (slot + i) * 8, 0, item.kv_head, here, full);
        else copy_box(to + key / 8 * (D * 16), &map, slot, 0, item.kv_head, here, full);
    }

    __device__ __forceinline__ void copy_keys(unsigned char *tile_at, int tile) const {
        is_whole(tile) ? copy_keys<true>(shared_address(tile_at), tile)
                       : copy_keys<false>(shared_address(tile_at), tile);
    }
    template <bool WHOLE_TILE>
    __device__ __forceinline__ void copy_keys(uint32_t to, int tile) const {
        if constexpr (TRANSPOSED) copy_chunked_keys<WHOLE_TILE>(to, tile);
        else copy_rows<WHOLE_TILE>(to, keys(), key_at(tile), a.key_slot * CACHE_BYTES, tile);
    }
    __device__ __forceinline__ void copy_values(unsigned char *tile_at, int tile) const {
        is_whole(tile) ? copy_values<true>(tile_at, tile) : copy_values<false>(tile_at, tile);
    }
    template <bool WHOLE_TILE>
    __device__ __forceinline__ void copy_values(unsigned char *tile_at, int tile) const {
        const uint32_t to = shared_address(tile_at);
        if constexpr (TRANSPOSED) copy_transposed_values<WHOLE_TILE>(to, tile_at, tile);
        else copy_rows<WHOLE_TILE>(to, values(), value_at(tile), a.value_slot * CACHE_BYTES, tile);
    }
};

// ---- products

// multiply(d, A, B, accumulate): d[64, N] (+)= A[64, 16] B[16, N], A in shared memory, or in registers; with A in
// registers, B may lie the other way, in panels of BC rows. See hopper.cuh for what operands are; R0.. are the numbers
// of those behind d. Types are spelled out in either, for the emulator finds instructions by their text.
#if QUERY_TYPE == FP16
#define MULTIPLY(N, H, R0, R1, R2, R3, R4, R5, R6)                                                                \
    __device__ __forceinline__ void multiply(float (&d)[H], uint64_t A, uint64_t B, int accumulate) {             \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #R2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N     \
                     "k16.f32.f16.f16 {" D_REGS_##H "}, %" #R0 ", %" #R1 ", p, 1, 1, 0, 0;\n}"                    \
                     : D_##H(d, 0)                                                                                \
                     : "l"(A), "l"(B), "r"(accumulate));                                                          \
    }                                                                                                             \
    template <int ACROSS>                                                                                         \
    __device__ __forceinline__ void multiply(float (&d)[H], const uint32_t (&a)[4], uint64_t B, int accumulate) { \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #R5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N     \
                     "k16.f32.f16.f16 {" D_REGS_##H "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4          \
                                                    ", p, 1, 1, %" #R6 ";\n}"                                     \
                     : D_##H(d, 0)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(B), "r"(accumulate), "n"(ACROSS));         \
    }
#else
#define MULTIPLY(N, H, R0, R1, R2, R3, R4, R5, R6)                                                                \
    __device__ __forceinline__ void multiply(float (&d)[H], uint64_t A, uint64_t B, int accumulate) {             \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #R2 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N     \
                     "k16.f32.bf16.bf16 {" D_REGS_##H "}, %" #R0 ", %" #R1 ", p, 1, 1, 0, 0;\n}"                  \
                     : D_##H(d, 0)                                                                                \
                     : "l"(A), "l"(B), "r"(accumulate));                                                          \
    }                                                                                                             \
    template <int ACROSS>                                                                                         \
    __device__ __forceinline__ void multiply(float (&d)[H], const uint32_t (&a)[4], uint64_t B, int accumulate) { \
        asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #R5 ", 0;\n wgmma.mma_async.sync.aligned.m64n" #N     \
                     "k16.f32.bf16.bf16 {" D_REGS_##H "}, {%" #R0 ", %" #R1 ", %" #R2 ", %" #R3 "}, %" #R4        \
                                                      ", p, 1, 1, %" #R6 ";\n}"                                   \
                     : D_##H(d, 0)                                                                                \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(B), "r"(accumulate), "n"(ACROSS));         \
    }
#endif
MULTIPLY(64, 32, 32, 33, 34, 35, 36, 37, 38)
MULTIPLY(128, 64, 64, 65, 66, 67, 68, 69, 70)

// Columns of O that a product has, and how many such products there are.
constexpr int O_COLUMNS = D % 128 == 0 ? 128 : 64, O_CHUNKS = D / O_COLUMNS;

// The descriptor of an operand with 8 rows' chunks together, 128 bytes: from one to the next of the same rows, and of
// the next rows, are so many bytes.
__device__ __forceinline__ uint64_t descriptor_of_chunks(uint32_t address, int across, int down) {
    return (uint64_t)down / 16 << 32 | (uint64_t)across / 16 << 16 | address >> 4;
}
__device__ __forceinline__ uint64_t K_descriptor(uint32_t address) {
    return TRANSPOSED ? descriptor_of_chunks(address, 128, D * 16) : descriptor(address);
}
// Of rows of 32 or 64 bytes, swizzled.
__device__ __forceinline__ uint64_t descriptor_of_rows(uint32_t address) {
    return (V_ROW == 32 ? 3ull : 2ull) << 62 | (uint64_t)(8 * V_ROW / 16) << 32 | 1 << 16 | address >> 4;
}
// The descriptor of columns of V for a product: of rows that lie the other way, panels are BC rows apart.
__device__ __forceinline__ uint64_t V_descriptor(uint32_t address) {
    constexpr uint64_t PANEL = BC * 128 / 16 - 1;  // instead of the 1 that stands where nobody reads
    if (!TRANSPOSED) return descriptor(address) + (PANEL << 16);
    return V_ROW == 16 ? descriptor_of_chunks(address, D * 16, 128) : descriptor_of_rows(address);
}
// How far, in units of a descriptor, a k-step and chunk of columns are.
__device__ __forceinline__ constexpr int V_step(int step, int chunk) {
    if (!TRANSPOSED) return step * 128 + chunk * (O_COLUMNS / 64) * (BC * 128 / 16);
    return (V_ROW == 64 ? step / 2 * (4 * D) + step % 2 * 2 : step * 2 * D) + chunk * (O_COLUMNS * V_ROW / 16);
}
__device__ __forceinline__ constexpr int Q_step(int step) { return step / 4 * (64 * 128 / 16) + step % 4 * 2; }
__device__ __forceinline__ constexpr int K_step(int step) {
    return TRANSPOSED ? step * 16 : step / 4 * (BC * 128 / 16) + step % 4 * 2;
}
