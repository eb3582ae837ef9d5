// Many heads of more than 128 numbers with few rows and keys: blocks split K and V themselves, without a pre-pass.
//
// What changed: two warpgroups, in place of the one that copies, read K and V and split them to shared memory, a tile of
// each; the third one multiplies as ever (long.cuh). The tiles are those of `prepare`, and so are all bytes.
// Why it is faster: K and V go through memory once, where the pre-pass writes as many bytes and they are read again.
// What it costs: a tile is split for each row tile anew, in about the time of its products.
//
// Macro: SPLITTERS, their number of threads.
#pragma once
#include "long.cuh"

static_assert(STAGES == 2 * PANELS && WARPGROUPS == 1 && IN_PLACE, "there is one tile of K and one of V");

struct Splitters : Panels {
    static constexpr int WARPS = SPLITTERS / 32, BARRIER = 7;
    unsigned scratch[2][2 * WARPS];

    static __device__ __forceinline__ Splitters &here() {
        __shared__ Splitters splitters;
        return splitters;
    }

    // Splits tile t of K and of V, of those of all heads, each as soon as there is room; called by all of these threads.
    __device__ __forceinline__ void copy_tile(Ring &ring, unsigned char *tiles, const Attention &a, int t) {
        const int Tc = ceil_div(a.N, BC), head = t / Tc, j0 = (t - head * Tc) * BC, b = head / a.Hkv,
                  h = head - b * a.Hkv;
        const Input *const K = rows_of(a.K, a.k, b, h), *const V = rows_of(a.V, a.v, b, h);
        wait(&free[PANELS - 1], ring.parity ^ 1);  // panels become free in their order
        int s = split_K<SPLITTERS>(K, row_stride(a.k), j0, a.N, tiles, scratch[0], threadIdx.x, BARRIER);
        give(0, s);
        wait(&free[2 * PANELS - 1], ring.parity ^ 1);
        s = split_V<SPLITTERS>(V, row_stride(a.v), j0, a.N, tiles + K_TILE, scratch[1], threadIdx.x, BARRIER);
        give(PANELS, s);
        ring.parity ^= 1;
    }

    // The panels of a tile are there, from the first one on, and the exponent of their scale.
    __device__ __forceinline__ void give(int first, int s) {
        if (threadIdx.x == 0) exponent[first] = make_int4(s, s, s, s);
        fence_for_async();
        __syncwarp();
        if (threadIdx.x % 32 == 0)
#pragma unroll
            for (int p = 0; p < PANELS; ++p) arrive(&full[first + p]);
    }
};
