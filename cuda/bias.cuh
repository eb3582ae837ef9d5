// What changes scores one by one: a bias, floats that are added, and a mask, bytes of which 0 takes a key away from a
// query; and ALiBi's biases, which follow from positions. Shared by attention and its gradients, whose arguments have
// the fields `bias`, `bias_strides`, `mask` and so on; what there is of them is known when a kernel is built.
//
// To a kernel both are one number, -inf where the key is taken away, by the mask or by a bias of -inf. There the score
// is -inf, whatever it was, NaN too. Without a bias the number is Inf for the other keys.
#pragma once
#include "common.cuh"

#ifndef BIAS
#define BIAS 0  // 1: there is a bias; 2: there is a mask; 4: there are ALiBi's slopes; or a sum of these
#endif
// How far apart keys are, 0: as the arguments say; 1: they are neighbours; 2 or 4: and all strides are multiples of so
// many numbers, so that as many are read at once, for which the cache takes no longer than for one.
#ifndef BIAS_COLUMN
#define BIAS_COLUMN 1
#endif
constexpr bool READS = BIAS & 1, HIDES = BIAS & 2, SLOPES = BIAS & 4, ADDS = READS || SLOPES;

// 1: the mask takes keys away from all queries. A thread then reads it once for all of its queries.
#ifndef MASK_OF_KEYS
#define MASK_OF_KEYS 0
#endif

// 1: a mask of keys needs no instruction for each score: sums of products begin with -inf where it takes a key away.
#ifndef MASK_IN_SUMS
#define MASK_IN_SUMS 0
#endif
constexpr bool HIDES_SCORES = HIDES && !MASK_IN_SUMS;

// A thread has the scores of two neighbouring columns of each 8. Where biases are read, a tile's keys of each 16 have
// changed places so that a thread's four of these 16 are neighbours in memory: INTERLEAVES is 1 in kernels that do so.
#ifndef INTERLEAVES
#define INTERLEAVES 0
#endif
constexpr bool INTERLEAVED = INTERLEAVES && (READS || HIDES);
// The key, counted from the tile's first one, that is in a place of a tile.
__host__ __device__ constexpr int key_in(int place) {
    return INTERLEAVED ? (place & ~15) + place % 8 * 2 + place / 8 % 2 : place;
}
// The key of the x-th score of a thread, which has scores of two rows, counted from its first key; and that key, of lane
// t of a quad.
__host__ __device__ constexpr int key_of(int x) {
    return INTERLEAVED ? x / 8 * 16 + x % 2 * 2 + x / 4 % 2 : x / 4 * 8 + x % 2;
}
__device__ __forceinline__ int first_key_of_lane(int t) { return t * (INTERLEAVED ? 4 : 2); }

// Where the bias of query i of a head and a key is, or that of the last ones there are; and the byte of the mask.
template <class Arguments, class Head>
__device__ __forceinline__ const float *bias_at(const Arguments &a, Head head, int i, int key) {
    return a.bias + head.b * a.bias_strides.batch + head.h * a.bias_strides.head +
           min(i, a.M - 1) * a.bias_strides.row + key * (BIAS_COLUMN ? 1 : a.bias_column);
}
template <class Arguments, class Head>
__device__ __forceinline__ const unsigned char *mask_at(const Arguments &a, Head head, int i, int key) {
    return a.mask + head.b * a.mask_strides.batch + head.h * a.mask_strides.head +
           min(i, a.M - 1) * a.mask_strides.row + key * (BIAS_COLUMN ? 1 : a.mask_column);
}

// ALiBi (arXiv 2108.12409): the slope of a head, and how much it takes from the score of query i and a key.
template <class Arguments, class Head>
__device__ __forceinline__ float slope_of(const Arguments &a, Head head) {
    return a.slopes[head.b * a.slopes_batch + head.h * a.slopes_head];
}
template <class Arguments>
__device__ __forceinline__ float distance(const Arguments &a, int i, int key) {
    return fabsf(float(a.position + i - key));
}

// The bias of query i of a head and a key, or of the last ones there are. It is to be read for many keys before any is
// used.
template <class Arguments, class Head>
__device__ __forceinline__ float bias_of(const Arguments &a, Head head, int i, int key) {
    if (!BIAS) return 0;
    key = min(key, a.N - 1);
    float bias = READS ? *bias_at(a, head, i, key) : ADDS ? 0 : INFINITY_F;
    if (SLOPES) bias -= slope_of(a, head) * distance(a, i, key);
    if (HIDES && *mask_at(a, head, i, key) == 0) bias = NEG_INF;
    return bias;
}

// How many bytes apart a query's biases and the next one's are. Where several are read at once, 32 bits hold it: a
// product then takes one instruction.
template <class Arguments>
__device__ __forceinline__ long long bytes_between_rows(const Arguments &a) {
    const long long bytes = a.bias_strides.row * (long long)sizeof(float);
    return BIAS_COLUMN > 1 ? (unsigned)bytes : bytes;
}

// Where a query's biases, and its bytes of the mask, begin; beyond the last query those of that one.
struct BiasRow {
    int i;
    const float *numbers;
    const unsigned char *bytes;
    BiasRow() = default;
    __device__ __forceinline__ BiasRow(int i, const float *numbers, const unsigned char *bytes)
        : i(i), numbers(numbers), bytes(bytes) {}
    template <class Arguments, class Head>
    __device__ __forceinline__ BiasRow(const Arguments &a, Head head, int i)
        : i(i),
          numbers(READS ? bias_at(a, head, i, 0) : nullptr),
          bytes(HIDES ? mask_at(a, head, MASK_OF_KEYS ? 0 : i, 0) : nullptr) {}

    // The row so many rows on, by a product and a sum. This one is not beyond the last query.
    template <class Arguments>
    __device__ __forceinline__ BiasRow down(const Arguments &a, int rows) const {
        const unsigned far = min(rows, a.M - 1 - i);
        BiasRow row = {i + rows, numbers, bytes};
        if (READS)
            row.numbers = reinterpret_cast<const float *>(reinterpret_cast<const char *>(numbers) +
                                                          (long long)far * bytes_between_rows(a));
        if (HIDES && !MASK_OF_KEYS) row.bytes += far * a.mask_strides.row;
        return row;
    }
};

// Where a thread's scores of neighbouring keys are: that of the key after the x-th score's one is NEXT places on, those
// of the two keys after both are AFTER places on; each a power of two, AFTER 0 if there are no four. If not IN_MEMORY,
// they are no neighbours there.
template <int NEXT_, int AFTER_, bool IN_MEMORY = true>
struct Neighbours {
    static constexpr int NEXT = NEXT_, AFTER = AFTER_;
    static constexpr int TOGETHER = !IN_MEMORY                  ? 1
                                    : BIAS_COLUMN >= 4 && AFTER ? 4
                                    : BIAS_COLUMN >= 2          ? 2
                                                                : 1;  // that are read at once
    static __host__ __device__ constexpr bool is_first(int x) {
        return !(TOGETHER > 1 && x & NEXT) && !(TOGETHER > 2 && x & AFTER);
    }
    // Four bytes of the mask are a word: those of scores that differ in NEXT and SECOND.
    static constexpr int SECOND = AFTER ? AFTER : NEXT == 1 ? 2 : 1;
    static __host__ __device__ constexpr int without(int x, int digit) { return x / (2 * digit) * digit + x % digit; }
    static __host__ __device__ constexpr int word(int x) {
        return without(without(x, larger(NEXT, SECOND)), smaller(NEXT, SECOND));
    }
    static __host__ __device__ constexpr int shift(int x) { return (x & NEXT ? 8 : 0) + (x & SECOND ? 16 : 0); }
};
using OfColumns = Neighbours<INTERLEAVED ? 4 : 1, INTERLEAVED ? 1 : 0>;  // of rows of queries, as `key_of` says

// The biases of n scores of a thread, read ahead of their use.
template <int n, class By>
struct Biases {
    float numbers[ADDS ? n : 1];
    unsigned words[HIDES_SCORES ? ceil_div(n, 4) : 1];

    // The first m of them; the x-th is of the query that row(x) is of, and of key(x).
    template <int m, class Arguments, class Head, class Row, class Key>
    __device__ __forceinline__ void read(const Arguments &a, Head head, Row row, Key key) {
        read_numbers<m>(a, head, row, key);
        read_mask<m>(a, row, key);
    }
    template <int m, class Arguments, class Head, class Row, class Key>
    __device__ __forceinline__ void read_numbers(const Arguments &a, Head head, Row row, Key key) {
        constexpr int TOGETHER = By::TOGETHER;
#pragma unroll
        for (int x = 0; x < (READS ? m : 0); ++x) {
            if (!By::is_first(x)) continue;
            const float *const from = row(x).numbers + min(key(x), a.N - TOGETHER) * (BIAS_COLUMN ? 1 : a.bias_column);
            if constexpr (TOGETHER == 4) {
                const float4 four = *reinterpret_cast<const float4 *>(from);
                numbers[x] = four.x, numbers[x + By::NEXT] = four.y;
                numbers[x + By::AFTER] = four.z, numbers[x + By::NEXT + By::AFTER] = four.w;
            } else if constexpr (TOGETHER == 2) {
                const float2 two = *reinterpret_cast<const float2 *>(from);
                numbers[x] = two.x, numbers[x + By::NEXT] = two.y;
            } else numbers[x] = *from;
        }
        if (SLOPES) {  // which go beyond the last key
            const float slope = slope_of(a, head);
#pragma unroll
            for (int x = 0; x < m; ++x) numbers[x] = (READS ? numbers[x] : 0) - slope * distance(a, row(x).i, key(x));
        }
    }
    template <int m, class Arguments, class Row, class Key>
    __device__ __forceinline__ void read_mask(const Arguments &a, Row row, Key key) {
        constexpr int TOGETHER = By::TOGETHER;
#pragma unroll
        for (int x = 0; x < (HIDES_SCORES ? m : 0); ++x) {
            if (!By::is_first(x)) continue;
            const unsigned char *const from =
                row(x).bytes + min(key(x), a.N - TOGETHER) * (BIAS_COLUMN ? 1 : a.mask_column);
            unsigned read;
            if constexpr (TOGETHER == 4) read = *reinterpret_cast<const unsigned *>(from);
            else if constexpr (TOGETHER == 2) read = *reinterpret_cast<const unsigned short *>(from);
            else read = *from;
            unsigned &word = words[By::word(x)];
            word = By::shift(x) == 0 ? read : word | read << By::shift(x);
        }
    }

    // Whether the mask takes the x-th score away.
    __device__ __forceinline__ bool hides(int x) const {
        return HIDES_SCORES && (words[By::word(x)] >> By::shift(x) & 0xff) == 0;
    }
};

// A bias in powers of two. What is finite stays so: a row whose biases are all the lowest float has equal scores, while
// one whose biases are all -inf sees nothing.
__device__ __forceinline__ float in_powers_of_two(float bias) {
    return fabsf(bias) < INFINITY_F ? fmaxf(-LARGEST, fminf(LARGEST, bias * LOG2E)) : bias;
}

// A score with its bias: `product` times `factor` is the score in powers of two.
__device__ __forceinline__ float biased(float product, float factor, float bias) {
    if (!ADDS) return fminf(product * factor, bias);  // of NaN and -inf the smaller one is -inf
    return bias == NEG_INF ? NEG_INF : fmaf(product, factor, in_powers_of_two(bias));
}
template <int n, class By>
__device__ __forceinline__ float biased(float product, float factor, const Biases<n, By> &biases, int x) {
    const float score = ADDS ? biased(product, factor, biases.numbers[x]) : product * factor;
    return biases.hides(x) ? NEG_INF : score;
}
