// The shortest sequences: all keys of a head in one tile, split in shared memory, and each warp for itself from there on.
//
// What changed: back to mma.sync, whose 16 rows are a warp's own, where wgmma's 64 are a warpgroup's. A block has up to
// 128 rows of a head. All its threads read Q, K and V at once and split them; then each warp multiplies its 16 rows with
// all keys at once: scores of a row are all there before the first exponential, so that nothing is rescaled. Nothing is
// specialised, nothing is copied ahead: some blocks are on a multiprocessor at a time, and one computes while others
// wait for memory.
// Why it is faster: up to 128 keys the products are little work, and what counts is how many reads are under way, and
// how long a head takes from its first byte to its last. Of 64 rows of a tile, those beyond the last query are
// multiplied for nothing; of 16, fewer are. Heads are padded to multiples of 16 numbers, not 32.
// What it costs: mma.sync has two thirds of wgmma's rate, each warp reads all of K and V from shared memory, and a
// thread has registers for the scores of 128 keys at most.
//
// Launch: `attention` with a block for each BR rows of each head; BC is N or more.
#define PAD 16
#define FEW_REGISTERS true  // for rows that are done again: else those take more than all others
#include "exact.cuh"
#include "short.cuh"

constexpr int WARPS = THREADS / 32;
constexpr int TILE = split_bytes(BC, D);  // all keys, or all values, of a head
// Registers: for S, O, and what is beside; and before, for what is read. Before sm_90 ptxas takes more.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int MORE = 16;
#else
constexpr int MORE = 0;
#endif
constexpr bool LEAN = HEAD_DIM <= 16 && BC <= 96 && DENSE && !BIAS && MORE == 0;  // few are for what is beside
constexpr int OF_SCORES = (LEAN ? 24 : 48) + BC / 2 + D / 2 + (BIAS && BC > 64 ? 16 : 0) + MORE;
constexpr int OF_READS = 32 + 2 * BC * D / THREADS + D / 2;
constexpr int REGISTERS = smaller(larger(larger(OF_SCORES, OF_READS), LEAN ? 72 : 96), 128 + 2 * MORE);
constexpr int MIN_BLOCKS = larger(1, 65536 / REGISTERS / THREADS);
constexpr float P_BIAS = 6, LARGEST_P = 64;  // as in warpgroup.cuh

static_assert(BR == 16 * WARPS, "a warp has 16 rows");
static_assert(SHARED == 2 * TILE, "K and V");
extern __shared__ __align__(1024) unsigned char shared[];

// The head of a block, and the first of its warp's 16 rows.
struct Place {
    Head head;
    int first;
    __device__ __forceinline__ Place(const Attention &a, unsigned block) {
        const unsigned Tr = ceil_div(a.M, BR), index = Tr == 1 ? block : block / Tr;
        head = head_soon(a, index), first = (block - index * Tr) * BR + opaque(threadIdx.x) / 32 * 16;
    }
};

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) attention(const Attention a) {
    __shared__ unsigned scratch[2][2 * WARPS];
    __shared__ int exponents[2];  // of the scales of K and of V
    const int lane = threadIdx.x % 32;
    const Place here(a, blockIdx.x);
    const Head head = here.head;
    const int i = here.first + lane / 4;  // of this thread's rows, the first

    // Q for each warp; K and V, once for all of them
    int q_exponent[2], factor_exponent;
    Fragment Q_hi[K_STEPS], Q_lo[K_STEPS];
    const float factor = frexpf(a.scale * log2e_given_back(HEAD_DIM), &factor_exponent);
    {
        TwoRows Q;
        Pieces<THREADS> K = {threadIdx.x}, V = {threadIdx.x};
        Q.load(rows_of(a.Q, a.q, head.b, head.h), row_stride(a.q), i, a.M);
        K.load(rows_of(a.K, a.k, head.b, head.kv), row_stride(a.k), 0, a.N);
        V.load(rows_of(a.V, a.v, head.b, head.kv), row_stride(a.v), 0, a.N);
        const int s[2] = {K.scale(scratch[0], 0), V.scale(scratch[1], 0)};
        K.store(shared, s[0]), V.store(shared + TILE, s[1]);
        if (threadIdx.x == 0) exponents[0] = s[0], exponents[1] = s[1];
#pragma unroll
        for (int r = 0; r < 2; ++r) q_exponent[r] = Q.split(r, factor, Q_hi, Q_lo);
    }
    __syncthreads();
    if (here.first >= a.M) return;

    // S = Q Kᵀ
    const int seen_by_some = keys_seen(a.q_start + here.first + 15, a.N);
    const int steps = CAUSAL ? ceil_div(max(0, seen_by_some), 16) : P_STEPS;
    float S[P_STEPS][2][4] = {};
    multiply_rows(S, Q_hi, Q_lo, shared, steps, exponents[0]);

    // m, P = 2^(S - m) = hi + lo, l
    float unit[2], shift[2], l[2];  // that brings scores to powers of two, itself one; m - P_BIAS
#pragma unroll
    for (int r = 0; r < 2; ++r)
        unit[r] = power_of_two(max(-126, min(factor_exponent - q_exponent[r] - exponents[0], 127)));
    mask_scores(
        S, unit, a, head, i, [&](int row) { return keys_hidden(a, row); },
        [&](int row) { return keys_seen(a.q_start + row, a.N); });
    exponentiate(S, unit, P_BIAS, shift, l);
    Fragment P_hi[P_STEPS], P_lo[P_STEPS];
    split_rows(S, {1, 1}, P_hi, P_lo);

    // O = P V
    const int v_exponent = exponents[1];
    float O[K_STEPS][2][4] = {};
    multiply_keys(O, P_hi, P_lo, shared + TILE, steps, v_exponent);

    const Place there(a, opaque(blockIdx.x));  // computed anew: kept from above, it would take registers
    bool finite = true;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int row = there.first + lane / 4 + 8 * r;
        const float inverse_l = inverse(a, row, l[r]);
        const float factor = given_back(inverse_l, LARGEST_P), undo = power_of_two(-v_exponent);
        if (row >= a.M) continue;
        Finiteness finiteness;
        Answer *const out = rows_of(a.O, a.o, there.head.b, there.head.h) + row * row_stride(a.o);
#pragma unroll
        for (int c = 0; c < D / 8; ++c) {
            const float x = O[c / 2][c % 2][2 * r] * factor * undo, y = O[c / 2][c % 2][2 * r + 1] * factor * undo;
            finiteness.add(x, y);
            store2(out, 8 * c + lane % 4 * 2, x, y);
        }
        finite &= finiteness.finite();
        if (lane % 4 == 0) give_lse(a, there.head, row, shift[r], inverse_l);
    }
    if (IN_PLACE && !__all_sync(~0u, finite)) redo_rows(a, there.head, there.first, 16);
}
