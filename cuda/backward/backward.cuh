// Shared by the backward kernels: their arguments, the mask, the bias, P and dS of one score, and numbers of a row.
//
// With s = scale * q . k + bias, in powers of two, and dP = dO . v:
//   P = 2^(s - above) * inverse, above being the row's LSE, infinite where the row sees nothing, so that its P is 0;
//   dS = P (dP - D), D being dO . O less the gradient of the LSE.
// `delta` writes above and D. What is rounded of O and of the LSE, and otherwise in S than the forward pass did, is an
// error that a whole row has in common, and does not average out. So `dq`, which has all of a row, sums it up: the sum
// of 2^(s - above) is 1 but for roundings, its inverse a factor for P; the sum of dS is 0 but for roundings, an error
// of D.
#pragma once
#include "arguments.h"
#include "bias.cuh"
#include "common.cuh"
#include "float4.cuh"
#include "packed.cuh"

#ifndef CAUSAL
#error "CAUSAL is a macro, 1: a query sees no key after its own position; see flashcli/kernels/backward.py"
#endif
#ifndef ROW_THREADS
#error "ROW_THREADS is a macro: threads of a block that takes rows one by one"
#endif
static_assert(sizeof(Backward) == ARGUMENT_BYTES, "as flashcli/kernels/backward.py packs them");

// A head of Q in a batch, and its head of K and V.
struct Head {
    int b, h, kv;
};
__device__ __forceinline__ Head head_of(const Backward &a, unsigned index) {
    const int h = index % a.H;
    return {int(index / a.H), h, h / (a.H / a.Hkv)};
}

// The rows of a head.
template <class Number>
__device__ __forceinline__ Number *rows_of(Number *matrix, Strides by, int b, int h) {
    return matrix + b * by.batch + h * by.head;
}

// A row's numbers at the beginning of the workspace: `delta` writes above and D, `dq` the others for what
// follows.
struct __align__(16) Row {
    float above;    // the LSE in powers of two; infinite where the row sees nothing
    float D;        // dO . O - dlse
    float mended;   // the same, less the error of what it was computed from
    float inverse;  // 1 / the sum of 2^(s - above); 0 where the row sees nothing
};
__device__ __forceinline__ Row &row_of(const Backward &a, Head head, int i) {
    const long long first =
        PACKED ? (long long)head.h * a.tokens + a.first_row : ((long long)head.b * a.H + head.h) * a.M;
    return reinterpret_cast<Row *>(a.workspace)[first + i];
}

// The workspace of a kernel that splits matrices: what is kept of rows; then records of ROWS rows of Q and dO, and
// after them of K and V, of BYTES each.
template <int ROWS, int BYTES>
struct Records {
    unsigned char *records;
    int first_of_keys;  // numbers of records, fewer than there are rows, fit an int
    __device__ __forceinline__ explicit Records(const Backward &a) {
        const long long rows = (long long)a.B * a.H *
                               opaque(PACKED ? a.tokens : a.M);  // opaque: kept through a loop, it would take registers
        records = a.workspace + (rows * sizeof(Row) + 127) / 128 * 128;
        first_of_keys = a.B * a.H * of_rows(a);
    }
    // The number of records of a head; of packed sequences as many as their tiles may have numbers.
    static __device__ __forceinline__ int of_rows(const Backward &a) {
        return PACKED ? tile_numbers(a.tokens, ROWS, a.S) : ceil_div(a.M, ROWS);
    }
    static __device__ __forceinline__ int of_key_rows(const Backward &a) {
        return PACKED ? tile_numbers(a.key_tokens, ROWS, a.S) : ceil_div(a.N, ROWS);
    }
    __device__ __forceinline__ unsigned char *at(int record) const { return records + (long long)record * BYTES; }
    __device__ __forceinline__ int of_queries(const Backward &a, int b, int h) const {
        return (b * a.H + h) * of_rows(a) + (PACKED ? first_number(a.first_row, ROWS, a.sequence) : 0);
    }
    __device__ __forceinline__ int of_keys(const Backward &a, int b, int kv) const {
        const int in_head = PACKED ? first_number(a.first_key, ROWS, a.sequence) : 0;
        return first_of_keys + (b * a.Hkv + kv) * of_key_rows(a) + in_head;
    }
};

__device__ __forceinline__ float dlse_of(const Backward &a, Head head, int i) {
    return a.dlse == nullptr ? 0 : a.dlse[head.b * a.dlse_at.batch + head.h * a.dlse_at.head + i * a.dlse_at.row];
}

__device__ __forceinline__ float lse_of(const Backward &a, Head head, int i) {
    return a.lse[head.b * a.lse_at.batch + head.h * a.lse_at.head + i * a.lse_at.row];
}
// In powers of two; infinite where the row sees nothing.
__device__ __forceinline__ float above_of(float lse) { return lse == NEG_INF ? INFINITY_F : lse * LOG2E; }

// How many keys, of N, query i sees, 0 to that many - 1; and the first query that sees a key.
__device__ __forceinline__ int keys_seen(const Backward &a, int i) {
    return CAUSAL ? max(0, min(a.N, a.q_start + i + 1)) : a.N;
}
__device__ __forceinline__ int first_query(const Backward &a, int key) {
    return CAUSAL ? min(a.M, max(0, key - a.q_start)) : 0;
}

// How many keys at the beginning, or more than there are, query i does not see; whether it sees a key, of those there
// are; and the query after the last one that sees a key.
__device__ __forceinline__ int keys_hidden(const Backward &a, int i) { return WINDOW ? max(0, a.first + i) : 0; }
__device__ __forceinline__ bool sees(const Backward &a, int i, int key) {
    return key < keys_seen(a, i) && (!WINDOW || key >= a.first + i);
}
__device__ __forceinline__ int end_query(const Backward &a, int key) {
    return WINDOW ? max(0, min(a.M, key - a.first + 1)) : a.M;
}

// The arguments of a tile of queries, or with OF_KEYS of keys, of `size`: where sequences are packed, those of its
// sequence, in shared memory; `number` counts the tiles of a head. Called by all threads.
#ifndef WHERE_ONE
#define WHERE_ONE __shared__ Backward one
#endif
template <bool OF_KEYS>
__device__ __forceinline__ const Backward &of_tile(const Backward &all, int size, unsigned number) {
#if PACKED
    WHERE_ONE;
    if (threadIdx.x < 32) take_sequence<OF_KEYS>(one, all, size, number);
    if (threadIdx.x == 0) {
        const long long row = one.first_row, key = one.first_key;
        one.Q += row * all.q.row, one.dO += row * all.d_o.row, one.O += row * all.o.row, one.dQ += row * all.dq.row;
        one.K += key * all.k.row, one.V += key * all.v.row, one.dK += key * all.dk.row, one.dV += key * all.dv.row;
        one.lse += row * all.lse_at.row;
        if (all.dlse != nullptr) one.dlse += row * all.dlse_at.row;
    }
    __syncthreads();
    return one;
#else
    return all;
#endif
}
// How many tiles of queries, or keys, a head has, or as many as there are numbers; and which of them a number is.
template <bool OF_KEYS>
__device__ __forceinline__ int tiles_of_head(const Backward &a, int size) {
    if (PACKED) return tile_numbers(OF_KEYS ? a.key_tokens : a.tokens, size, a.S);
    return ceil_div(OF_KEYS ? a.N : a.M, size);
}
__device__ __forceinline__ int tile_with(const Backward &a, int number) { return PACKED ? a.tile : number; }

// blockIdx.x, read anew: kept, what follows from it would take registers.
__device__ __forceinline__ unsigned block_index() {
    unsigned x;
    asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
    return x;
}

// ---- one score

// P of a score that is taken away, where there are biases: so that it is told from a small P, and met by nothing that is
// not finite.
constexpr float HIDDEN = -0.0f;
__device__ __forceinline__ bool is_hidden(float p) { return BIAS && __float_as_uint(p) == 0x80000000; }

// Makes P and dS of a product q . k in `p` and a product dO . v in `ds`, in units of their own: in powers of two scale
// * q . k is p * factor, and dO . v is ds * unit. P is times `inverse`, where that is known already.
__device__ __forceinline__ void p_and_ds(float &p, float &ds, float factor, float above, float D, float bias, bool seen,
                                         float unit = 1, float inverse = 1) {
    if (BIAS) seen = seen && bias != NEG_INF;
    const float exponent = ADDS ? fmaf(p, factor, in_powers_of_two(bias)) - above : fmaf(p, factor, -above);
    p = seen ? exp2_fast(exponent) * inverse : BIAS ? HIDDEN : 0;
    ds = seen ? p * fmaf(ds, unit, -D) : 0;  // though dO or V be not finite
}

// Two sums over a row that `dq` has found: of 2^(s - above), and of dS times that.
struct Found {
    float inverse, error;  // 0 for a row that sees nothing
    __device__ __forceinline__ Found(const Backward &a, Head head, int i, float above, float total, float sum_ds) {
        const bool nothing = above == INFINITY_F && total == 0;
        inverse = nothing ? 0 : 1 / total;
        error = nothing ? 0 : fmaf(sum_ds, inverse, -dlse_of(a, head, i));
    }
    __device__ __forceinline__ void keep(Row &row) const { row.mended = row.D + error, row.inverse = inverse; }
};

// ---- numbers of a row, once for all passes: some lanes a row, which read four columns at a time

constexpr int ROW_LANES = HEAD_DIM <= 16 ? 4 : HEAD_DIM <= 32 ? 8 : HEAD_DIM <= 64 ? 16 : 32;

extern "C" __global__ void __launch_bounds__(ROW_THREADS) delta(const Backward a) {
    const long long index = blockIdx.x * (long long)(ROW_THREADS / ROW_LANES) + threadIdx.x / ROW_LANES;
    const bool there = index < (long long)a.B * a.H * a.M;
    const int i = there ? index % a.M : 0, lane = threadIdx.x % ROW_LANES;
    const Head head = head_of(a, there ? index / a.M : 0);
    const Answer *const o = rows_of(a.O, a.o, head.b, head.h) + i * a.o.row;
    const Answer *const d_o = rows_of(a.dO, a.d_o, head.b, head.h) + i * a.d_o.row;
    float sum = 0;
#pragma unroll
    for (int x = 4 * lane; x < HEAD_DIM; x += 4 * ROW_LANES) {
        const float4 p = load4(o, 0, 0, x, 1), q = load4(d_o, 0, 0, x, 1);
        sum += fmaf(p.x, q.x, p.y * q.y) + fmaf(p.z, q.z, p.w * q.w);  // in one order, wherever rows lie
    }
    for (int lanes = ROW_LANES / 2; lanes > 0; lanes /= 2) sum += __shfl_xor_sync(~0u, sum, lanes);
    if (!there || lane != 0) return;
    Row &row = row_of(a, head, i);
    row.above = above_of(lse_of(a, head, i));
    row.D = sum - dlse_of(a, head, i);
}

// ---- NaN and Inf

// Kernels that split numbers into halves make NaN of an Inf. Where a block has not all of a head (exact_head.cuh), they
// note each head of K and V of which a matrix, or one of a query, is not finite, behind the note that there is one; next
// are launched those of a kernel that does not split: for the heads noted. Of packed sequences each has its own notes: b
// is its number, or 0 where the arguments are a block's, which have it.
__device__ __forceinline__ int &note_of(const Backward &a, int b, int kv) {
    return a.notes[1 + (long long)(b + (PACKED ? a.sequence : 0)) * a.Hkv + kv];
}
__device__ __forceinline__ void note_not_finite(const Backward &a, int b, int kv) {
    a.notes[0] = note_of(a, b, kv) = 1;
}
__device__ __forceinline__ bool none_is_wanted(const Backward &a) { return a.notes != nullptr && a.notes[0] == 0; }
__device__ __forceinline__ bool is_wanted(const Backward &a, int b, int kv) {
    return a.notes == nullptr || note_of(a, b, kv) != 0;
}
