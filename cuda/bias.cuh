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
// How far apart keys are, 0: as the arguments say; 1: they are neighbours; 2: and all numbers are even, so that two can
// be read at once, for which the cache takes no longer than for one.
#ifndef BIAS_COLUMN
#define BIAS_COLUMN 1
#endif
constexpr bool READS = BIAS & 1, HIDES = BIAS & 2, SLOPES = BIAS & 4, ADDS = READS || SLOPES;

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

// Which of a thread's first n scores the mask takes away, a bit each; the x-th is of query(x) and key(x). With IN_PAIRS
// keys of even x are even, and followed by their neighbours.
template <int n, bool IN_PAIRS, class Arguments, class Head, class Query, class Key>
__device__ __forceinline__ unsigned long long read_mask(const Arguments &a, Head head, Query query, Key key) {
    unsigned hidden[2] = {};
    if (BIAS_COLUMN == 2 && IN_PAIRS) {
#pragma unroll
        for (int x = 0; x < (HIDES ? n : 0); x += 2) {
            const unsigned two =
                *reinterpret_cast<const unsigned short *>(mask_at(a, head, query(x), min(key(x), a.N - 2)));
            hidden[x / 32] |= unsigned((two & 0xff) == 0) << x % 32 | unsigned(two >> 8 == 0) << (x + 1) % 32;
        }
    } else {
#pragma unroll
        for (int x = 0; x < (HIDES ? n : 0); ++x)
            hidden[x / 32] |= unsigned(*mask_at(a, head, query(x), min(key(x), a.N - 1)) == 0) << x % 32;
    }
    return (unsigned long long)hidden[1] << 32 | hidden[0];
}

// The numbers of a thread's first n biases, without the mask; ALiBi's go beyond the last key.
template <int n, bool IN_PAIRS, int size, class Arguments, class Head, class Query, class Key>
__device__ __forceinline__ void read_numbers(float (&bias)[size], const Arguments &a, Head head, Query query, Key key) {
    if (!READS) {
#pragma unroll
        for (int x = 0; x < n; ++x) bias[x] = ADDS ? 0 : INFINITY_F;
    } else if (BIAS_COLUMN == 2 && IN_PAIRS) {
#pragma unroll
        for (int x = 0; x < n; x += 2) {
            const float2 two = *reinterpret_cast<const float2 *>(bias_at(a, head, query(x), min(key(x), a.N - 2)));
            bias[x] = two.x, bias[x + 1] = two.y;
        }
    } else {
#pragma unroll
        for (int x = 0; x < n; ++x) bias[x] = *bias_at(a, head, query(x), min(key(x), a.N - 1));
    }
    if (SLOPES) {
        const float slope = slope_of(a, head);
#pragma unroll
        for (int x = 0; x < n; ++x) bias[x] -= slope * distance(a, query(x), key(x));
    }
}

// Whether the first n biases are all finite, in powers of two, too, as nearly always; then there is less to do.
template <int n, int size>
__device__ __forceinline__ bool are_ordinary(const float (&bias)[size]) {
    if (!ADDS) return false;
    float sums[4] = {};
#pragma unroll
    for (int x = 0; x < n; ++x) sums[x % 4] += fabsf(bias[x]);
    return sums[0] + sums[1] + (sums[2] + sums[3]) < LARGEST / 2;
}

// The first n biases of a thread. Returns whether they are ordinary, but for what the mask takes away.
template <int n, bool IN_PAIRS, int size, class Arguments, class Head, class Query, class Key>
__device__ __forceinline__ bool read_biases(float (&bias)[size], const Arguments &a, Head head, Query query, Key key) {
    static_assert(n <= 64, "a bit each");
    read_numbers<n, IN_PAIRS>(bias, a, head, query, key);
    const bool ordinary = are_ordinary<n>(bias);
    const unsigned long long hidden = read_mask<n, IN_PAIRS>(a, head, query, key);
#pragma unroll
    for (int x = 0; x < (HIDES ? n : 0); ++x)
        if (hidden >> x & 1) bias[x] = NEG_INF;
    return ordinary;
}

// A bias in powers of two. What is finite stays so: a row whose biases are all the lowest float has equal scores, while
// one whose biases are all -inf sees nothing.
__device__ __forceinline__ float in_powers_of_two(float bias) {
    return fabsf(bias) < INFINITY_F ? fmaxf(-LARGEST, fminf(LARGEST, bias * LOG2E)) : bias;
}

// A score with its bias: `product` times `factor` is the score in powers of two. A bias that is `ordinary`, or -inf, is
// less work; but where it is -inf, and the product NaN, that leaves NaN, for whoever looks at answers to mend.
__device__ __forceinline__ float biased(float product, float factor, float bias, bool ordinary = false) {
    if (!ADDS) return fminf(product * factor, bias);  // of NaN and -inf the smaller one is -inf
    if (ordinary) return fmaf(product, factor, bias * LOG2E);
    return bias == NEG_INF ? NEG_INF : fmaf(product, factor, in_powers_of_two(bias));
}
