// The pre-passes of the kernel that multiplies with wgmma: K and V, then Q and dO, scaled, split and swizzled (split.cuh) in
// records of 64 rows, in the workspace.
//
// `prepare_keys` comes first. `prepare_queries` comes after `dq`, from which it has of each row the factor `inverse`, which
// dO takes, and a bound of dS; of 64 rows it makes one scale.
#pragma once
#include "backward.cuh"
#include "split.cuh"

constexpr int OWN = 64;  // rows of a record
static_assert(BC == OWN, "as the registry counts them");
static_assert(PRODUCTS == 3 && D % 32 == 0 && D != 96 && D <= 128, "tiles of 32, 64 or 128 columns");
constexpr int OWN_TILE = split_bytes(OWN, D);
constexpr float P_BIAS = 14, P_UNIT = 0x1p-14f;  // P, at most 1, is times 2^14

// ---- the workspace: what is kept of rows; of each a bound of dS; records of 64 rows of Q and dO, then of K and V

// Two split tiles one after the other, and behind them:
struct Tail {
    float above[OWN], D[OWN];  // of queries: what `dk_dv` needs of rows
    int first, second;         // exponents of the tiles' scales
    int dS;                    // of queries: the exponent that brings all dS of these rows just below fp16's end
    float largest;             // of keys: no number of V is larger
};
constexpr int RECORD = 2 * OWN_TILE + TAIL;
static_assert(sizeof(Tail) == TAIL && TAIL % 16 == 0, "as the scratch has room for, and copies want");

struct Workspace {
    float *bounds;
    unsigned char *records;
    int first_of_keys;
    __device__ __forceinline__ explicit Workspace(const Backward &a) {
        const long long rows = (long long)a.B * a.H * a.M;
        bounds = reinterpret_cast<float *>(a.workspace + (rows * sizeof(Row) + 127) / 128 * 128);
        records = reinterpret_cast<unsigned char *>(bounds) + (rows * sizeof(float) + 127) / 128 * 128;
        first_of_keys = a.B * a.H * ceil_div(a.M, OWN);
    }
    __device__ __forceinline__ unsigned char *at(int record) const { return records + (long long)record * RECORD; }
    __device__ __forceinline__ Tail &tail(int record) const {
        return *reinterpret_cast<Tail *>(at(record) + 2 * OWN_TILE);
    }
    __device__ __forceinline__ float &bound(const Backward &a, Head head, int i) const {
        return bounds[((long long)head.b * a.H + head.h) * a.M + i];
    }
    __device__ __forceinline__ int of_queries(const Backward &a, int b, int h) const {
        return (b * a.H + h) * ceil_div(a.M, OWN);
    }
    __device__ __forceinline__ int of_keys(const Backward &a, int b, int kv) const {
        return first_of_keys + (b * a.Hkv + kv) * ceil_div(a.N, OWN);
    }
};

// ---- splitting

// A tile of 64 rows of a matrix, row i times factor(i), by a block; returns its exponent, and whether all is finite and 0.
struct Taken {
    int exponent;
    bool finite, zero;
};
template <class Factor>
__device__ __forceinline__ Taken split_tile(const float *matrix, long long stride, int first, int rows,
                                            unsigned char *tile, Factor factor) {
    __shared__ unsigned scratch[2 * PREPARE_THREADS / 32];
    constexpr int PIECES = OWN * D / 8, EACH = PIECES / PREPARE_THREADS;
    static_assert(PIECES % PREPARE_THREADS == 0, "as many pieces for each thread");
    float x[EACH][8], sum = 0;
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int piece = e * PREPARE_THREADS + threadIdx.x, row = first + piece / (D / 8),
                  column = piece % (D / 8) * 8;
        *reinterpret_cast<float4 *>(&x[e][0]) = load4(matrix, stride, row, column, rows);
        *reinterpret_cast<float4 *>(&x[e][4]) = load4(matrix, stride, row, column + 4, rows);
        const float by = factor(row);
#pragma unroll
        for (int c = 0; c < 8; ++c) sum += fabsf(x[e][c]), x[e][c] *= by;
    }
    const bool finite = __syncthreads_and(sum < INFINITY_F), zero = __syncthreads_and(sum == 0);
    const int s = group_scale<PREPARE_THREADS, EACH * 8>(&x[0][0], scratch, threadIdx.x, 0);
#pragma unroll
    for (int e = 0; e < EACH; ++e) {
        const int piece = e * PREPARE_THREADS + threadIdx.x;
        store_split<OWN, D>(tile, piece / (D / 8), piece % (D / 8) * 8, x[e], power_of_two(s));
    }
    return {s, finite, zero};
}

// K and V: a block a tile, even ones K.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare_keys(const Backward a) {
    let_next_launch_begin();
    const Workspace to(a);
    const int index = blockIdx.x / 2, tiles = ceil_div(a.N, OWN), first = index % tiles * OWN;
    const int kv = index / tiles % a.Hkv, b = index / tiles / a.Hkv;
    const bool values = blockIdx.x % 2;
    const Strides by = values ? a.v : a.k;
    const Taken taken = split_tile(rows_of(values ? a.V : a.K, by, b, kv), by.row, first, a.N,
                                   to.at(to.first_of_keys + index) + values * OWN_TILE, [](int) { return 1.0f; });
    if (threadIdx.x != 0) return;
    Tail &tail = to.tail(to.first_of_keys + index);
    if (values) tail.second = taken.exponent, tail.largest = taken.zero ? 0 : ldexpf(1, 15 - taken.exponent);
    else tail.first = taken.exponent, tail.dS = 0;
    if (!taken.finite) a.notes[b * a.Hkv + kv] = 1;
}

// Q and dO, after `dq`: a block a tile, even ones Q. dO takes each row's `inverse`.
extern "C" __global__ void __launch_bounds__(PREPARE_THREADS) prepare_queries(const Backward a) {
    let_next_launch_begin();
    const Workspace to(a);
    const int index = blockIdx.x / 2, tiles = ceil_div(a.M, OWN), first = index % tiles * OWN;
    const Head head = head_of(a, index / tiles);
    const bool gradients = blockIdx.x % 2;
    const Strides by = gradients ? a.d_o : a.q;
    const Row *const rows = &row_of(a, head, 0);
    const Taken taken = split_tile(rows_of(gradients ? a.dO : a.Q, by, head.b, head.h), by.row, first, a.M,
                                   to.at(index) + gradients * OWN_TILE,
                                   [&](int i) { return gradients && i < a.M ? rows[i].inverse : 1; });
    Tail &tail = to.tail(index);
    if (threadIdx.x == 0) {
        (gradients ? tail.second : tail.first) = taken.exponent;
        if (!taken.finite) a.notes[(long long)head.b * a.Hkv + head.kv] = 1;
    }
    if (!gradients || threadIdx.x >= 32) return;
    Row row[2];
    float bound = 0;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        const int i = first + threadIdx.x + 32 * r;
        row[r] = i < a.M ? rows[i] : Row{INFINITY_F, 0, 0, 0};
        if (i < a.M) bound = fmaxf(bound, to.bound(a, head, i) * row[r].inverse);
    }
    const int s = scale_exponent(__uint_as_float(__reduce_max_sync(~0u, __float_as_uint(bound))));
#pragma unroll
    for (int r = 0; r < 2; ++r) {
        tail.above[threadIdx.x + 32 * r] = row[r].above - P_BIAS;
        tail.D[threadIdx.x + 32 * r] = row[r].mended * row[r].inverse * power_of_two(max(-126, s));
    }
    if (threadIdx.x == 0) tail.dS = s, tail.largest = 0;
}
