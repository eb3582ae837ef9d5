// CUDA's language on a CPU, as far as a CPU can run it: what translate.py leaves of a kernel is C++.
// What threads do together is in block.cpp, which is compiled once for all kernels, as this is for each.
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <initializer_list>
#include <type_traits>

// ---- words of the language

#define __device__
#define __host__
#define __global__
#define __constant__
#define __managed__
#define __forceinline__ inline
#define __grid_constant__
#define __launch_bounds__(...)
#define __cluster_dims__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
#define __shared__ static thread_local
#define __CUDA_ARCH__ 900

#define VECTORS(name, number, align2, align4)                                         \
    struct alignas(align2) name##2 { number x, y; };                                  \
    struct name##3 { number x, y, z; };                                               \
    struct alignas(align4) name##4 { number x, y, z, w; };                            \
    inline name##2 make_##name##2(number x, number y) { return {x, y}; }              \
    inline name##3 make_##name##3(number x, number y, number z) { return {x, y, z}; } \
    inline name##4 make_##name##4(number x, number y, number z, number w) { return {x, y, z, w}; }
VECTORS(float, float, 8, 16)
VECTORS(double, double, 16, 16)
VECTORS(int, int, 8, 16)
VECTORS(uint, unsigned, 8, 16)
VECTORS(char, signed char, 2, 4)
VECTORS(uchar, unsigned char, 2, 4)
#undef VECTORS

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
    dim3(uint3 all) : x(all.x), y(all.y), z(all.z) {}
    operator uint3() const { return {x, y, z}; }
};

template <class A, class B>
inline std::common_type_t<A, B> min(A a, B b) {
    return a < b ? a : b;
}
template <class A, class B>
inline std::common_type_t<A, B> max(A a, B b) {
    return a > b ? a : b;
}

template <class To, class From>
inline To bits_as(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}
inline float __int_as_float(int x) { return bits_as<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_as<float>(x); }
inline unsigned __float_as_uint(float x) { return bits_as<unsigned>(x); }
inline int __float_as_int(float x) { return bits_as<int>(x); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fsub_rn(float a, float b) { return a - b; }
inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1 / x; }
inline float __fsqrt_rn(float x) { return std::sqrt(x); }
inline float __frsqrt_rn(float x) { return 1 / std::sqrt(x); }
inline float rsqrtf(float x) { return 1 / std::sqrt(x); }
inline double rsqrt(double x) { return 1 / std::sqrt(x); }
inline float rsqrt(float x) { return rsqrtf(x); }
inline float __exp10f(float x) { return std::pow(10.0f, x); }
inline float __logf(float x) { return std::log(x); }
inline float __log10f(float x) { return std::log10(x); }
inline float __powf(float x, float y) { return std::pow(x, y); }
inline float __sinf(float x) { return std::sin(x); }
inline float __cosf(float x) { return std::cos(x); }
inline float __tanf(float x) { return std::tan(x); }
// As products and powers of two are rounded on the GPU: that of a large x is off by more than its last bit.
inline float __expf(float x) noexcept { return std::exp2(x * 1.44269504088896340736f); }
inline float __fdividef(float a, float b) { return std::fabs(b) > 0x1p126f ? 0 * a : a / b; }
inline int __float2int_rn(float x) {
    return x != x ? 0 : std::nearbyint(std::fmin(std::fmax(x, -2147483648.0f), 2147483520.0f));
}
inline float __saturatef(float x) { return x > 0 ? (x < 1 ? x : 1) : 0; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __clz(int x) { return x ? __builtin_clz(x) : 32; }
inline int __mul24(int a, int b) { return a * b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return (uint64_t)a * b >> 32; }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline float __log2f(float x) { return std::log2(x); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned which) {
    unsigned y = 0;
    for (int i = 0; i < 4; ++i) y |= (((uint64_t)b << 32 | a) >> (which >> 4 * i & 7) * 8 & 0xff) << 8 * i;
    return y;
}

namespace emulator {

// A line of a source.
struct Place {
    const char *file = nullptr;
    int line = 0;
    static Place here(const char *file = __builtin_FILE(), int line = __builtin_LINE()) { return {file, line}; }
};

[[noreturn]] void fail(const char *what, Place place = {});

#pragma GCC visibility push(hidden)
// A block is an OS thread, so that blocks of a cluster can run side by side; of a program, all are one (program.h).
#ifndef OF_A_BLOCK
#define OF_A_BLOCK __thread
#define DYNAMIC_SHARED static thread_local
#endif
extern OF_A_BLOCK uint3 thread_index, block_index, grid_size, block_size;
extern OF_A_BLOCK int number;  // of the thread in its block
// Shared memory whose size comes with the launch; DYNAMIC_SHARED begins the declaration of a pointer to it.
constexpr int MOST_SHARED = 227 * 1024, BEYOND = 1024;
alignas(1024) extern OF_A_BLOCK char dynamic_shared[MOST_SHARED + BEYOND];
#pragma GCC visibility pop

// A launch, or of its blocks some, counted along x, then y, then z.
struct Grid {
    uint3 blocks, threads;
    int shared = 0;
    int cluster = 1;  // blocks at a time: one after the other, or, where they meet, side by side
    long first = 0, last = 0;
    bool backwards = false;  // the last thread of a block begins
};
void launch(const Grid &grid, void (*kernel)(const void *), const void *given);

// Let other threads run. Who comes back looks again at what it waits for.
void wait();

// Meet so many threads, or all that are there; some may only come by.
void barrier(int which = 0, int threads = 0, bool stay = true, Place place = {});

constexpr int WORDS = 6;  // that a lane gives to an exchange at most

// Exchange words within a warp, among the lanes of a mask: returns what each lane of it has given.
const uint64_t (&exchange(const char *what, std::initializer_list<uint64_t> words = {}, unsigned mask = ~0u,
                          Place place = {}))[32][WORDS];

inline int lane() { return number % 32; }
unsigned lanes();  // that the warp has, as a mask

// Functions whose accesses to memory are the emulator's own, not the kernel's.
#define EMULATORS __attribute__((no_sanitize("thread", "undefined")))

template <class T>
EMULATORS inline T of_lane(const char *what, T x, int which, unsigned mask, Place place) {
    static_assert(sizeof x <= 8, "a lane gives at most eight bytes");
    uint64_t word = 0;
    memcpy(&word, &x, sizeof x);
    word = exchange(what, {word}, mask, place)[which][0];
    memcpy(&x, &word, sizeof x);
    return x;
}

template <class T>
inline T *aligned(T *address, int bytes) {
    if ((uintptr_t)address % bytes) fail("an address is not aligned");
    return address;
}

// Look at an address before something atomic is done there; what programs have more than kernels alone (program.h).
#ifndef EMULATED_ATOMIC
#define EMULATED_ATOMIC(address)
#endif

// *to = next(*to), with nobody between.
template <class T, class Next>
EMULATORS inline T atomically(T *to, Next next) {
    EMULATED_ATOMIC(to);
    T before, after;
    __atomic_load(to, &before, __ATOMIC_SEQ_CST);
    do after = next(before);
    while (!__atomic_compare_exchange(to, &before, &after, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST));
    return before;
}

}  // namespace emulator

#define threadIdx emulator::thread_index
#define blockIdx emulator::block_index
#define gridDim emulator::grid_size
#define blockDim emulator::block_size
constexpr int warpSize = 32;

// ---- what threads do together

#define EMULATED_PLACE emulator::Place place = emulator::Place::here()

inline void __syncthreads(EMULATED_PLACE) { emulator::barrier(0, 0, true, place); }
int __syncthreads_count(int vote, EMULATED_PLACE);
inline int __syncthreads_and(int vote, EMULATED_PLACE) { return __syncthreads_count(!vote, place) == 0; }
inline int __syncthreads_or(int vote, EMULATED_PLACE) { return __syncthreads_count(vote, place) > 0; }
void __syncwarp(unsigned mask = ~0u, EMULATED_PLACE);
inline void __nanosleep(unsigned) { emulator::wait(); }
void __threadfence();
inline void __threadfence_block() {}
inline void __threadfence_system() { __threadfence(); }
// The lane that a lane of a group of `width` looks at: itself, where there is none.
template <class T>
inline T __shfl_sync(unsigned mask, T x, int lane, int width = 32, EMULATED_PLACE) {
    return emulator::of_lane("__shfl_sync", x, emulator::lane() / width * width + (lane & (width - 1)), mask, place);
}
template <class T>
inline T __shfl_xor_sync(unsigned mask, T x, int by, int width = 32, EMULATED_PLACE) {
    const int me = emulator::lane(), other = me ^ by;
    return emulator::of_lane("__shfl_xor_sync", x, other / width > me / width ? me : other, mask, place);
}
template <class T>
inline T __shfl_up_sync(unsigned mask, T x, unsigned by, int width = 32, EMULATED_PLACE) {
    const int me = emulator::lane();
    return emulator::of_lane("__shfl_up_sync", x, me % width < (int)by ? me : me - (int)by, mask, place);
}
template <class T>
inline T __shfl_down_sync(unsigned mask, T x, unsigned by, int width = 32, EMULATED_PLACE) {
    const int me = emulator::lane();
    return emulator::of_lane("__shfl_down_sync", x, me % width + (int)by >= width ? me : me + (int)by, mask, place);
}
EMULATORS inline unsigned __ballot_sync(unsigned mask, int x, EMULATED_PLACE) {
    const auto &given = emulator::exchange("__ballot_sync", {x != 0}, mask, place);
    unsigned y = 0;
    for (int i = 0; i < 32; ++i) y |= (mask & emulator::lanes()) >> i & 1 ? (unsigned)given[i][0] << i : 0;
    return y;
}
inline int __any_sync(unsigned mask, int x, EMULATED_PLACE) { return __ballot_sync(mask, x, place) != 0; }
inline int __all_sync(unsigned mask, int x, EMULATED_PLACE) { return __ballot_sync(mask, !x, place) == 0; }
template <class Both>
EMULATORS inline unsigned reduce_sync(const char *what, unsigned mask, unsigned x, Both both, emulator::Place place) {
    const auto &given = emulator::exchange(what, {x}, mask, place);
    const unsigned there = emulator::lanes() & mask & ~(1u << emulator::lane());
    for (int i = 0; i < 32; ++i)
        if (there >> i & 1) x = both(x, (unsigned)given[i][0]);
    return x;
}
inline unsigned __reduce_max_sync(unsigned mask, unsigned x, EMULATED_PLACE) {
    return reduce_sync("__reduce_max_sync", mask, x, [](unsigned a, unsigned b) { return max(a, b); }, place);
}
inline unsigned __reduce_add_sync(unsigned mask, unsigned x, EMULATED_PLACE) {
    return reduce_sync("__reduce_add_sync", mask, x, [](unsigned a, unsigned b) { return a + b; }, place);
}

#define ATOMIC(name, what)                                                    \
    template <class T>                                                        \
    inline T name(T *to, std::common_type_t<T> x) {                           \
        return emulator::atomically(to, [x](T before) -> T { return what; }); \
    }
ATOMIC(atomicAdd, before + x)
ATOMIC(atomicSub, before - x)
ATOMIC(atomicMin, min(before, x))
ATOMIC(atomicMax, max(before, x))
ATOMIC(atomicExch, x)
ATOMIC(atomicAnd, before &x)
ATOMIC(atomicOr, before | x)
ATOMIC(atomicXor, before ^ x)
#undef ATOMIC
inline unsigned atomicInc(unsigned *to, unsigned most) {
    return emulator::atomically(to, [most](unsigned before) { return before < most ? before + 1 : 0; });
}
inline unsigned atomicDec(unsigned *to, unsigned most) {
    return emulator::atomically(to,
                                [most](unsigned before) { return before == 0 || before > most ? most : before - 1; });
}
template <class T>
inline T atomicCAS(T *to, std::common_type_t<T> want, std::common_type_t<T> x) {
    return emulator::atomically(to, [want, x](T before) { return before == want ? x : before; });
}
template <class T>
inline T __ldg(const T *from) {
    return *emulator::aligned(from, sizeof(T));
}
inline size_t __cvta_generic_to_global(const void *p) { return (size_t)p; }
inline void *__cvta_global_to_generic(size_t address) { return (void *)address; }
inline long long __cvta_generic_to_shared(const void *p) { return (const char *)p - emulator::dynamic_shared; }
inline void *__cvta_shared_to_generic(unsigned address) { return emulator::dynamic_shared + (int)address; }

// ---- instructions, each by its opcode

namespace ptx {
using emulator::aligned;
using emulator::lane;

// -- numbers

enum class Number { half, bf16 };
inline float from_half(unsigned short x) {
    const unsigned wide = (x & 0x7fff) << 13, sign = (x & 0x8000) << 16;
    const float size = wide < 0x7c00u << 13 ? __uint_as_float(wide) * 0x1p112f : __uint_as_float(wide | 0x7f800000);
    return __uint_as_float(__float_as_uint(size) | sign);
}
// To the nearest, or the even one of two: by hand, for older compilers have no type of 16 bits.
inline unsigned to_half(float x) {
    const unsigned bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, wide = bits & 0x7fffffff;
    if (wide > 0x7f800000) return 0x7fff;
    if (std::abs(x) < 0x1p-14f) return sign | (unsigned)std::nearbyint(std::abs(x) * 0x1p24f);
    return sign | std::min(0x7c00u, ((wide + 0xfff + (wide >> 13 & 1)) >> 13) - (112 << 10));
}
inline float from_bf16(unsigned short x) { return __uint_as_float((unsigned)x << 16); }
inline unsigned to_bf16(float x) {
    const unsigned wide = __float_as_uint(x);
    return x != x ? 0x7fff : (wide + 0x7fff + (wide >> 16 & 1)) >> 16;
}
inline float from_e4m3(unsigned char x) {
    const int exponent = x >> 3 & 15, digits = x & 7;
    const float y = exponent == 0 ? std::ldexp(digits, -9) : std::ldexp(8 + digits, exponent - 10);
    return std::copysign((x & 127) == 127 ? NAN : y, x & 128 ? -1.0f : 1.0f);
}
inline void nothing(...) {}
// To the nearest number of so many digits after the first, or the largest.
inline unsigned to_fp8(float x, int digits, int bias, unsigned largest) {
    const unsigned sign = std::signbit(x) ? 128 : 0;
    if (std::isnan(x)) return sign | 127;
    if (std::isinf(x)) return sign | largest;
    const int exponent = max(x == 0 ? 1 - bias : std::ilogb(x), 1 - bias);
    const unsigned places = std::nearbyint(std::ldexp(std::abs(x), digits - exponent));
    return sign | min(((exponent + bias - 1) << digits) + places, largest);
}
inline void cvt_rn_satfinite_e4m3x2_f32(unsigned short &y, float high, float low) {
    y = to_fp8(high, 3, 7, 0x7e) << 8 | to_fp8(low, 3, 7, 0x7e);
}
inline void cvt_rn_satfinite_e5m2x2_f32(unsigned short &y, float high, float low) {
    y = to_fp8(high, 2, 15, 0x7b) << 8 | to_fp8(low, 2, 15, 0x7b);
}
inline void ex2_approx_ftz_f32(float &y, float x) { y = std::exp2(x); }
inline void lg2_approx_f32(float &y, float x) { y = std::log2(x); }
inline void cvt_f32_f16(float &y, unsigned short x) { y = from_half(x); }
inline void cvt_f32_f16(float &low, float &high, unsigned both) {  // two, of a word
    low = from_half(both), high = from_half(both >> 16);
}
inline void cvt_rn_f16_f32(unsigned short &y, float x) { y = to_half(x); }
inline void cvt_rn_f16x2_f32(unsigned &y, float high, float low) { y = to_half(high) << 16 | to_half(low); }
inline void cvt_rn_satfinite_f16x2_f32(unsigned &y, float high, float low) {
    const auto finite = [](float x) { return std::isnan(x) ? x : max(-65504.0f, min(x, 65504.0f)); };
    cvt_rn_f16x2_f32(y, finite(high), finite(low));
}
inline void cvt_rn_bf16x2_f32(unsigned &y, float high, float low) { y = to_bf16(high) << 16 | to_bf16(low); }
inline void cvt_rn_f16x2_e4m3x2(unsigned &y, unsigned short x) {
    y = to_half(from_e4m3(x >> 8)) << 16 | to_half(from_e4m3(x & 255));
}
inline void cvt_rn_f16x2_e5m2x2(unsigned &y, unsigned short x) { y = (x >> 8) << 24 | (x & 255) << 8; }
inline void mul_rn_f16x2(unsigned &y, unsigned a, unsigned b) {
    y = to_half(from_half(a >> 16) * from_half(b >> 16)) << 16 | to_half(from_half(a) * from_half(b));
}
inline void sub_rn_f16x2(unsigned &y, unsigned a, unsigned b) {
    y = to_half(from_half(a >> 16) - from_half(b >> 16)) << 16 | to_half(from_half(a) - from_half(b));
}
inline void mov_u32_ctaid_x(unsigned &y) { y = emulator::block_index.x; }
inline void mov_b32(unsigned short &low, unsigned short &high, unsigned x) { low = x, high = x >> 16; }

// -- memory

inline void ld_global_nc_L2__128B_v4_u32(unsigned &a, unsigned &b, unsigned &c, unsigned &d, const void *from,
                                         bool wanted) {
    if (!wanted) return;
    const uint4 x = *aligned((const uint4 *)from, 16);
    a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void ld_global_nc_L2__128B_v2_u32(unsigned &a, unsigned &b, const void *from, bool wanted) {
    if (!wanted) return;
    const uint2 x = *aligned((const uint2 *)from, 8);
    a = x.x, b = x.y;
}
inline void ld_global_nc_L2__128B_u32(unsigned &a, const void *from, bool wanted) {
    if (wanted) a = *aligned((const unsigned *)from, 4);
}
inline void ld_global_nc_L1__no_allocate_L2__128B_v4_u32(unsigned &a, unsigned &b, unsigned &c, unsigned &d,
                                                         const void *from, bool wanted) {
    if (!wanted) return;
    const uint4 x = *aligned((const uint4 *)from, 16);
    a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void ld_global_nc_L1__no_allocate_L2__128B_v2_u32(unsigned &a, unsigned &b, const void *from, bool wanted) {
    if (!wanted) return;
    const uint2 x = *aligned((const uint2 *)from, 8);
    a = x.x, b = x.y;
}
inline void ld_global_nc_L1__no_allocate_L2__128B_u32(unsigned &a, const void *from, bool wanted) {
    if (wanted) a = *aligned((const unsigned *)from, 4);
}
inline void ld_shared_v4_b32(unsigned &a, unsigned &b, unsigned &c, unsigned &d, int at) {
    const uint4 x = *aligned((const uint4 *)(emulator::dynamic_shared + at), 16);
    a = x.x, b = x.y, c = x.z, d = x.w;
}
inline void prefetch_global_L2(const void *) {}

void st_shared_v2_u32(int to, unsigned x, unsigned y);
void st_shared_v4_u32(int to, unsigned x, unsigned y, unsigned z, unsigned w);

// -- copies to shared memory, until which nothing good is there

// So many bytes to there, of which the first are read and the others zeros.
void cp_async(int to, const void *from, int bytes, int given);
inline void cp_async_ca_shared_global(int to, const void *from, int given) { cp_async(to, from, 4, given); }
inline void cp_async_ca_shared_global(int to, const void *from, int bytes, int given) {
    cp_async(to, from, bytes, given);
}
inline void cp_async_cg_shared_global(int to, const void *from, int given = 16) { cp_async(to, from, 16, given); }
void cp_async_commit_group();
void cp_async_wait_group(unsigned left);
inline void cp_async_wait_all() { cp_async_commit_group(), cp_async_wait_group(0); }

// -- products

void ldmatrix(bool transposed, int at, std::initializer_list<unsigned *> words);
inline void ldmatrix_sync_aligned_m8n8_x4_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, int at) {
    ldmatrix(false, at, {&a, &b, &c, &d});
}
inline void ldmatrix_sync_aligned_m8n8_x4_trans_shared_b16(unsigned &a, unsigned &b, unsigned &c, unsigned &d, int at) {
    ldmatrix(true, at, {&a, &b, &c, &d});
}

// D += A B of 16 x 8 numbers: four of D, and the words that are a lane's part of A and of B.
void m16n8k16(Number number, std::initializer_list<float *> d, std::initializer_list<uint64_t> words);
inline void mma_sync_aligned_m16n8k16_row_col_f32_f16_f16_f32(float &d0, float &d1, float &d2, float &d3, unsigned a0,
                                                              unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                              unsigned b1) {
    m16n8k16(Number::half, {&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1});
}
inline void mma_sync_aligned_m16n8k16_row_col_f16_f16_f16_f16(unsigned &d0, unsigned &d1, unsigned a0, unsigned a1,
                                                              unsigned a2, unsigned a3, unsigned b0, unsigned b1) {
    float d[] = {from_half(d0), from_half(d0 >> 16), from_half(d1), from_half(d1 >> 16)};
    m16n8k16(Number::half, {&d[0], &d[1], &d[2], &d[3]}, {a0, a1, a2, a3, b0, b1});
    d0 = to_half(d[1]) << 16 | to_half(d[0]), d1 = to_half(d[3]) << 16 | to_half(d[2]);
}
inline void mma_sync_aligned_m16n8k16_row_col_f32_bf16_bf16_f32(float &d0, float &d1, float &d2, float &d3, unsigned a0,
                                                                unsigned a1, unsigned a2, unsigned a3, unsigned b0,
                                                                unsigned b1) {
    m16n8k16(Number::bf16, {&d0, &d1, &d2, &d3}, {a0, a1, a2, a3, b0, b1});
}

// -- Hopper's barriers that count, and bulk copies: what is copied is not there before somebody has waited for it

void mbarrier_init_shared__cta_b64(int at, int count);
void mbarrier_arrive_shared__cta_b64(int at);
void mbarrier_arrive_expect_tx_shared__cta_b64(int at, int bytes);
void selp_u32(unsigned &ended, int at, unsigned parity);  // the phase of that parity, by try_wait or test_wait
void cp_async_bulk_shared__cluster_global_mbarrier__complete_tx__bytes(int to, const void *from, int bytes, int at);
void cp_async_bulk_tensor_4d_shared__cluster_global_tile_mbarrier__complete_tx__bytes(int to, const void *map, int x,
                                                                                      int y, int z, int w, int at);
inline void cp_async_mbarrier_arrive_noinc_shared__cta_b64(int at) {
    cp_async_wait_all();
    mbarrier_arrive_shared__cta_b64(at);
}
inline void fence_mbarrier_init_release_cluster() {}
inline void fence_proxy_async_shared__cta() {}
inline void fence_proxy_async_global() {}

// -- products of a warpgroup: each lane computes its own numbers of D when they are waited for, from what is there then

// A number of D, or the word of what comes after them.
struct Operand {
    float *number = nullptr;
    uint64_t word = 0;
    Operand(float &number) : number(&number) {}
    Operand(uint64_t word) : word(word) {}
};
void wgmma(Number number, bool transposed_B, std::initializer_list<Operand> operands);
template <class... Operands>
inline void wgmma_mma_async_sync_aligned_m64nk16_f32_f16_f16(Operands &&...all) {  // of any number of columns
    wgmma(Number::half, false, {all...});
}
template <class... Operands>
inline void wgmma_mma_async_sync_aligned_m64nk16_f32_bf16_bf16(Operands &&...all) {
    wgmma(Number::bf16, false, {all...});
}
template <class... Operands>
inline void wgmma_mma_async_sync_aligned_m64n64k16_f32_f16_f16(Operands &&...all) {
    wgmma(Number::half, true, {all...});
}
inline void wgmma_fence_sync_aligned() {}
void wgmma_commit_group_sync_aligned();
void wgmma_wait_group_sync_aligned(int left);
inline void setmaxnreg_dec_sync_aligned_u32(int) {}
inline void setmaxnreg_inc_sync_aligned_u32(int) {}

// -- barriers, launches and clusters

inline void bar_sync(int which, int threads) { emulator::barrier(which, threads); }
inline void bar_arrive(int which, int threads) { emulator::barrier(which, threads, false); }
inline void atom_add_acq_rel_gpu_global_s32(int &before, int *to, int x) { before = atomicAdd(to, x); }
inline void ld_acquire_gpu_global_s32(int &x, const int *from) { x = __atomic_load_n(from, __ATOMIC_SEQ_CST); }
inline void griddepcontrol_wait() {}  // launches run one after the other
inline void griddepcontrol_launch_dependents() {}
void barrier_cluster_arrive_release();
void barrier_cluster_wait_acquire();
void *of_cluster(void *here, int rank);
template <class T>
inline void mapa_u64(T *&there, T *here, int rank) {
    there = (T *)of_cluster(here, rank);
}

}  // namespace ptx
