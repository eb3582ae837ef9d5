// Write: new keys and values into the slots of the cache. No rung of the ladder, but what fills the cache that they
// read.
//
// What it does: a thread takes one vector of a token's key and of its value, as many numbers as the cache has in 16
// bytes, and stores them where the token's slot is; fp8 and int8 as the number divided by the scale, rounded to even,
// and cut to the type's range. What goes nowhere is not read: a token whose slot is negative, or beyond the cache.
// Why: it is vLLM's reshape_and_cache. A key's vector is whole in every layout. In vLLM's layout of values,
// neighbouring numbers of a token are PAGE numbers apart, so they are stored one by one.
#include "decode.cuh"

// The one argument, by value. Strides are in numbers. A scale that is on the device is read there, else it is the
// factor.
struct WriteKv {
    const void *key, *value;  // [tokens, Hkv, D]: tokens and heads are strides apart
    void *key_cache, *value_cache;
    const long long *slot_mapping;  // [tokens]
    const float *k_scale, *v_scale;
    long long new_key_token, new_key_head, new_value_token, new_value_head;
    long long key_page, key_head, key_slot, key_chunk;  // as in Decode
    long long value_page, value_head, value_slot;
    int tokens, kv_heads, pages;
    float k_factor, v_factor;
};

constexpr int GIVEN_BYTES = bytes_of(QUERY_TYPE);  // of a number in `key` and `value`
constexpr bool SAME = QUERY_TYPE == CACHE_TYPE;
constexpr int PER_LOAD = 16 / GIVEN_BYTES, LOADS = X / PER_LOAD;
static_assert(X % PER_LOAD == 0, "a vector is whole loads of 16 bytes");

// A vector of the cache, in words.
struct Vector {
    unsigned word[VECTOR_BYTES / 4];
};

__device__ __forceinline__ float number_of(const Words<16> &words, int i) {
    if (QUERY_TYPE == FP32) return __uint_as_float(words.word[i]);
    const unsigned bits = words.word[i / 2] >> i % 2 * 16;
    return QUERY_TYPE == FP16 ? from_half(bits) : __uint_as_float(bits << 16);
}

// A number as fp8 by hand: in units of its last digit it is rounded to even, and the units counted from the least
// exponent on are the bits. What is beyond the largest finite number becomes that one.
__device__ __forceinline__ unsigned fp8_of(float x) {
    constexpr int DIGITS = CACHE_TYPE == E4M3 ? 3 : 2, LEAST = CACHE_TYPE == E4M3 ? -6 : -14;
    const float magnitude = fminf(fabsf(x), CACHE_TYPE == E4M3 ? 448.0f : 57344.0f);
    const int exponent = max((__float_as_int(magnitude) >> 23) - 127, LEAST);
    const float unit_inverse = __int_as_float((127 + DIGITS - exponent) << 23);
    const unsigned bits = ((exponent - LEAST) << DIGITS) + __float2int_rn(magnitude * unit_inverse);
    return x != x ? 0x7f : bits | (__float_as_uint(x) >> 31) << 7;
}

// Two numbers as fp8, the first in the low bits.
__device__ __forceinline__ unsigned fp8_of(float low, float high) {
    unsigned short y = 0;
#if !CONVERTS_FP8
    y = fp8_of(low) | fp8_of(high) << 8;
#elif CACHE_TYPE == E4M3
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
#elif CACHE_TYPE == E5M2
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(y) : "f"(high), "f"(low));
#endif
    return y;
}

// A number as int8: rounded to even, NaN as 0.
__device__ __forceinline__ unsigned int8_of(float x) { return min(max(__float2int_rn(x), -128), 127) & 0xff; }

__device__ __forceinline__ Vector vector_of(const void *given, long long at, float scale) {
    const unsigned char *const from = static_cast<const unsigned char *>(given) + at * GIVEN_BYTES;
    Vector to = {};
#pragma unroll
    for (int n = 0; n < LOADS; ++n) {
        const Words<16> words = load<16>(from + n * 16);
#pragma unroll
        for (int i = 0; i < PER_LOAD; i += 2) {
            if (SAME) {
                to.word[i * GIVEN_BYTES / 4] = words.word[i * GIVEN_BYTES / 4];
                if (GIVEN_BYTES == 4) to.word[i + 1] = words.word[i + 1];
            } else {
                const int x = n * PER_LOAD + i;
                const float low = number_of(words, i) / scale, high = number_of(words, i + 1) / scale;
                const unsigned bytes = CACHE_TYPE == INT8 ? int8_of(low) | int8_of(high) << 8 : fp8_of(low, high);
                to.word[x / 4] |= bytes << x % 4 * 8;
            }
        }
    }
    return to;
}

__device__ __forceinline__ void store(const Vector &x, void *cache, long long at) {
    unsigned char *const to = static_cast<unsigned char *>(cache) + at * CACHE_BYTES;
    if constexpr (VECTOR_BYTES == 16)
        *reinterpret_cast<uint4 *>(to) = make_uint4(x.word[0], x.word[1], x.word[2], x.word[3]);
    else *reinterpret_cast<uint2 *>(to) = make_uint2(x.word[0], x.word[1]);
}

// The numbers of a vector each PAGE numbers after the one before.
__device__ __forceinline__ void store_apart(const Vector &x, void *cache, long long at) {
#pragma unroll
    for (int i = 0; i < X; ++i) {
        const unsigned word = x.word[i * CACHE_BYTES / 4] >> i * CACHE_BYTES % 4 * 8;
        const long long where = at + i * PAGE;
        if (CACHE_BYTES == 4) static_cast<unsigned *>(cache)[where] = word;
        else if (CACHE_BYTES == 2) static_cast<unsigned short *>(cache)[where] = word;
        else static_cast<unsigned char *>(cache)[where] = word;
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) write_kv(const WriteKv a) {
    const long long number = blockIdx.x * (long long)THREADS + threadIdx.x, row = number / CHUNKS;
    const int chunk = number % CHUNKS, head = row % a.kv_heads;
    const long long token = row / a.kv_heads;
    if (token >= a.tokens) return;
    const long long place = a.slot_mapping[token], page = place / PAGE;
    if (place < 0 || page >= a.pages) return;
    const int slot = place % PAGE;

    const float k_scale = a.k_scale ? *a.k_scale : a.k_factor, v_scale = a.v_scale ? *a.v_scale : a.v_factor;
    const Vector key = vector_of(a.key, token * a.new_key_token + head * a.new_key_head + chunk * X, k_scale);
    const Vector value = vector_of(a.value, token * a.new_value_token + head * a.new_value_head + chunk * X, v_scale);
    store(key, a.key_cache, page * a.key_page + head * a.key_head + slot * a.key_slot + chunk * a.key_chunk);
    const long long at = page * a.value_page + head * a.value_head + slot * a.value_slot;
    if (TRANSPOSED) store_apart(value, a.value_cache, at + chunk * X * PAGE);
    else store(value, a.value_cache, at + chunk * X);
}
