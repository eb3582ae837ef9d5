// Heads of up to 128 rows by wgmma, in one pass.
//
// What changed: the pass is that of 06_mma_short.cu, by the same lines (whole_head.cuh), but a warpgroup multiplies. Of
// P and dS in shared memory keys are rows of dV and dK: so wgmma reads them across. Heads of up to 32 numbers have hi
// and lo in one row of 64 halves, which one product meets.
// Why it is faster: wgmma has half as much again of mma.sync's rate, and reads K, V, dO and Q once for 64 rows, where
// mma.sync has them loaded for each 16: shared memory was busy with little else.
// What it costs: of 64 queries and 64 keys, those that a head has not are multiplied, too.
//
// Macro: BLOCKS, of a multiprocessor. BR is M, padded to 64, and BC is N, to 16. Launch: `gradients`, a block a head.
#define PAD (HEAD_DIM > 32 ? 64 : 32)
#define P_COLUMNS (64 * ceil_div(BC, 64))
#include "whole_head.cuh"
#include "hopper.cuh"

static_assert(BR % 64 == 0 && THREADS % 128 == 0, "wgmma has 64 rows");
constexpr int STEP = 16 * 128 / 16;                       // what a descriptor moves on by for 16 rows
constexpr int AT_A_TIME = smaller(BC, D > 32 ? 64 : 32);  // keys of dP, for which there are registers
constexpr bool SIDE_BY_SIDE = D == 32;                    // hi and lo

__device__ __forceinline__ uint64_t tile_at(const unsigned char *tile) {
    return uniform_descriptor(descriptor(shared_address(tile)));
}

struct Products {
    static constexpr int ROWS = 64;
    static __device__ __forceinline__ void publish() { fence_for_async(); }

    // T = A Bᵀ, of 64 rows and n * 2 keys of the split tile B, small products first.
    template <int n>
    static __device__ __forceinline__ void multiply(float (&T)[n], const Fragment (&hi)[K_STEPS],
                                                    const Fragment (&lo)[K_STEPS], uint64_t B) {
        pin(T);
        wgmma_fence();
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) wgmma(T, lo[k].x, B + split_offset<BC>(0, 16 * k) / 16, k > 0);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) wgmma(T, hi[k].x, B + split_offset<BC>(0, D + 16 * k) / 16, 1);
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) wgmma(T, hi[k].x, B + split_offset<BC>(0, 16 * k) / 16, 1);
        wgmma_commit();
        wgmma_wait<0>();
        pin(T);
    }
    static __device__ __forceinline__ void scores(float (&S)[P_STEPS][2][4], const Fragment (&hi)[K_STEPS],
                                                  const Fragment (&lo)[K_STEPS], const unsigned char *K, int steps,
                                                  int exponent) {
        multiply(reinterpret_cast<float (&)[BC / 2]>(S), hi, lo, tile_at(K));
    }
    template <class Function>
    static __device__ __forceinline__ void for_dP(const Fragment (&hi)[K_STEPS], const Fragment (&lo)[K_STEPS],
                                                  const unsigned char *V, int steps, int exponent, Function take) {
        const uint64_t tile = tile_at(V);
        const auto some = [&](auto &dP, int first) {
            multiply(dP, hi, lo, tile + first * 128 / 16);
#pragma unroll
            for (int n = 0; n < int(sizeof(dP)) / 32; ++n) take(first / 16 + n, &dP[8 * n]);
        };
#pragma unroll
        for (int first = 0; first + AT_A_TIME <= BC; first += AT_A_TIME) {
            float dP[AT_A_TIME / 2];
            some(dP, first);
        }
        if constexpr (BC % AT_A_TIME > 0) {
            float rest[BC % AT_A_TIME / 2];
            some(rest, BC / AT_A_TIME * AT_A_TIME);
        }
    }

    // What `issue` adds to 64 columns, first of lo and then of hi, is a sum of all columns of a head.
    template <class Issue>
    static __device__ __forceinline__ void sum_of(float (&sum)[K_STEPS][2][4], Issue issue) {
        float T[32];
        pin(T);
        wgmma_fence();
        issue(T);
        wgmma_commit();
        wgmma_wait<0>();
        pin(T);
#pragma unroll
        for (int x = 0; x < 8 * K_STEPS; ++x) (&sum[0][0][0])[x] = SIDE_BY_SIDE ? T[x] + T[x + 16] : T[x];
    }
    static __device__ __forceinline__ void dQ(float (&sum)[K_STEPS][2][4], const Fragment (&hi)[P_STEPS],
                                              const Fragment (&lo)[P_STEPS], const unsigned char *K, int steps,
                                              int exponent) {
        const uint64_t tile = tile_at(K);
        sum_of(sum, [&](float (&T)[32]) {
#pragma unroll
            for (int k = 0; k < P_STEPS; ++k) wgmma_transposed(T, lo[k].x, tile + k * STEP, k > 0);
#pragma unroll
            for (int k = 0; k < (SIDE_BY_SIDE ? 0 : P_STEPS); ++k)
                wgmma_transposed(T, hi[k].x, tile + BC * 128 / 16 + k * STEP, 1);
#pragma unroll
            for (int k = 0; k < P_STEPS; ++k) wgmma_transposed(T, hi[k].x, tile + k * STEP, 1);
        });
    }
    static __device__ __forceinline__ void of_keys(float (&sum)[K_STEPS][2][4], const unsigned char *A, int key,
                                                   const unsigned char *B, int first_step) {
        const uint64_t hi = tile_at(A + key / 64 * (BR * 128)), lo = hi + P_COLUMNS / 64 * (BR * 128 / 16);
        const uint64_t tile = tile_at(B);
        sum_of(sum, [&](float (&T)[32]) {
#pragma unroll
            for (int k = 0; k < ROW_STEPS; ++k) wgmma_transposed(T, lo + k * STEP, tile + k * STEP, k > 0);
#pragma unroll
            for (int k = 0; k < (SIDE_BY_SIDE ? 0 : ROW_STEPS); ++k)
                wgmma_transposed(T, hi + k * STEP, tile + BR * 128 / 16 + k * STEP, 1);
#pragma unroll
            for (int k = 0; k < ROW_STEPS; ++k) wgmma_transposed(T, hi + k * STEP, tile + k * STEP, 1);
        });
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const Backward a) { one_pass<Products>(a); }
