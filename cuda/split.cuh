// Split precision: fp32 products on fp16 tensor cores, and the tiles of shared memory that feed them.
//
// A matrix is scaled by a power of two (exact) so that its largest finite magnitude lies in [2^14, 2^15), just below
// fp16's end, and each number becomes hi + lo, hi = fp16(x), lo = fp16(x - hi): 22 bits. A product of two such numbers
// is lo*hi + hi*lo + hi*hi; the lo*lo left out is below 2^-22 of it. K and V are scaled per tile, Q per row: an outlier
// coarsens only its own tile. Inf and NaN are ignored when choosing the scale and survive the split (lo = Inf - Inf).
//
// A split tile of R rows and C columns, as wgmma (128-byte swizzle, K-major) and ldmatrix read it without bank
// conflicts:
//   hi and lo stand side by side, [hi | lo], 2C fp16 columns (PRODUCTS < 3: only hi, C columns);
//   the columns are cut into panels of 64 (128 bytes); a panel is R rows of 128 bytes, panels follow one another;
//   in row r, the 16-byte chunk c of a panel lies at chunk c ^ (r % 8).
// So (row, column) is at split_offset<R>(row, column), and column c of lo is column C + c. R is a multiple of 8, C of
// 16. D is HEAD_DIM padded with zeros to a multiple of PAD.
#pragma once
#include "bias.cuh"
#include "float4.cuh"

#ifndef PRODUCTS
#define PRODUCTS 3  // 2: the matrices are halves, of which hi is all; 1: hi * hi only, the precision of fp16
#endif
static_assert(PRODUCTS >= 1 && PRODUCTS <= 3, "three products make fp32, two fp32 of halves, one makes fp16");

#ifndef PAD
#define PAD (HEAD_DIM <= 128 ? 32 : 64)
#endif
constexpr int D = round_up(HEAD_DIM, PAD);

__host__ __device__ constexpr int split_bytes(int R, int C) {
    return ceil_div(PRODUCTS == 3 ? 2 * C : C, 64) * R * 128;
}
constexpr int K_TILE = split_bytes(BC, D), V_TILE = split_bytes(D, BC);
static_assert(BC % 16 == 0, "a k-step of the tensor cores is 16 keys");

template <int R>
__host__ __device__ __forceinline__ constexpr int split_offset(int row, int column) {
    return column / 64 * (R * 128) + row * 128 + ((column % 64 / 8 ^ row % 8) * 16) + column % 8 * 2;
}

// ---- one number, two numbers, eight numbers

__device__ __forceinline__ float power_of_two(int e) { return __int_as_float((e + 127) << 23); }  // -126 <= e <= 127

// The exponent s for which 2^s brings a largest magnitude into [2^14, 2^15). All zeros: 0. Magnitudes below 2^-112 stay
// below 2^14: 2^s must be a float itself.
__device__ __forceinline__ int scale_exponent(float largest) {
    return largest == 0 ? 0 : min(14 + 127 - (__float_as_int(largest) >> 23), 126);
}

// The largest magnitude of n numbers, in several parts, so that one need not wait for the other: NaN is never the
// larger one, Inf counts.
template <int n>
__device__ __forceinline__ float largest_of(const float *x) {
    float largest[4] = {};
#pragma unroll
    for (int i = 0; i < n; ++i) largest[i % 4] = fmaxf(largest[i % 4], fabsf(x[i]));
    return fmaxf(fmaxf(largest[0], largest[1]), fmaxf(largest[2], largest[3]));
}

// `largest_of` among finite numbers, for where an Inf was found. Volatile: else the compiler computes it ahead for all.
template <int n>
__device__ __forceinline__ float largest_finite_of(const float *x) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < n; ++i) {
        float magnitude = fabsf(x[i]);
        asm volatile("" : "+f"(magnitude));
        largest = fmaxf(largest, magnitude == INFINITY_F ? 0 : magnitude);
    }
    return largest;
}

// Two floats to two fp16 in one register, `low` in the low half.
__device__ __forceinline__ unsigned pack(float low, float high) {
    unsigned r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

// `pack`, where the largest fp16 takes the place of what fp16 has no room for.
__device__ __forceinline__ unsigned pack_finite(float low, float high) {
    unsigned r;
    asm("cvt.rn.satfinite.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

__device__ __forceinline__ float2 unpack(unsigned x) {
    float2 r;
    asm("{\n .reg .f16 l, h;\n mov.b32 {l, h}, %2;\n cvt.f32.f16 %0, l;\n cvt.f32.f16 %1, h;\n}"
        : "=f"(r.x), "=f"(r.y)
        : "r"(x));
    return r;
}

// hi + lo of two numbers. FINITE: each is packed by `pack_finite`.
template <bool FINITE = false>
__device__ __forceinline__ void split(float x, float y, unsigned &hi, unsigned &lo) {
    hi = FINITE ? pack_finite(x, y) : pack(x, y);
    const float2 h = unpack(hi);
    lo = FINITE ? pack_finite(x - h.x, y - h.y) : pack(x - h.x, y - h.y);
}

// hi + lo of x * factor and y * factor, exact but for the last rounding.
__device__ __forceinline__ void split_scaled(float x, float y, float factor, unsigned &hi, unsigned &lo) {
    hi = pack(x * factor, y * factor);
    const float2 h = unpack(hi);
    lo = pack(fmaf(x, factor, -h.x), fmaf(y, factor, -h.y));
}

// Splits x[0..7] * factor (a power of two for K and V), stores the two 16-byte chunks at `column` and C + column.
template <int R, int C>
__device__ __forceinline__ void store_split(unsigned char *tile, int row, int column, const float (&x)[8],
                                            float factor) {
    uint4 hi, lo;
    unsigned *h = &hi.x, *l = &lo.x;
#pragma unroll
    for (int e = 0; e < 4; ++e) split_scaled(x[2 * e], x[2 * e + 1], factor, h[e], l[e]);
    *reinterpret_cast<uint4 *>(tile + split_offset<R>(row, column)) = hi;
    if (PRODUCTS == 3) *reinterpret_cast<uint4 *>(tile + split_offset<R>(row, C + column)) = lo;
}

// ---- what truncation takes

// Tensor cores round every sum towards zero. So a sum of products comes out too small, on average by some units of
// 2^-24 of itself, and two factors that are there anyway give it back (docs/measuring.md, "Whose rounding", has the
// emulation that found them): log2(e), in that of the scores, which are sums of `depth` products; and 1 / l, in that of
// O. Of a V of one sign more is lost than of one with both: the constant is between. Nothing is lost of a row that
// looks at one key only, whose l is `largest`, that of its largest p; or less, where scores are so huge that rounding
// has taken the bias from p: there, too, one key has all the weight, or some have the very same.
constexpr float TRUNCATED = 0x1p-24f;
__host__ __device__ constexpr double lost_of_scores(int depth) { return (0.38 + 0.0175 * depth) * TRUNCATED; }
__host__ __device__ constexpr float log2e_given_back(int depth) {
    return float(1.44269504088896340736 * (1 + lost_of_scores(depth)));
}
__device__ __forceinline__ float given_back(float inverse_l, float largest) {
    const float lost = (0.4f + 0.022f * BC) * TRUNCATED;
    return fmaf(lost * inverse_l, __saturatef(fmaf(-largest, inverse_l, 1.0f)), inverse_l);
}

// ---- reading matrices [rows, HEAD_DIM], whose rows are `stride` numbers apart

// ---- one tile by a group of threads: load, agree on the scale, split, store. The tile may overlay what is read

// The largest of the group's numbers, none of them negative; `scratch` is a word a warp, if there are several. In it is
// a barrier.
template <int GROUP>
__device__ __forceinline__ float group_max(float largest, unsigned *scratch, int thread, int barrier) {
    unsigned bits = __reduce_max_sync(~0u, __float_as_uint(largest));  // not negative: they order like integers
    if (GROUP == 32) {
        __syncwarp();
        return __uint_as_float(bits);
    }
    if (thread % 32 == 0) scratch[thread / 32] = bits;
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(GROUP) : "memory");
#pragma unroll
    for (int w = 0; w < GROUP / 32; ++w) bits = max(bits, scratch[w]);
    return __uint_as_float(bits);
}

// The scale's exponent for the n numbers of each thread of the group, whose `scratch` is two words a warp. After it all
// numbers have been read. bar.sync 0 with all threads is __syncthreads.
template <int GROUP, int n>
__device__ __forceinline__ int group_scale(const float *x, unsigned *scratch, int thread, int barrier) {
    float largest = group_max<GROUP>(largest_of<n>(x), scratch, thread, barrier);
    if (largest == INFINITY_F)
        largest = group_max<GROUP>(largest_finite_of<n>(x), scratch + GROUP / 32, thread, barrier);
    return scale_exponent(largest);
}

// Where fp32 numbers are read from. A tile in shared memory: each thread keeps to its columns, so that its addresses
// differ by constants only, and those of V that are neighbours take other keys, so that eight threads neither read nor
// write the same bank. (A bank is 4 bytes wide, and 32 banks are as long as 8 pieces are wide.) Columns of V are then
// where `place_of_V` says.
enum class From { MEMORY, TILE };

// Whether such a tile is read as if it had all keys, and what is read beyond the last becomes zero then, so that in whole
// tiles nothing is compared. With longer rows that gained nothing.
constexpr bool READS_ALL = D <= 32;

// A thread's share of K, or of another matrix whose rows stay rows: pieces of 8 columns of one key, a 16-byte chunk of hi
// and one of lo each.
template <int GROUP, From FROM = From::MEMORY>
struct Pieces {
    static constexpr int ACROSS = D / 8, COUNT = BC * ACROSS, EACH = ceil_div(COUNT, GROUP);
    static constexpr bool KEEPS = FROM == From::TILE, ALL = KEEPS && READS_ALL;
    static_assert(!KEEPS || GROUP % ACROSS == 0, "columns are kept");
    unsigned thread;
    float x[EACH][8];

    __device__ __forceinline__ bool has(int e) const { return COUNT % GROUP == 0 || e * GROUP + thread < COUNT; }
    __device__ __forceinline__ unsigned place(int e) const {
        return KEEPS ? thread / ACROSS + e * (GROUP / ACROSS) : (e * GROUP + thread) / ACROSS;
    }
    __device__ __forceinline__ unsigned column(int e) const {
        return (KEEPS ? thread : e * GROUP + thread) % ACROSS * 8;
    }

    template <class Number>
    __device__ __forceinline__ void load(const Number *K, long long stride, int j0, int N) {
#pragma unroll
        for (int e = 0; e < EACH; ++e) {
            const int row = has(e) ? j0 + key_in(place(e)) : N, end = ALL ? row + 1 : N;
            *reinterpret_cast<float4 *>(&x[e][0]) = load4(K, stride, row, column(e), end);
            *reinterpret_cast<float4 *>(&x[e][4]) = load4(K, stride, row, column(e) + 4, end);
        }
        if (ALL && j0 + BC > N) {
#pragma unroll
            for (int i = 0; i < EACH * 8; ++i)
                if (j0 + key_in(place(i / 8)) >= N) x[i / 8][i % 8] = 0;
        }
    }
    __device__ __forceinline__ int scale(unsigned *scratch, int barrier) const {
        return group_scale<GROUP, EACH * 8>(&x[0][0], scratch, thread, barrier);
    }
    __device__ __forceinline__ void store(unsigned char *tile, int s) const {
        const float factor = power_of_two(s);
#pragma unroll
        for (int e = 0; e < EACH; ++e)
            if (has(e)) store_split<BC, D>(tile, place(e), column(e), x[e], factor);
    }
};

// The row of a split tile of V that has column `four` + c, where `four` is a multiple of 4 and c < 4. Of each 16 columns
// of O, up to IN_FOURS, a lane of a quad then has four neighbours. With shorter rows nothing was gained.
constexpr int IN_FOURS = HEAD_DIM < 32 ? 0 : round_up(HEAD_DIM, 8) / 16 * 16;
__device__ __forceinline__ unsigned place_of_V(unsigned four, unsigned c) {
    return int(four) < IN_FOURS ? (four / 16 * 16 + four % 16 / 2 | c % 2) + c / 2 * 8 : four + c;
}

// What a group waits for between reading a tile and storing it: nothing.
struct AtOnce {
    __device__ __forceinline__ void operator()(unsigned &) const {}
};

// K by a group. Returns the scale's exponent.
template <int GROUP, From FROM = From::MEMORY, class Number, class Function = AtOnce>
__device__ __forceinline__ int split_K(const Number *K, long long stride, int j0, int N, unsigned char *tile,
                                       unsigned *scratch, unsigned thread, int barrier, Function await_room = {}) {
    asm volatile("" : "+r"(thread));  // else, in a loop, all addresses are computed ahead and held in registers
    Pieces<GROUP, FROM> mine = {thread};
    mine.load(K, stride, j0, N);
    const int s = mine.scale(scratch, barrier);
    await_room(mine.thread);
    mine.store(tile, s);
    return s;
}

// V, transposed: a piece of work is 4 columns of 8 keys. Neighbouring threads have neighbouring keys, so that reads and
// writes meet in whole 32-byte sectors of memory; or BESIDE of them first have neighbouring columns, so that a row is
// read in longer pieces; or all have, of a tile in shared memory.
#ifndef BESIDE
#define BESIDE 1
#endif
template <int GROUP, From FROM = From::MEMORY, class Number, class Function = AtOnce>
__device__ __forceinline__ int split_V(const Number *V, long long stride, int j0, int N, unsigned char *tile,
                                       unsigned *scratch, unsigned thread, int barrier, Function await_room = {}) {
    asm volatile("" : "+r"(thread));  // else, in a loop, all addresses are computed ahead and held in registers
    constexpr int ACROSS = D / 4, DOWN = BC / 8, PIECES = DOWN * ACROSS, EACH = ceil_div(PIECES, GROUP);
    constexpr bool KEEPS = FROM == From::TILE, ALL = KEEPS && READS_ALL;
    static_assert(ACROSS % BESIDE == 0, "columns are padded");
    static_assert(!KEEPS || (DOWN % 4 == 0 && GROUP % ACROSS == 0), "columns are kept; keys change places in fours");
    const auto place_of = [&](int e) {
        const unsigned other = IN_FOURS > 0 ? thread % ACROSS / 4 % 2 : thread / 2 % 4;
        return 8 * (KEEPS ? (thread / ACROSS + e * (GROUP / ACROSS)) ^ other : (e * GROUP + thread) / BESIDE % DOWN);
    };
    const auto column_of = [&](int e) {
        const unsigned piece = e * GROUP + thread;
        return 4 * (KEEPS ? thread % ACROSS : piece / (BESIDE * DOWN) * BESIDE + piece % BESIDE);
    };
    const auto has = [&](int e) { return KEEPS || e * GROUP + thread < PIECES; };
    static_assert(!KEEPS || PIECES % GROUP == 0, "each thread has as many");
    float x[EACH][4][8];  // [column][key]
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int k = 0; k < 8; ++k) {
            const int row = has(e) ? j0 + key_in(place_of(e) + k) : N;
            const float4 v = load4(V, stride, row, column_of(e), ALL ? row + 1 : N);
            x[e][0][k] = v.x, x[e][1][k] = v.y, x[e][2][k] = v.z, x[e][3][k] = v.w;
        }
    if (ALL && j0 + BC > N) {
#pragma unroll
        for (int i = 0; i < EACH * 32; ++i)
            if (j0 + key_in(place_of(i / 32) + i % 8) >= N) x[i / 32][i % 32 / 8][i % 8] = 0;
    }
    const int s = group_scale<GROUP, EACH * 32>(&x[0][0][0], scratch, thread, barrier);
    await_room(thread);
    const float factor = power_of_two(s);
#pragma unroll
    for (int e = 0; e < EACH; ++e)
#pragma unroll
        for (int c = 0; c < 4; ++c)
            if (has(e)) {
                const unsigned row = KEEPS ? place_of_V(column_of(e), c) : column_of(e) + c;
                store_split<D, BC>(tile, row, place_of(e), x[e][c], factor);
            }
    return s;
}
