// The types of matrices in memory: floats, or halves of 16 bits. Halves become floats when they are read, which is
// exact, and floats are rounded to even when they are written.
//
// Macros, each 0 for float, 1 for float16, 2 for bfloat16: INPUT, the type of Q, K and V; ANSWER, that of O, and in
// gradients of dO; GRADIENT, that of dQ, dK and dV.
#pragma once

#ifndef INPUT
#define INPUT 0
#endif
#ifndef ANSWER
#define ANSWER 0
#endif
#ifndef GRADIENT
#define GRADIENT 0
#endif

__device__ __forceinline__ float from_half(unsigned bits) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"((unsigned short)bits));
    return y;
}
__device__ __forceinline__ unsigned bits_of_half(float x) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(x));
    return bits;
}

__device__ __forceinline__ float from_bfloat16(unsigned bits) { return __uint_as_float(bits << 16); }
// By hand, which any GPU can; NaN stays NaN.
__device__ __forceinline__ unsigned bits_of_bfloat16(float x) {
    const unsigned wide = __float_as_uint(x);
    return x != x ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}

template <int TYPE>
__device__ __forceinline__ float widen(unsigned bits) {
    return TYPE == 1 ? from_half(bits) : from_bfloat16(bits & 0xffff);
}
template <int TYPE>
__device__ __forceinline__ unsigned narrow(float x) {
    return TYPE == 1 ? bits_of_half(x) : bits_of_bfloat16(x);
}

template <int TYPE>
struct Half {
    unsigned short bits;
    __device__ __forceinline__ operator float() const { return widen<TYPE>(bits); }
    __device__ __forceinline__ void operator=(float x) { bits = narrow<TYPE>(x); }
};
template <int TYPE>
struct NumberOf {
    using Type = Half<TYPE>;
};
template <>
struct NumberOf<0> {
    using Type = float;
};
using Input = NumberOf<INPUT>::Type;
using Answer = NumberOf<ANSWER>::Type;
using Gradient = NumberOf<GRADIENT>::Type;

// ---- several numbers of a row at a time, from a column that is a multiple of as many

__device__ __forceinline__ float4 four_from(const float *x) { return *reinterpret_cast<const float4 *>(x); }
template <int TYPE>
__device__ __forceinline__ float4 four_from(const Half<TYPE> *x) {
    const uint2 bits = *reinterpret_cast<const uint2 *>(x);
    return make_float4(widen<TYPE>(bits.x), widen<TYPE>(bits.x >> 16), widen<TYPE>(bits.y), widen<TYPE>(bits.y >> 16));
}

__device__ __forceinline__ float2 two_from(const float *x) { return *reinterpret_cast<const float2 *>(x); }
template <int TYPE>
__device__ __forceinline__ float2 two_from(const Half<TYPE> *x) {
    const unsigned bits = *reinterpret_cast<const unsigned *>(x);
    return make_float2(widen<TYPE>(bits), widen<TYPE>(bits >> 16));
}

__device__ __forceinline__ void put(float *to, float2 x) { *reinterpret_cast<float2 *>(to) = x; }
__device__ __forceinline__ void put(float *to, float4 x) { *reinterpret_cast<float4 *>(to) = x; }
template <int TYPE>
__device__ __forceinline__ unsigned narrow(float low, float high) {
    return narrow<TYPE>(low) | narrow<TYPE>(high) << 16;
}
template <int TYPE>
__device__ __forceinline__ void put(Half<TYPE> *to, float2 x) {
    *reinterpret_cast<unsigned *>(to) = narrow<TYPE>(x.x, x.y);
}
template <int TYPE>
__device__ __forceinline__ void put(Half<TYPE> *to, float4 x) {
    *reinterpret_cast<uint2 *>(to) = make_uint2(narrow<TYPE>(x.x, x.y), narrow<TYPE>(x.z, x.w));
}
