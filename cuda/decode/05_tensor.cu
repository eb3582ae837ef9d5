// Tensor: products on tensor cores, keys and values straight from memory into their registers.
//
// What changed: a warp takes 16 tokens at a time and computes S = Q Kᵀ and Oᵀ = Vᵀ Pᵀ on tensor cores (see tensor.cuh). Each
// lane loads what it will multiply (see tiles.cuh); shared memory has only the query. The next tile's keys are loaded as
// soon as S has been computed, its values as soon as O has, and the next piece's while this one's answer is put together.
// Warps have maxima and sums of their own, and meet at the end of a piece. fp8 becomes half in registers.
// Why it is faster: between the arrival of a tile and the next, a warp has some 300 instructions to do instead of thousands,
// so it always waits for memory, never memory for it; 12 warps to a multiprocessor have up to 96 KB under way, more than twice
// what the memory's rate needs.
// What it costs: P and the query are rounded to 16 bits, so there is no fp32, for which split is there. A tile's registers
// leave room for 12 or 16 warps only.
#include "tensor.cuh"

extern __shared__ __align__(16) float O_of_warps[];

struct Registers {
    static constexpr int GROUPS = 0;
    Keys k = {};
    Values v = {};

    __device__ __forceinline__ void load_keys(const Decode &a, const Way &way, int i) {
        way.keys(a, i, [&](int n, const unsigned char *from, bool wanted) {
            stream<16>(from, wanted && i < way.count, k.of[n]);
        });
    }
    __device__ __forceinline__ void load_values(const Decode &a, const Way &way, int i) {
        way.values(a, i, [&](int n, const unsigned char *from, bool wanted) {
            stream<VALUE_BYTES>(from, wanted && i < way.count, v.of[n]);
        });
    }
    __device__ __forceinline__ void begin(const Decode &a, const Way &way) { again(a, way); }
    __device__ __forceinline__ void again(const Decode &a, const Way &way) {
        load_keys(a, way, 0), load_values(a, way, 0);
    }
    __device__ __forceinline__ const Keys &keys(int) const { return k; }
    __device__ __forceinline__ Values &values(int) { return v; }
    __device__ __forceinline__ void keys_used(const Decode &a, const Way &way, int i) { load_keys(a, way, i + 1); }
    __device__ __forceinline__ void values_used(const Decode &a, const Way &way, int i) { load_values(a, way, i + 1); }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) tensor(const __grid_constant__ Decode a) {
    Registers feed;
    answer_pieces(a, feed, O_of_warps);
}
