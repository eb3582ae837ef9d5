// Staged: the same, but for copies to shared memory, several tiles ahead.
//
// What changed: a lane has what it will multiply copied to its own places in shared memory by asynchronous copies, STAGES tiles
// ahead, and loads a tile into registers when its turn comes. Nobody else reads these places, so nobody waits for
// anybody: a lane waits for its own copies only.
// Why it is faster: what is under way does not need registers, so there can be more of it.
// What it costs: each byte passes through shared memory, once in and once out, and the tiles fill it: fewer warps to a
// multiprocessor.
#include "tensor.cuh"

constexpr int VALUES_AT = 2 * KEY_VECTORS * 32 * 16;  // in a warp's tile
constexpr int TILE_BYTES = VALUES_AT + VALUE_LOADS * 32 * VALUE_BYTES;
constexpr int O_BYTES = WARPS * ROWS * O_ROW * 4, PART_BYTES = THREADS * (int)sizeof(Part);
constexpr int TILES_AT = O_BYTES > PART_BYTES ? O_BYTES : PART_BYTES;

extern __shared__ __align__(
    16) unsigned char shared_bytes[];  // the warps' O, or a Part a thread; then [WARPS][STAGES] tiles

struct Stages {
    static constexpr int GROUPS = STAGES;
    unsigned char *tiles;  // the warp's
    int stage = 0;         // of the tile that is next
    Keys k;
    Values v;

    // Every tile, or none in its place, is a group of copies.
    __device__ __forceinline__ void ask(const Decode &a, const Way &way, int i, int stage) {
        if (i < way.count) {
            unsigned char *const tile = tiles + stage * TILE_BYTES;
            way.keys(a, i, [&](int n, const unsigned char *from, bool wanted) {
                copy<16>(tile + (n * 32 + Way::lane()) * 16, from, wanted);
            });
            way.values(a, i, [&](int n, const unsigned char *from, bool wanted) {
                copy<VALUE_BYTES>(tile + VALUES_AT + (n * 32 + Way::lane()) * VALUE_BYTES, from, wanted);
            });
        }
        commit_copies();
    }
    __device__ __forceinline__ void begin(const Decode &a, const Way &way) {
        stage = 0;
#pragma unroll 1
        for (int i = 0; i < STAGES; ++i) ask(a, way, i, i);
    }
    __device__ __forceinline__ void again(const Decode &, const Way &) {}
    __device__ __forceinline__ const Keys &keys(int) {
        wait_for_copies<STAGES - 1>();
        const unsigned char *const from = tiles + stage * TILE_BYTES + Way::lane() * 16;
#pragma unroll
        for (int n = 0; n < 2 * KEY_VECTORS; ++n) {
            const uint4 words = *reinterpret_cast<const uint4 *>(from + n * 512);
            k.of[n][0] = words.x, k.of[n][1] = words.y, k.of[n][2] = words.z, k.of[n][3] = words.w;
        }
        return k;
    }
    __device__ __forceinline__ Values &values(int) {
        const unsigned char *const from = tiles + stage * TILE_BYTES + VALUES_AT + Way::lane() * VALUE_BYTES;
#pragma unroll
        for (int n = 0; n < VALUE_LOADS; ++n) {
            if constexpr (VALUE_BYTES == 16) {
                const uint4 words = *reinterpret_cast<const uint4 *>(from + n * 512);
                v.of[n][0] = words.x, v.of[n][1] = words.y, v.of[n][2] = words.z, v.of[n][3] = words.w;
            } else
#pragma unroll
                for (int word = 0; word < VALUE_WORDS; ++word)
                    v.of[n][word] = reinterpret_cast<const unsigned *>(from + n * 32 * VALUE_BYTES)[word];
        }
        return v;
    }
    __device__ __forceinline__ void keys_used(const Decode &, const Way &, int) {}
    __device__ __forceinline__ void values_used(const Decode &a, const Way &way, int i) {
        ask(a, way, i + STAGES, stage);
        stage = stage == STAGES - 1 ? 0 : stage + 1;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) staged(const __grid_constant__ Decode a) {
    Stages feed;
    feed.tiles = shared_bytes + TILES_AT + threadIdx.x / 32 * STAGES * TILE_BYTES;
    answer_pieces(a, feed, reinterpret_cast<float *>(shared_bytes));
}
