// The shortest heads: all of one in a block, rows of P and dS whole in a warp's registers, one pass.
//
// What changed: back to mma.sync, whose 16 rows are a warp's own. Each warp reads 16 rows of Q, dO, K and V, and leaves
// their halves in shared memory. Then it has 16 queries, with the scores of all their keys in registers, as in the
// attention kernel of this name, by the same lines: so it finds P anew, to the last bit, and needs neither the LSE, nor
// O: D is the sum of P dP. It writes their dQ. P and then dS go through shared memory, in one place, for each warp also
// has 16 keys, and dV and dK are sums over queries.
// Why it is faster: five products of a pair instead of seven, seven matrices moved instead of eight, each once; and
// warps enough to fill each other's gaps, where with wgmma a multiprocessor has eight.
// What it costs: mma.sync has two thirds of wgmma's rate. A head has up to 128 queries and 128 keys, each head of Q its
// own of K.
//
// Macro: BLOCKS, of a multiprocessor. BR is M, and BC is N, both padded. Launch: `gradients`, a block a head.
#define PAD 16
#include "whole_head.cuh"

struct Products {
    static constexpr int ROWS = 16;
    static __device__ __forceinline__ void publish() {}
    static __device__ __forceinline__ void scores(float (&S)[P_STEPS][2][4], const Fragment (&hi)[K_STEPS],
                                                  const Fragment (&lo)[K_STEPS], const unsigned char *K, int steps,
                                                  int exponent) {
        multiply_rows(S, hi, lo, K, steps, exponent);
    }
    template <class Function>
    static __device__ __forceinline__ void for_dP(const Fragment (&hi)[K_STEPS], const Fragment (&lo)[K_STEPS],
                                                  const unsigned char *V, int steps, int exponent, Function take) {
#pragma unroll
        for (int n = 0; n < P_STEPS; ++n) {
            float dP[2][4] = {};
            if (n < steps && !never(exponent + n)) multiply_block(dP, hi, lo, V, 16 * n);
            take(n, dP[0]);
        }
    }
    static __device__ __forceinline__ void dQ(float (&sum)[K_STEPS][2][4], const Fragment (&hi)[P_STEPS],
                                              const Fragment (&lo)[P_STEPS], const unsigned char *K, int steps,
                                              int exponent) {
        multiply_keys<true>(sum, hi, lo, K, steps, exponent);
    }
    // c = Aᵀ B: of 16 keys from `key` on, all columns of a head; A, of P or dS, and B have a row for each query.
    static __device__ __forceinline__ void of_keys(float (&c)[K_STEPS][2][4], const unsigned char *A, int key,
                                                   const unsigned char *B, int first_step) {
        float small[K_STEPS][2][4] = {};
#pragma unroll 1
        for (int k = first_step; k < ROW_STEPS; ++k) {
            const Fragment hi = left_operand_transposed<BR>(A, 16 * k, key);
            const Fragment lo = left_operand_transposed<BR>(A, 16 * k, BC + key);
#pragma unroll
            for (int n = 0; n < K_STEPS; ++n) {
                const Fragment b = right_operand_transposed<BR>(B, 16 * k, 16 * n);
                const Fragment b_lo = right_operand_transposed<BR>(B, 16 * k, D + 16 * n);
                multiply(small[n], lo, b), multiply(small[n], hi, b_lo), multiply(c[n], hi, b);
            }
        }
#pragma unroll
        for (int x = 0; x < D / 2; ++x) c[x / 8][x / 4 % 2][x % 4] += small[x / 8][x / 4 % 2][x % 4];
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, BLOCKS) gradients(const Backward a) { one_pass<Products>(a); }
