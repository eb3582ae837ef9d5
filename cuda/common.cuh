// Shared by every kernel: the macros it is built with, and a few one-line helpers.
//
// Macros, set by flashcli/kernels/operation.py so that launch and kernel cannot disagree:
//   HEAD_DIM  d, the length of a row of Q, K, V and O       BR, BC   rows of a Q tile and of a K/V tile
//   THREADS   threads in a block                            SHARED   its bytes of dynamic shared memory
#pragma once

#ifndef HEAD_DIM
#error "HEAD_DIM, BR, BC, THREADS and SHARED are macros: see flashcli/kernels/operation.py"
#endif

#ifndef ALIGNED
#define ALIGNED (HEAD_DIM % 4 == 0)  // rows of global memory start on 16 bytes; else floats are read one by one
#endif

__host__ __device__ constexpr int ceil_div(int a, int b) { return (a + b - 1) / b; }
__host__ __device__ constexpr int round_up(int a, int b) { return ceil_div(a, b) * b; }
// ceil_div of a number as large as an int can be, by an instruction more.
__host__ __device__ constexpr int ceil_div_large(int a, int b) { return a / b + (a % b != 0); }
// The last digit of a number to this base, which is taken off. Many bases are 1, and to divide takes long.
__device__ __forceinline__ int take_digit(unsigned &number, unsigned base) {
    if (base == 1) return 0;
    const unsigned digit = number % base;
    number /= base;
    return digit;
}
// min and max, of which constants can be made.
__host__ __device__ constexpr int smaller(int a, int b) { return a < b ? a : b; }
__host__ __device__ constexpr int larger(int a, int b) { return a > b ? a : b; }

// x, of which the compiler then knows nothing: what depends on it is computed where it is needed, not kept in a
// register.
__device__ __forceinline__ int opaque(int x) {
    asm volatile("" : "+r"(x));
    return x;
}

// False, but ptxas does not know, and does not look beyond a branch for what to fetch ahead: more than there are
// registers for.
__device__ __forceinline__ bool never(int x) {
    asm volatile("" : "+r"(x));
    return x > 1000;
}

// The sum and the maximum over the four lanes of a quad, which have numbers of the same rows of an accumulator.
__device__ __forceinline__ float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}

// The sum, or the maximum, of what all lanes of a warp have: `both` joins two.
template <class Function>
__device__ __forceinline__ float over_warp(float x, Function both) {
#pragma unroll
    for (int lanes = 16; lanes > 0; lanes /= 2) x = both(x, __shfl_xor_sync(~0u, x, lanes));
    return x;
}

// The 128 bytes of global memory there to the second-level cache.
__device__ __forceinline__ void prefetch(const void *from) { asm volatile("prefetch.global.L2 [%0];" ::"l"(from)); }

// All that this thread copies with cp.async has arrived.
__device__ __forceinline__ void await_copies() { asm volatile("cp.async.wait_all;" ::: "memory"); }

// Launches that may begin before the one before has ended (Hopper on; elsewhere, and for other launches, these do
// nothing): the wait is for its end, with all that it has written; the hint says that the next one may begin now.
__device__ __forceinline__ void await_launch_before() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void let_next_launch_begin() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

constexpr float LOG2E = 1.44269504088896340736f;
#define INFINITY_F __int_as_float(0x7f800000)
#define NEG_INF __int_as_float(0xff800000)
#define LARGEST __int_as_float(0x7f7fffff)  // finite

// 2^x with one instruction of the special-function unit: relative error below 2^-22; 2^-inf = 0, 2^NaN = NaN.
__device__ __forceinline__ float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// log2(x), with one instruction too: relative error below 2^-22, or absolute between 1/2 and 2.
__device__ __forceinline__ float log2_fast(float x) {
    float y;
    asm("lg2.approx.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// The value to subtract from scores whose row maximum is m. While a row has seen only -inf, subtracting -inf would
// make NaN of what must be exp(-inf) = 0.
__device__ __forceinline__ float finite_or_zero(float m) { return m == NEG_INF ? 0.0f : m; }
